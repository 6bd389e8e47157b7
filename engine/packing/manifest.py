"""What a directory of packed weights says of itself: files, sizes, checksums."""

from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from engine.errors import PackError
from engine.experts.layout import ExpertLayout
from engine.packing.source import Source

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
RECORDS = "experts.bin"
DENSE = "dense-{:03}.safetensors"

T = TypeVar("T")


class _Versioned(msgspec.Struct, frozen=True):
    """What a manifest of any version has."""

    format_version: int


class _Sealed(_Versioned, frozen=True):
    """A manifest with the checksum of its own text, as hexadecimal."""

    checksum: str
    content: msgspec.Raw


class FileEntry(msgspec.Struct, frozen=True):
    """A file of tensors."""

    name: str
    num_bytes: int
    checksum: int
    """xxh3 of the whole file."""


class Manifest(msgspec.Struct, frozen=True):
    """Of a pack."""

    source: Source
    dtype: str
    """The checkpoint's type, to which dense weights belong unless transformers keeps them in another one."""
    layout: ExpertLayout
    dense: list[FileEntry]
    record_checksums: list[int]
    """xxh3 of each record, in their order."""


class DraftManifest(msgspec.Struct, frozen=True):
    """Of the quantized experts inside a pack."""

    layers: list[FileEntry]


def write_manifest(directory: Path, manifest: msgspec.Struct) -> None:
    content = msgspec.json.encode(manifest)
    sealed = _Sealed(FORMAT_VERSION, xxhash.xxh3_64_hexdigest(content), msgspec.Raw(content))
    (directory / MANIFEST).write_bytes(msgspec.json.encode(sealed))


def manifest_version(directory: Path) -> int | None:
    """The version of the manifest there; None where there is none. Raises `PackError` where it is damaged."""
    if not (directory / MANIFEST).exists():
        return None
    return _decode(directory, _Versioned).format_version


def read_manifest(directory: Path, kind: type[T]) -> T:
    """The manifest, which must be of this version. Raises `PackError` where it is missing or damaged."""
    sealed = _decode(directory, _Sealed)
    if xxhash.xxh3_64_hexdigest(bytes(sealed.content)) != sealed.checksum:
        raise PackError(f"{directory} has a damaged manifest (wrong checksum); {remedy(directory)}.")
    return msgspec.json.decode(sealed.content, type=kind)


def _decode(directory: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise PackError(f"{directory} has a damaged manifest ({error}); {remedy(directory)}.") from error


def check_size(file: Path, num_bytes: int) -> None:
    """Raise `PackError` where the file is missing or has another size than was written."""
    found = file.stat().st_size if file.exists() else None
    if found != num_bytes:
        state = "missing" if found is None else f"{found} bytes long instead of {num_bytes}"
        raise PackError(f"{file} is {state}; {remedy(file.parent)}.")


def remedy(directory: Path) -> str:
    """What to do about damage in the directory."""
    return f"delete {directory} to make it anew"
