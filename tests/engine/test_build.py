"""A whole engine from a configuration: budgets become slots, and what cannot be built is refused in one sentence."""

import re
import threading
from pathlib import Path

import pytest

from engine.build import open_engine
from engine.config import EngineConfig
from engine.errors import ConfigError, InsufficientMemoryError, ModelNotFoundError, SpecterError
from engine.protocol import Finished, SamplingParams, Submit, Tokens, ToServer
from tests.engine.harness import ignore_progress
from tests.engine.tiny import random_prompt, reference_tokens


def config_of(checkpoint: Path, cache: Path, **settings: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {"model": str(checkpoint), "cache": cache, "device": "cpu", "draft_group_size": 32, **settings}
    )


def test_the_default_budget_holds_a_quarter_of_the_experts(qwen3_moe: Path, model_cache: Path) -> None:
    with open_engine(config_of(qwen3_moe, model_cache), ignore_progress) as (_, capabilities):
        assert capabilities.num_experts == 24
        assert capabilities.num_slots == 6
        assert capabilities.max_model_len == 256
        assert capabilities.eos_token_ids == [2]
        on_device = sum(row.num_bytes for row in capabilities.memory if row.tier == "device")
        assert on_device == capabilities.device_memory_bytes
        assert any("of all parameters quantized" in decision for decision in capabilities.decisions)


def test_the_remedy_of_a_budget_that_is_too_small_works(mixtral: Path, model_cache: Path) -> None:
    with (
        pytest.raises(InsufficientMemoryError) as refusal,
        open_engine(config_of(mixtral, model_cache, device_memory="1kB"), ignore_progress),
    ):
        pass
    needed = re.search(r"needs at least (\d+ MB)", str(refusal.value))
    assert needed is not None
    sent: list[ToServer] = []
    with open_engine(config_of(mixtral, model_cache, device_memory=needed[1]), ignore_progress) as (core, capabilities):
        assert 1 <= capabilities.num_slots < capabilities.num_experts
        core.send = sent.append
        core.submit(Submit("request", random_prompt(0, 7), 12, SamplingParams(temperature=0.0), ignore_eos=True))
        while core.has_work:
            core.step()
    tokens = [token_id for message in sent if isinstance(message, Tokens) for token_id in message.token_ids]
    assert tokens == reference_tokens(mixtral, random_prompt(0, 7), 12, ignore_eos=True)
    assert sent[-1] == Finished("request", "length")


def test_more_memory_than_the_experts_need_gives_each_a_slot(mixtral: Path, model_cache: Path) -> None:
    with open_engine(config_of(mixtral, model_cache, device_memory="1GB"), ignore_progress) as (_, capabilities):
        assert capabilities.num_slots == capabilities.num_experts == 18


def test_without_a_draft_its_memory_is_free_for_slots(mixtral: Path, model_cache: Path) -> None:
    with open_engine(config_of(mixtral, model_cache), ignore_progress) as (_, with_draft):
        assert with_draft.draft_length == 4
    config = config_of(mixtral, model_cache, draft=False, device_memory=with_draft.device_memory_bytes)
    with open_engine(config, ignore_progress) as (_, without_draft):
        assert without_draft.draft_length == 0
    assert without_draft.num_slots > with_draft.num_slots


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model": "/no/such/model"}, ModelNotFoundError, "Model '/no/such/model' is not a directory here"),
        ({"max_model_len": 1000}, ConfigError, "max_model_len is 1000, but the model's maximum is 256"),
        ({"draft_group_size": 48}, ConfigError, "draft_group_size 48 does not divide .* such as"),
        ({"device": "cuda"}, ConfigError, "device is 'cuda', but torch finds no CUDA device"),
    ],
)
def test_what_cannot_be_built_is_refused(
    mixtral: Path,
    model_cache: Path,
    settings: dict[str, object],
    error: type[SpecterError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with (
        pytest.raises(error, match=message) as refusal,
        open_engine(config_of(mixtral, model_cache, **settings), ignore_progress),
    ):
        pass
    assert "\n" not in str(refusal.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("transfer")]


def test_a_budget_beyond_what_is_free_is_refused(
    mixtral: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.device.CpuDevice.free_bytes", lambda device: 0)
    config = config_of(mixtral, model_cache, device_memory="1GB")
    with (
        pytest.raises(InsufficientMemoryError, match=r"needs at least \d+ MB of device memory, but only"),
        open_engine(config, ignore_progress),
    ):
        pass


def test_nothing_is_left_when_the_engine_closes(mixtral: Path, model_cache: Path) -> None:
    with open_engine(config_of(mixtral, model_cache), ignore_progress):
        assert [thread for thread in threading.enumerate() if thread.name.startswith("transfer")]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("transfer")]
