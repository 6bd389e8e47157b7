from pathlib import Path

import pytest

from server.settings import load_settings

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_configuration_can_be_used(path: Path) -> None:
    assert load_settings({}, path).model


def test_there_is_one_for_the_demo() -> None:
    assert "demo.yaml" in [path.name for path in CONFIGS]
