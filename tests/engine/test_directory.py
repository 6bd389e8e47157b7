import threading
from pathlib import Path

import pytest

from engine.directory import ensure_directory, partial_directory


def is_intact(directory: Path) -> bool:
    return (directory / "content").is_file() and (directory / "content").read_text() == "done"


def build(directory: Path) -> None:
    (directory / "content").write_text("done")


def never(*_: object) -> None:
    raise AssertionError("must not be called")


def siblings(path: Path) -> set[str]:
    return {sibling.name for sibling in path.parent.iterdir()} - {f".{path.name}.lock"}


def test_it_is_built_once(tmp_path: Path) -> None:
    path = tmp_path / "models" / "demo"
    ensure_directory(path, is_intact, build, waiting=never)
    assert is_intact(path)
    ensure_directory(path, is_intact, never, waiting=never)
    assert siblings(path) == {"demo"}


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "demo"

    def fail(directory: Path) -> None:
        build(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_directory(path, is_intact, fail, waiting=never)
    assert siblings(path) == set()
    ensure_directory(path, is_intact, build, waiting=never)
    assert is_intact(path)


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "demo"
    leftover = tmp_path / ".demo.partial"
    (leftover / "download").mkdir(parents=True)
    (leftover / "content").write_text("half")

    def check_and_build(directory: Path) -> None:
        assert list(directory.iterdir()) == []
        build(directory)

    ensure_directory(path, is_intact, check_and_build, waiting=never)
    assert siblings(path) == {"demo"}


class Stopped(BaseException):
    """As a signal would end a build."""


INTERRUPTIONS = [Stopped, KeyboardInterrupt, SystemExit, BrokenPipeError, ConnectionResetError]


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_an_interrupted_build_that_can_be_resumed_is_gone_on_with(
    tmp_path: Path, interruption: type[BaseException]
) -> None:
    path = tmp_path / "demo"

    def stop(directory: Path) -> None:
        assert list(directory.iterdir()) == []
        (directory / "half").write_text("half")
        raise interruption

    def go_on(directory: Path) -> None:
        assert [file.name for file in directory.iterdir()] == ["half"]
        build(directory)

    with pytest.raises(interruption):
        ensure_directory(path, is_intact, stop, waiting=never, is_resumable=True)
    assert siblings(path) == {partial_directory(path).name}
    ensure_directory(path, is_intact, go_on, waiting=never, is_resumable=True)
    assert siblings(path) == {"demo"}
    assert {file.name for file in path.iterdir()} == {"half", "content"}


def test_an_interrupted_build_leaves_the_old_directory_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "demo"
    path.mkdir()
    (path / "content").write_text("old")

    def stop(directory: Path) -> None:
        build(directory)
        raise Stopped

    with pytest.raises(Stopped):
        ensure_directory(path, is_intact, stop, waiting=never, is_resumable=True)
    assert (path / "content").read_text() == "old"
    ensure_directory(path, is_intact, build, waiting=never, is_resumable=True)
    assert is_intact(path)
    assert siblings(path) == {"demo"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a bug"), TimeoutError()])
def test_other_errors_leave_nothing_to_go_on_with(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "demo"

    def fail(directory: Path) -> None:
        build(directory)
        raise error

    with pytest.raises(type(error)):
        ensure_directory(path, is_intact, fail, waiting=never, is_resumable=True)
    assert siblings(path) == set()


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_a_build_that_cannot_be_resumed_leaves_nothing(tmp_path: Path, interruption: type[BaseException]) -> None:
    path = tmp_path / "demo"

    def stop(directory: Path) -> None:
        build(directory)
        raise interruption

    with pytest.raises(interruption):
        ensure_directory(path, is_intact, stop, waiting=never)
    assert siblings(path) == set()


@pytest.mark.parametrize("is_resumable", [False, True])
def test_what_cannot_be_replaced_leaves_nothing_half_done(tmp_path: Path, is_resumable: bool) -> None:
    path = tmp_path / "demo"
    path.write_text("a file")
    with pytest.raises(NotADirectoryError):
        ensure_directory(path, lambda _: False, build, waiting=never, is_resumable=is_resumable)
    assert path.read_text() == "a file"
    assert siblings(path) == {"demo"}


def test_a_damaged_directory_is_replaced_and_kept_while_the_build_may_fail(tmp_path: Path) -> None:
    path = tmp_path / "demo"
    path.mkdir()
    (path / "content").write_text("damaged")
    (path / "stray").write_text("old")
    with pytest.raises(AssertionError):
        ensure_directory(path, is_intact, never, waiting=never)
    assert (path / "content").read_text() == "damaged"
    ensure_directory(path, is_intact, build, waiting=never)
    assert [file.name for file in path.iterdir()] == ["content"]


def test_a_second_builder_waits_for_the_first_and_builds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "demo"
    building, may_end, waits = threading.Event(), threading.Event(), threading.Event()

    def build_slowly(directory: Path) -> None:
        building.set()
        assert may_end.wait(10)
        build(directory)

    first = threading.Thread(target=ensure_directory, args=(path, is_intact, build_slowly, never))
    second = threading.Thread(target=ensure_directory, args=(path, is_intact, never, waits.set))
    first.start()
    assert building.wait(10)
    second.start()
    assert waits.wait(10)
    assert not path.exists()
    may_end.set()
    first.join(10)
    second.join(10)
    assert is_intact(path)
    assert siblings(path) == {"demo"}
