from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3NextConfig, ViTConfig

from engine.errors import UnsupportedModelError
from engine.model.skeleton import NUM_PROBE_TOKENS, KvLayer, Skeleton, read_skeleton
from tests.engine.families import FAMILIES
from tests.engine.tiny import mixtral_config, qwen3_moe_config

HEADS = 2 * 2 * 16
"""Elements of a token in one layer: key and value, heads, head size; the same in all tiny models with heads."""


def full(num_elements: int) -> KvLayer:
    return KvLayer(num_elements, None, is_convertible=True)


def window(num_elements: int, max_tokens: int) -> KvLayer:
    return KvLayer(num_elements, max_tokens, is_convertible=False)


def gpt_oss_config() -> PreTrainedConfig:
    config = FAMILIES["gpt_oss"]()
    config.num_hidden_layers = 2
    config.layer_types = ["sliding_attention", "full_attention"]
    config.sliding_window = 128
    return config


def read(config: PreTrainedConfig) -> Skeleton:
    return read_skeleton(config, torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "kv_layers"),
    [
        (mixtral_config(), 3 * [full(HEADS)]),
        (qwen3_moe_config(), 4 * [full(HEADS)]),  # one of which has no experts
        (gpt_oss_config(), [window(HEADS, 128), full(HEADS)]),
        (FAMILIES["deepseek_v2"](), 3 * [full(16 + 16)]),  # the latent, and the rotary key of all heads
        (FAMILIES["deepseek_v3"](), 3 * [full(16 + 16)]),
    ],
    ids=["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"],
)
def test_the_cache_of_each_layer(config: PreTrainedConfig, kv_layers: list[KvLayer]) -> None:
    assert read(config).kv_layers == kv_layers


@pytest.mark.parametrize(
    ("name", "top_k", "num_experts"),
    [
        ("mixtral", 2, [6, 6, 6]),
        ("qwen3_moe", 3, [8, 8, 8]),
        ("gpt_oss", 2, [3, 3, 3]),
        ("deepseek_v2", 2, [4, 4]),
        ("deepseek_v3", 2, [4, 4]),
    ],
)
def test_experts_and_routes(name: str, top_k: int, num_experts: list[int]) -> None:
    config = FAMILIES[name]()
    skeleton = read(config)
    assert skeleton.top_k == top_k
    assert [layer.parameters["down_proj"].shape[0] for layer in skeleton.experts] == num_experts
    assert all(layer.is_transposed == (name == "gpt_oss") for layer in skeleton.experts)
    assert skeleton.vocab_size == config.vocab_size


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_read_without_weights(name: str) -> None:
    skeleton = read(FAMILIES[name]())
    assert all(weight.is_meta for layer in skeleton.experts for weight in layer.parameters.values())
    assert skeleton.num_dense_parameters > 0


def test_a_window_shorter_than_the_probe_does_not_hide_what_a_token_takes() -> None:
    config = mixtral_config()
    config.sliding_window = NUM_PROBE_TOKENS // 2
    assert read(config).kv_layers == 3 * [window(HEADS, NUM_PROBE_TOKENS // 2)]


def test_a_model_that_looks_at_positions_needs_no_data() -> None:
    """Phi-3.5-MoE compares the longest position with a limit, which cannot be read from a tensor without data."""
    config = FAMILIES["phimoe"]()
    factors = config.hidden_size // config.num_attention_heads // 2 * [1.0]
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "short_mscale": 1.2,
        "long_mscale": 1.2,
        "original_max_position_embeddings": 8,
    }
    assert read(config).kv_layers == config.num_hidden_layers * [full(HEADS)]


def test_what_stays_in_float32_does() -> None:
    """The buffer that corrects DeepSeek-V3's routing is stored, its rotary frequencies are not."""
    config = FAMILIES["deepseek_v3"]()
    skeleton = read(config)
    assert skeleton.num_dense_weights.keys() == {torch.float32, torch.bfloat16}
    assert skeleton.computed_bytes % 4 == 0
    assert skeleton.computed_bytes > 0
    kept, converted = (skeleton.num_dense_weights[dtype] for dtype in (torch.float32, torch.bfloat16))
    assert skeleton.stored_bytes(torch.bfloat16) == 4 * kept + 2 * converted
    assert skeleton.stored_bytes(torch.float32) == 4 * kept + 4 * converted
    assert skeleton.dense_bytes(torch.float32) == 4 * kept + 4 * converted + skeleton.computed_bytes


def test_of_a_checkpoint_in_float32_everything_stored_is_converted() -> None:
    skeleton = read_skeleton(FAMILIES["deepseek_v3"](), torch.float32)
    (num_weights,) = skeleton.num_dense_weights.values()
    assert skeleton.dense_bytes(torch.bfloat16) == 2 * num_weights + skeleton.computed_bytes


def test_the_kv_cache_is_whole_or_a_window_and_a_pass() -> None:
    skeleton = read(gpt_oss_config())
    for num_tokens, num_kept in [(100, 100), (130, 130), (137, 137), (138, 137), (1000, 137)]:
        assert skeleton.kv_bytes(num_tokens, torch.float32, 10) == 4 * HEADS * (num_tokens + num_kept)
    assert skeleton.kv_bytes(1000, torch.bfloat16, 1) == 2 * HEADS * (1000 + 128)


def llama_config() -> PreTrainedConfig:
    return LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)


def qwen3_next_config() -> PreTrainedConfig:
    return Qwen3NextConfig(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], hidden_size=32, num_experts=4
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (llama_config, "LlamaForCausalLM has no experts"),
        (qwen3_next_config, "qwen3_next keeps its context in LinearAttention.*cannot drop rejected tokens"),
        (ViTConfig, "cannot build a causal language model of the type vit "),
    ],
)
def test_what_cannot_be_served_is_named(config: Callable[[], PreTrainedConfig], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        read(config())
    assert "\n" not in str(refusal.value)
