"""Greedy output is token for token that of transformers, whatever is drafted, cached or evicted."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.assembly import open_store
from engine.config import BenchConfig, DeviceName, DraftWeights
from engine.device import open_device
from engine.loading import LoadedModel
from engine.protocol import Finished, Tokens
from tests.engine.harness import changed, ignore_progress, load, running_core
from tests.engine.tiny import mixtral_config, random_prompt, reference_tokens, save_checkpoint

NUM_NEW_TOKENS = 20

Load = Callable[[Path, DraftWeights], tuple[LoadedModel, BenchConfig]]


@cache
def expected(checkpoint: Path, prompt: tuple[int, ...], device: DeviceName) -> list[int]:
    return reference_tokens(checkpoint, list(prompt), NUM_NEW_TOKENS, ignore_eos=True, device=device)


@pytest.fixture(scope="session")
def loaded(model_cache: Path, device: DeviceName) -> Load:
    """Models on the device, each loaded once."""
    return cache(lambda checkpoint, weights: load(checkpoint, model_cache, device=device, draft_weights=weights))


@pytest.fixture(params=["mixtral", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    path = request.getfixturevalue(request.param)
    assert isinstance(path, Path)
    return path


def assert_parity(
    checkpoint: Path, model: LoadedModel, config: BenchConfig, num_slots: int, prompts: list[tuple[int, ...]]
) -> None:
    with running_core(model, config, num_slots) as running:
        for prompt in prompts:
            reply = running.generate(list(prompt), NUM_NEW_TOKENS, ignore_eos=True)
            assert reply.token_ids == expected(checkpoint, prompt, config.device)
            assert reply.end == Finished("request", "length")


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    return [tuple(random_prompt(seed, length)) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("num_slots", [1, 2, 7, 1000])
def test_parity_for_any_number_of_slots(checkpoint: Path, loaded: Load, num_slots: int) -> None:
    model, config = loaded(checkpoint, "qint4")
    num_slots = min(num_slots, model.pack.layout.num_experts)
    assert_parity(checkpoint, model, config, num_slots, prompts(1, 7, 40))


@pytest.mark.parametrize("draft_length", range(9))
def test_parity_for_any_draft_length(checkpoint: Path, loaded: Load, draft_length: int) -> None:
    model, config = changed(*loaded(checkpoint, "qint4"), draft_length=draft_length)
    assert model.description.choices.draft_length == draft_length
    assert_parity(checkpoint, model, config, 4, prompts(1, 7))


@pytest.mark.parametrize("weights", ["qint2", "qint8", "qfloat8"])
def test_parity_for_any_draft_precision(checkpoint: Path, loaded: Load, weights: DraftWeights) -> None:
    model, config = loaded(checkpoint, weights)
    assert_parity(checkpoint, model, config, 3, prompts(1, 7))


def test_parity_with_a_draft_of_other_weights(mixtral: Path, loaded: Load, tmp_path: Path) -> None:
    stranger = save_checkpoint(mixtral_config(), tmp_path / "stranger", seed=1)
    model, config = loaded(mixtral, "qint4")
    model = model._replace(draft=loaded(stranger, "qint4")[0].draft)
    assert_parity(mixtral, model, config, 3, prompts(1, 7, 40))


def test_parity_without_a_draft(checkpoint: Path, loaded: Load) -> None:
    model, config = loaded(checkpoint, "qint4")
    assert_parity(checkpoint, *changed(model, config, draft="none"), 3, prompts(1, 7))


@pytest.mark.parametrize("num_slots", [1, 5, 1000])
@pytest.mark.parametrize("prefetch", [True, False])
def test_parity_without_a_draft_whatever_is_prefetched(
    checkpoint: Path, loaded: Load, num_slots: int, prefetch: bool
) -> None:
    model, config = changed(*loaded(checkpoint, "qint4"), draft="none", prefetch=prefetch)
    num_slots = min(num_slots, model.pack.layout.num_experts)
    with running_core(model, config, num_slots) as running:
        for prompt in prompts(1, 7, 40):
            reply = running.generate(list(prompt), NUM_NEW_TOKENS, ignore_eos=True)
            assert reply.token_ids == expected(checkpoint, prompt, config.device)
            assert reply.stats.num_draft_tokens == 0
        stats = running.transfers.stats()
    assert (stats.prefetch_bytes > 0) == prefetch
    assert stats.demand_bytes > 0 or prefetch


def repetitive(*lengths: int) -> list[tuple[int, ...]]:
    """Prompts that say everything twice, so that n-grams of them occur again."""
    return [(*prompt, *prompt[: 2 * len(prompt) // 3]) for prompt in prompts(*lengths)]


@pytest.mark.parametrize("num_slots", [1, 4, 1000])
@pytest.mark.parametrize("draft_length", [1, 4, 8, "auto"])
def test_parity_with_ngrams(checkpoint: Path, loaded: Load, draft_length: int | str, num_slots: int) -> None:
    model, config = changed(*loaded(checkpoint, "qint4"), draft="ngram", draft_length=draft_length)
    assert model.draft is None
    num_slots = min(num_slots, model.pack.layout.num_experts)
    num_drafted = 0
    with running_core(model, config, num_slots) as running:
        for prompt in repetitive(9, 30):
            # The second time, the prompt says what the first reply was.
            for text in (prompt, (*prompt, *expected(checkpoint, prompt, config.device), *prompt)):
                reply = running.generate(list(text), NUM_NEW_TOKENS, ignore_eos=True)
                assert reply.token_ids == expected(checkpoint, text, config.device)
                num_drafted += reply.stats.num_draft_tokens
    assert num_drafted > 0 or draft_length == "auto"


@pytest.mark.parametrize("num_slots", [1, 4, 1000])
def test_parity_with_a_draft_of_automatic_length(checkpoint: Path, loaded: Load, num_slots: int) -> None:
    model, config = changed(*loaded(checkpoint, "qint4"), draft_length="auto")
    num_slots = min(num_slots, model.pack.layout.num_experts)
    with running_core(model, config, num_slots) as running:
        for prompt in prompts(1, 7, 40):
            reply = running.generate(list(prompt), NUM_NEW_TOKENS, ignore_eos=True)
            assert reply.token_ids == expected(checkpoint, prompt, config.device)
            cycles = [message for message in reply.messages if isinstance(message, Tokens)][1:]
            assert all(cycle.estimates is not None for cycle in cycles[:-1])


@pytest.mark.parametrize("draft", ["quantized", "ngram", "none"])
@pytest.mark.parametrize("num_slots", [1, 5])
def test_parity_with_the_least_recently_used_evicted(
    checkpoint: Path, loaded: Load, draft: str, num_slots: int
) -> None:
    model, config = changed(*loaded(checkpoint, "qint4"), cache_policy="lru", draft=draft)
    assert_parity(checkpoint, model, config, num_slots, [*prompts(1, 40), *repetitive(9)])


@pytest.mark.parametrize("draft", ["quantized", "none"])
def test_parity_over_a_paced_link(mixtral: Path, loaded: Load, draft: str) -> None:
    model, config = changed(*loaded(mixtral, "qint4"), draft=draft)
    device = open_device(config.device)
    with open_store(model.pack, 0, device, ignore_progress, link_bandwidth=10**9) as store:
        store.is_on = True
        with running_core(model, config, 3, device=device, store=store) as running:
            for prompt in prompts(7, 40):
                reply = running.generate(list(prompt), NUM_NEW_TOKENS, ignore_eos=True)
                assert reply.token_ids == expected(mixtral, prompt, config.device)


@pytest.mark.parametrize("chunk", [1, 5, 16, 40])
def test_parity_for_any_prefill_chunk(mixtral: Path, loaded: Load, chunk: int) -> None:
    model, config = loaded(mixtral, "qint4")
    model, config = changed(model, config, prefill_chunk_tokens=chunk)
    assert_parity(mixtral, model, config, 4, prompts(40))


def test_parity_for_many_prompts(checkpoint: Path, loaded: Load) -> None:
    model, config = loaded(checkpoint, "qint4")
    assert_parity(checkpoint, model, config, 6, prompts(*range(1, 25)))


def test_parity_of_a_bfloat16_checkpoint_with_tied_embeddings(tmp_path: Path, loaded: Load) -> None:
    checkpoint = save_checkpoint(mixtral_config(is_tied=True), tmp_path / "bfloat16", dtype=torch.bfloat16)
    model, config = loaded(checkpoint, "qint4")
    assert model.pack.layout.layers[0].tensors[0].torch_dtype is torch.bfloat16
    assert_parity(checkpoint, model, config, 3, prompts(1, 7))


def test_the_references_are_diverse(checkpoint: Path, device: DeviceName) -> None:
    """Parity with a model that repeats one token would prove little."""
    assert len({token for prompt in prompts(7, 7, 7, 7) for token in expected(checkpoint, prompt, device)}) > 15


def test_the_better_the_draft_the_more_is_accepted(qwen3_moe: Path, loaded: Load) -> None:
    rates = {}
    for weights in ("qint8", "qint4", "qint2"):
        model, config = loaded(qwen3_moe, weights)
        with running_core(model, config, 24) as running:
            stats = [
                running.generate(list(prompt), NUM_NEW_TOKENS, ignore_eos=True).stats for prompt in prompts(7, 7, 7)
            ]
        rates[weights] = sum(s.num_accepted_tokens for s in stats) / sum(s.num_draft_tokens for s in stats)
    assert rates["qint8"] > rates["qint4"] > rates["qint2"]
