"""Plans for models as they were published, of which there is nothing here but `config.json`.

The configurations hold the published dimensions; the factors of Phi's longrope are made up, as they take no memory.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine.config import BenchConfig, DrafterName
from engine.description import ModelDescription, describe_model
from engine.experts.store import NUM_TRANSFERS
from engine.planning import Machine
from engine.protocol import ModelPlan
from tests.engine.plans import GB, MB, flags, replan, rows_of

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
MAX_MODEL_LEN = 4096
HOST_BYTES = 64 * GB
CPU = Machine(torch.device("cpu"), "CPU (16 threads)", 128 * GB, 128 * GB)
MACHINES = ["a GPU that is not here", "a CPU"]


class Published(NamedTuple):
    name: str
    billion_parameters: float
    expert_bytes: int
    """In bfloat16, by hand: its matrices and biases, in whole blocks of 4096 bytes."""
    num_experts: int
    """Layers times experts."""
    kv_elements: int
    """Per token, by hand: layers x key and value x heads x size."""
    quantized_bits: float
    """Of the draft per weight of an expert: qint4 with a scale and a shift, 16 bits each, for every 64 of them."""
    gpu_slots: int
    """Of 24 GB, at 4096 tokens."""
    cpu_slots: int
    draft: DrafterName = "quantized"
    """"none" where 24 GB have no room for one."""


QINT4 = 4 + 2 * 16 / 64
MODELS = [
    Published(
        "Mixtral-8x7B",
        46.7,
        expert_bytes=2 * 3 * 4096 * 14336,
        num_experts=32 * 8,
        kv_elements=32 * 2 * 8 * 128,
        quantized_bits=QINT4,
        gpu_slots=57,
        cpu_slots=44,
        draft="none",
    ),
    Published(
        "Qwen3-30B-A3B",
        30.5,
        expert_bytes=2 * 3 * 2048 * 768,
        num_experts=48 * 128,
        kv_elements=48 * 2 * 4 * 128,
        quantized_bits=QINT4,
        gpu_slots=434,
        cpu_slots=53,
    ),
    Published(
        "Phi-3.5-MoE",
        41.9,
        expert_bytes=2 * 3 * 4096 * 6400,
        num_experts=32 * 16,
        kv_elements=32 * 2 * 8 * 128,
        quantized_bits=QINT4,
        gpu_slots=128,
        cpu_slots=101,
        draft="none",
    ),
    Published(
        "DeepSeek-V2-Lite",
        15.7,
        expert_bytes=2 * 3 * 2048 * 1408,
        num_experts=(27 - 1) * 64,
        kv_elements=27 * (512 + 64),  # the latent, and the rotary key of all heads
        quantized_bits=QINT4,
        gpu_slots=754,
        cpu_slots=547,
    ),
    Published(
        "gpt-oss-20b",
        20.9,
        expert_bytes=-(-2 * (2880 * 5760 + 5760 + 2880 * 2880 + 2880) // 4096) * 4096,
        num_experts=24 * 32,
        kv_elements=24 * 2 * 8 * 64,
        quantized_bits=QINT4 + 16 * (5760 + 2880) / (3 * 2880 * 2880),  # biases stay as they are
        gpu_slots=173,
        cpu_slots=78,
    ),
]
every_model = pytest.mark.parametrize("published", MODELS, ids=[published.name for published in MODELS])
on_each_machine = pytest.mark.parametrize("machine", MACHINES)


def machine_of(name: str) -> Machine:
    return CPU if name == "a CPU" else Machine.with_absent_cuda()


def config_of(published: Published, machine: str, **settings: object) -> BenchConfig:
    """24 GB for the device; 64 GB for the host, where that is another memory."""
    memory = {"device_memory": "24GB", "host_memory": "auto" if machine == "a CPU" else "64GB"}
    chosen = {
        "model": published.name,
        "max_model_len": MAX_MODEL_LEN,
        "draft": published.draft,
        "draft_length": 4,
        "prefill_chunk_tokens": 512,
        **memory,
    }
    return BenchConfig.model_validate(chosen | settings)


@cache
def describe(published: Published, machine: str) -> ModelDescription:
    return describe_model(config_of(published, machine), CONFIGS / published.name, machine_of(machine).device)


def plan(published: Published, machine: str, **settings: object) -> ModelPlan:
    return replan(config_of(published, machine, **settings), describe(published, machine), machine_of(machine))


@every_model
def test_parameters_are_as_published(published: Published) -> None:
    skeleton = describe(published, "a CPU").skeleton
    experts = sum(weight.numel() for layer in skeleton.experts for weight in layer.parameters.values())
    billions = (experts + skeleton.num_dense_parameters) / 1e9
    assert billions == pytest.approx(published.billion_parameters, rel=0.01)
    assert skeleton.dtype is torch.bfloat16


@on_each_machine
@every_model
def test_rows_add_up(published: Published, machine: str) -> None:
    planned = plan(published, machine)
    model = describe(published, machine)
    needs = model.sizes.needs(model.choices)
    assert planned.fits
    assert planned.remedies == []
    # Device: the needs and the slots, within the budget, which has no room for one slot more.
    device = {part: row.num_bytes for part, row in rows_of(planned, "device").items()}
    assert device == {
        "dense weights": needs.dense,
        "draft experts": needs.draft,
        "KV cache": needs.kv_cache,
        "workspace": needs.workspace,
        "expert slots": planned.num_slots * planned.expert_bytes,
    }
    assert planned.tier_bytes("device") == needs.total + planned.num_slots * planned.expert_bytes
    assert planned.budget_bytes["device"] == 24 * GB
    assert 24 * GB - planned.expert_bytes < planned.tier_bytes("device") <= 24 * GB
    # Host and disk: every expert is read from one of them.
    assert planned.num_experts == published.num_experts
    room = 0 if machine == "a CPU" else HOST_BYTES // planned.expert_bytes
    staging = NUM_TRANSFERS if 0 < room < published.num_experts else 0
    assert planned.num_host_experts == min(published.num_experts, room - staging)
    assert planned.tier_bytes("host") == (planned.num_host_experts + staging) * planned.expert_bytes
    from_disk = published.num_experts - planned.num_host_experts
    note = rows_of(planned, "disk")["packed model"].note
    assert note.startswith(f"{from_disk} of {published.num_experts}" if from_disk else "read at the start only")


@on_each_machine
@every_model
def test_sizes_are_those_worked_out_by_hand(published: Published, machine: str) -> None:
    planned = plan(published, machine)
    itemsize = 4 if machine == "a CPU" else 2
    assert planned.expert_bytes == published.expert_bytes
    assert planned.kv_bytes_per_token == published.kv_elements * itemsize
    assert planned.num_slots == (published.cpu_slots if machine == "a CPU" else published.gpu_slots)
    experts = rows_of(planned, "disk")["packed model"].num_bytes - planned.num_experts * planned.expert_bytes
    model = describe(published, machine)
    quantized = sum(
        shape.numel() * layer.num_experts
        for layer in model.sizes.layout.layers
        for shape in layer.matrix_shapes.values()
    )
    draft_bytes = rows_of(planned, "device")["draft experts"].num_bytes
    assert draft_bytes == (round(quantized * published.quantized_bits / 8) if published.draft == "quantized" else 0)
    # What is packed besides the experts: dense weights, mostly in bfloat16, and the draft.
    assert experts - draft_bytes == pytest.approx(2 * model.skeleton.num_dense_parameters, rel=0.01)


def test_longrope_whose_scale_stays_is_served_at_any_length() -> None:
    """Phi-3.5-MoE's changes beyond 4096 tokens by name only: its two scales are equal."""
    (phi,) = (published for published in MODELS if published.name == "Phi-3.5-MoE")
    config = config_of(phi, "a CPU", max_model_len=None)
    model = describe_model(config, CONFIGS / phi.name, CPU.device)
    rope = model.hf_config.get_text_config().rope_parameters
    assert rope["rope_type"] == "longrope"
    assert rope["original_max_position_embeddings"] == 4096
    assert model.choices.max_model_len == 131072


def test_all_tokens_are_kept_but_those_that_left_a_window() -> None:
    by_name = {published.name: published for published in MODELS}
    for published in MODELS[:4]:
        cached = rows_of(plan(published, "a GPU that is not here"), "device")["KV cache"].num_bytes
        assert cached == 2 * published.kv_elements * MAX_MODEL_LEN
    gpt_oss = by_name["gpt-oss-20b"]
    cached = rows_of(plan(gpt_oss, "a GPU that is not here"), "device")["KV cache"].num_bytes
    # Every other layer sees 128 tokens: 127 besides the next, and a chunk of a prompt while it is computed.
    assert cached == 2 * gpt_oss.kv_elements * (MAX_MODEL_LEN + 127 + 512) // 2


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Phi-3.5-MoE"])
def test_a_draft_that_does_not_fit_can_be_left_out(name: str) -> None:
    (published,) = (published for published in MODELS if published.name == name)
    refused = plan(published, "a GPU that is not here", draft="quantized")
    assert refused.shortages.keys() == {"device"}
    assert refused.tier_bytes("device") - refused.shortages["device"] == 24 * GB
    larger, plain = refused.remedies
    assert larger == f"--device-memory {-(-refused.tier_bytes('device') // MB)}MB"
    assert plain == "--draft none"


@on_each_machine
@every_model
def test_a_context_that_would_not_fit_is_refused_with_a_shorter_one(published: Published, machine: str) -> None:
    """Room for a slot at 4096 tokens is too little for the model's longest context."""
    short = plan(published, machine)
    least = short.tier_bytes("device") - (short.num_slots - 1) * short.expert_bytes
    settings: dict[str, Any] = {"device_memory": least}
    refused = plan(published, machine, **settings, max_model_len=None)
    assert refused.max_model_len >= 32768
    assert refused.shortages.keys() == {"device"}
    assert refused.shortages["device"] == refused.tier_bytes("device") - least
    assert f"--max-model-len {MAX_MODEL_LEN}" in refused.remedies
    for remedy in refused.remedies:
        assert plan(published, machine, **settings | {"max_model_len": None} | flags(remedy)).fits, remedy
