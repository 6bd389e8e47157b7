"""Budgets become rows, shortages and sentences."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.description import describe_model
from engine.device import CpuDevice
from engine.errors import ConfigError, InsufficientMemoryError
from engine.experts.store import NUM_TRANSFERS
from engine.memory import DEVICE_MARGIN, HOST_MARGIN
from engine.planning import Alternative, Machine, alternatives, choose, require_fit
from engine.protocol import ModelPlan
from tests.engine.families import FAMILIES
from tests.engine.plans import GB, MB, cpu, cuda, describe, flags, plan_for, rows_of, save_config, settings_of
from tests.engine.tiny import mixtral_config

NUM_EXPERTS = 18


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(mixtral_config(), tmp_path_factory.mktemp("configurations") / "mixtral")


def least_bytes(path: Path, machine: Machine, **settings: object) -> int:
    """What the device needs with one slot."""
    roomy = machine._replace(free_device_bytes=GB, free_host_bytes=GB)
    plan = plan_for(roomy, path, device_memory="1GB", **settings)
    return plan.tier_bytes("device") - (plan.num_slots - 1) * plan.expert_bytes


def decision(plan: ModelPlan, start: str) -> str:
    (found,) = (sentence for sentence in plan.decisions if sentence.startswith(start))
    return found


# Rows.


def test_rows_say_what_lies_where(model: Path) -> None:
    plan = plan_for(cuda(GB, GB), model, device_memory="10MB", host_memory="200kB", draft_weights="qint8")
    device, host, disk = rows_of(plan, "device"), rows_of(plan, "host"), rows_of(plan, "disk")
    described = describe(model, "cuda", draft_weights="qint8")
    needs = described.sizes.needs(described.choices)
    assert {part: row.num_bytes for part, row in device.items()} == {
        "dense weights": needs.dense,
        "draft experts": needs.draft,
        "KV cache": needs.kv_cache,
        "workspace": needs.workspace,
        "expert slots": plan.num_slots * plan.expert_bytes,
    }
    assert device["dense weights"].note == "all but the experts, in bfloat16"
    assert device["draft experts"].note == "all experts in qint8"
    assert device["KV cache"].note == "at 256 tokens, in bfloat16"
    assert device["expert slots"].note == "18, for 100% of the experts"
    assert host["full-precision experts"].num_bytes == 3 * plan.expert_bytes
    assert host["full-precision experts"].note == "3 of 18, 0.0 MB each"
    assert host["staging buffers"].num_bytes == NUM_TRANSFERS * plan.expert_bytes
    assert disk["packed model"].num_bytes == described.sizes.pack_bytes(described.choices.draft)
    assert disk["packed model"].note == "15 of 18 experts are read from here"
    assert plan.tier_bytes("device") == needs.total + plan.num_slots * plan.expert_bytes
    assert plan.max_model_len == 256
    assert plan.cold_token_bytes == 3 * 2 * plan.expert_bytes  # layers, experts per token
    assert plan.kv_bytes_per_token == 3 * 2 * 2 * 16 * 2  # layers, key and value, heads, size, bfloat16


def test_experts_that_are_all_in_host_memory_leave_the_disk_alone(model: Path) -> None:
    plan = plan_for(cuda(GB, GB), model, device_memory="auto")
    assert plan.num_host_experts == plan.num_experts == NUM_EXPERTS
    assert rows_of(plan, "disk")["packed model"].note == "read at the start only"


# Budgets.


def test_automatic_budgets_on_cuda(model: Path) -> None:
    free_bytes, host_bytes = least_bytes(model, cuda(GB, GB)) * 10 // 9 + 1, 200_000
    for setting in (None, "auto"):
        plan = plan_for(cuda(free_bytes, host_bytes), model, device_memory=setting)
        assert plan.fits
        assert plan.num_slots == 1
        assert plan.budget_bytes == {
            "device": int(free_bytes * (1 - DEVICE_MARGIN)),
            "host": int(host_bytes * (1 - HOST_MARGIN)),
        }
        assert plan.num_host_experts + NUM_TRANSFERS == plan.budget_bytes["host"] // plan.expert_bytes == 4
        assert rows_of(plan, "host")["staging buffers"].num_bytes == NUM_TRANSFERS * plan.expert_bytes
        assert decision(plan, "Device memory").endswith("what is free less 10%.")
        assert decision(plan, "Host memory").endswith("what is free less 20%.")


def test_automatic_budgets_on_a_cpu(model: Path) -> None:
    plan = plan_for(cpu(GB), model)
    assert plan.fits
    assert plan.budget_bytes == {"device": 800 * MB, "host": 0}
    assert plan.num_slots == NUM_EXPERTS
    assert plan.num_host_experts == 0
    assert rows_of(plan, "host") == {}
    assert "RAM already" in decision(plan, "Host memory")


def test_budgets_as_set(model: Path) -> None:
    plan = plan_for(cuda(GB, GB), model, device_memory="20MB", host_memory="190kB")
    assert plan.budget_bytes == {"device": 20 * MB, "host": 190_000}
    assert plan.num_host_experts + NUM_TRANSFERS == 5
    assert decision(plan, "Device memory") == "Device memory: 20 MB, as set."
    assert decision(plan, "Host memory") == "Host memory for experts: 0 MB, as set."


def test_an_automatic_device_budget_on_a_cpu_leaves_what_the_host_was_given(model: Path) -> None:
    least = least_bytes(model, cpu(GB))
    without, with_host = (plan_for(cpu(least * 2), model, host_memory=size) for size in ("auto", "100kB"))
    assert without.fits
    assert with_host.fits
    assert with_host.num_host_experts == 2
    assert without.budget_bytes["device"] == int(0.8 * 2 * least)
    assert with_host.budget_bytes["device"] == int(0.8 * (2 * least - 2 * with_host.expert_bytes))


def test_where_the_host_was_given_everything_a_cpu_has_nothing_left(model: Path) -> None:
    plan = plan_for(cpu(100_000), model, host_memory="200kB")
    assert plan.budget_bytes["device"] == 0
    assert not plan.fits


def test_more_host_memory_than_experts_is_not_taken(model: Path) -> None:
    plan = plan_for(cpu(GB), model, device_memory="20MB", host_memory="500MB")
    assert plan.num_host_experts == NUM_EXPERTS
    assert plan.tier_bytes("host") == NUM_EXPERTS * plan.expert_bytes
    assert plan.fits


# The demo.


def test_the_demo_gets_room_for_a_quarter_of_its_experts(model: Path) -> None:
    for machine in (cpu(GB), cuda(GB, GB), cuda(None, GB)):
        plan = plan_for(machine, model, model="demo")
        assert plan.fits
        assert plan.num_slots == NUM_EXPERTS // 4
        assert plan.budget_bytes["device"] == plan.tier_bytes("device")
        assert "25% of the demo's experts; --device-memory changes it" in decision(plan, "Device memory")


@pytest.mark.parametrize("setting", ["auto", "800MB"])
def test_the_demo_s_device_memory_can_be_set(model: Path, setting: str) -> None:
    plan = plan_for(cpu(GB), model, model="demo", device_memory=setting)
    assert plan.num_slots == NUM_EXPERTS
    assert plan.budget_bytes["device"] == 800 * MB


def test_another_model_is_no_demo(model: Path) -> None:
    assert plan_for(cpu(GB), model).num_slots == NUM_EXPERTS


def test_where_a_quarter_does_not_fit_the_demo_gets_what_is_free(model: Path) -> None:
    least = least_bytes(model, cpu(GB))
    free_bytes = -(-least * 10 // 8)
    plan = plan_for(cpu(free_bytes), model, model="demo")
    assert plan.fits
    assert plan.num_slots < NUM_EXPERTS // 4
    assert plan.budget_bytes["device"] == int(0.8 * free_bytes)
    assert decision(plan, "Device memory").endswith("what is free less 20%.")


# Shortages.


def test_a_device_that_is_too_small(model: Path) -> None:
    least = least_bytes(model, cuda(GB, GB))
    plan = plan_for(cuda(GB, GB), model, device_memory=least - 1)
    assert plan.shortages == {"device": 1}
    assert plan.num_slots == 1
    assert f"--device-memory {-(-least // MB)}MB" in plan.remedies
    assert plan_for(cuda(GB, GB), model, device_memory=least).shortages == {}


def test_a_host_that_is_too_small_on_cuda(model: Path) -> None:
    plan = plan_for(cuda(GB, 150_000), model, device_memory="20MB", host_memory="190kB")
    assert plan.num_host_experts + NUM_TRANSFERS == 5
    assert plan.shortages == {"host": 5 * plan.expert_bytes - 150_000}
    assert plan.remedies == ["--host-memory 0MB"]


def test_on_a_cpu_device_and_host_are_counted_together(model: Path) -> None:
    device_bytes = least_bytes(model, cpu(GB))
    settings = {"device_memory": device_bytes, "host_memory": "190kB"}
    host_bytes = 5 * plan_for(cpu(GB), model, **settings).expert_bytes
    assert plan_for(cpu(device_bytes + host_bytes), model, **settings).shortages == {}
    assert plan_for(cpu(device_bytes + host_bytes - 7), model, **settings).shortages == {"host": 7}


def test_two_tiers_that_are_too_small(model: Path) -> None:
    least = least_bytes(model, cuda(GB, GB))
    plan = plan_for(cuda(GB, 150_000), model, device_memory=least - 3, host_memory="190kB")
    assert plan.shortages == {"device": 3, "host": 5 * plan.expert_bytes - 150_000}
    assert "more device memory" in refusal_of(plan)
    assert plan.remedies[0] == f"--device-memory {-(-least // MB)}MB --host-memory 0MB"


def test_a_machine_that_is_not_here_has_the_host_memory_that_was_set(model: Path) -> None:
    plan = plan_for(cuda(None, 1000), model, device_memory="20MB", host_memory="190kB")
    assert plan.fits
    assert plan.num_host_experts + NUM_TRANSFERS == 5
    # What was not set is this machine's.
    assert plan_for(cuda(None, 1000), model, device_memory="20MB").budget_bytes["host"] == 800


def test_a_device_that_is_not_here_needs_a_size(model: Path) -> None:
    machine = Machine.with_absent_cuda()
    assert machine.is_absent
    assert not machine.is_cpu
    for setting in (None, "auto"):
        with pytest.raises(ConfigError) as refusal:
            plan_for(machine, model, device_memory=setting)
        assert str(refusal.value) == (
            "Planning for a CUDA device (there is none here) needs its size: pass --device-memory, such as 24GB."
        )
    assert plan_for(machine, model, device_memory="20MB").budget_bytes["device"] == 20 * MB


# Refusals.


def refusal_of(plan: ModelPlan) -> str:
    with pytest.raises(InsufficientMemoryError) as refusal:
        require_fit(plan)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_what_fits_is_not_refused(model: Path) -> None:
    require_fit(plan_for(cpu(GB), model))


def test_a_refusal_names_parts_and_remedies(model: Path) -> None:
    settings = {"device_memory": "500kB", "max_model_len": 256}
    plan = plan_for(cuda(GB, GB), model, model="a/model", **settings)
    parts = ", ".join(f"{row.part} {-(-row.num_bytes // MB)} MB" for row in rows_of(plan, "device").values())
    assert refusal_of(plan) == (
        f"a/model needs {-(-plan.shortages['device'] // MB)} MB more device memory than there is for it, 1 MB "
        f"({parts}); pass {plan.remedies[0]}."
    )
    assert "dense weights 1 MB, draft experts 1 MB, KV cache 1 MB, workspace " in parts


def test_a_refusal_joins_remedies(model: Path) -> None:
    least = least_bytes(model, cpu(GB))
    plan = plan_for(cpu(GB), model, device_memory=least - 1)
    assert len(plan.remedies) > 1
    assert refusal_of(plan).endswith(f"; pass {' or '.join(plan.remedies)}.")


def test_a_refusal_for_the_host_names_its_part(model: Path) -> None:
    plan = plan_for(cuda(GB, 150_000), model, device_memory="20MB", host_memory="190kB")
    assert refusal_of(plan).endswith(
        "needs 1 MB more host memory than there is for it, 1 MB (full-precision experts 1 MB, staging buffers 1 MB); "
        "pass --host-memory 0MB."
    )


def test_a_refusal_without_a_way_out_says_so(model: Path) -> None:
    assert refusal_of(plan_for(cpu(1000), model)).endswith("; no setting makes it fit here.")


def test_a_refused_plan_fits_with_its_remedy(model: Path) -> None:
    settings: dict[str, Any] = {"device_memory": 0}
    refused = plan_for(cpu(GB), model, **settings)
    refusal_of(refused)
    require_fit(plan_for(cpu(GB), model, **settings | flags(refused.remedies[0])))


# Decisions.


@pytest.mark.parametrize(
    ("machine", "settings", "sentence"),
    [
        (cpu(GB), {}, "in float32, which is faster and more exact on a CPU than 16 bits."),
        (cuda(GB, GB), {}, "in bfloat16, the checkpoint's type."),
        (cuda(GB, GB), {"dtype": "float16"}, "in float16, as set."),
        (cpu(GB), {"dtype": "bfloat16"}, "in bfloat16, as set."),
    ],
)
def test_what_is_computed_in(model: Path, machine: Machine, settings: dict[str, Any], sentence: str) -> None:
    plan = plan_for(machine, model, **settings)
    assert plan.device == machine.description
    assert plan.decisions[0] == f"Computing on {machine.description} {sentence}"


def test_a_conversion_of_the_kv_cache_is_said(model: Path) -> None:
    plan = plan_for(cpu(GB), model, kv_dtype="bfloat16")
    assert "The KV cache is kept in bfloat16, as set, and converted on use." in plan.decisions
    for settings in ({}, {"kv_dtype": "float32"}, {"kv_dtype": "bfloat16", "dtype": "bfloat16"}):
        assert not any("KV cache" in sentence for sentence in plan_for(cpu(GB), model, **settings).decisions)


def test_the_draft_is_said(model: Path) -> None:
    share = describe(model).sizes.quantized_share()
    assert 0.8 < share < 0.9
    drafting = f"Drafting 4 tokens per cycle with qint4-g32 experts: {share:.1%} of all parameters quantized"
    assert plan_for(cpu(GB), model).decisions[-1] == f"{drafting}."
    assert plan_for(cuda(GB, GB), model).decisions[-1] == (
        f"{drafting}; no fast kernel here, so weights are dequantized on each use."
    )
    for settings in ({"draft": "none"}, {"draft_length": 0}):
        assert plan_for(cpu(GB), model, **settings).decisions[-1] == "No draft: every token is decoded by itself."


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_the_quantized_share_is_of_all_parameters(tmp_path: Path, name: str) -> None:
    described = describe(save_config(FAMILIES[name](), tmp_path))
    matrices = [
        weight.numel()
        for layer in described.skeleton.experts
        for part, weight in layer.parameters.items()
        if not part.endswith("_bias")
    ]
    experts = [weight.numel() for layer in described.skeleton.experts for weight in layer.parameters.values()]
    total = sum(experts) + described.skeleton.num_dense_parameters
    assert described.sizes.quantized_share() == pytest.approx(sum(matrices) / total)


# Prefill steps.


def test_where_the_usual_steps_do_not_fit_automatic_ones_are_shorter(model: Path) -> None:
    least = least_bytes(model, cuda(GB, GB))
    assert not plan_for(cuda(GB, GB), model, device_memory=least - 1).fits
    ((plan, choices),) = found_for(cuda(GB, GB), model, device_memory=least - 1, prefill_chunk_tokens="auto")
    assert plan.fits
    assert choices.prefill_chunk_tokens < 512
    assert decision(plan, "Prompts") == f"Prompts are computed in steps of up to {choices.prefill_chunk_tokens} tokens."


def test_steps_are_as_set(model: Path) -> None:
    ((plan, choices),) = found_for(cuda(GB, GB), model, prefill_chunk_tokens=100)
    assert choices.prefill_chunk_tokens == 100
    assert not any(sentence.startswith("Prompts") for sentence in plan.decisions)


# Drafters.


def found_for(machine: Machine, path: Path, **settings: object) -> list[Alternative]:
    config = settings_of(path, **settings)
    return alternatives(config, describe_model(config, path, machine.device), machine)


@pytest.mark.parametrize("drafter", ["quantized", "ngram", "none"])
def test_a_drafter_that_is_set_is_the_only_way(model: Path, drafter: str) -> None:
    ((plan, choices),) = found_for(cpu(GB), model, draft=drafter)
    assert plan.drafter == choices.drafter == drafter
    assert (choices.draft is not None) == (drafter == "quantized")


def test_an_automatic_drafter_is_one_of_two_that_share_one_budget(model: Path) -> None:
    budget = least_bytes(model, cuda(GB, GB))
    quantized, ngram = found_for(cuda(GB, GB), model, draft="auto", device_memory=budget)
    assert (quantized.plan.drafter, ngram.plan.drafter) == ("quantized", "ngram")
    assert quantized.plan.budget_bytes == ngram.plan.budget_bytes
    assert quantized.plan.num_slots == 1
    assert ngram.plan.num_slots > 1
    assert "draft experts" not in {part for part, row in rows_of(ngram.plan, "device").items() if row.num_bytes}


def test_automatic_weights_add_a_finer_draft_to_the_ways(model: Path) -> None:
    found = found_for(cuda(GB, GB), model, draft="auto", draft_weights="auto")
    assert [str(choices.draft) for _, choices in found] == ["qint4-g32", "qint8", "None"]


def test_without_tokens_to_draft_there_is_nothing_to_choose(model: Path) -> None:
    ((plan, choices),) = found_for(cpu(GB), model, draft="auto", draft_length=0)
    assert (plan.drafter, choices.draft_length) == ("none", 0)


def test_where_a_quantized_draft_does_not_fit_an_automatic_one_does_without(model: Path) -> None:
    least = least_bytes(model, cuda(GB, GB))
    (only,) = found_for(cuda(GB, GB), model, draft="auto", device_memory=least - 1)
    assert only.plan.fits
    assert only.plan.drafter == "ngram"
    assert not plan_for(cuda(GB, GB), model, draft="quantized", device_memory=least - 1).fits
    (refused,) = found_for(cuda(GB, GB), model, draft="auto", device_memory=1000)
    assert not refused.plan.fits


@pytest.mark.parametrize("best", ["quantized", "ngram"])
def test_the_drafter_that_is_predicted_to_be_fastest_is_chosen_and_the_reason_said(model: Path, best: str) -> None:
    found = found_for(cuda(GB, GB), model, draft="auto")
    plan, choices = choose(found, lambda alternative: 0.02 if alternative.plan.drafter == best else 0.05)
    assert plan.drafter == choices.drafter == best
    said = plan.decisions[-1]
    assert said.startswith("Predicted per output token: ")
    assert "20 ms" in said
    assert "50 ms" in said


def test_without_a_prediction_the_one_that_moves_less_is_chosen(model: Path) -> None:
    # Where everything is resident neither moves anything, and n-grams take less memory.
    assert choose(found_for(cuda(GB, GB), model, draft="auto")).plan.drafter == "ngram"
    for budget in (least_bytes(model, cuda(GB, GB)) + slots * 200_000 for slots in range(4)):
        found = found_for(cuda(GB, GB), model, draft="auto", device_memory=budget)
        moved = [plan.forecasts[0].host_bytes_per_token + plan.forecasts[0].disk_bytes_per_token for plan, _ in found]
        chosen = choose(found).plan.forecasts[0]
        assert chosen.host_bytes_per_token + chosen.disk_bytes_per_token == min(moved)


def test_one_way_needs_no_prediction(model: Path) -> None:
    found = found_for(cpu(GB), model, draft="quantized")

    def predict(alternative: Alternative) -> float:
        raise AssertionError("there is nothing to choose")

    assert choose(found, predict) == found[0]


def test_slots_can_be_limited(model: Path) -> None:
    assert plan_for(cpu(GB), model).num_slots == NUM_EXPERTS
    assert plan_for(cpu(GB), model, max_slots=3).num_slots == 3
    assert plan_for(cpu(GB), model, max_slots=1000).num_slots == NUM_EXPERTS


def test_the_ngram_drafter_is_said(model: Path) -> None:
    assert plan_for(cpu(GB), model, draft="ngram").decisions[-1] == (
        "Drafting 4 tokens per cycle from what followed the last ones before."
    )
    assert "Drafting up to 16 tokens per cycle" in plan_for(cpu(GB), model, draft_length="auto").decisions[-1]


# Forecasts.


def test_with_a_draft_and_without_its_memory_goes_to_slots(model: Path) -> None:
    machine = cuda(GB, GB)
    budget = least_bytes(model, machine)
    drafted, plain = plan_for(machine, model, device_memory=budget, draft_length=3).forecasts
    expert_bytes = plan_for(machine, model, device_memory=budget).expert_bytes
    assert (drafted.draft_length, plain.draft_length) == (3, 0)
    assert drafted.num_slots == 1
    undrafted = plan_for(machine, model, device_memory=budget, draft="none")
    assert plain.num_slots == undrafted.num_slots > 1
    assert undrafted.forecasts == [plain]
    # Two experts in each of three layers, but for those that are resident; all from host memory.
    missed = 1 - plain.num_slots / NUM_EXPERTS
    assert plain.host_bytes_per_token == pytest.approx(3 * 2 * missed * expert_bytes)
    assert plain.disk_bytes_per_token == 0


def test_nothing_is_measured_by_planning(model: Path) -> None:
    assert plan_for(cpu(GB), model).bandwidths == {}


def test_a_machine_is_what_the_device_says() -> None:
    machine = Machine.of(CpuDevice())
    assert machine.device == torch.device("cpu")
    assert machine.is_cpu
    assert not machine.is_absent
    assert machine.description.startswith("CPU")
    assert (machine.free_device_bytes or 0) > 0
    assert machine.free_host_bytes > 0
