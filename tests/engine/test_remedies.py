"""What a plan advises works, and where it advises nothing, nothing would."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine.description import ModelDescription
from engine.errors import ConfigError
from engine.planning import Machine
from engine.protocol import ModelPlan
from engine.remedies import CONTEXT_STEP_TOKENS
from tests.engine.families import FAMILIES
from tests.engine.plans import GB, MB, cpu, cuda, describe, flags, replan, save_config, settings_of

MAX_TOKENS = 4096
MODELS = ["mixtral", "gpt_oss"]


@cache
def model_of(name: str, device: str) -> ModelDescription:
    """Mixtral with a KV cache that can be converted, or gpt-oss with a window, which cannot."""
    config = FAMILIES[name]()
    if name == "gpt_oss":
        config.layer_types = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
        config.num_hidden_layers = len(config.layer_types)
    config.max_position_embeddings = MAX_TOKENS
    config.intermediate_size = 1024  # so that megabytes matter
    with TemporaryDirectory() as directory:
        return describe(save_config(config, Path(directory)), device)


def plan(name: str, machine: Machine, chosen: dict[str, Any]) -> ModelPlan:
    config = settings_of(Path("model"), **{"prefill_chunk_tokens": 32, **chosen})
    return replan(config, model_of(name, machine.device.type), machine)


class Situation(NamedTuple):
    name: str
    machine: Machine
    chosen: dict[str, Any]

    def plan(self, **changed: Any) -> ModelPlan:
        return plan(self.name, self.machine, self.chosen | changed)


@st.composite
def situations(draw: st.DrawFn, largest_bytes: int) -> Situation:
    """Models that need 0.5 to 8 MB, on machines of any kind and size up to `largest_bytes`, with any settings."""
    sizes = st.integers(0, 250).map(lambda number: number * largest_bytes // 250 + number % 7)
    name = draw(st.sampled_from(MODELS))
    machine = draw(st.builds(cpu, sizes) | st.builds(cuda, st.none() | sizes, sizes))
    chosen = {
        "model": draw(st.sampled_from(["demo", "a-model"])),
        "device_memory": draw(sizes if machine.is_absent else st.none() | st.just("auto") | sizes),
        "host_memory": draw(st.just("auto") | sizes),
        "max_model_len": draw(st.sampled_from([1, 511, 512, 700, 1024, 2000, MAX_TOKENS])),
        "draft": draw(st.sampled_from(["auto", "quantized", "ngram", "none"])),
        "draft_length": draw(st.sampled_from(["auto", 0, 4])),
        "draft_weights": draw(st.sampled_from(["qint4", "qint8"])),
        "dtype": draw(st.sampled_from(["auto", "float32"])),
        "kv_dtype": draw(st.sampled_from(["auto", "bfloat16"])) if name == "mixtral" else "auto",
        "prefill_chunk_tokens": draw(st.sampled_from([1, 32])),
    }
    return Situation(name, machine, chosen)


@given(situations(12 * MB))
@settings(max_examples=400)
def test_every_remedy_makes_the_model_fit(situation: Situation) -> None:
    refused = situation.plan()
    assert not (refused.fits and refused.remedies)
    for remedy in refused.remedies:
        event(" ".join(word for word in remedy.split() if word.startswith("--")))
        changed = flags(remedy)
        assert situation.plan(**changed).fits, remedy
        if context := int(changed.get("max_model_len", 0)):
            longer = situation.plan(**changed | {"max_model_len": min(context + CONTEXT_STEP_TOKENS, MAX_TOKENS)})
            assert not longer.fits, f"{remedy} is not the longest"


@given(situations(3 * MB))
@settings(max_examples=200)
def test_where_there_is_no_remedy_no_setting_helps(situation: Situation) -> None:
    refused = situation.plan()
    if refused.fits or refused.remedies:
        event("remedies" if refused.remedies else "fits")
        return
    event(" and ".join(refused.shortages))
    free_bytes = situation.machine.free_device_bytes
    assert free_bytes is not None  # a device that is not here can be larger
    for change in changes(situation):
        try:
            changed = situation.plan(**change)
        except ConfigError:  # a window that is to be converted
            assert situation.name == "gpt_oss"
            continue
        # What is advised besides something else is in whole megabytes.
        assert not changed.fits or changed.tier_bytes("device") > free_bytes // MB * MB, change


def changes(situation: Situation) -> Iterator[dict[str, Any]]:
    """What could be set otherwise: memory, and one of the things that take it, or two."""
    contexts = range(CONTEXT_STEP_TOKENS, situation.chosen["max_model_len"] + 1, CONTEXT_STEP_TOKENS)
    smaller: list[dict[str, Any]] = [{}, {"draft": "none"}, {"kv_dtype": "bfloat16"}]
    smaller += [{"max_model_len": context, **draft} for context in contexts for draft in ({}, {"draft": "none"})]
    memory: list[dict[str, Any]] = [{}, {"host_memory": 0}, {"host_memory": "auto"}]
    memory += [{"device_memory": situation.machine.free_device_bytes, **host} for host in memory]
    for change in smaller:
        for size in memory:
            yield change | size


def remedies(name: str, machine: Machine, **chosen: Any) -> list[str]:
    refused = plan(name, machine, chosen)
    assert not refused.fits
    return refused.remedies


def needs(name: str, device: str = "cpu", **chosen: Any) -> int:
    """Bytes with one slot."""
    machine = cpu(GB) if device == "cpu" else cuda(GB, GB)
    fitting = plan(name, machine, {"device_memory": "1GB", **chosen})
    return fitting.tier_bytes("device") - (fitting.num_slots - 1) * fitting.expert_bytes


def test_what_takes_memory_is_named() -> None:
    """Each budget has room for the model with one thing less."""
    whole, converted, undrafted = (
        needs("mixtral"),
        needs("mixtral", kv_dtype="bfloat16"),
        needs("mixtral", draft="none"),
    )
    assert undrafted < converted < whole
    larger = f"--device-memory {-(-whole // MB)}MB"
    found = remedies("mixtral", cpu(GB), device_memory=whole - 1)
    assert found[:3] == [larger, "--kv-dtype bfloat16", "--draft none"]
    assert found[3].startswith("--max-model-len ")
    assert len(found) == 4
    assert remedies("mixtral", cpu(GB), device_memory=converted - 1)[:2] == [larger, "--draft none"]
    assert remedies("mixtral", cpu(GB), device_memory=undrafted - 1)[1].startswith("--max-model-len ")


def test_the_context_that_is_advised_is_the_longest_in_whole_steps() -> None:
    budget = needs("mixtral", max_model_len=2 * CONTEXT_STEP_TOKENS)
    assert "--max-model-len 1024" in remedies("mixtral", cpu(GB), device_memory=budget)
    assert "--max-model-len 512" in remedies("mixtral", cpu(GB), device_memory=budget - 1)


def test_where_one_thing_does_not_help_two_are_advised() -> None:
    budget = needs("mixtral", draft="none", max_model_len=2 * CONTEXT_STEP_TOKENS)
    assert budget < needs("mixtral", max_model_len=CONTEXT_STEP_TOKENS)
    larger = f"--device-memory {-(-needs('mixtral') // MB)}MB"
    assert remedies("mixtral", cpu(GB), device_memory=budget) == [larger, "--draft none --max-model-len 1024"]
    assert remedies("mixtral", cpu(budget), device_memory=budget) == ["--draft none --max-model-len 1024"]


def test_a_window_is_not_to_be_converted() -> None:
    budget = needs("gpt_oss") - 1
    assert not any("kv-dtype" in remedy for remedy in remedies("gpt_oss", cpu(GB), device_memory=budget))


def test_where_the_budget_wants_more_than_there_is_it_is_to_be_lowered() -> None:
    whole = needs("mixtral")
    assert remedies("mixtral", cpu(whole + MB), device_memory="1GB") == [f"--device-memory {(whole + MB) // MB}MB"]


def test_between_two_megabytes_there_are_bytes() -> None:
    whole = needs("mixtral")
    assert whole % MB < MB - 10
    assert remedies("mixtral", cpu(whole + 10), device_memory="1GB") == [f"--device-memory {whole + 10}B"]
    assert remedies("mixtral", cpu(whole), device_memory=0) == [f"--device-memory {whole}B"]


def test_a_budget_that_is_no_use_is_changed_besides() -> None:
    """Of no use is one that is too small for anything, and one of which slots would take all that is saved."""
    whole = needs("mixtral", "cuda")
    for budget in (0, "1GB"):
        found = remedies("mixtral", cuda(whole - 1, GB), device_memory=budget)
        megabytes = (whole - 1) // MB
        assert found[0] == f"--device-memory {megabytes}MB --draft none"
        assert found[1].startswith(f"--device-memory {megabytes}MB --max-model-len ")
        assert len(found) == 2


def test_a_device_that_is_not_here_can_have_any_size() -> None:
    megabytes = -(-needs("mixtral", "cuda") // MB)
    for host_memory in ("auto", "2MB"):
        found = remedies("mixtral", cuda(None, 1000), device_memory=0, host_memory=host_memory)
        assert found == [f"--device-memory {megabytes}MB"]


def test_on_a_cpu_both_tiers_share_what_there_is() -> None:
    free = needs("mixtral") + 2 * MB
    assert remedies("mixtral", cpu(free), device_memory=free - 2 * MB, host_memory="3MB") == ["--host-memory 2MB"]
    found = remedies("mixtral", cpu(free), device_memory="1GB", host_memory="3MB")
    expert_bytes = plan("mixtral", cpu(free), {}).expert_bytes
    beside = free - 3 * MB // expert_bytes * expert_bytes
    assert f"--device-memory {beside // MB}MB --draft none" in found


def test_where_two_tiers_are_short_both_are_helped() -> None:
    whole = needs("mixtral", "cuda")
    found = remedies("mixtral", cuda(GB, MB), device_memory=whole - 1, host_memory="2MB")
    assert found[0] == f"--device-memory {-(-whole // MB)}MB --host-memory 1MB"
    assert len(found) > 1
    assert all(remedy.endswith(" --host-memory 1MB") for remedy in found)
    assert remedies("mixtral", cuda(GB, MB), device_memory="1GB", host_memory="2MB") == ["--host-memory 1MB"]


def test_nothing_helps_where_there_is_nothing() -> None:
    for name in MODELS:
        assert remedies(name, cpu(1000), device_memory="1GB") == []
        assert remedies(name, cuda(1000, GB), device_memory="auto") == []
