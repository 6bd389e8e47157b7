"""A tiny configuration for each of several families, which store experts and dense weights in different ways."""

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

from tests.engine.tiny import EOS_TOKEN_ID, VOCAB_SIZE, mixtral_config, qwen3_moe_config

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def gpt_oss_config() -> PreTrainedConfig:
    """Transposed matrices, with biases."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return _config(GptOssConfig, num_local_experts=3, head_dim=16, rope_parameters=rope)


def qwen2_moe_config() -> PreTrainedConfig:
    """A shared expert, which is dense."""
    return _config(Qwen2MoeConfig, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=64)


def deepseek_config(config_class: Any, **values: object) -> PreTrainedConfig:
    """The first layer is dense; version 3 has buffers that are stored, and kept in float32."""
    return _config(
        config_class,
        n_routed_experts=4,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        **values,
    )


def deepseek_v4_config() -> PreTrainedConfig:
    """Names on disk that other parameters have in the model."""
    sizes = {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "q_lora_rank": 16}
    return _config(DeepseekV4Config, **sizes, head_dim=16, qk_rope_head_dim=16, v_head_dim=16)


def glm4_moe_config() -> PreTrainedConfig:
    return _config(Glm4MoeConfig, n_routed_experts=4, moe_intermediate_size=32, first_k_dense_replace=1, head_dim=16)


def ernie4_5_moe_config() -> PreTrainedConfig:
    return _config(Ernie4_5_MoeConfig, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=1)


def olmoe_config() -> PreTrainedConfig:
    """So many experts and layers that their numbers sort otherwise as text."""
    return _config(OlmoeConfig, num_hidden_layers=11, intermediate_size=32, num_experts=12)


def _config(config_class: Any, **values: object) -> PreTrainedConfig:
    config: PreTrainedConfig = config_class(**COMMON | values)
    return config


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": mixtral_config,
    "qwen3_moe": qwen3_moe_config,
    "qwen2_moe": qwen2_moe_config,
    "deepseek_v2": lambda: deepseek_config(DeepseekV2Config),
    "deepseek_v3": lambda: deepseek_config(DeepseekV3Config, n_group=2, topk_group=1),
    "deepseek_v4": deepseek_v4_config,
    "gpt_oss": gpt_oss_config,
    "phimoe": lambda: _config(PhimoeConfig, num_local_experts=4),
    "olmoe": olmoe_config,
    "glm4_moe": glm4_moe_config,
    "granite_moe": lambda: _config(GraniteMoeConfig, num_local_experts=4),
    "ernie4_5_moe": ernie4_5_moe_config,
}
