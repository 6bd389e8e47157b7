"""A checkpoint's weights, read part by part and converted as transformers would convert all of them at once.

transformers' conversion mapping says which tensors on disk make up which parameter of the model (mostly one tensor per
expert and projection, which are fused), so any subset of the parameters can be converted by itself.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.loading_report import LoadStateDictInfo

from engine.errors import ModelNotFoundError, UnsupportedModelError
from engine.model.skeleton import meta_model
from engine.model.structure import FusedExperts, fused_experts, fused_names, missing_weights
from engine.model.tensor_files import TensorFiles

PART_BYTES = 32 * 1024**2
"""Dense weights are read in parts of about this size."""


def checkpoint_dtype(config: PreTrainedConfig, model_path: Path) -> torch.dtype:
    """The type that transformers loads the checkpoint in: what its configuration says, or else that of its weights."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return TensorFiles(model_path).first_dtype or torch.float32


class CheckpointReader:
    """The model's parameters, a few at a time, in the types in which transformers loads them. Not thread-safe."""

    def __init__(self, model_path: Path, config: PreTrainedConfig) -> None:
        """Raises `ModelNotFoundError` or `UnsupportedModelError`; reads no weights yet."""
        self._files = TensorFiles(model_path)
        if not self._files.names:
            raise ModelNotFoundError(
                f"{model_path} has no weights: neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME} is there."
            )
        self.dtype = checkpoint_dtype(config, model_path)
        self._model = meta_model(config, self.dtype)
        mapping = get_model_conversion_mapping(self._model)
        self._mapping = cast(list[WeightConverter | WeightRenaming], mapping)
        self._layer_names = fused_names(self._model)
        self._expert_names = {name for names in self._layer_names for name in names}
        self._sources = self._group_by_target()
        self._itemsizes: dict[str, int] = {
            name: tensor.dtype.itemsize for name, tensor in self._model.state_dict().items()
        }
        self._seen: set[str] = set()

    @property
    def experts(self) -> list[FusedExperts]:
        """All layers' experts, without data."""
        return fused_experts(self._model)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all weights but the experts', in the types in which they are loaded."""
        return sum(map(self._num_bytes, self._dense_targets()))

    def dense_parts(self) -> Iterator[dict[str, torch.Tensor]]:
        """All weights but the experts', by their names in the state dict, in parts of about `PART_BYTES`.

        Raises `UnsupportedModelError` after the last one where the checkpoint lacks some.
        """
        part: list[str] = []
        num_bytes = 0
        for target in self._dense_targets():
            part.append(target)
            num_bytes += self._num_bytes(target)
            if num_bytes >= PART_BYTES:
                yield self._load(part)
                part, num_bytes = [], 0
        if part:
            yield self._load(part)
        self._require_all_dense()

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """The fused experts [E, ...] of one mixture-of-experts layer, by parameter name."""
        # One parameter after the other: while one is fused, its weights are in memory up to three times.
        fused: dict[str, torch.Tensor] = {}
        for name in self._layer_names[index]:
            if name in self._sources:
                fused |= self._load([name])
        if lacking := set(self._layer_names[index]) - fused.keys():
            raise missing_weights(self._model, lacking)
        return {name.rpartition(".")[2]: fused[name] for name in self._layer_names[index]}

    def _group_by_target(self) -> dict[str, list[str]]:
        """The tensors on disk by the (first) parameter that they become, without those that the model does not know."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        parameters = self._model.state_dict()
        prefix = self._model.base_model_prefix
        sources: dict[str, list[str]] = {}
        for name in self._files.names:
            target, _ = rename_source_key(name, renamings, converters, prefix, parameters)
            if target not in parameters:
                target, _ = rename_source_key(name, [], [], prefix, parameters)
            if target in parameters:
                sources.setdefault(target, []).append(name)
        return sources

    def _load(self, targets: Iterable[str]) -> dict[str, torch.Tensor]:
        loading = LoadStateDictConfig(
            dtype=self.dtype, dtype_plan=self._model._get_dtype_plan(self.dtype), weight_mapping=self._mapping
        )
        with self._files.opened(name for target in targets for name in self._sources[target]) as tensors:
            info, _ = convert_and_load_state_dict_in_model(self._model, tensors, loading)
        if misfits := _misfits(info):
            raise UnsupportedModelError(
                f"{type(self._model).__name__} does not fit the checkpoint's weights ({misfits[0]})."
            )
        loaded = {name: tensor for name, tensor in self._model.state_dict().items() if not tensor.is_meta}
        self._seen |= loaded.keys()
        emptied = {name: tensor.to("meta") for name, tensor in loaded.items()}
        self._model.load_state_dict(emptied, strict=False, assign=True)
        return loaded

    def _num_bytes(self, target: str) -> int:
        """Of the parameter, and of those that are made of the same tensors."""
        return self._files.num_weights(self._sources[target]) * self._itemsizes[target]

    def _dense_targets(self) -> list[str]:
        return [target for target in self._sources if target not in self._expert_names]

    def _require_all_dense(self) -> None:
        tied = self._model.all_tied_weights_keys
        # Of weights that are tied, the checkpoint need hold one.
        present = {tied.get(name, name) for name in self._seen}
        dense = set(self._model.state_dict()) - self._expert_names
        if lacking := {name for name in dense if tied.get(name, name) not in present}:
            raise missing_weights(self._model, lacking)


def _misfits(info: LoadStateDictInfo) -> list[str]:
    """What of the weights transformers could not convert, and why."""
    shapes = [
        f"{name} is {list(found)} instead of {list(expected)}" for name, found, expected in sorted(info.mismatched_keys)
    ]
    # A traceback that ends with the exception's message, and then a line about the operation.
    failures = [
        f"{name}: {text.strip().splitlines()[-2:][0].rstrip('.')}" for name, text in info.conversion_errors.items()
    ]
    return [*shapes, *failures, *info.error_msgs]
