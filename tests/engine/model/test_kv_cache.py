from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3NextConfig

from engine.errors import UnsupportedModelError
from engine.loading import LoadedModel
from engine.model.kv_cache import GROWTH_TOKENS, BufferedLayer, KvCache
from tests.engine.harness import load
from tests.engine.tiny import mixtral_config, qwen3_moe_config, random_prompt, save_checkpoint

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
