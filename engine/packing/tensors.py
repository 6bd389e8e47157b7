"""Files of tensors, with a checksum over all of each."""

from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.directory import flush
from engine.errors import PackError, first_line
from engine.packing.manifest import FileEntry, remedy

HASHED_BYTES = 8 * 1024**2


def write_tensors(directory: Path, name: str, tensors: dict[str, torch.Tensor]) -> FileEntry:
    """Write a file, which is on the disk on return. Raises `OSError` or `SafetensorError`."""
    file = directory / name
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    flush(file)
    return FileEntry(name, file.stat().st_size, _checksum(file))


def read_tensors(directory: Path, entry: FileEntry) -> dict[str, torch.Tensor]:
    """The tensors of a file, in memory. Raises `PackError` where it is not what was written."""
    file = directory / entry.name
    try:
        if _checksum(file) != entry.checksum:
            raise PackError(f"{file} is damaged (wrong checksum); {remedy(directory)}.")
        # Read rather than mapped, so that the pages are this process's own and the file may go.
        with safe_open(file, "pt", backend="pread") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError) as error:
        raise PackError(f"{file} is damaged ({first_line(error)}); {remedy(directory)}.") from error


def _checksum(file: Path) -> int:
    hasher = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while piece := stream.read(HASHED_BYTES):
            hasher.update(piece)
    return hasher.intdigest()
