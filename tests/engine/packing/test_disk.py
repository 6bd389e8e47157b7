import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import SafetensorError

from engine.errors import PackError
from engine.packing import Pack, disk
from engine.packing.disk import disk_errors, require_room, size_of
from tests.engine.packing.harness import (
    QINT4,
    draft_of,
    files,
    make_read_only,
    names,
    pack_of,
    read_experts,
    small_disk,
)

MIB = 2**20
PAGE = 4096


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Where no pack can be written."""
    with small_disk(tmp_path / "disk", 8 * PAGE) as path:
        yield path


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another process took the room between the check and the writing."""
    monkeypatch.setattr(disk, "SLACK_BYTES", -1000 * MIB)


def refusal(error: BaseException) -> str:
    message = str(error)
    assert "\n" not in message
    assert "--cache" in message
    return message


def test_what_is_needed_and_free_is_said_before_anything_is_written(checkpoint: Path, full_disk: Path) -> None:
    with pytest.raises(PackError) as caught:
        pack_of(checkpoint, full_disk, draft_bytes=5 * 10**9)
    message = refusal(caught.value)
    # 64 MiB for small things; the tiny model itself is less than a hundredth.
    assert message == (
        f"Packing needs 5.07 GB in {full_disk / 'packs'}, but only 0.00 GB are free there; free 5.07 GB or choose "
        "another directory (--cache)."
    )
    assert names(full_disk / "packs") == set()


def test_the_experts_and_the_dense_weights_need_room_too(
    checkpoint: Path, whole_pack: Pack, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def room(directory: Path, num_bytes: int, written_bytes: int) -> None:
        asked.append(num_bytes)
        raise PackError("no room")

    monkeypatch.setattr("engine.packing.write.require_room", room)
    with pytest.raises(PackError, match="no room"):
        pack_of(checkpoint, cache, draft_bytes=7)
    dense_bytes = sum(tensor.nbytes for part in whole_pack.dense_parts() for tensor in part.values())
    assert asked == [dense_bytes + whole_pack.records_path.stat().st_size + 7]


def test_room_is_needed_for_what_is_not_written_yet(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 100 * MIB) as directory:
        partial = directory / "partial"
        partial.mkdir()
        (partial / "experts.bin").write_bytes(bytes(20 * MIB))
        free = shutil.disk_usage(directory).free
        assert free == 80 * MIB
        room_bytes = free - disk.SLACK_BYTES
        require_room(partial, 20 * MIB + room_bytes, size_of(partial))
        with pytest.raises(PackError, match="Packing needs"):
            require_room(partial, 20 * MIB + room_bytes + 1, size_of(partial))


def test_the_size_of_a_directory_is_that_of_all_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert size_of(tmp_path) == 0
    (tmp_path / "x").write_bytes(b"123")
    (tmp_path / "a" / "b" / "y").write_bytes(b"45")
    assert size_of(tmp_path) == 5


@pytest.mark.usefixtures("unchecked")
def test_a_disk_that_fills_up_leaves_nothing_behind(small_checkpoint: Path, tmp_path: Path) -> None:
    total_bytes = size_of(pack_of(small_checkpoint, tmp_path / "cache").directory)
    num_failures = 0
    # From not even a lock to enough: dense weights, journal, experts, configuration, manifest.
    for num_bytes in [*range(PAGE, 8 * PAGE, PAGE), *range(8 * PAGE, total_bytes + 20 * PAGE, 9 * PAGE)]:
        with small_disk(tmp_path / "disk", num_bytes) as directory:
            try:
                pack_of(small_checkpoint, directory)
            except PackError as error:
                num_failures += 1
                message = refusal(error)
                assert re.search(r"could not be written \(.*No space left on device.*\); free some space", message)
                assert str(directory) in message
                assert size_of(directory) == 0
                assert not (directory / "packs").exists() or names(directory / "packs") == set()
            else:
                break
    else:
        pytest.fail("there was never enough room")
    assert num_failures > 10


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writing further than this into a file is an OSError, which needs no privileges to bring about."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [1000, 200_000])
def test_what_cannot_be_written_is_said_and_leaves_nothing_behind(
    small_checkpoint: Path, cache: Path, limit: int
) -> None:
    # The first limit stops the dense weights, the second the experts.
    with largest_file(limit), pytest.raises(PackError, match=r"could not be written \(.*File too large"):
        pack_of(small_checkpoint, cache)
    assert names(cache / "packs") == set()
    pack = pack_of(small_checkpoint, cache)
    with largest_file(1000), pytest.raises(PackError, match=r"could not be written \(.*File too large"):
        draft_of(pack)
    assert not [path for path in pack.directory.iterdir() if path.is_dir()]


@pytest.mark.usefixtures("unchecked")
def test_a_full_disk_leaves_the_old_pack_as_it_was(source: Path, tmp_path: Path, layers_read: list[int]) -> None:
    needed = size_of(pack_of(source, tmp_path / "cache").directory)
    with small_disk(tmp_path / "disk", needed + needed // 2) as directory:
        pack = pack_of(source, directory)
        before = files(pack.directory)
        (source / "config.json").touch()
        with pytest.raises(PackError, match="No space left on device"):
            pack_of(source, directory)
        assert layers_read == [0, 1, 2, 0, 1, 2, 0, 1]
        assert files(pack.directory) == before
        assert names(directory / "packs") == {pack.directory.name}


@pytest.mark.usefixtures("unchecked")
def test_a_full_disk_while_quantizing_leaves_no_draft(checkpoint: Path, whole_pack: Pack, tmp_path: Path) -> None:
    needed = size_of(whole_pack.directory)
    draft_bytes = size_of(whole_pack.directory / "draft-qint4-g32")
    with small_disk(tmp_path / "disk", needed - draft_bytes // 2) as directory:
        pack = pack_of(checkpoint, directory)
        before = files(pack.directory)
        with pytest.raises(PackError, match=r"draft-qint4-g32 could not be written \(.*No space left on device"):
            draft_of(pack)
        assert files(pack.directory) == before
        assert not [path for path in pack.directory.iterdir() if path.is_dir()]


def test_a_draft_needs_room_too(checkpoint: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 80 * MIB) as directory:
        pack = pack_of(checkpoint, directory)
        (directory / "ballast").write_bytes(bytes(20 * MIB))
        with pytest.raises(PackError, match=rf"Packing needs 0\.07 GB in {pack.directory}, but only 0\.06 GB"):
            draft_of(pack)
        assert not [path for path in pack.directory.iterdir() if path.is_dir()]


def test_a_disk_that_cannot_be_written_is_said(checkpoint: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 100 * MIB) as directory:
        make_read_only(directory)
        with pytest.raises(PackError, match=r"could not be written \(.*Read-only file system") as caught:
            pack_of(checkpoint, directory)
        refusal(caught.value)


def test_what_is_packed_can_be_served_from_a_disk_that_cannot_be_written(checkpoint: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 100 * MIB) as directory:
        draft_of(pack_of(checkpoint, directory))
        make_read_only(directory)
        pack = pack_of(checkpoint, directory)
        assert len(read_experts(pack)) == 3
        assert len(list(draft_of(pack).layers())) == 3
        with pytest.raises(PackError, match=r"draft-qint4-g16 could not be written \(.*Read-only file system"):
            draft_of(pack, QINT4._replace(group_size=16))


@pytest.mark.parametrize("name", ["cache", "cache/packs"])
def test_a_file_where_a_directory_should_be_is_said(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(PackError, match=r"could not be written .*choose another directory \(--cache\)") as caught:
        pack_of(checkpoint, tmp_path / "cache")
    refusal(caught.value)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
def test_errors_of_writing_are_pack_errors(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(PackError, match=rf"^{tmp_path} could not be written \(.*(No space|I/O)"), disk_errors(tmp_path):
        raise error


@pytest.mark.parametrize("error", [BrokenPipeError(), ConnectionResetError(), ValueError(), PackError("x")])
def test_a_server_that_is_gone_and_other_errors_are_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, disk_errors(tmp_path):
        raise error
    assert caught.value is error
