"""Making packs and drafts, and looking at what was made."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.device import empty_pages
from engine.errors import PackError
from engine.experts.layout import ExpertId
from engine.kernels.quantization import QuantizationSpec
from engine.model.checkpoint import read_config
from engine.packing import Draft, Pack, ensure_draft, ensure_pack
from engine.protocol import Loading, OnProgress
from tests.engine.harness import ignore_progress

QINT4 = QuantizationSpec("qint4", 32)


class Interrupted(BaseException):
    """As Ctrl-C or a signal would end a run."""


def pack_of(
    checkpoint: Path,
    cache: Path,
    on_progress: OnProgress = ignore_progress,
    *,
    out: Path | None = None,
    draft_bytes: int = 0,
) -> Pack:
    return ensure_pack(checkpoint, read_config(checkpoint), out, cache, draft_bytes, on_progress)


def draft_of(pack: Pack, spec: QuantizationSpec = QINT4, on_progress: OnProgress = ignore_progress) -> Draft:
    return ensure_draft(pack, spec, 0, on_progress)


def read_experts(pack: Pack) -> list[dict[str, torch.Tensor]]:
    """All records, put together as the fused weights of each layer by name, [E, ...] each."""
    record = empty_pages(1, pack.layout.expert_bytes)[0]
    layers: list[dict[str, torch.Tensor]] = []
    with pack.open_records() as records:
        for index, layer in enumerate(pack.layout.layers):
            experts: list[dict[str, torch.Tensor]] = []
            for expert in range(layer.num_experts):
                records.read(ExpertId(index, expert), record)
                experts.append({name: view.clone() for name, view in pack.layout.views(index, record).items()})
            layers.append({name: torch.stack([expert[name] for expert in experts]) for name in experts[0]})
    return layers


def serve(directory: Path) -> None:
    """Read everything that serving the pack with its draft reads."""
    pack = pack_of(directory, directory / "no-cache")
    for _ in pack.dense_parts():
        pass
    read_experts(pack)
    for _ in draft_of(pack).layers():
        pass


def damage_said(directory: Path, file: Path) -> str:
    """What is said of the damage, in one sentence with the file and the remedy."""
    with pytest.raises(PackError) as caught:
        serve(directory)
    message = str(caught.value)
    assert str(file) in message
    assert "\n" not in message
    assert "delete" in message
    return message


def files(directory: Path) -> dict[str, bytes]:
    """The content of a directory's files by their relative paths, but for locks."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def names(directory: Path) -> set[str]:
    """What is in the directory, but for locks."""
    return {path.name for path in directory.iterdir() if path.suffix != ".lock"}


def written(directory: Path) -> dict[str, tuple[int, int]]:
    """What changes where a file is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.rglob("*")}


def raise_at(number: int, error: BaseException) -> Callable[[Loading], None]:
    """Raise the error at the message of that number, from 0."""
    num_messages = 0

    def on_progress(message: Loading) -> None:
        nonlocal num_messages
        num_messages += 1
        if num_messages > number:
            raise error

    return on_progress


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of that size, mounted at `path`; skips the test where mounting is not permitted."""
    path.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.partition(chr(10))[0]}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
