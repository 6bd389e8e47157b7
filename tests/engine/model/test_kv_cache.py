from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3NextConfig

from engine.errors import ConfigError, UnsupportedModelError
from engine.loading import LoadedModel
from engine.model.causal_lm import CausalLM
from engine.model.dispatch import ExpertsModule
from engine.model.kv_cache import GROWTH_TOKENS, BufferedLayer, KvCache
from tests.engine.harness import load
from tests.engine.tiny import (
    mixtral_config,
    qwen3_moe_config,
    random_prompt,
    reference_model,
    reference_tokens,
    save_checkpoint,
)

WINDOW = 8
MAX_TOKENS = 100


@pytest.fixture(scope="module")
def sliding_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = mixtral_config()
    config.sliding_window = WINDOW
    return save_checkpoint(config, tmp_path_factory.mktemp("checkpoints") / "tiny-sliding-mixtral")


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe", "sliding_mixtral"])
def loaded(request: pytest.FixtureRequest, model_cache: Path) -> LoadedModel:
    # The kernels of qint4 round to bfloat16, which would hide small differences; qfloat8 computes in float32.
    return load(request.getfixturevalue(request.param), model_cache, draft_weights="qfloat8")[0]


class Sequence:
    """A sequence that the model continues, with the draft's experts."""

    def __init__(self, loaded: LoadedModel) -> None:
        assert loaded.draft is not None
        self._model = loaded.model
        self._experts = loaded.draft
        self.cache = loaded.model.new_cache(MAX_TOKENS)

    def forward(self, token_ids: list[int]) -> torch.Tensor:
        logits = self._model.forward(token_ids, self.cache, self._experts)
        self._experts.take_routes()
        return logits


PROMPT = random_prompt(0, 13)
WRONG = random_prompt(1, 4)
NEXT = random_prompt(2, 3)


def test_the_cache_counts_its_tokens(loaded: LoadedModel) -> None:
    sequence = Sequence(loaded)
    assert sequence.cache.num_tokens == 0
    assert sequence.cache.num_bytes == 0
    sequence.forward(PROMPT)
    sequence.cache.drop(0)
    assert sequence.cache.num_tokens == len(PROMPT)
    sequence.forward(NEXT)
    sequence.cache.drop(2)
    assert sequence.cache.num_tokens == len(PROMPT) + 1


@pytest.mark.parametrize("num_prompt_tokens", [2, WINDOW - 1, len(PROMPT)])
def test_dropped_tokens_leave_no_trace(loaded: LoadedModel, num_prompt_tokens: int) -> None:
    plain, drafted = Sequence(loaded), Sequence(loaded)
    for sequence in (plain, drafted):
        sequence.forward(PROMPT[:num_prompt_tokens])
        sequence.cache.drop(0)
    for _ in range(3):
        # As the drafter does: one pass per token, and all dropped together.
        for token_id in WRONG:
            drafted.forward([token_id])
        drafted.cache.drop(len(WRONG))
        assert drafted.cache.num_tokens == plain.cache.num_tokens
        expected = plain.forward(NEXT)
        plain.cache.drop(0)
        # As verification does: one pass for all, of which the last are dropped.
        drafted.forward([*NEXT, *WRONG])
        drafted.cache.drop(len(WRONG) + 1)
        torch.testing.assert_close(drafted.forward(NEXT[-1:]), expected, rtol=1e-5, atol=1e-5)
        drafted.cache.drop(0)


def test_all_tokens_may_be_dropped(loaded: LoadedModel) -> None:
    sequence = Sequence(loaded)
    expected = sequence.forward(PROMPT)
    sequence.cache.drop(len(PROMPT))
    assert sequence.cache.num_tokens == 0
    torch.testing.assert_close(sequence.forward(PROMPT), expected)


def test_a_full_cache_holds_keys_and_values_of_every_token(qwen3_moe: Path, model_cache: Path) -> None:
    sequence = Sequence(load(qwen3_moe, model_cache)[0])
    sequence.forward(PROMPT)
    sequence.cache.drop(0)
    assert sequence.cache.num_bytes == len(PROMPT) * 4 * 2 * 2 * 16 * 4  # layers, key and value, heads, size, float32


def test_a_sliding_window_frees_what_left_it(sliding_mixtral: Path, model_cache: Path) -> None:
    sequence = Sequence(load(sliding_mixtral, model_cache)[0])
    sequence.forward(PROMPT)
    sequence.cache.drop(0)
    assert sequence.cache.num_bytes == (WINDOW - 1) * 3 * 2 * 2 * 16 * 4
    assert sequence.cache.num_tokens == len(PROMPT)


def test_a_cache_that_cannot_be_rolled_back_is_refused_by_name() -> None:
    config = Qwen3NextConfig(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], hidden_size=32, num_experts=4
    )
    with pytest.raises(UnsupportedModelError) as caught:
        KvCache(config, MAX_TOKENS)
    assert "qwen3_next" in str(caught.value)
    assert "LinearAttention" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [mixtral_config(), qwen3_moe_config()])
def test_a_new_cache_is_empty(config: PreTrainedConfig) -> None:
    assert KvCache(config, MAX_TOKENS).num_tokens == 0


def states(num_tokens: int, start: int = 0) -> torch.Tensor:
    """[1, heads, tokens, head_dim], with the position of each token in all its elements."""
    return torch.arange(start, start + num_tokens, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, -1, 4)


def test_buffers_grow_in_steps_and_keep_what_they_hold() -> None:
    layer = BufferedLayer(max_tokens=10_000)
    capacities = set()
    for position in range(2 * GROWTH_TOKENS + 1):
        keys, values = layer.update(states(1, position), -states(1, position))
        assert layer._key_buffer is not None
        capacities.add(layer._key_buffer.shape[-2])
    assert torch.equal(keys, states(2 * GROWTH_TOKENS + 1))
    assert torch.equal(values, -keys)
    assert capacities == {GROWTH_TOKENS, 2 * GROWTH_TOKENS, 3 * GROWTH_TOKENS}


def test_buffers_grow_no_further_than_the_context() -> None:
    layer = BufferedLayer(max_tokens=GROWTH_TOKENS + 8)
    layer.update(states(GROWTH_TOKENS), states(GROWTH_TOKENS))
    layer.update(states(8), states(8))
    assert layer._key_buffer is not None
    assert layer._key_buffer.shape[-2] == GROWTH_TOKENS + 8


def test_a_token_costs_no_allocation_where_there_is_room() -> None:
    layer = BufferedLayer(max_tokens=100)
    layer.update(states(3), states(3))
    before = layer._key_buffer
    layer.crop(-2)
    keys, _ = layer.update(states(4, start=10), states(4, start=10))
    assert layer._key_buffer is before
    assert torch.equal(keys, torch.cat([states(1), states(4, start=10)], dim=-2))


def random_states(num_tokens: int) -> torch.Tensor:
    """[1, heads, tokens, head_dim], which bfloat16 has to round."""
    return torch.randn(1, 2, num_tokens, 4, generator=torch.Generator().manual_seed(num_tokens))


def rounded(states: torch.Tensor) -> torch.Tensor:
    return states.bfloat16().float()


def test_another_type_is_stored_and_what_was_given_comes_back_rounded() -> None:
    layer = BufferedLayer(100, torch.bfloat16)
    given = random_states(5)
    keys, values = layer.update(given, -given)
    assert keys.dtype is values.dtype is torch.float32
    assert torch.equal(keys, rounded(given))
    assert torch.equal(values, rounded(-given))
    assert layer.keys is not None
    assert layer.values is not None
    assert layer.keys.dtype is layer.values.dtype is torch.bfloat16
    assert not torch.equal(keys, given)


def test_tokens_can_be_dropped_and_buffers_grow_in_another_type() -> None:
    layer = BufferedLayer(10_000, torch.bfloat16)
    kept, dropped, new = random_states(7), random_states(3), random_states(2 * GROWTH_TOKENS)
    layer.update(torch.cat([kept, dropped], dim=-2), torch.cat([kept, dropped], dim=-2))
    layer.crop(-3)
    assert layer.get_seq_length() == 7
    keys, values = layer.update(new, -new)
    assert torch.equal(keys, rounded(torch.cat([kept, new], dim=-2)))
    assert torch.equal(values, rounded(torch.cat([kept, -new], dim=-2)))
    layer.crop(-(7 + 2 * GROWTH_TOKENS))
    assert layer.get_seq_length() == 0
    assert torch.equal(layer.update(kept, kept)[0], rounded(kept))


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_type_that_is_given_costs_no_copy(dtype: torch.dtype | None) -> None:
    layer = BufferedLayer(100, dtype)
    keys, values = layer.update(random_states(5), random_states(5))
    assert layer._key_buffer is not None
    assert layer._value_buffer is not None
    assert keys.data_ptr() == layer._key_buffer.data_ptr()
    assert values.data_ptr() == layer._value_buffer.data_ptr()
    assert keys.dtype is torch.float32


def plain_model(checkpoint: Path, kv_dtype: torch.dtype | None) -> CausalLM:
    """The checkpoint with transformers' own experts."""
    return CausalLM(reference_model(checkpoint), [], kv_dtype)


def not_called(
    module: ExpertsModule,
    layer: int,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    raise AssertionError


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_stored_as_computed_greedy_tokens_are_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    checkpoint = request.getfixturevalue(name)
    model = plain_model(checkpoint, torch.float32)
    cache = model.new_cache(MAX_TOKENS)
    token_ids, new = [], PROMPT
    for _ in range(20):
        logits = model.forward([*new, *WRONG], cache, not_called, num_logits=len(WRONG) + 1)
        cache.drop(len(WRONG))
        new = [int(logits[0].argmax())]
        token_ids += new
    assert token_ids == reference_tokens(checkpoint, PROMPT, 20, ignore_eos=True)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.float16, 2)])
def test_a_smaller_type_takes_its_share_of_the_memory(qwen3_moe: Path, dtype: torch.dtype, share: int) -> None:
    plain, small = plain_model(qwen3_moe, None), plain_model(qwen3_moe, dtype)
    plain_cache, small_cache = plain.new_cache(MAX_TOKENS), small.new_cache(MAX_TOKENS)
    expected = plain.forward(PROMPT, plain_cache, not_called)
    torch.testing.assert_close(small.forward(PROMPT, small_cache, not_called), expected, rtol=0.1, atol=0.1)
    assert plain_cache.num_bytes == share * small_cache.num_bytes
    small_cache.drop(3)
    assert small_cache.num_tokens == len(PROMPT) - 3
    assert small_cache.num_bytes == (len(PROMPT) - 3) * 4 * 2 * 2 * 16 * dtype.itemsize


def test_layers_that_cannot_store_another_type_are_refused_by_name() -> None:
    config = mixtral_config()
    config.sliding_window = WINDOW
    with pytest.raises(ConfigError) as caught:
        KvCache(config, MAX_TOKENS, torch.bfloat16)
    assert str(caught.value) == (
        "kv_dtype is bfloat16, but mixtral keeps context in DynamicSlidingWindowLayer, which stores it as it was "
        "computed; leave --kv-dtype at auto."
    )
    assert KvCache(config, MAX_TOKENS).num_tokens == 0
