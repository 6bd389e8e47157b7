import logging
from pathlib import Path

import msgspec
import pytest

from engine.packing.profiles import DIRECTORY, read_profile, write_profile
from engine.profile import PassTimes, Profile, ProfiledToken
from tests.engine.packing.harness import make_read_only, small_disk

PROFILE = Profile(
    tokens=[
        ProfiledToken([[0, 1], [2, 3]], [[0, 1], [2, 4]], True, 0.5, [[[2, 5]], []]),
        ProfiledToken([[1, 0], [3, 2]], [], False, 0.0, []),
    ],
    times=PassTimes((0.1, 0.2), (4, 9), 0.05),
)
SUBJECT = "CPU (2 threads), torch.float32, qint4-g64"


class Other(msgspec.Struct, frozen=True, tag="profile-1"):
    """The same in another version of the format."""

    tokens: list[ProfiledToken]
    times: PassTimes


def the_file(directory: Path) -> Path:
    (file,) = (directory / DIRECTORY).iterdir()
    return file


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_profile(tmp_path, SUBJECT, PROFILE)
    assert read_profile(tmp_path, SUBJECT) == PROFILE


def test_a_profile_is_of_one_subject(tmp_path: Path) -> None:
    write_profile(tmp_path, SUBJECT, PROFILE)
    assert read_profile(tmp_path, "CPU (4 threads), torch.float32, qint4-g64") is None


def test_the_last_profile_counts_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_profile(tmp_path, SUBJECT, PROFILE)
    newer = msgspec.structs.replace(PROFILE, tokens=PROFILE.tokens[:1])
    write_profile(tmp_path, SUBJECT, newer)
    assert read_profile(tmp_path, SUBJECT) == newer
    assert the_file(tmp_path).is_file()


def test_there_is_none_at_first(tmp_path: Path) -> None:
    assert read_profile(tmp_path, SUBJECT) is None


@pytest.mark.parametrize("content", [b"", b"no profile", msgspec.msgpack.encode(PROFILE)[:-9]])
def test_a_file_that_cannot_be_read_is_no_profile(tmp_path: Path, content: bytes) -> None:
    write_profile(tmp_path, SUBJECT, PROFILE)
    the_file(tmp_path).write_bytes(content)
    assert read_profile(tmp_path, SUBJECT) is None


def test_another_version_of_the_format_is_no_profile(tmp_path: Path) -> None:
    write_profile(tmp_path, SUBJECT, PROFILE)
    the_file(tmp_path).write_bytes(msgspec.msgpack.encode(Other(PROFILE.tokens, PROFILE.times)))
    assert read_profile(tmp_path, SUBJECT) is None


def test_a_directory_that_cannot_be_written_to_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", 2**20) as disk:
        make_read_only(disk)
        with caplog.at_level(logging.WARNING):
            write_profile(disk, SUBJECT, PROFILE)
        assert read_profile(disk, SUBJECT) is None
    (record,) = caplog.records
    assert str(disk) in record.message
    assert "makes it again" in record.message


def test_so_is_something_else_in_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / DIRECTORY).touch()
    write_profile(tmp_path, SUBJECT, PROFILE)
    assert str(tmp_path / DIRECTORY) in caplog.text
    assert read_profile(tmp_path, SUBJECT) is None
