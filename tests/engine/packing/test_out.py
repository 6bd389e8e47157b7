"""Packs in a directory that the user chose."""

import os
import shutil
from pathlib import Path

import pytest

from engine.errors import PackError
from engine.packing import Pack
from engine.protocol import Loading
from tests.engine.packing.harness import Interrupted, draft_of, files, names, pack_of, raise_at, small_disk


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "packs" / "mine"


def test_the_pack_is_where_it_was_wanted_and_nowhere_else(
    checkpoint: Path, cache: Path, out: Path, whole_pack: Pack
) -> None:
    pack = pack_of(checkpoint, cache, out=out)
    assert pack.directory == out
    draft_of(pack)
    assert files(out) == files(whole_pack.directory)
    assert names(out.parent) == {"mine"}
    assert not cache.exists()


def test_an_empty_directory_is_filled(checkpoint: Path, cache: Path, out: Path) -> None:
    out.mkdir(parents=True)
    assert pack_of(checkpoint, cache, out=out).directory == out


def test_a_pack_that_is_there_is_kept(checkpoint: Path, cache: Path, out: Path, layers_read: list[int]) -> None:
    pack_of(checkpoint, cache, out=out)
    layers_read.clear()
    progress: list[Loading] = []
    pack_of(checkpoint, cache, progress.append, out=out)
    assert (layers_read, progress) == ([], [])


def test_a_pack_of_the_same_model_is_replaced(source: Path, cache: Path, out: Path, layers_read: list[int]) -> None:
    old = pack_of(source, cache, out=out)
    os.utime(source / "model.safetensors")
    layers_read.clear()
    new = pack_of(source, cache, out=out)
    assert layers_read == [0, 1, 2]
    assert new.manifest.source != old.manifest.source


def refusal(checkpoint: Path, cache: Path, out: Path, layers_read: list[int]) -> str:
    layers_read.clear()
    with pytest.raises(PackError) as caught:
        pack_of(checkpoint, cache, out=out)
    assert layers_read == []
    assert str(out) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_pack_of_another_model_is_not_replaced(
    checkpoint: Path, small_checkpoint: Path, cache: Path, out: Path, layers_read: list[int]
) -> None:
    pack_of(small_checkpoint, cache, out=out)
    before = files(out)
    message = refusal(checkpoint, cache, out, layers_read)
    assert message == (
        f"{out} is the pack of another model, {small_checkpoint}; delete it or choose another directory."
    )
    assert files(out) == before


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "config.json", "manifest.json", "experts.bin"])
def test_a_directory_with_other_files_is_not_replaced(
    checkpoint: Path, cache: Path, out: Path, layers_read: list[int], name: str
) -> None:
    out.mkdir(parents=True)
    (out / name).write_text("mine")
    assert refusal(checkpoint, cache, out, layers_read).endswith(
        "holds other files; choose a directory that is empty or does not exist."
    )
    assert files(out) == {name: b"mine"}


def test_the_checkpoint_itself_is_not_replaced(source: Path, cache: Path, layers_read: list[int]) -> None:
    before = files(source)
    assert "holds other files" in refusal(source, cache, source, layers_read)
    assert "holds other files" in refusal(source, cache, source.parent, layers_read)
    assert files(source) == before


def test_a_damaged_pack_is_not_replaced_unasked(
    checkpoint: Path, cache: Path, out: Path, layers_read: list[int]
) -> None:
    pack_of(checkpoint, cache, out=out)
    (out / "manifest.json").write_bytes(b"{")
    assert "has a damaged manifest" in refusal(checkpoint, cache, out, layers_read)


def test_a_file_is_not_replaced(checkpoint: Path, cache: Path, out: Path, layers_read: list[int]) -> None:
    out.parent.mkdir()
    out.write_text("mine")
    assert "is a file" in refusal(checkpoint, cache, out, layers_read)
    assert out.read_text() == "mine"


def test_a_mount_point_is_refused_at_once(
    checkpoint: Path, cache: Path, tmp_path: Path, layers_read: list[int]
) -> None:
    # It could not be replaced at the end, and what is beside it is another disk.
    with small_disk(tmp_path / "disk", 2**20) as disk:
        assert "mount point" in refusal(checkpoint, cache, disk, layers_read)


def test_a_symbolic_link_stays_and_leads_to_the_new_pack(source: Path, cache: Path, out: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    out.parent.mkdir()
    out.symlink_to(target)
    assert pack_of(source, cache, out=out).directory == target
    os.utime(source / "model.safetensors")
    pack = pack_of(source, cache, out=out)
    assert out.is_symlink()
    assert pack_of(out, cache).manifest == pack.manifest


def test_a_pack_in_the_cache_may_be_a_symbolic_link(source: Path, cache: Path, tmp_path: Path) -> None:
    pack = pack_of(source, cache)
    moved = Path(shutil.move(pack.directory, tmp_path / "larger-disk"))
    pack.directory.symlink_to(moved)
    assert pack_of(source, cache).manifest == pack.manifest
    os.utime(source / "model.safetensors")
    assert pack_of(source, cache).manifest != pack.manifest
    assert pack.directory.is_symlink()


def test_the_current_directory_may_be_chosen(
    checkpoint: Path, cache: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.mkdir(parents=True)
    monkeypatch.chdir(out)
    assert pack_of(checkpoint, cache, out=Path()).directory == out
    assert names(out.parent) == {"mine"}


def test_an_interrupted_pack_goes_on_where_it_was_wanted(
    checkpoint: Path, cache: Path, out: Path, layers_read: list[int], whole_pack: Pack
) -> None:
    with pytest.raises(Interrupted):
        pack_of(checkpoint, cache, raise_at(10, Interrupted()), out=out)
    assert not out.exists()
    layers_read.clear()
    pack = pack_of(checkpoint, cache, out=out)
    assert layers_read == [1, 2]
    draft_of(pack)
    assert files(out) == files(whole_pack.directory)


def test_what_another_model_left_there_half_done_is_not_mixed_in(
    checkpoint: Path, small_checkpoint: Path, cache: Path, out: Path, layers_read: list[int], whole_pack: Pack
) -> None:
    with pytest.raises(Interrupted):
        pack_of(small_checkpoint, cache, raise_at(5, Interrupted()), out=out)
    layers_read.clear()
    draft_of(pack_of(checkpoint, cache, out=out))
    assert layers_read == [0, 1, 2]
    assert files(out) == files(whole_pack.directory)


@pytest.mark.parametrize("version", [1, 3, None])
def test_a_pack_that_does_not_say_of_which_model_is_not_replaced(
    checkpoint: Path, cache: Path, out: Path, layers_read: list[int], version: int | None
) -> None:
    pack_of(checkpoint, cache, out=out)
    if version is None:
        (out / "manifest.json").unlink()
    else:
        (out / "manifest.json").write_text(f'{{"format_version":{version}}}')
    before = files(out)
    assert "delete it or choose another directory" in refusal(checkpoint, cache, out, layers_read)
    assert files(out) == before


def test_a_pack_is_not_packed_into_another_directory(checkpoint: Path, cache: Path, out: Path, tmp_path: Path) -> None:
    pack = pack_of(checkpoint, cache, out=out)
    assert pack_of(out, cache, out=out) == pack
    with pytest.raises(PackError, match=r"is packed already; copy it"):
        pack_of(out, cache, out=tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_that_ends_before_its_pack_has_its_name_has_nothing_to_do_again(
    checkpoint: Path, cache: Path, out: Path, layers_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(directory: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("engine.directory._flush", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pack_of(checkpoint, cache, out=out)
    assert layers_read
    layers_read.clear()
    pack_of(checkpoint, cache, out=out)
    assert layers_read == []
    assert not (out / "journal").exists()
