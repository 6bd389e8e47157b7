"""transformers' model with accelerate's hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.model.structure import missing_weights
from engine.peers.placement import PeerModel


@contextmanager
def offload_directory(cache: Path) -> Iterator[Path]:
    """For weights on disk; gone when the block ends, however it ends."""
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="accelerate-", dir=cache) as directory:
        yield Path(directory)


def load_offloaded(model: PeerModel, device_map: dict[str, int | str], offload_dir: Path) -> PreTrainedModel:
    """The model with its weights where the map says.

    What is on disk is read from the checkpoint itself, but for experts: transformers fuses these as it loads them, and
    writes them into `offload_dir`. Raises `UnsupportedModelError` where the checkpoint lacks weights.
    """
    # Typed as if it returned the model alone.
    load: Any = AutoModelForCausalLM.from_pretrained
    loaded, info = load(
        model.path,
        dtype=model.skeleton.dtype,
        device_map=device_map,
        offload_folder=offload_dir,
        output_loading_info=True,
    )
    if lacking := info["missing_keys"]:
        raise missing_weights(loaded, lacking)
    _compute_in(loaded, model.skeleton.dtype, model.dtype)
    offloaded: PreTrainedModel = loaded
    return offloaded


def _compute_in(model: PreTrainedModel, loaded_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Convert what the device holds; the hooks convert what they load to the type that its parameter has.

    `from_pretrained` in `dtype` would write experts of 16 bits in 32, and double what is read per token.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dtype is loaded_dtype:
            tensor.data = tensor.data.to(dtype)
