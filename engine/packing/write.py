"""Packing a checkpoint: its dense weights part by part, then its experts layer by layer."""

import logging
import os
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedConfig

from engine.device import empty_pages
from engine.dtypes import dtype_name
from engine.experts.layout import ExpertLayout, LayerLayout
from engine.experts.records import checksum
from engine.model.weights import CheckpointReader
from engine.packing.disk import require_room, size_of
from engine.packing.journal import Journal
from engine.packing.manifest import DENSE, FORMAT_VERSION, RECORDS, FileEntry, Manifest, write_manifest
from engine.packing.small_files import copy_small_files
from engine.packing.source import Source
from engine.packing.tensors import write_tensors
from engine.protocol import Loading, OnProgress
from engine.resident import frugal_memory, peak_memory, release_freed_memory

logger = logging.getLogger(__name__)


class _Begun(msgspec.Struct, frozen=True):
    """Header of the journal: the dense weights are written. Its entries are the checksums of each layer's records."""

    format_version: int
    source: Source
    layout: ExpertLayout
    dense: list[FileEntry]

    def is_of(self, source: Source, layout: ExpertLayout) -> bool:
        """Whether what it began would become the same pack."""
        return (self.format_version, self.source, self.layout) == (FORMAT_VERSION, source, layout)


def write_pack(
    directory: Path,
    model_path: Path,
    config: PreTrainedConfig,
    source: Source,
    draft_bytes: int,
    on_progress: OnProgress,
) -> None:
    """Fill the directory, or go on where an interrupted run left it; `draft_bytes` must fit the disk besides.

    Raises `PackError`, `OSError`, and what `CheckpointReader` raises.
    """
    with peak_memory() as peak, frugal_memory():
        reader = CheckpointReader(model_path, config)
        layout = ExpertLayout(tuple(LayerLayout.of(*layer) for layer in reader.experts))
        records_bytes = layout.num_experts * layout.expert_bytes
        require_room(directory, reader.dense_bytes + records_bytes + draft_bytes, size_of(directory))
        journal = Journal(directory, _Begun, list[int])
        begun, layers = journal.read() or (None, [])
        if begun is None or not begun.is_of(source, layout):
            _clear(directory)
            dense = _write_dense(directory, reader, on_progress)
            begun, layers = _Begun(FORMAT_VERSION, source, layout, dense), []
            journal.begin(begun)
        for checksums in _write_records(directory / RECORDS, reader, layout, len(layers), on_progress):
            journal.add(checksums)
            layers.append(checksums)
        copy_small_files(model_path, directory)
        record_checksums = list(chain(*layers))
        write_manifest(directory, Manifest(source, dtype_name(reader.dtype), layout, begun.dense, record_checksums))
    largest_layer = max(layer.num_experts for layer in layout.layers) * layout.expert_bytes
    logger.info(
        "packed %s: memory peaked at %d MB (dense weights %d MB, largest layer of experts %d MB)",
        model_path,
        *(num_bytes // 10**6 for num_bytes in (peak.num_bytes, reader.dense_bytes, largest_layer)),
    )


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _write_dense(directory: Path, reader: CheckpointReader, on_progress: OnProgress) -> list[FileEntry]:
    entries: list[FileEntry] = []
    done = 0
    on_progress(Loading("Packing dense weights", done, reader.dense_bytes, "bytes"))
    for part in reader.dense_parts():
        entries.append(write_tensors(directory, DENSE.format(len(entries)), part))
        done += sum(tensor.nbytes for tensor in part.values())
        del part  # before the next one is read
        release_freed_memory()
        on_progress(Loading("Packing dense weights", min(done, reader.dense_bytes), reader.dense_bytes, "bytes"))
    return entries


def _write_records(
    path: Path, reader: CheckpointReader, layout: ExpertLayout, num_done: int, on_progress: OnProgress
) -> Iterator[list[int]]:
    """Write the layers that are not done yet; yields the checksums of each when it is on the disk."""
    with path.open("r+b" if num_done else "wb") as file:
        num_experts = sum(layer.num_experts for layer in layout.layers[:num_done])
        # What a torn layer left is written again.
        file.truncate(num_experts * layout.expert_bytes)
        file.seek(0, os.SEEK_END)
        for layer in range(num_done, len(layout.layers)):
            checksums = []
            for record in _records(reader.layer(layer), layout, layer):
                content = record.numpy().data
                file.write(content)
                checksums.append(checksum(content))
                num_experts += 1
                on_progress(Loading("Packing experts", num_experts, layout.num_experts))
            file.flush()
            os.fsync(file.fileno())
            # Nobody reads it soon, and the page cache has better uses.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            release_freed_memory()
            yield checksums


def _records(fused: dict[str, torch.Tensor], layout: ExpertLayout, layer: int) -> Iterator[torch.Tensor]:
    """Each expert's record, uint8 [expert_bytes]; valid until the next one."""
    record = empty_pages(1, layout.expert_bytes)[0]
    views = layout.views(layer, record)
    for expert in range(layout.layers[layer].num_experts):
        for name, view in views.items():
            view.copy_(fused[name][expert])
        yield record
