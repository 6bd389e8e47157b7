"""A packed model: the checkpoint rearranged so that it can be served, one directory per model in the cache.

    manifest.json                 what the pack was made from, and the layout of the records
    dense.safetensors             everything but the experts, in the checkpoint's types
    experts.bin                   one aligned record per expert
    draft-<precision>.safetensors the experts quantized, made when a precision is first asked for

A pack that exists is complete, and has one writer at a time (see `engine.directory`).
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.device import empty_pages
from engine.directory import ensure_directory, only_writer
from engine.errors import PackError
from engine.experts.layout import ExpertId, ExpertLayout, LayerLayout
from engine.experts.store import RecordFile
from engine.kernels.quantization import QuantizationSpec, quantize
from engine.model.checkpoint import dense_state, expert_parameters, experts_modules, load_whole
from engine.model.dispatch import ExpertsModule
from engine.protocol import Loading, OnProgress

FORMAT_VERSION = 1

WAITING = Loading("Waiting for another process that packs this model", 0, 0)


class Manifest(msgspec.Struct, frozen=True):
    format_version: int
    source: dict[str, tuple[int, int]]
    """Size and modification time in nanoseconds of each of the checkpoint's files."""
    layout: ExpertLayout


class Pack(NamedTuple):
    directory: Path
    layout: ExpertLayout

    @property
    def dense_file(self) -> Path:
        return self.directory / "dense.safetensors"

    def draft_file(self, spec: QuantizationSpec) -> Path:
        return self.directory / f"draft-{spec}.safetensors"

    def open_records(self) -> RecordFile:
        """The file of full-precision experts; the caller closes it. Raises `PackError` where its size is wrong."""
        return RecordFile(_records_file(self.directory), self.layout)


def ensure_pack(model_path: Path, cache: Path, on_progress: OnProgress) -> Pack:
    """The model's pack, made if there is none for the checkpoint as it is now."""
    source = _fingerprint(model_path)
    key = hashlib.sha256(str(model_path.resolve()).encode()).hexdigest()[:12]
    directory = cache / "packs" / f"{model_path.name}-{key}"
    with _disk_errors(directory):
        ensure_directory(
            directory,
            is_intact=lambda packed: _read_manifest(packed, source) is not None,
            build=lambda empty: _write_pack(model_path, empty, source, on_progress),
            waiting=lambda: on_progress(WAITING),
        )
    manifest = _read_manifest(directory, source)
    assert manifest is not None
    return Pack(directory, manifest.layout)


def ensure_draft(pack: Pack, spec: QuantizationSpec, on_progress: OnProgress) -> Path:
    """The file of experts quantized as `spec` says, made from the pack's records if it is not there."""
    path = pack.draft_file(spec)
    if not path.exists():
        with _disk_errors(path), only_writer(pack.directory, lambda: on_progress(WAITING)):
            if not path.exists():
                _write_draft(pack, spec, path, on_progress)
    return path


def _write_draft(pack: Pack, spec: QuantizationSpec, path: Path, on_progress: OnProgress) -> None:
    tensors: dict[str, torch.Tensor] = {}
    with pack.open_records() as records:
        for layer, layout in enumerate(pack.layout.layers):
            on_progress(Loading(f"Quantizing experts to {spec}", layer, len(pack.layout.layers)))
            for name, weight in _read_layer(records, pack.layout, layer).items():
                if name.endswith("_bias"):
                    tensors[f"{layer}.{name}"] = weight
                    continue
                matrices = weight.transpose(1, 2).contiguous() if layout.is_transposed else weight
                for part, tensor in quantize(matrices, spec)._asdict().items():
                    tensors[f"{layer}.{name}.{part}"] = tensor
        on_progress(Loading(f"Quantizing experts to {spec}", len(pack.layout.layers), len(pack.layout.layers)))
        temporary = path.with_suffix(".partial")
        try:
            save_file(tensors, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _write_pack(model_path: Path, directory: Path, source: dict[str, tuple[int, int]], on_progress: OnProgress) -> None:
    """Fill the empty directory."""
    on_progress(Loading("Loading the checkpoint", 0, 0))
    model = load_whole(model_path)
    modules = [module for _, module in experts_modules(model)]
    layers = tuple(LayerLayout.of(expert_parameters(module), module.is_transposed) for module in modules)
    manifest = Manifest(FORMAT_VERSION, source, ExpertLayout(layers))
    save_file(dense_state(model), directory / "dense.safetensors")
    with _records_file(directory).open("wb") as file:
        for index, record in enumerate(_records(modules, manifest.layout)):
            file.write(record.numpy().data)
            on_progress(Loading("Packing experts", index + 1, manifest.layout.num_experts))
    (directory / "manifest.json").write_bytes(msgspec.json.encode(manifest))


def _records(modules: list[ExpertsModule], layout: ExpertLayout) -> Iterator[torch.Tensor]:
    for expert in layout.experts():
        record = torch.zeros(layout.expert_bytes, dtype=torch.uint8)
        parameters = expert_parameters(modules[expert.layer])
        for name, view in layout.views(expert.layer, record).items():
            view.copy_(parameters[name][expert.expert].detach())
        yield record


def _read_layer(records: RecordFile, layout: ExpertLayout, layer: int) -> dict[str, torch.Tensor]:
    """The fused weights of a layer, [E, ...] by name."""
    buffer = empty_pages(layout.layers[layer].num_experts, layout.expert_bytes)
    for expert, record in enumerate(buffer):
        records.read(ExpertId(layer, expert), record)
    views = [layout.views(layer, record) for record in buffer]
    return {name: torch.stack([view[name] for view in views]) for name in views[0]}


def _fingerprint(model_path: Path) -> dict[str, tuple[int, int]]:
    files = [*model_path.glob("*.safetensors"), *model_path.glob("*.bin"), model_path / "config.json"]
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)}


def _read_manifest(directory: Path, source: dict[str, tuple[int, int]]) -> Manifest | None:
    """The manifest of a pack that was made from this source; None where there is none."""
    try:
        manifest = msgspec.json.decode((directory / "manifest.json").read_bytes(), type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError as error:
        raise PackError(f"{directory} has a damaged manifest ({error}); delete that directory to pack anew.") from error
    return manifest if manifest.source == source and manifest.format_version == FORMAT_VERSION else None


def _records_file(directory: Path) -> Path:
    return directory / "experts.bin"


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except ConnectionError:
        raise  # the server is gone, which reporting progress found out
    except (OSError, SafetensorError) as error:
        raise PackError(f"{path} could not be written ({error}); free some space or choose another --cache.") from error
