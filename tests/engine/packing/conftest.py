import shutil
from pathlib import Path

import pytest
import torch

from engine.model.weights import CheckpointReader
from engine.packing import Pack
from tests.engine.packing.harness import draft_of, pack_of
from tests.engine.tiny import mixtral_config, save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of six experts."""
    return save_checkpoint(mixtral_config(), tmp_path_factory.mktemp("checkpoints") / "mixtral", dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of six experts."""
    config = mixtral_config(num_layers=1)
    return save_checkpoint(config, tmp_path_factory.mktemp("checkpoints") / "small", dtype=torch.bfloat16)


@pytest.fixture
def source(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint, for a test that changes it."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def whole_pack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """The checkpoint's pack with a draft, made without interruptions; nobody changes it."""
    pack = pack_of(checkpoint, tmp_path_factory.mktemp("cache"))
    draft_of(pack)
    return pack


@pytest.fixture
def own_pack(whole_pack: Pack, tmp_path: Path) -> Path:
    """A copy of the pack, by itself, for a test that damages it."""
    return Path(shutil.copytree(whole_pack.directory, tmp_path / "packed"))


@pytest.fixture
def layers_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers of experts that were read from a checkpoint, as they are."""
    layers: list[int] = []
    read_layer = CheckpointReader.layer

    def layer(reader: CheckpointReader, index: int) -> dict[str, torch.Tensor]:
        layers.append(index)
        return read_layer(reader, index)

    monkeypatch.setattr(CheckpointReader, "layer", layer)
    return layers
