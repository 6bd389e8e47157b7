"""From a model's description to a model on the device: everything but the slots."""

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedConfig

from engine.config import DEMO_MODEL, EngineConfig
from engine.demo import build_demo
from engine.description import ModelDescription
from engine.device import Device
from engine.experts.codec import IdentityCodec
from engine.experts.layout import LayerLayout
from engine.kernels.quantization import QuantizationSpec, QuantizedStack
from engine.kernels.quantized_linear import quantized_linear
from engine.model.causal_lm import CausalLM
from engine.model.checkpoint import build_model
from engine.model.resolve import resolve_configuration, resolve_model
from engine.packing import Draft, Pack, ensure_draft, ensure_pack
from engine.phases import PhaseClock
from engine.protocol import Loading, OnProgress
from engine.speculative.quantized import QuantizedExperts, QuantizedLayer


class LoadedModel(NamedTuple):
    description: ModelDescription
    pack: Pack
    eos_token_ids: frozenset[int]
    model: CausalLM
    draft: QuantizedExperts | None
    codec: IdentityCodec


def locate_model(config: EngineConfig, on_progress: OnProgress) -> Path:
    """The model's directory; the demo is built and a hub id downloaded if need be. Raises `ModelNotFoundError`."""
    cache = config.cache.expanduser()
    if config.model == DEMO_MODEL:
        return build_demo(cache, on_progress)
    return resolve_model(config.model, cache, on_progress)


def locate_configuration(config: EngineConfig, on_progress: OnProgress) -> Path:
    """As `locate_model`, but of a hub id only the small files are fetched."""
    if config.model == DEMO_MODEL:
        return locate_model(config, on_progress)
    return resolve_configuration(config.model, config.cache.expanduser(), on_progress)


def pack_model(
    model: ModelDescription, cache: Path, directory: Path | None, on_progress: OnProgress
) -> tuple[Pack, Draft | None]:
    """The model packed, with its draft; made where they are not there yet, in `directory` or else in the cache.

    Raises `PackError` and what reading the checkpoint raises.
    """
    spec = model.choices.draft
    draft_bytes = model.sizes.draft_file_bytes(spec) if spec else 0
    pack = ensure_pack(model.path, model.hf_config, directory, cache, draft_bytes, on_progress)
    return pack, ensure_draft(pack, spec, draft_bytes, on_progress) if spec else None


def load_model(
    config: EngineConfig, model: ModelDescription, device: Device, clock: PhaseClock, on_progress: OnProgress
) -> LoadedModel:
    """Pack the model if it is not packed yet, and load dense weights and draft. Raises `SpecterError`."""
    choices = model.choices
    with clock.phase("packing"):
        pack, draft_files = pack_model(model, config.cache.expanduser(), None, on_progress)
    draft = None
    if draft_files and choices.draft:
        with clock.phase("draft"):
            draft = _load_draft(draft_files, pack, choices.draft, device, on_progress)
    with clock.phase("dense weights"):
        on_progress(Loading("Loading dense weights", 0, 0))
        causal_lm = build_model(
            model.hf_config,
            pack.dense_parts(),
            stored_dtype=pack.dtype,
            dtype=choices.dtype,
            device=device.torch_device,
            kv_dtype=choices.stored_kv_dtype,
        )
    return LoadedModel(
        description=model,
        pack=pack,
        eos_token_ids=eos_token_ids(model.path, model.hf_config),
        model=causal_lm,
        draft=draft,
        codec=IdentityCodec(pack.layout, choices.dtype, device.torch_device),
    )


def eos_token_ids(path: Path, hf_config: PreTrainedConfig) -> frozenset[int]:
    """The tokens that end a text, by the model's generation settings or else its configuration."""
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the file is optional
        ids = None
    if ids is None:
        ids = hf_config.get_text_config().eos_token_id
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _load_draft(
    files: Draft, pack: Pack, spec: QuantizationSpec, device: Device, on_progress: OnProgress
) -> QuantizedExperts:
    num_layers = len(pack.layout.layers)
    layers: list[QuantizedLayer] = []
    for layer, tensors in zip(pack.layout.layers, files.layers(), strict=True):
        on_progress(Loading("Loading draft experts", len(layers), num_layers))
        layers.append(_quantized_layer(layer, tensors, spec, device.torch_device))
    on_progress(Loading("Loading draft experts", num_layers, num_layers))
    return QuantizedExperts(layers, device)


def _quantized_layer(
    layer: LayerLayout, tensors: dict[str, torch.Tensor], spec: QuantizationSpec, device: torch.device
) -> QuantizedLayer:
    projections = {
        name: quantized_linear(
            QuantizedStack(*(tensors.pop(f"{name}.{part}") for part in QuantizedStack._fields)), spec, shape, device
        )
        for name, shape in layer.matrix_shapes.items()
    }
    return QuantizedLayer(projections, {name: bias.to(device) for name, bias in tensors.items()})
