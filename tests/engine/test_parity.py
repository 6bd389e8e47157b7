"""Greedy output is token for token that of transformers, whatever is drafted, cached or evicted."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.config import DeviceName, DraftWeights, EngineConfig
from engine.loading import LoadedModel
from engine.protocol import Finished
from tests.engine.harness import load, running_core
from tests.engine.tiny import mixtral_config, random_prompt, reference_tokens, save_checkpoint

NUM_NEW_TOKENS = 20

Load = Callable[[Path, DraftWeights], tuple[LoadedModel, EngineConfig]]


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
    checkpoint: Path, model: LoadedModel, config: EngineConfig, num_slots: int, prompts: list[tuple[int, ...]]
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
    model, config = loaded(checkpoint, "qint4")
    assert_parity(checkpoint, model, config.model_copy(update={"draft_length": draft_length}), 4, prompts(1, 7))


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
    assert_parity(checkpoint, model._replace(draft=None), config, 3, prompts(1, 7))


@pytest.mark.parametrize("chunk", [1, 5, 16, 40])
def test_parity_for_any_prefill_chunk(mixtral: Path, loaded: Load, chunk: int) -> None:
    model, config = loaded(mixtral, "qint4")
    assert_parity(mixtral, model, config.model_copy(update={"prefill_chunk_tokens": chunk}), 4, prompts(40))


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
