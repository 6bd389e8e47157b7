"""Dense weights and full-precision experts: found, or packed from the checkpoint layer by layer."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from engine.directory import ensure_directory
from engine.dtypes import torch_dtype
from engine.errors import PackError
from engine.experts.layout import ExpertLayout
from engine.experts.records import RecordFile
from engine.packing.disk import disk_errors
from engine.packing.journal import Journal
from engine.packing.manifest import (
    DENSE,
    FORMAT_VERSION,
    MANIFEST,
    RECORDS,
    Manifest,
    check_size,
    manifest_version,
    read_manifest,
)
from engine.packing.small_files import copy_small_files
from engine.packing.source import Source, pack_name
from engine.packing.tensors import read_tensors
from engine.packing.write import write_pack
from engine.protocol import Loading, OnProgress

WAITING = Loading("Waiting for another process that packs this model", 0, 0)


class Pack(NamedTuple):
    directory: Path
    manifest: Manifest

    @property
    def layout(self) -> ExpertLayout:
        return self.manifest.layout

    @property
    def dtype(self) -> torch.dtype:
        """The checkpoint's type."""
        return torch_dtype(self.manifest.dtype)

    @property
    def records_path(self) -> Path:
        return self.directory / RECORDS

    def open_records(self) -> RecordFile:
        """The file of full-precision experts; the caller closes it. Raises `PackError` where its size is wrong."""
        return RecordFile(self.records_path, self.layout, self.manifest.record_checksums)

    def dense_parts(self) -> Iterator[dict[str, torch.Tensor]]:
        """The dense weights in host memory, one file after the other. Raises `PackError` where one is damaged."""
        for entry in self.manifest.dense:
            yield read_tensors(self.directory, entry)


def is_pack(path: Path) -> bool:
    """Whether the directory is a packed model rather than a checkpoint; also where one of its files is missing."""
    return sum((path / name).exists() for name in (MANIFEST, RECORDS, DENSE.format(0))) > 1


def find_records(model_path: Path, cache: Path) -> Path | None:
    """The file of experts, where the model is packed already, of whatever version; else None."""
    directory = model_path if is_pack(model_path) else cache / "packs" / pack_name(model_path)
    records = directory / RECORDS
    return records if records.exists() else None


def pack_dtype(directory: Path) -> torch.dtype:
    """The type of the checkpoint that the pack was made from. Raises `PackError`."""
    return _open_pack(directory).dtype


def ensure_pack(
    model_path: Path,
    config: PreTrainedConfig,
    out: Path | None,
    cache: Path,
    draft_bytes: int,
    on_progress: OnProgress,
) -> Pack:
    """The model's pack in `out`, or else in the cache; made if there is none for the checkpoint as it is now.

    Where `model_path` is a pack, that one. `draft_bytes` more must fit the disk before packing begins. Raises
    `PackError`, and what `CheckpointReader` raises.
    """
    if is_pack(model_path):
        if out is not None and out.resolve() != model_path.resolve():
            raise PackError(f"{model_path} is packed already; copy it to {out}, or pack its checkpoint there.")
        return _open_pack(model_path)
    source = Source.of(model_path)
    # Where symbolic links lead: they cannot be replaced by a directory.
    directory = (out or cache / "packs" / pack_name(model_path)).resolve()
    if out is not None:
        _require_replaceable(directory, source)

    def build(partial: Path) -> None:
        if reason := _staleness(directory, source):
            on_progress(Loading(f"Packing anew, because {reason}", 0, 0))
        write_pack(partial, model_path, config, source, draft_bytes, on_progress)

    with disk_errors(directory):
        ensure_directory(
            directory,
            is_intact=lambda packed: manifest_version(packed) is not None and not _staleness(packed, source),
            build=build,
            waiting=lambda: on_progress(WAITING),
            is_resumable=True,
        )
        Journal.end(directory)
        copy_small_files(model_path, directory)  # which may change while the weights do not
    return _open_pack(directory)


def _open_pack(directory: Path) -> Pack:
    version = manifest_version(directory)
    if version not in (None, FORMAT_VERSION):
        raise PackError(
            f"{directory} is a pack of format {version}, but this version of Specter reads format {FORMAT_VERSION}; "
            "pack the model again with specter pack."
        )
    pack = Pack(directory, read_manifest(directory, Manifest))
    for entry in pack.manifest.dense:
        check_size(directory / entry.name, entry.num_bytes)
    check_size(pack.records_path, pack.layout.num_experts * pack.layout.expert_bytes)
    return pack


def _staleness(directory: Path, source: Source) -> str | None:
    """Why the pack there is not one of the checkpoint as it is now; None where it is, or where there is none."""
    version = manifest_version(directory)
    if version is None:
        return None
    if version != FORMAT_VERSION:
        return f"the pack is of format {version}, not {FORMAT_VERSION}"
    changes = read_manifest(directory, Manifest).source.changes(source)
    return f"{', '.join(changes[:3])} changed" if changes else None


def _require_replaceable(directory: Path, source: Source) -> None:
    """Packing replaces the directory: refuse to delete what is not a pack of the same model."""
    if directory.exists() and not directory.is_dir():
        raise PackError(f"{directory} is a file; choose a directory that is empty or does not exist.")
    if directory.is_mount():
        raise PackError(f"{directory} is a mount point, which cannot be replaced; choose a directory below it.")
    if not directory.exists() or not any(directory.iterdir()):
        return
    if not is_pack(directory):
        raise PackError(f"{directory} holds other files; choose a directory that is empty or does not exist.")
    if manifest_version(directory) != FORMAT_VERSION:
        raise PackError(
            f"{directory} is a pack of another format, or of nobody knows which model; delete it or choose another "
            "directory."
        )
    packed = read_manifest(directory, Manifest).source
    if packed.path != source.path:
        raise PackError(
            f"{directory} is the pack of another model, {packed.path}; delete it or choose another directory."
        )
