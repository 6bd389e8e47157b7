"""The experts quantized: found in the pack, or made from its records layer by layer."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from engine.device import empty_pages
from engine.directory import ensure_directory
from engine.experts.layout import ExpertId, ExpertLayout
from engine.experts.records import RecordFile
from engine.kernels.quantization import QuantizationSpec, quantize, require_fitting
from engine.packing.disk import disk_errors, require_room, size_of
from engine.packing.journal import Journal
from engine.packing.manifest import (
    FORMAT_VERSION,
    DraftManifest,
    FileEntry,
    check_size,
    manifest_version,
    read_manifest,
    write_manifest,
)
from engine.packing.pack import WAITING, Pack
from engine.packing.tensors import read_tensors, write_tensors
from engine.protocol import Loading, OnProgress
from engine.resident import peak_memory, release_freed_memory

logger = logging.getLogger(__name__)

PREFIX = "draft-"


class Draft(NamedTuple):
    directory: Path
    files: list[FileEntry]

    def layers(self) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of each layer in host memory, named `PROJECTION.PART` (see `QuantizedStack`) and `BIAS`.

        Raises `PackError` where a file is damaged.
        """
        for entry in self.files:
            yield read_tensors(self.directory, entry)


def ensure_draft(pack: Pack, spec: QuantizationSpec, num_bytes: int, on_progress: OnProgress) -> Draft:
    """The experts quantized as `spec` says, `num_bytes` in all; made from the pack's records if they are not there.

    Raises `ConfigError` where the group size does not fit the experts, and `PackError`.
    """
    for layer in pack.layout.layers:
        require_fitting(spec, layer.matrix_shapes.values())
    directory = pack.directory / f"{PREFIX}{spec}"
    with disk_errors(directory):
        ensure_directory(
            directory,
            is_intact=lambda made: manifest_version(made) == FORMAT_VERSION,
            build=lambda partial: _write(partial, pack, spec, num_bytes, on_progress),
            waiting=lambda: on_progress(WAITING),
            is_resumable=True,
        )
        Journal.end(directory)
    manifest = read_manifest(directory, DraftManifest)
    for entry in manifest.layers:
        check_size(directory / entry.name, entry.num_bytes)
    return Draft(directory, manifest.layers)


class _Begun(msgspec.Struct, frozen=True):
    """Header of the journal, whose entries are the files of the layers that are done."""

    format_version: int


def _write(directory: Path, pack: Pack, spec: QuantizationSpec, num_bytes: int, on_progress: OnProgress) -> None:
    require_room(directory, num_bytes, size_of(directory))
    stage = f"Quantizing experts to {spec}"
    if others := sorted(path.name.removeprefix(PREFIX) for path in pack.directory.glob(f"{PREFIX}*")):
        stage += f" (the pack has {', '.join(others)})"
    journal = Journal(directory, _Begun, FileEntry)
    begun, entries = journal.read() or (None, [])
    if begun != _Begun(FORMAT_VERSION):
        journal.begin(_Begun(FORMAT_VERSION))
        entries = []
    num_layers = len(pack.layout.layers)
    with peak_memory() as peak, pack.open_records() as records:
        for layer in range(len(entries), num_layers):
            on_progress(Loading(stage, layer, num_layers))
            tensors = _quantized(records, pack.layout, layer, spec)
            entries.append(write_tensors(directory, f"{layer:03}.safetensors", tensors))
            journal.add(entries[-1])
            del tensors
            release_freed_memory()
    on_progress(Loading(stage, num_layers, num_layers))
    write_manifest(directory, DraftManifest(entries))
    logger.info("quantized the experts to %s: memory peaked at %d MB", spec, peak.num_bytes // 10**6)


def _quantized(
    records: RecordFile, layout: ExpertLayout, layer: int, spec: QuantizationSpec
) -> dict[str, torch.Tensor]:
    """The tensors of one layer's file. One expert is in memory at a time, besides what becomes of all."""
    shapes = layout.layers[layer].matrix_shapes
    is_transposed = layout.layers[layer].is_transposed
    parts: dict[str, list[torch.Tensor]] = {}
    record = empty_pages(1, layout.expert_bytes)[0]
    for expert in range(layout.layers[layer].num_experts):
        records.read(ExpertId(layer, expert), record)
        for name, weight in layout.views(layer, record).items():
            if name in shapes:
                stack = quantize([weight.T.contiguous() if is_transposed else weight], spec)
                for part, tensor in stack._asdict().items():
                    parts.setdefault(f"{name}.{part}", []).append(tensor)
            else:
                parts.setdefault(name, []).append(weight.clone().unsqueeze(0))
    return {name: torch.cat(tensors) for name, tensors in parts.items()}
