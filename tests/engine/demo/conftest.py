import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def dense() -> LlamaForCausalLM:
    """A tiny random Llama with grouped-query attention, tied embeddings and settings unlike Mixtral's defaults."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


@pytest.fixture
def prompts() -> list[Tensor]:
    """Token ids [1, T] of three prompts."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(97, (1, length), generator=generator) for length in (40, 9, 25)]
