"""Runs that end before the pack is whole: the next one goes on where they stopped, and makes the same pack."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import msgspec
import pytest
import torch

from engine.directory import partial_directory
from engine.errors import PackError
from engine.experts.layout import ExpertId
from engine.experts.records import RecordFile
from engine.packing import Pack, is_pack
from engine.protocol import Loading
from tests.engine.packing.harness import Interrupted, draft_of, files, names, pack_of, raise_at

NUM_LAYERS = 3
NUM_EXPERTS = 6
FIRST_EXPERT = 2
"""Messages before the first expert's: of the dense weights."""
NUM_MESSAGES = FIRST_EXPERT + NUM_LAYERS * NUM_EXPERTS

ERRORS = [Interrupted, KeyboardInterrupt, BrokenPipeError, ConnectionResetError]


@pytest.fixture
def experts_read(monkeypatch: pytest.MonkeyPatch) -> list[ExpertId]:
    """The records that were read, as they are."""
    experts: list[ExpertId] = []
    read = RecordFile.read

    def counting_read(file: RecordFile, expert: ExpertId, destination: torch.Tensor) -> None:
        experts.append(expert)
        read(file, expert, destination)

    monkeypatch.setattr(RecordFile, "read", counting_read)
    return experts


@pytest.fixture
def expected(whole_pack: Pack) -> dict[str, bytes]:
    """The files of a pack that nothing interrupted, with its draft."""
    return files(whole_pack.directory)


def expected_pack(expected: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in expected.items() if not name.startswith("draft-")}


def partial_of(cache: Path, pack: Pack) -> Path:
    return partial_directory(cache / "packs" / pack.directory.name)


def stop_packing(checkpoint: Path, cache: Path, at: int, error: type[BaseException] = Interrupted) -> None:
    with pytest.raises(error):
        pack_of(checkpoint, cache, raise_at(at, error()))


@pytest.mark.parametrize(("stop", "error"), list(zip(range(NUM_MESSAGES), cycle(ERRORS), strict=False)))
def test_packing_goes_on_where_it_stopped(
    checkpoint: Path,
    cache: Path,
    whole_pack: Pack,
    expected: dict[str, bytes],
    layers_read: list[int],
    stop: int,
    error: type[BaseException],
) -> None:
    stop_packing(checkpoint, cache, stop, error)
    assert not any(is_pack(path) for path in (cache / "packs").iterdir() if not path.name.startswith("."))
    # The last expert's message comes before its layer is sure to be on the disk.
    num_done = max(0, stop - FIRST_EXPERT) // NUM_EXPERTS
    assert layers_read == list(range(num_done + (stop >= FIRST_EXPERT)))
    layers_read.clear()
    progress: list[Loading] = []
    pack = pack_of(checkpoint, cache, progress.append)
    assert layers_read == list(range(num_done, NUM_LAYERS))
    assert [message.done for message in progress if message.stage == "Packing experts"] == list(
        range(num_done * NUM_EXPERTS + 1, NUM_LAYERS * NUM_EXPERTS + 1)
    )
    assert ("Packing dense weights" in {message.stage for message in progress}) == (stop < FIRST_EXPERT)
    assert pack.directory.name == whole_pack.directory.name
    assert files(pack.directory) == expected_pack(expected)
    assert names(cache / "packs") == {pack.directory.name}


def test_packing_may_be_interrupted_again_and_again(
    checkpoint: Path, cache: Path, expected: dict[str, bytes], layers_read: list[int]
) -> None:
    stop_packing(checkpoint, cache, FIRST_EXPERT + 8)
    stop_packing(checkpoint, cache, 3)
    stop_packing(checkpoint, cache, 9)
    stop_packing(checkpoint, cache, 5)
    assert files(pack_of(checkpoint, cache).directory) == expected_pack(expected)
    assert layers_read == [0, 1, 1, 1, 2, 2, 2]


def test_it_may_be_interrupted_whenever_something_is_flushed(
    checkpoint: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync
    num_left = 10**6

    def fsync_or_stop(descriptor: int) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise Interrupted
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_or_stop)
    pack_of(checkpoint, tmp_path / "uninterrupted")
    total = 10**6 - num_left
    assert total > 10
    for number in range(total):
        cache = tmp_path / f"cache-{number}"
        num_left = number
        with pytest.raises(Interrupted):
            pack_of(checkpoint, cache)
        num_left = 10**6
        assert files(pack_of(checkpoint, cache).directory) == expected_pack(expected)
        assert len(names(cache / "packs")) == 1


def test_what_the_journal_says_is_on_the_disk_before_it_says_so(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def recording_fsync(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    pack = pack_of(checkpoint, cache)
    partial = f".{pack.directory.name}.partial"
    assert flushed[:9] == ["dense-000.safetensors", "journal", partial, *3 * ["experts.bin", "journal"]]
    # And everything before it gets its name, which is then on the disk too.
    assert set(flushed[9:-1]) == {*names(pack.directory), "journal", partial}
    assert flushed[-1] == "packs"
    flushed.clear()
    draft_of(pack)
    layers = [f"00{layer}.safetensors" for layer in range(NUM_LAYERS)]
    steps = [name for layer in layers for name in (layer, "journal")]
    assert flushed[:8] == ["journal", ".draft-qint4-g32.partial", *steps]
    assert set(flushed[8:-1]) == {*layers, "manifest.json", "journal", ".draft-qint4-g32.partial"}
    assert flushed[-1] == pack.directory.name


@pytest.mark.parametrize(
    "tear",
    [
        lambda content: content + b"[1,2",
        lambda content: content + b"\0" * 50,
        lambda content: content + content.splitlines()[-1],
    ],
)
def test_a_torn_last_line_of_the_journal_does_not_count(
    checkpoint: Path,
    cache: Path,
    whole_pack: Pack,
    expected: dict[str, bytes],
    layers_read: list[int],
    tear: Callable[[bytes], bytes],
) -> None:
    stop_packing(checkpoint, cache, FIRST_EXPERT + 8)
    journal = partial_of(cache, whole_pack) / "journal"
    journal.write_bytes(tear(journal.read_bytes()))
    # And the next run is interrupted too, after it has written a line of its own.
    stop_packing(checkpoint, cache, 8)
    assert files(pack_of(checkpoint, cache).directory) == expected_pack(expected)
    assert layers_read == [0, 1, 1, 2, 2]


def test_a_line_that_was_torn_off_costs_its_layer(
    checkpoint: Path, cache: Path, whole_pack: Pack, expected: dict[str, bytes], layers_read: list[int]
) -> None:
    stop_packing(checkpoint, cache, FIRST_EXPERT + 14)
    journal = partial_of(cache, whole_pack) / "journal"
    journal.write_bytes(journal.read_bytes()[:-1])
    assert files(pack_of(checkpoint, cache).directory) == expected_pack(expected)
    assert layers_read == [0, 1, 2, 1, 2]


@pytest.mark.parametrize("num_bytes", [1, 4096, 100_000])
def test_what_a_torn_layer_left_in_the_records_is_written_again(
    checkpoint: Path, cache: Path, whole_pack: Pack, expected: dict[str, bytes], num_bytes: int
) -> None:
    stop_packing(checkpoint, cache, FIRST_EXPERT + 6)
    with (partial_of(cache, whole_pack) / "experts.bin").open("ab") as file:
        file.write(b"\xff" * num_bytes)
    assert files(pack_of(checkpoint, cache).directory) == expected_pack(expected)


def journal_lines(journal: Path) -> list[bytes]:
    return journal.read_bytes().splitlines(keepends=True)


def with_header(journal: Path, change: Callable[[dict[str, object]], object]) -> None:
    header, *entries = journal_lines(journal)
    content = msgspec.json.decode(header)
    change(content)
    journal.write_bytes(b"".join([msgspec.json.encode(content), b"\n", *entries]))


def other_layout(content: dict[str, object]) -> None:
    layout = content["layout"]
    assert isinstance(layout, dict)
    layout["layers"][0]["tensors"].reverse()


@pytest.mark.parametrize(
    "change",
    [
        lambda journal: with_header(journal, lambda content: content.update(format_version=1)),
        lambda journal: with_header(journal, lambda content: content.update(source={"path": "/x", "files": {}})),
        lambda journal: with_header(journal, lambda content: content.pop("source")),
        lambda journal: with_header(journal, other_layout),
        lambda journal: journal.write_bytes(b"not json\n" + b"".join(journal_lines(journal)[1:])),
        lambda journal: journal.write_bytes(b"".join([*journal_lines(journal)[:1], b'"no list"\n'])),
        lambda journal: journal.write_bytes(b""),
        lambda journal: journal.unlink(),
    ],
)
def test_what_was_begun_otherwise_is_begun_anew(
    checkpoint: Path,
    cache: Path,
    whole_pack: Pack,
    expected: dict[str, bytes],
    layers_read: list[int],
    change: Callable[[Path], object],
) -> None:
    stop_packing(checkpoint, cache, FIRST_EXPERT + 8)
    partial = partial_of(cache, whole_pack)
    change(partial / "journal")
    (partial / "stray").write_text("of another run")
    (partial / "directory").mkdir()
    layers_read.clear()
    pack = pack_of(checkpoint, cache)
    assert layers_read == [0, 1, 2]
    assert files(pack.directory) == expected_pack(expected)
    assert "directory" not in names(pack.directory)


def test_a_checkpoint_that_changed_meanwhile_is_begun_anew(source: Path, cache: Path, layers_read: list[int]) -> None:
    stop_packing(source, cache, FIRST_EXPERT + 8)
    os.utime(source / "model.safetensors")
    pack_of(source, cache)
    assert layers_read == [0, 1, 0, 1, 2]


def test_an_old_pack_stays_until_the_new_one_is_whole(source: Path, cache: Path) -> None:
    pack = pack_of(source, cache)
    before = files(pack.directory)
    os.utime(source / "config.json")
    # The message why it is packed anew comes first.
    stop_packing(source, cache, 1 + FIRST_EXPERT + 8)
    assert files(pack.directory) == before
    assert pack_of(source, cache).manifest.source != pack.manifest.source


def test_another_error_leaves_nothing_to_go_on_with(checkpoint: Path, cache: Path, layers_read: list[int]) -> None:
    with pytest.raises(ValueError, match="a bug"):
        pack_of(checkpoint, cache, raise_at(FIRST_EXPERT + 8, ValueError("a bug")))
    assert names(cache / "packs") == set()
    pack_of(checkpoint, cache)
    assert layers_read == [0, 1, 0, 1, 2]


def test_what_a_complete_but_unnamed_pack_left_is_not_taken_for_one(
    checkpoint: Path, cache: Path, whole_pack: Pack, expected: dict[str, bytes]
) -> None:
    pack = pack_of(checkpoint, cache)
    (pack.directory / "experts.bin").write_bytes(b"half")
    pack.directory.rename(partial_of(cache, whole_pack))
    assert files(pack_of(checkpoint, cache).directory) == expected_pack(expected)


@pytest.mark.parametrize(("stop", "error"), list(zip(range(NUM_LAYERS + 1), ERRORS, strict=True)))
def test_quantizing_goes_on_where_it_stopped(
    own_pack: Path, expected: dict[str, bytes], experts_read: list[ExpertId], stop: int, error: type[BaseException]
) -> None:
    pack = without_draft(own_pack)
    with pytest.raises(error):
        draft_of(pack, on_progress=raise_at(stop, error()))
    assert not (own_pack / "draft-qint4-g32").exists()
    experts_read.clear()
    progress: list[Loading] = []
    draft_of(pack, on_progress=progress.append)
    assert experts_read == [ExpertId(layer, e) for layer in range(stop, NUM_LAYERS) for e in range(NUM_EXPERTS)]
    assert [message.done for message in progress] == list(range(stop, NUM_LAYERS + 1))
    assert files(own_pack) == expected


def without_draft(directory: Path) -> Pack:
    pack = pack_of(directory, directory / "no-cache")
    draft = draft_of(pack).directory
    for path in draft.iterdir():
        path.unlink()
    draft.rmdir()
    return pack


def stop_quantizing(pack: Pack, at: int) -> Path:
    with pytest.raises(Interrupted):
        draft_of(pack, on_progress=raise_at(at, Interrupted()))
    return pack.directory / ".draft-qint4-g32.partial"


def test_a_torn_line_of_a_drafts_journal_does_not_count(
    own_pack: Path, expected: dict[str, bytes], experts_read: list[ExpertId]
) -> None:
    pack = without_draft(own_pack)
    partial = stop_quantizing(pack, 1)
    journal = partial / "journal"
    journal.write_bytes(journal.read_bytes() + b'{"name":"001')
    stop_quantizing(pack, 1)
    experts_read.clear()
    draft_of(pack)
    assert {expert.layer for expert in experts_read} == {2}
    assert files(own_pack) == expected


@pytest.mark.parametrize("header", [b'{"format_version":1}\n', b"{}\n", b"\n", b""])
def test_a_draft_that_was_begun_otherwise_is_begun_anew(
    own_pack: Path, expected: dict[str, bytes], experts_read: list[ExpertId], header: bytes
) -> None:
    pack = without_draft(own_pack)
    journal = stop_quantizing(pack, 2) / "journal"
    journal.write_bytes(b"".join([header, *journal_lines(journal)[1:]]))
    experts_read.clear()
    draft_of(pack)
    assert {expert.layer for expert in experts_read} == {0, 1, 2}
    assert files(own_pack) == expected


def test_half_a_layer_of_a_draft_is_written_again(own_pack: Path, expected: dict[str, bytes]) -> None:
    pack = without_draft(own_pack)
    partial = stop_quantizing(pack, 1)
    (partial / "001.safetensors").write_bytes(b"half")
    draft_of(pack)
    assert files(own_pack) == expected


def test_a_pack_whose_finished_part_was_damaged_meanwhile_is_not_served(
    checkpoint: Path, cache: Path, whole_pack: Pack
) -> None:
    stop_packing(checkpoint, cache, FIRST_EXPERT + 8)
    (partial_of(cache, whole_pack) / "dense-000.safetensors").unlink()
    with pytest.raises(PackError, match=r"dense-000\.safetensors is missing; delete .* to make it anew"):
        pack_of(checkpoint, cache)


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from engine.kernels.quantization import QuantizationSpec
from engine.model.checkpoint import read_config
from engine.packing import ensure_draft, ensure_pack

def on_progress(message):
    if message.stage.startswith(sys.argv[3]) and message.done == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint, cache = Path(sys.argv[1]), Path(sys.argv[2])
pack = ensure_pack(checkpoint, read_config(checkpoint), None, cache, 0, on_progress)
ensure_draft(pack, QuantizationSpec("qint4", 32), 0, on_progress)
"""


def run_until_killed(checkpoint: Path, cache: Path, stage: str, done: int) -> None:
    arguments = [sys.executable, "-c", KILLED_AT, str(checkpoint), str(cache), stage, str(done)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_after_a_process_was_killed_the_next_one_goes_on(
    checkpoint: Path, cache: Path, expected: dict[str, bytes], layers_read: list[int], experts_read: list[ExpertId]
) -> None:
    run_until_killed(checkpoint, cache, "Packing experts", 2 * NUM_EXPERTS + 3)
    pack = pack_of(checkpoint, cache)
    assert layers_read == [2]
    assert files(pack.directory) == expected_pack(expected)
    run_until_killed(checkpoint, cache, "Quantizing experts", 2)
    draft_of(pack)
    assert experts_read == [ExpertId(2, expert) for expert in range(NUM_EXPERTS)]
    assert files(pack.directory) == expected
