import dataclasses
from pathlib import Path

import msgspec
import pytest

from engine.demo import manifest
from engine.demo.build import describe_origin
from engine.demo.upcycle import Recipe

ORIGIN = describe_origin(Recipe())


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a small file, which is checked by content, and a large one, which is checked by size."""
    monkeypatch.setattr(manifest, "MAX_CHECKED_BYTES", 100)
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    manifest.write(tmp_path, ORIGIN)
    return tmp_path


def test_a_finished_model_is_intact(model: Path) -> None:
    assert manifest.is_intact(model, ORIGIN)


def test_a_model_of_another_recipe_or_format_is_not(model: Path) -> None:
    assert not manifest.is_intact(model, describe_origin(dataclasses.replace(Recipe(), seed=1)))
    assert not manifest.is_intact(model, msgspec.structs.replace(ORIGIN, format=ORIGIN.format + 1))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", manifest.NAME])
def test_a_missing_file_is_noticed(model: Path, name: str) -> None:
    (model / name).unlink()
    assert not manifest.is_intact(model, ORIGIN)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", manifest.NAME])
def test_a_torn_file_is_noticed(model: Path, name: str) -> None:
    (model / name).write_bytes((model / name).read_bytes()[:-2])
    assert not manifest.is_intact(model, ORIGIN)


def test_changed_content_of_a_small_file_is_noticed(model: Path) -> None:
    (model / "config.json").write_bytes(b"[]")
    assert not manifest.is_intact(model, ORIGIN)


def test_a_directory_that_is_not_there_is_not_intact(tmp_path: Path) -> None:
    assert not manifest.is_intact(tmp_path / "nothing", ORIGIN)
