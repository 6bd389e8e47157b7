"""The manifest of a built demo model: what it was made from, and what it must look like on disk."""

import hashlib
from pathlib import Path

import msgspec

NAME = "specter-demo.json"
FORMAT = 1
"""Raised with every change of the code or the calibration text that changes the model."""

# Reading 1.4 GB at every start would take seconds, and a torn weight file never gets here: it is on disk before the
# directory has its name. So the weights are checked by size, everything else by content.
MAX_CHECKED_BYTES = 16 * 1024 * 1024


class Origin(msgspec.Struct, frozen=True):
    """Whatever changes the result; a model of another origin is built again."""

    source: str
    source_sha256: str
    num_experts: int
    num_experts_per_tok: int
    noise: float
    dtype: str
    seed: int
    format: int = FORMAT


class FileEntry(msgspec.Struct, frozen=True):
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    origin: Origin
    files: dict[str, FileEntry]


def write(directory: Path, origin: Origin) -> None:
    """Describe every file of `directory`; call it last."""
    files = {path.name: _describe(path) for path in sorted(directory.iterdir())}
    encoded = msgspec.json.encode(Manifest(origin, files))
    (directory / NAME).write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")


def is_intact(directory: Path, origin: Origin) -> bool:
    """Whether `directory` holds a finished model of this origin, with every file as it was written."""
    try:
        manifest = msgspec.json.decode((directory / NAME).read_bytes(), type=Manifest)
        return manifest.origin == origin and all(
            _is_as_described(directory / name, entry) for name, entry in manifest.files.items()
        )
    except (OSError, msgspec.DecodeError):
        return False


def _is_as_described(path: Path, entry: FileEntry) -> bool:
    if entry.num_bytes > MAX_CHECKED_BYTES:
        return path.stat().st_size == entry.num_bytes
    return _describe(path) == entry


def _describe(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(path.stat().st_size, digest)
