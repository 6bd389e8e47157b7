"""accelerate's offload: its tokens are transformers' own, it keeps to its budget, and nothing of it stays behind."""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.client import EngineClient
from engine.config import BenchConfig, DeviceName
from engine.device import CpuDevice
from engine.errors import (
    ConfigError,
    ContextLengthError,
    EngineDiedError,
    InsufficientMemoryError,
    SpecterError,
    UnsupportedModelError,
)
from engine.peers import build
from engine.peers.build import Peer, open_peer
from engine.peers.pacing import PacedWeights
from engine.phases import PhaseClock
from engine.protocol import Finished, Prefill, SamplingParams, Submit, Task, Tokens, ToServer
from engine.sampling import target_distribution
from tests.engine.harness import GREEDY, ignore_progress
from tests.engine.tiny import mixtral_config, random_prompt, reference_model, reference_tokens, save_checkpoint

COMMAND = (sys.executable, "-m", "engine.peers.accelerate")
GRACE_SECONDS = 20.0
PROMPT = random_prompt(0, 7)

LAYERS_THAT_STAY = {"0.7MB": 0, "1.3MB": 1, "1.72MB": 2, "100MB": 3}
"""Of the three of the tiny Mixtral, 0.5 MB each, by the budget, which holds 0.2 MB of KV cache and one block too."""


def config_of(checkpoint: Path, cache: Path, **settings: object) -> BenchConfig:
    defaults = {"device": "cpu", "device_memory": "1.3MB"}
    return BenchConfig.model_validate({"model": str(checkpoint), "cache": cache, **defaults, **settings})


@contextmanager
def opened(checkpoint: Path, cache: Path, **settings: object) -> Iterator[Peer]:
    with open_peer(config_of(checkpoint, cache, **settings), ignore_progress, PhaseClock()) as peer:
        yield peer


def serve(peer: Peer, submit: Submit) -> list[ToServer]:
    sent: list[ToServer] = []
    peer.core.send = sent.append
    peer.core.submit(submit)
    while peer.core.has_work:
        peer.core.step()
    return sent


def token_ids(messages: list[ToServer]) -> list[int]:
    return [token_id for message in messages if isinstance(message, Tokens) for token_id in message.token_ids]


def count_reads(model: nn.Module) -> list[int]:
    """Bytes of each weight that a hook loads from now on."""
    read: list[int] = []

    class CountedWeights(PacedWeights):
        def __getitem__(self, name: str) -> torch.Tensor:
            read.append(self._weights[name].nbytes)
            return self._weights[name]

    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        if hook is not None and hook.offload:
            hook.weights_map = CountedWeights(hook.weights_map, 1.0)
    return read


def entries(directory: Path) -> list[Path]:
    return list(directory.iterdir())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("device_memory", LAYERS_THAT_STAY)
def test_greedy_output_is_that_of_generate(mixtral: Path, cache: Path, device_memory: str) -> None:
    with opened(mixtral, cache, device_memory=device_memory) as peer:
        plan = peer.capabilities.plan
        num_resident = sum(
            not weight.is_meta
            for name, weight in peer.core._model.named_parameters()
            if name.endswith("experts.down_proj")
        )
        assert num_resident == LAYERS_THAT_STAY[device_memory]
        assert plan.tier_bytes("device") <= plan.budget_bytes["device"]
        assert any(f"{num_resident} of 3 layers" in decision for decision in plan.decisions)

        sent = serve(peer, Submit("request", PROMPT, 12, GREEDY, ignore_eos=True))
        assert token_ids(sent) == reference_tokens(mixtral, PROMPT, 12, ignore_eos=True)
        # A second request does not see the first one's keys and values.
        again = serve(peer, Submit("again", random_prompt(1, 5), 12, GREEDY, ignore_eos=True))
        assert token_ids(again) == reference_tokens(mixtral, random_prompt(1, 5), 12, ignore_eos=True)
    assert entries(cache) == []


@pytest.mark.gpu
def test_all_three_tiers_beside_a_gpu(mixtral: Path, cache: Path, device: DeviceName) -> None:
    if device == "cpu":
        pytest.skip("has two tiers")
    settings = {"device": "cuda", "dtype": "float32", "host_memory": "1.1MB"}
    with opened(mixtral, cache, **settings) as peer:
        plan = peer.capabilities.plan
        assert all(row.num_bytes > 0 for row in plan.memory)
        assert {row.tier for row in plan.memory} == {"device", "host", "disk"}
        assert plan.num_host_experts == 6
        sent = serve(peer, Submit("request", PROMPT, 12, GREEDY, ignore_eos=True))
    assert token_ids(sent) == reference_tokens(mixtral, PROMPT, 12, ignore_eos=True, device="cuda")


def test_a_request_is_its_prefill_then_single_tokens_then_its_end(mixtral: Path, cache: Path) -> None:
    with opened(mixtral, cache) as peer:
        prefill, *tokens, end = serve(peer, Submit("request", PROMPT, 3, GREEDY, ignore_eos=True))
        moved = peer.capabilities.plan.forecasts[0].disk_bytes_per_token
    assert isinstance(prefill, Prefill)
    assert (prefill.done, prefill.total) == (7, 7)
    assert [len(message.token_ids) for message in tokens if isinstance(message, Tokens)] == [1, 1, 1]
    assert end == Finished("request", "length")
    # The first token comes out of the prompt's pass.
    assert [message.cycle.demand_bytes for message in tokens if isinstance(message, Tokens)] == [0, moved, moved]
    assert prefill.cycle.demand_bytes == moved


def test_an_end_of_sequence_token_ends_a_request(mixtral: Path, cache: Path) -> None:
    with opened(mixtral, cache) as peer:
        prompt = next(
            prompt
            for prompt in (random_prompt(seed, 5) for seed in range(50))
            if len(reference_tokens(mixtral, prompt, 12)) < 12
        )
        sent = serve(peer, Submit("request", prompt, 12, GREEDY))
    assert token_ids(sent) == reference_tokens(mixtral, prompt, 12)
    assert sent[-1] == Finished("request", "stop")


def test_sampled_tokens_follow_the_target_distribution(mixtral: Path, cache: Path) -> None:
    sampling = SamplingParams(temperature=0.7, top_k=4)
    with torch.no_grad():
        logits = reference_model(mixtral)(torch.tensor([PROMPT])).logits[0, -1]
    expected = target_distribution(logits, sampling)
    num_draws = 300
    counts = torch.zeros_like(expected)
    with opened(mixtral, cache, device_memory="100MB") as peer:
        for seed in range(num_draws):
            params = SamplingParams(temperature=0.7, top_k=4, seed=seed)
            (token_id,) = token_ids(serve(peer, Submit("request", PROMPT, 1, params, ignore_eos=True)))
            counts[token_id] += 1
    assert (counts / num_draws - expected).abs().sum() < 0.2


def test_an_abort_ends_a_request_and_the_next_is_right(mixtral: Path, cache: Path) -> None:
    sent: list[ToServer] = []
    with opened(mixtral, cache) as peer:
        peer.core.send = sent.append
        peer.core.submit(Submit("running", PROMPT, 12, GREEDY, ignore_eos=True))
        peer.core.step()
        peer.core.abort("running")
        peer.core.abort("unknown")
        assert sent[-1] == Finished("running", "abort")
        assert not peer.core.has_work
        next_ones = serve(peer, Submit("next", PROMPT, 12, GREEDY, ignore_eos=True))
    assert token_ids(next_ones) == reference_tokens(mixtral, PROMPT, 12, ignore_eos=True)


@pytest.mark.parametrize("is_tied", [False, True])
def test_16_bits_are_moved_where_32_are_computed_in(tmp_path: Path, cache: Path, is_tied: bool) -> None:
    checkpoint = save_checkpoint(mixtral_config(is_tied=is_tied), tmp_path / "checkpoint", dtype=torch.bfloat16)
    with opened(checkpoint, cache) as peer:
        plan, model = peer.capabilities.plan, peer.core._model
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        resident, on_disk = (
            sum(row.num_bytes for row in plan.memory if (row.part, row.tier) == part)
            for part in (("resident weights", "device"), ("offloaded weights", "disk"))
        )
        assert resident // 4 + on_disk // 2 == sum(weight.numel() for weight in model.parameters())
        assert 0 < resident < 4 * on_disk

        read = count_reads(model)
        sent = serve(peer, Submit("request", PROMPT, 12, GREEDY, ignore_eos=True))
        assert sum(read) == 12 * plan.forecasts[0].disk_bytes_per_token
    assert token_ids(sent) == reference_tokens(checkpoint, PROMPT, 12, ignore_eos=True)


def test_tied_weights_on_disk_are_read_once_per_use(tmp_path: Path, cache: Path) -> None:
    checkpoint = save_checkpoint(mixtral_config(is_tied=True), tmp_path / "checkpoint")
    with opened(checkpoint, cache, device_memory="0.7MB") as peer:
        read = count_reads(peer.core._model)
        sent = serve(peer, Submit("request", PROMPT, 12, GREEDY, ignore_eos=True))
        assert sum(read) == 12 * peer.capabilities.plan.forecasts[0].disk_bytes_per_token
    assert token_ids(sent) == reference_tokens(checkpoint, PROMPT, 12, ignore_eos=True)


def test_the_link_bandwidth_is_kept(mixtral: Path, cache: Path) -> None:
    with opened(mixtral, cache, device_memory="0.7MB", link_bandwidth=15_000_000) as peer:
        moved = peer.capabilities.plan.forecasts[0].disk_bytes_per_token
        started = time.perf_counter()
        sent = serve(peer, Submit("request", PROMPT, 2, GREEDY, ignore_eos=True))
        assert time.perf_counter() - started >= 2 * moved / 15_000_000
    assert token_ids(sent) == reference_tokens(mixtral, PROMPT, 2, ignore_eos=True)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"device_memory": "0.6MB"}, InsufficientMemoryError, "pass --device-memory 1MB, or a smaller --max-model-len"),
        ({"device_memory": "0.3MB", "max_model_len": 16}, InsufficientMemoryError, "16 tokens and 1 MB to load"),
        ({"max_model_len": 257}, ConfigError, "model's maximum is 256"),
        ({"kv_dtype": "bfloat16"}, ConfigError, "computed in, float32; use auto"),
        ({"model": "demo", "device_memory": None}, ConfigError, "pass --device-memory"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    mixtral: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    error: type[SpecterError],
    says: str,
) -> None:
    monkeypatch.setattr(build, "locate_model", lambda config, send: mixtral)
    with pytest.raises(error, match=says), opened(mixtral, cache, **settings):
        pass
    assert not cache.exists()


@pytest.mark.parametrize("where", ["on the device", "in .*cache"])
def test_what_the_machine_has_no_room_for_is_refused(
    mixtral: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "on the device":
        monkeypatch.setattr(CpuDevice, "free_bytes", lambda device: 1000)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InsufficientMemoryError, match=rf"would take [12] MB {where}, and 0 MB"), opened(mixtral, cache):
        pass
    assert entries(cache) == []


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path, cache: Path) -> None:
    checkpoint = save_checkpoint(mixtral_config(), tmp_path / "checkpoint")
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.2.self_attn.q_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with (
        pytest.raises(UnsupportedModelError, match=r"lacks: model\.layers\.2\.self_attn\.q_proj"),
        opened(checkpoint, cache),
    ):
        pass
    assert entries(cache) == []


def test_the_process_serves_like_the_engine(mixtral: Path, cache: Path) -> None:
    async def main() -> None:
        client = await EngineClient.start(config_of(mixtral, cache), "bench", COMMAND)
        try:
            assert await client.wait_located(ignore_progress) == str(mixtral)
            capabilities = await client.wait_ready(ignore_progress)
            assert (capabilities.drafter, capabilities.draft_length) == ("none", 0)
            assert len(entries(cache)) == 1
            submit = Submit("request", PROMPT, 12, GREEDY, ignore_eos=True)
            async with aclosing(client.generate(submit)) as events:
                sent: list[ToServer] = [event async for event in events]
            assert token_ids(sent) == reference_tokens(mixtral, PROMPT, 12, ignore_eos=True)
            assert sent[-1] == Finished("request", "length")
            with pytest.raises(ContextLengthError, match="maximum context length is 256 tokens"):
                await anext(client.generate(Submit("long", random_prompt(0, 300), 1, GREEDY)))
            await client.ping(GRACE_SECONDS)
        finally:
            await client.close(GRACE_SECONDS)
        assert entries(cache) == []

    asyncio.run(main())


def test_a_terminated_process_leaves_nothing(mixtral: Path, cache: Path) -> None:
    async def main() -> None:
        client = await EngineClient.start(config_of(mixtral, cache), "bench", COMMAND)
        try:
            await client.wait_ready(ignore_progress)
            assert len(entries(cache)) == 1
            async with aclosing(client.generate(Submit("running", PROMPT, 200, GREEDY, ignore_eos=True))) as events:
                await anext(events)
                os.kill(client.pid, signal.SIGTERM)
                with pytest.raises(EngineDiedError, match="exit status 143"):
                    async for _ in events:
                        pass
        finally:
            await client.close(GRACE_SECONDS)
        assert entries(cache) == []

    asyncio.run(main())


@pytest.mark.parametrize("task", ["serve", "prepare"])
def test_other_tasks_are_refused(mixtral: Path, cache: Path, task: Task) -> None:
    async def main() -> None:
        client = await EngineClient.start(config_of(mixtral, cache), task, COMMAND)
        try:
            with pytest.raises(ConfigError, match=f"no task '{task}'"):
                await client.wait_ready(ignore_progress)
        finally:
            await client.close(GRACE_SECONDS)

    asyncio.run(main())
