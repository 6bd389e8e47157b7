"""Tiny random checkpoints, and what transformers itself says about them."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from engine.config import DeviceName

VOCAB_SIZE = 96
EOS_TOKEN_ID = 2


def mixtral_config(*, num_layers: int = 3, vocab_size: int = VOCAB_SIZE, is_tied: bool = False) -> MixtralConfig:
    return MixtralConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=is_tied,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
    )


def qwen3_moe_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim is read from the keywords
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
    )


def save_checkpoint(config: PreTrainedConfig, path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A random model with decided routers and outputs: near ties, where rounding would choose, are improbable."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                gain = 2.0 if "mlp.gate." in name else 1.0
                parameter.normal_(0.0, gain / parameter.shape[-1] ** 0.5)
        model.get_input_embeddings().weight.normal_(0.0, 1.0)
    model.to(dtype).save_pretrained(path)
    return path


@cache
def reference_model(path: Path, device: DeviceName = "cpu") -> PreTrainedModel:
    """The checkpoint as transformers loads it, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.eval()
    on_device: PreTrainedModel = model.to(device)
    return on_device


def reference_tokens(
    path: Path, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False, device: DeviceName = "cpu"
) -> list[int]:
    """What transformers' own greedy `generate` continues the prompt with, in float32 on the device."""
    model: Any = reference_model(path, device)
    output = model.generate(
        torch.tensor([prompt], device=device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None if ignore_eos else EOS_TOKEN_ID,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
