from pathlib import Path

import msgspec
import pytest

from engine.packing.journal import Journal


class Header(msgspec.Struct, frozen=True):
    what: str


@pytest.fixture
def journal(tmp_path: Path) -> Journal[Header, list[int]]:
    return Journal(tmp_path, Header, list[int])


def file_of(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_what_was_written_is_read(journal: Journal[Header, list[int]], tmp_path: Path) -> None:
    journal.begin(Header("x"))
    assert journal.read() == (Header("x"), [])
    journal.add([1, 2**64 - 1])
    journal.add([])
    again = Journal(tmp_path, Header, list[int])
    assert again.read() == (Header("x"), [[1, 2**64 - 1], []])
    again.add([3])
    assert journal.read() == (Header("x"), [[1, 2**64 - 1], [], [3]])


def test_where_nothing_was_written_there_is_nothing(journal: Journal[Header, list[int]], tmp_path: Path) -> None:
    assert journal.read() is None
    assert not file_of(tmp_path).exists()


def test_begin_starts_over(journal: Journal[Header, list[int]]) -> None:
    journal.begin(Header("x"))
    journal.add([1])
    journal.begin(Header("y"))
    assert journal.read() == (Header("y"), [])


def test_end_leaves_nothing(journal: Journal[Header, list[int]], tmp_path: Path) -> None:
    journal.begin(Header("x"))
    Journal.end(tmp_path)
    Journal.end(tmp_path)
    assert journal.read() is None
    assert list(tmp_path.iterdir()) == []


def test_a_line_counts_when_it_is_whole(journal: Journal[Header, list[int]], tmp_path: Path) -> None:
    journal.begin(Header("x"))
    num_bytes = file_of(tmp_path).stat().st_size
    journal.add([1, 2])
    content = file_of(tmp_path).read_bytes()
    for length in range(num_bytes, len(content)):
        file_of(tmp_path).write_bytes(content[:length])
        assert journal.read() == (Header("x"), [])
        # What was torn is gone, and does not spoil the next line.
        journal.add([3])
        assert journal.read() == (Header("x"), [[3]])
    for length in range(num_bytes):
        file_of(tmp_path).write_bytes(content[:length])
        assert journal.read() is None


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"x\n", b"{}\n", b'{"what":1}\n', b'{"what":"x"}\n{}\n', b'{"what":"x"}\n[1]\n["2"]\n', b"\xff\n"],
)
def test_what_cannot_be_read_is_nothing_to_go_on_with(
    journal: Journal[Header, list[int]], tmp_path: Path, content: bytes
) -> None:
    file_of(tmp_path).write_bytes(content)
    assert journal.read() is None
