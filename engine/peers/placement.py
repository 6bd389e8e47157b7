"""Where accelerate puts a model's weights, and what that takes; decided before any are loaded."""

from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import compute_module_sizes, get_max_layer_size
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import InsufficientMemoryError
from engine.model.skeleton import Skeleton, meta_model
from engine.model.structure import fused_names
from engine.protocol import Tier

GPU = 0
"""accelerate's name for the device where it is a GPU."""


class PeerModel(NamedTuple):
    path: Path
    hf_config: PreTrainedConfig
    skeleton: Skeleton
    """In the type that weights are loaded in, and kept in beyond the device."""
    dtype: torch.dtype
    """What is computed in, and what the device holds."""
    max_model_len: int

    @property
    def kv_bytes(self) -> int:
        # The whole prompt is one pass.
        return self.skeleton.kv_bytes(self.max_model_len, self.dtype, self.max_model_len)


class Placement(NamedTuple):
    device_map: dict[str, int | str]
    """accelerate's name of a device by the name of a module."""
    held_bytes: dict[Tier, int]
    """Weights that lie in a tier."""
    pass_bytes: dict[Tier, int]
    """Weights that each pass loads out of a tier: all that are there, and tied ones once per use."""
    block_bytes: int
    """Room on the device to load a block into; 0 where the device holds everything."""
    tiers_of_layers: list[Tier]
    """Where the experts of each mixture-of-experts layer are."""


def place(model: PeerModel, device_bytes: int, host_bytes: int, *, is_cpu: bool) -> Placement:
    """Let accelerate fill the device, less the KV cache, then host memory, then the disk.

    On a CPU the two tiers are the same memory. Raises `InsufficientMemoryError` where the device cannot even take one
    block after the other.
    """
    computed = meta_model(model.hf_config, model.dtype)
    unsplit = list(computed._no_split_modules or ())
    block_bytes, _ = get_max_layer_size(list(computed.named_children()), compute_module_sizes(computed), unsplit)
    weight_bytes = device_bytes - model.kv_bytes + (host_bytes if is_cpu else 0)
    if weight_bytes < block_bytes:
        raise InsufficientMemoryError(
            f"accelerate needs {megabytes(model.kv_bytes)} MB of device memory for the KV cache at "
            f"{model.max_model_len} tokens and {megabytes(block_bytes)} MB to load a block into, more than the "
            f"{device_bytes // 10**6} MB that it may use; pass --device-memory "
            f"{megabytes(model.kv_bytes + block_bytes)}MB, or a smaller --max-model-len."
        )
    max_memory = {"cpu": weight_bytes} if is_cpu else {GPU: weight_bytes, "cpu": host_bytes}
    device_map = dict(infer_auto_device_map(computed, max_memory=max_memory, no_split_module_classes=unsplit))
    return _placement(device_map, model.skeleton.model, computed, block_bytes, is_cpu=is_cpu)


def _placement(
    device_map: dict[str, int | str],
    loaded: PreTrainedModel,
    computed: PreTrainedModel,
    block_bytes: int,
    *,
    is_cpu: bool,
) -> Placement:
    tiers: dict[int | str, Tier] = {"cpu": "device" if is_cpu else "host", "disk": "disk", GPU: "device"}

    def tier_of(name: str) -> Tier:
        while name not in device_map:
            name = name.rpartition(".")[0]
        return tiers[device_map[name]]

    held_bytes = dict.fromkeys(tiers.values(), 0)
    for name, weight in computed.named_parameters():
        tier = tier_of(name)
        held_bytes[tier] += weight.nbytes if tier == "device" else loaded.get_parameter(name).nbytes
    pass_bytes = dict.fromkeys(tiers.values(), 0)
    for name, weight in loaded.named_parameters(remove_duplicate=False):
        pass_bytes[tier_of(name)] += weight.nbytes
    del pass_bytes["device"]
    tiers_of_layers = [tier_of(names[0]) for names in fused_names(loaded)]
    return Placement(
        device_map=device_map,
        held_bytes=held_bytes,
        pass_bytes=pass_bytes,
        block_bytes=block_bytes if any(pass_bytes.values()) else 0,
        tiers_of_layers=tiers_of_layers,
    )


def megabytes(num_bytes: int) -> int:
    """Rounded up, as settings take them."""
    return -(-num_bytes // 10**6)
