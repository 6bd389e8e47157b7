from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3NextConfig

from engine.errors import UnsupportedModelError
from engine.loading import LoadedModel
from engine.model.kv_cache import KvCache
from tests.engine.harness import load
from tests.engine.tiny import mixtral_config, qwen3_moe_config, random_prompt, save_checkpoint

WINDOW = 8


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
        self.cache = loaded.model.new_cache()

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
        KvCache(config)
    assert "qwen3_next" in str(caught.value)
    assert "LinearAttention" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [mixtral_config(), qwen3_moe_config()])
def test_a_new_cache_is_empty(config: PreTrainedConfig) -> None:
    assert KvCache(config).num_tokens == 0
