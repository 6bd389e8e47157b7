"""From settings to a running engine: plans come first, tiers change nothing but the speed, and everything ends."""

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import LlamaConfig

from engine.build import Engine, open_engine, pack, plan
from engine.config import EngineConfig, PackConfig
from engine.errors import (
    ConfigError,
    InsufficientMemoryError,
    ModelNotFoundError,
    PackError,
    SpecterError,
    TransferError,
    UnsupportedModelError,
)
from engine.packing import is_pack
from engine.phases import PhaseClock
from engine.profile import PassTimes
from engine.protocol import Failed, Finished, Loading, Located, SamplingParams, Submit, Tokens, ToServer
from tests.engine.harness import ignore_progress
from tests.engine.plans import DRAFT
from tests.engine.tiny import mixtral_config, random_prompt, reference_tokens, save_checkpoint

PROMPT = random_prompt(0, 7)


def config_of(checkpoint: Path, cache: Path, **settings: object) -> EngineConfig:
    defaults = {"device": "cpu", "device_memory": "100MB", **DRAFT}
    return EngineConfig.model_validate({"model": str(checkpoint), "cache": cache, **defaults, **settings})


@contextmanager
def opened(checkpoint: Path, cache: Path, **settings: object) -> Iterator[Engine]:
    with open_engine(config_of(checkpoint, cache, **settings), ignore_progress, PhaseClock()) as engine:
        yield engine


@pytest.fixture
def own_mixtral(tmp_path: Path) -> Path:
    """A checkpoint that the test may change or lose."""
    return save_checkpoint(mixtral_config(), tmp_path / "own-mixtral")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def messages(engine: Engine, max_tokens: int = 12) -> list[ToServer]:
    sent: list[ToServer] = []
    engine.core.send = sent.append
    engine.core.submit(Submit("request", PROMPT, max_tokens, SamplingParams(temperature=0.0), ignore_eos=True))
    while engine.core.has_work:
        engine.core.step()
    return sent


def reply(engine: Engine) -> list[int]:
    sent = messages(engine)
    assert sent[-1] == Finished("request", "length")
    return [token_id for message in sent if isinstance(message, Tokens) for token_id in message.token_ids]


def device_memory_for(checkpoint: Path, cache: Path, num_slots: int, **settings: object) -> int:
    """The smallest budget with so many slots."""
    planned = plan(config_of(checkpoint, cache, **settings), ignore_progress)
    return planned.tier_bytes("device") - (planned.num_slots - num_slots) * planned.expert_bytes


def transfer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("transfer")]


@pytest.mark.parametrize("num_slots", [1, 5, 18])
@pytest.mark.parametrize("num_host_experts", [0, 7, 18])
def test_whatever_fits_where_the_tokens_are_the_same(
    mixtral: Path, model_cache: Path, num_slots: int, num_host_experts: int
) -> None:
    device_memory = device_memory_for(mixtral, model_cache, num_slots)
    expert_bytes = plan(config_of(mixtral, model_cache), ignore_progress).expert_bytes
    settings = {"device_memory": device_memory, "host_memory": num_host_experts * expert_bytes}
    with opened(mixtral, model_cache, **settings) as engine:
        assert engine.capabilities.plan.num_slots == num_slots
        assert engine.capabilities.plan.num_host_experts == num_host_experts
        assert reply(engine) == reference_tokens(mixtral, PROMPT, 12, ignore_eos=True)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_what_was_planned_is_what_is_served(name: str, model_cache: Path, request: pytest.FixtureRequest) -> None:
    checkpoint: Path = request.getfixturevalue(name)
    planned = plan(config_of(checkpoint, model_cache, host_memory="100kB"), ignore_progress)
    with opened(checkpoint, model_cache, host_memory="100kB") as engine:
        served = engine.capabilities
        assert served.plan.memory == planned.memory
        assert served.plan.forecasts == planned.forecasts
        assert served.plan.decisions == planned.decisions
        assert served.plan.max_model_len == 256
        assert served.eos_token_ids == [2]
        assert served.draft_length == 4
        # Records of a tiny model are too small a file to measure a disk by.
        assert served.plan.bandwidths.keys() == planned.bandwidths.keys() == {"host"}


def test_the_stages_of_the_start_are_timed(mixtral: Path, model_cache: Path) -> None:
    clock = PhaseClock()
    with clock.phase("imports"):
        pass
    with open_engine(config_of(mixtral, model_cache), ignore_progress, clock) as engine:
        stages = engine.capabilities.startup_seconds
        preparing = ["imports", "planning", "packing", "bandwidth", "choosing"]
        assert list(stages) == [*preparing, "draft", "dense weights", "experts", "warm-up"]
        assert all(seconds >= 0 for seconds in stages.values())


def test_the_model_is_located_before_anything_else(own_mixtral: Path, cache: Path) -> None:
    sent: list[Loading | Located] = []
    with open_engine(config_of(own_mixtral, cache), sent.append, PhaseClock()):
        assert sent[0] == Located(str(own_mixtral))
        assert sum(isinstance(message, Located) for message in sent) == 1


def test_the_remedy_of_a_budget_that_is_too_small_works(own_mixtral: Path, cache: Path) -> None:
    with pytest.raises(InsufficientMemoryError) as refusal, opened(own_mixtral, cache, device_memory="1kB"):
        pass
    assert not cache.exists(), "nothing is packed for a model that does not fit"
    remedy = re.search(r"--device-memory (\d+MB)", str(refusal.value))
    assert remedy is not None
    with opened(own_mixtral, cache, device_memory=remedy[1]) as engine:
        assert 1 <= engine.capabilities.plan.num_slots < engine.capabilities.plan.num_experts
        assert reply(engine) == reference_tokens(own_mixtral, PROMPT, 12, ignore_eos=True)


def test_a_context_that_does_not_fit_is_refused_at_the_start(own_mixtral: Path, cache: Path) -> None:
    needed = device_memory_for(own_mixtral, cache, 1, max_model_len=64)
    with (
        pytest.raises(InsufficientMemoryError, match="KV cache"),
        opened(own_mixtral, cache, device_memory=needed, max_model_len=256),
    ):
        pass
    with opened(own_mixtral, cache, device_memory=needed, max_model_len=64) as engine:
        assert reply(engine) == reference_tokens(own_mixtral, PROMPT, 12, ignore_eos=True)


def test_more_memory_than_the_experts_need_gives_each_a_slot(mixtral: Path, model_cache: Path) -> None:
    with opened(mixtral, model_cache, device_memory="auto") as engine:
        assert engine.capabilities.plan.num_slots == engine.capabilities.plan.num_experts == 18


def test_without_a_draft_its_memory_is_free_for_slots(mixtral: Path, model_cache: Path) -> None:
    device_memory = device_memory_for(mixtral, model_cache, 3)
    with opened(mixtral, model_cache, device_memory=device_memory, draft="none") as engine:
        assert engine.capabilities.draft_length == 0
        assert engine.capabilities.plan.num_slots > 3
        (forecast,) = engine.capabilities.plan.forecasts
        assert forecast.num_slots == engine.capabilities.plan.num_slots


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_a_smaller_kv_cache_leaves_room_for_slots_and_serves(mixtral: Path, model_cache: Path, kv_dtype: str) -> None:
    device_memory = device_memory_for(mixtral, model_cache, 3)
    with opened(mixtral, model_cache, device_memory=device_memory, kv_dtype=kv_dtype) as engine:
        row = next(row for row in engine.capabilities.plan.memory if row.part == "KV cache")
        assert kv_dtype in row.note
        tokens = reply(engine)
        cache = engine.core._model.new_cache(8)
        engine.core._model.forward(PROMPT, cache, engine.core._experts.planned)
        assert cache.num_bytes * 256 == row.num_bytes * len(PROMPT)
    # Rounded keys and values may in time lead to other tokens, but not at once.
    assert tokens[:3] == reference_tokens(mixtral, PROMPT, 12, ignore_eos=True)[:3]


def dense_checkpoint(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    return save_checkpoint(config, tmp_path / "llama")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model": "/no/such/model"}, ModelNotFoundError, "Model '/no/such/model' is not a directory here"),
        ({"max_model_len": 1000}, ConfigError, "max_model_len is 1000, but the model's maximum is 256"),
        ({"draft_group_size": 48}, ConfigError, "draft_group_size 48 does not divide .* such as"),
        ({"device": "cuda"}, ConfigError, "device is 'cuda', but torch finds no CUDA device"),
        ({"model": "dense"}, UnsupportedModelError, "LlamaForCausalLM has no experts"),
        ({"host_memory": "100kB"}, InsufficientMemoryError, r"needs \d+ MB more device memory than there is"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_packed(
    own_mixtral: Path,
    cache: Path,
    tmp_path: Path,
    settings: dict[str, object],
    error: type[SpecterError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if settings.get("model") == "dense":
        settings = {"model": str(dense_checkpoint(tmp_path))}
    if error is InsufficientMemoryError:
        # The experts are few; what is free is less still.
        monkeypatch.setattr("engine.planning.available_bytes", lambda: 10**5)
        monkeypatch.setattr("engine.device.available_bytes", lambda: 10**5)
    with pytest.raises(error, match=message) as refusal, opened(own_mixtral, cache, **settings):
        pass
    assert "\n" not in str(refusal.value)
    assert not cache.exists()
    assert not transfer_threads()


def test_nothing_is_left_when_the_engine_closes(mixtral: Path, model_cache: Path) -> None:
    with opened(mixtral, model_cache, host_memory="100kB"):
        assert transfer_threads()
    assert not transfer_threads()


def test_a_failure_while_experts_are_loaded_leaves_nothing(mixtral: Path, model_cache: Path) -> None:
    class Stopped(Exception):
        pass

    def send(message: Loading | Located) -> None:
        if isinstance(message, Loading) and message.stage == "Loading experts into host memory" and message.done == 2:
            raise Stopped

    config = config_of(mixtral, model_cache, host_memory="100MB")
    threads = threading.active_count()
    with pytest.raises(Stopped), open_engine(config, send, PhaseClock()):
        pass
    assert threading.active_count() == threads


def damage_all_experts(own_mixtral: Path, cache: Path) -> None:
    with opened(own_mixtral, cache):
        (records,) = cache.rglob("experts.bin")
    content = bytearray(records.read_bytes())
    for place in range(100, len(content), 4096):
        content[place] ^= 1
    records.write_bytes(content)


def test_damaged_experts_end_the_start(own_mixtral: Path, cache: Path) -> None:
    damage_all_experts(own_mixtral, cache)
    with (
        pytest.raises(TransferError, match=r"experts\.bin is damaged at .*delete its directory"),
        opened(own_mixtral, cache),
    ):
        pass
    assert not transfer_threads()


def test_a_damaged_expert_fails_its_request_by_name_and_is_never_served(
    own_mixtral: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage_all_experts(own_mixtral, cache)
    # Of the damage, the first passes need not have seen anything.
    monkeypatch.setattr("engine.build.measure_passes", lambda *arguments: PassTimes((1e-3, 1e-3), (1, 2), 1e-3))
    with opened(own_mixtral, cache) as engine:
        failure = messages(engine)[-1]
        assert isinstance(failure, Failed)
        assert failure.kind == "TransferError"
        assert re.search(r"experts\.bin is damaged at .*delete its directory", failure.message)
        assert isinstance(messages(engine)[-1], Failed)


def test_a_pack_is_served_without_its_checkpoint(own_mixtral: Path, cache: Path, tmp_path: Path) -> None:
    expected = reference_tokens(own_mixtral, PROMPT, 12, ignore_eos=True)
    out = tmp_path / "packed"
    config = PackConfig(**config_of(own_mixtral, cache).model_dump(), out=out)
    assert pack(config, ignore_progress) == out
    assert is_pack(out)
    assert not (cache / "packs").exists()
    shutil.rmtree(own_mixtral)
    progress: list[Loading | Located] = []
    with open_engine(config_of(out, cache), progress.append, PhaseClock()) as engine:
        assert reply(engine) == expected
        assert engine.capabilities.eos_token_ids == [2]
    assert not any(isinstance(message, Loading) and "acking" in message.stage for message in progress)


def test_a_pack_into_a_directory_with_other_files_is_refused(own_mixtral: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    config = PackConfig(**config_of(own_mixtral, cache).model_dump(), out=tmp_path / "full")
    with pytest.raises(PackError, match="holds other files"):
        pack(config, ignore_progress)
    assert (tmp_path / "full" / "thesis.txt").exists()


def test_a_plan_reads_no_weights(own_mixtral: Path, cache: Path) -> None:
    whole = plan(config_of(own_mixtral, cache), ignore_progress)
    (own_mixtral / "model.safetensors").unlink()
    assert plan(config_of(own_mixtral, cache), ignore_progress) == whole
    assert not cache.exists()


def test_a_plan_for_a_gpu_that_is_not_here(own_mixtral: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    planned = plan(config_of(own_mixtral, cache, device="cuda", host_memory="100kB"), ignore_progress)
    assert "none here" in planned.device
    assert planned.num_slots == 18
    with pytest.raises(ConfigError, match="--device-memory"):
        plan(config_of(own_mixtral, cache, device="cuda", device_memory=None), ignore_progress)


def test_a_disk_is_measured_by_the_checkpoint_until_there_is_a_pack(
    own_mixtral: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Path] = []

    def measure(path: Path) -> float:
        measured.append(path)
        return 2e9

    monkeypatch.setattr("engine.build.measure_disk", measure)
    assert plan(config_of(own_mixtral, cache), ignore_progress).bandwidths == {"disk": 2e9}
    with opened(own_mixtral, cache) as engine:
        assert engine.capabilities.plan.bandwidths == {"disk": 2e9}
    plan(config_of(own_mixtral, cache), ignore_progress)
    assert [path.name for path in measured] == ["model.safetensors", "experts.bin", "experts.bin"]
