import os
from pathlib import Path

import pytest

from engine.packing import small_files
from engine.packing.small_files import copy_small_files

COPIED = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "merges.txt",
    "LICENSE",
    "LICENSE.md",
    "README.md",
]
LEFT = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors",
    "manifest.json",
    "notes.md",
    "weights.pt",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return directory


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    directory = tmp_path / "pack"
    directory.mkdir()
    return directory


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_what_a_server_reads_is_copied_and_weights_are_not(model: Path, pack: Path) -> None:
    for name in [*COPIED, *LEFT]:
        (model / name).write_text(name)
    (model / "tokenizer").mkdir()
    copy_small_files(model, pack)
    assert names(pack) == set(COPIED)
    assert all((pack / name).read_text() == name for name in COPIED)


def test_large_files_are_not_small(model: Path, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_files, "MAX_COPIED_BYTES", 10)
    (model / "tokenizer.json").write_bytes(b"x" * 10)
    (model / "tokenizer.model").write_bytes(b"x" * 11)
    copy_small_files(model, pack)
    assert names(pack) == {"tokenizer.json"}


def test_links_are_followed(model: Path, pack: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("content")
    (model / "tokenizer.json").symlink_to(tmp_path / "blob")
    copy_small_files(model, pack)
    assert not (pack / "tokenizer.json").is_symlink()
    assert (pack / "tokenizer.json").read_text() == "content"


def test_only_what_has_changed_is_copied_again(model: Path, pack: Path) -> None:
    for name in ("config.json", "tokenizer.json", "merges.txt"):
        (model / name).write_text("old")
    copy_small_files(model, pack)
    before = {name: (pack / name).stat().st_ino for name in names(pack)}
    (model / "tokenizer.json").write_text("new")
    os.utime(model / "merges.txt")
    copy_small_files(model, pack)
    after = {name: (pack / name).stat().st_ino for name in names(pack)}
    assert {name for name in after if after[name] != before[name]} == {"tokenizer.json"}
    assert (pack / "tokenizer.json").read_text() == "new"
