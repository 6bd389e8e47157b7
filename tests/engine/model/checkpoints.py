"""Checkpoints that a test may change, and what transformers says of them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.model.checkpoint import read_config
from engine.model.weights import CheckpointReader
from tests.engine.oracle import assert_dense_weights, assert_same_weights, experts_of, load_whole
from tests.engine.tiny import mixtral_config, save_checkpoint

Tensors = dict[str, torch.Tensor]

EXPERT = "model.layers.1.block_sparse_moe.experts.2"


def reader_of(checkpoint: Path) -> CheckpointReader:
    return CheckpointReader(checkpoint, read_config(checkpoint))


def assert_as_transformers_loads_it(checkpoint: Path) -> None:
    whole, reader = load_whole(checkpoint), reader_of(checkpoint)
    assert reader.dtype is whole.dtype
    assert_dense_weights(reader.dense_parts(), whole)
    expected = experts_of(whole)
    assert len(reader.experts) == len(expected)
    for layer, parameters in enumerate(expected):
        assert_same_weights(reader.layer(layer), parameters)


def stored(checkpoint: Path) -> Tensors:
    return load_file(checkpoint / "model.safetensors")


def store(checkpoint: Path, tensors: Tensors, name: str = "model.safetensors") -> None:
    save_file(tensors, checkpoint / name, metadata={"format": "pt"})


def randomize(checkpoint: Path) -> Path:
    """Make all tensors differ, norms and buffers too, which are ones and zeros at first."""
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in stored(checkpoint).items()}
    store(checkpoint, tensors)
    return checkpoint


def split(checkpoint: Path, num_shards: int = 3) -> dict[str, str]:
    """Spread the one file over shards, tensor by tensor; the index's weight map."""
    tensors = stored(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    file_of = {name: f"model-{i % num_shards + 1:05}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for file in set(file_of.values()):
        store(checkpoint, {name: tensors[name] for name in tensors if file_of[name] == file}, file)
    write_index(checkpoint, {"metadata": {}, "weight_map": file_of})
    return file_of


def write_index(checkpoint: Path, content: object) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(content))


def set_config(checkpoint: Path, **values: object) -> None:
    """A value of None removes the key."""
    file = checkpoint / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def changeable_mixtral(tmp_path: Path) -> Path:
    return randomize(save_checkpoint(mixtral_config(), tmp_path / "mixtral", dtype=torch.bfloat16))
