from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.errors import ModelNotFoundError
from engine.model.tensor_files import TensorFiles, weight_files
from tests.engine.model.checkpoints import (
    EXPERT,
    assert_as_transformers_loads_it,
    changeable_mixtral,
    reader_of,
    split,
    store,
    stored,
    write_index,
)
from tests.engine.oracle import assert_same_weights


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return changeable_mixtral(tmp_path)


def test_what_lies_beside_the_index_is_ignored(mixtral: Path) -> None:
    split(mixtral)
    store(mixtral, {"model.norm.weight": torch.zeros(64)}, "consolidated.safetensors")
    torch.save({"model.norm.weight": torch.zeros(64)}, mixtral / "pytorch_model.bin")
    assert [file.name for file in weight_files(mixtral)] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert_as_transformers_loads_it(mixtral)


def test_one_file_goes_before_an_index(mixtral: Path) -> None:
    write_index(mixtral, {"weight_map": {"model.norm.weight": "missing.safetensors"}})
    assert_as_transformers_loads_it(mixtral)


def unreadable(checkpoint: Path) -> str:
    with pytest.raises(ModelNotFoundError) as caught:
        reader_of(checkpoint)
    message = str(caught.value)
    assert str(checkpoint) in message
    assert "\n" not in message
    return message


def test_a_shard_that_is_missing_is_named(mixtral: Path) -> None:
    split(mixtral)
    (mixtral / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in unreadable(mixtral)


def damaged(file: Path) -> Iterator[bytes]:
    content = file.read_bytes()
    yield b""
    yield b"not weights" * 10
    yield content[:-1]
    yield content[: len(content) // 2]
    yield content[:4]


def test_damaged_weights_are_said(mixtral: Path) -> None:
    for content in damaged(mixtral / "model.safetensors"):
        (mixtral / "model.safetensors").write_bytes(content)
        assert "weights that cannot be read" in unreadable(mixtral)


def test_damaged_pickled_weights_are_said(mixtral: Path) -> None:
    tensors = stored(mixtral)
    (mixtral / "model.safetensors").unlink()
    torch.save(tensors, mixtral / "pytorch_model.bin")
    for content in damaged(mixtral / "pytorch_model.bin"):
        (mixtral / "pytorch_model.bin").write_bytes(content)
        assert "weights that cannot be read" in unreadable(mixtral)


def test_pickled_objects_are_not_loaded(mixtral: Path) -> None:
    (mixtral / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Path("code")}, mixtral / "pytorch_model.bin")
    assert "weights that cannot be read (Weights only load failed" in unreadable(mixtral)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": 1}', "null"])
def test_a_damaged_index_is_said(mixtral: Path, content: str) -> None:
    (mixtral / "model.safetensors").unlink()
    (mixtral / "model.safetensors.index.json").write_text(content)
    assert "weights that cannot be read" in unreadable(mixtral)


def test_an_index_of_nothing_has_no_weights(mixtral: Path) -> None:
    (mixtral / "model.safetensors").unlink()
    write_index(mixtral, {"weight_map": {}})
    assert "has no weights" in unreadable(mixtral)


def test_without_weights_it_is_said_what_was_looked_for(mixtral: Path) -> None:
    (mixtral / "model.safetensors").unlink()
    assert weight_files(mixtral) == []
    assert "neither model.safetensors nor model.safetensors.index.json is there" in unreadable(mixtral)


def test_weights_that_go_while_they_are_read_are_said(mixtral: Path) -> None:
    reader = reader_of(mixtral)
    (mixtral / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="weights that cannot be read"):
        reader.layer(0)
    with pytest.raises(ModelNotFoundError, match="weights that cannot be read"):
        next(reader.dense_parts())


def test_only_what_is_asked_for_is_read(mixtral: Path) -> None:
    tensors = stored(mixtral)
    files = TensorFiles(mixtral)
    assert set(files.names) == tensors.keys()
    wanted = ["model.norm.weight", f"{EXPERT}.w1.weight"]
    with files.opened(wanted) as found:
        assert_same_weights({name: found[name][...] for name in wanted}, {name: tensors[name] for name in wanted})
    assert files.num_weights(wanted) == 64 + 96 * 64
