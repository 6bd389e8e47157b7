import gc
from pathlib import Path

import pytest
import torch

from engine.config import DeviceName
from engine.device import open_device
from engine.errors import ConfigError
from tests.engine.tiny import mixtral_config, qwen3_moe_config, save_checkpoint

# As the engine process does; packing looks for garbage, of which libraries have none.
gc.freeze()

# Tiny products gain nothing from threads, and threads that wait for each other lose much on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> DeviceName:
    """The devices that tests of the engine run on."""
    name: DeviceName = request.param
    try:
        open_device(name)
    except ConfigError:
        pytest.skip("no CUDA device")
    # Products of float32 that really are, which the references are compared with token for token.
    torch.set_float32_matmul_precision("highest")
    return name


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory with the packs of all tiny checkpoints."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(mixtral_config(), tmp_path_factory.mktemp("checkpoints") / "tiny-mixtral")


@pytest.fixture(scope="session")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(qwen3_moe_config(), tmp_path_factory.mktemp("checkpoints") / "tiny-qwen3-moe")
