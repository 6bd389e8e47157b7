"""Write a sharded safetensors checkpoint with no more than one shard in memory."""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"


def write_shards(directory: Path, shards: Iterable[dict[str, Tensor]], num_shards: int) -> None:
    """Write each of the `num_shards` shards as it comes, then the index."""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
