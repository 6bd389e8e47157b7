"""Plans of models of which there is nothing but a configuration."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from engine.config import BenchConfig
from engine.description import ModelDescription, _choices, describe_model
from engine.model.kv_cache import KvCache
from engine.planning import Machine, alternatives, choose
from engine.protocol import MemoryRow, ModelPlan, Tier

MB = 10**6
GB = 10**9
DRAFT = {"draft": "quantized", "draft_weights": "qint4", "draft_length": 4, "draft_group_size": 32}


def save_config(config: PreTrainedConfig, path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A checkpoint's directory without its weights."""
    config.dtype = dtype
    config.save_pretrained(path)
    return path


def settings_of(path: Path, **settings: object) -> BenchConfig:
    return BenchConfig.model_validate({"model": str(path), "prefill_chunk_tokens": 512, **DRAFT, **settings})


def describe(path: Path, device: str = "cpu", **settings: object) -> ModelDescription:
    return describe_model(settings_of(path, **settings), path, torch.device(device))


def cpu(free_bytes: int) -> Machine:
    return Machine(torch.device("cpu"), "CPU (2 threads)", free_bytes, free_bytes)


def cuda(free_device_bytes: int | None, free_host_bytes: int) -> Machine:
    return Machine(torch.device("cuda"), "a GPU", free_device_bytes, free_host_bytes)


def plan_for(machine: Machine, path: Path, **settings: object) -> ModelPlan:
    config = settings_of(path, **settings)
    return planned(config, describe_model(config, path, machine.device), machine)


def planned(config: BenchConfig, model: ModelDescription, machine: Machine) -> ModelPlan:
    """With what is known without a profile of the model."""
    return choose(alternatives(config, model, machine)).plan


def replan(config: BenchConfig, model: ModelDescription, machine: Machine) -> ModelPlan:
    """As `describe_model` and `planned` do with other settings, on what has been read of the model already."""
    choices = _choices(config, model.hf_config, model.skeleton.dtype, machine.device)
    KvCache(model.hf_config, choices.max_model_len, choices.stored_kv_dtype)
    return planned(config, model._replace(choices=choices), machine)


def flags(remedy: str) -> dict[str, Any]:
    """The settings that a remedy, such as `--draft none --max-model-len 512`, changes."""
    changed: dict[str, Any] = {}
    words = remedy.split()
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        changed[name] = words.pop(0)
    return changed


def rows_of(plan: ModelPlan, tier: Tier) -> dict[str, MemoryRow]:
    return {row.part: row for row in plan.memory if row.tier == tier}
