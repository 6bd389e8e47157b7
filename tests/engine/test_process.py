"""The real engine process, through the client that the server uses."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from pydantic import ByteSize

from engine.client import EngineClient
from engine.config import BenchConfig, EngineConfig
from engine.errors import ContextLengthError, EngineDiedError, InsufficientMemoryError, RequestError
from engine.protocol import Finished, Loading, SamplingParams, Submit, Tokens, Traced
from tests.engine.harness import ignore_progress
from tests.engine.tiny import random_prompt, reference_tokens

GRACE_SECONDS = 20.0
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def config(mixtral: Path, model_cache: Path) -> EngineConfig:
    return EngineConfig(model=str(mixtral), cache=model_cache, device="cpu", draft="quantized", draft_group_size=32)


@asynccontextmanager
async def engine(config: EngineConfig) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(config, "serve")
    try:
        yield client
    finally:
        await client.close(GRACE_SECONDS)


def run(test: Callable[[EngineClient], Awaitable[None]], config: EngineConfig) -> None:
    """Run the test's coroutine with a ready engine."""

    async def main() -> None:
        async with engine(config) as client:
            await client.wait_ready(ignore_progress)
            await test(client)

    asyncio.run(main())


async def tokens_of(client: EngineClient, request_id: str, prompt: list[int], max_tokens: int) -> list[int]:
    token_ids: list[int] = []
    submit = Submit(request_id, prompt, max_tokens, GREEDY, ignore_eos=True)
    async with aclosing(client.generate(submit)) as events:
        async for event in events:
            if isinstance(event, Tokens):
                token_ids += event.token_ids
    return token_ids


def test_requests_aborts_and_refusals(config: EngineConfig, mixtral: Path) -> None:
    """One process for what needs no fresh one: two clients at once, a client that leaves, a prompt too long."""
    prompts = [random_prompt(seed, 7) for seed in range(2)]
    expected = [reference_tokens(mixtral, prompt, 12, ignore_eos=True) for prompt in prompts]

    async def test(client: EngineClient) -> None:
        both = await asyncio.gather(*(tokens_of(client, str(i), prompt, 12) for i, prompt in enumerate(prompts)))
        assert both == expected

        async with aclosing(client.generate(Submit("left", prompts[0], 200, GREEDY, ignore_eos=True))) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    break
        assert await tokens_of(client, "after", prompts[1], 12) == expected[1]

        with pytest.raises(ContextLengthError, match="maximum context length is 256 tokens"):
            await tokens_of(client, "long", random_prompt(0, 300), 1)
        with pytest.raises(RequestError, match="token id 5000"):
            await tokens_of(client, "wrong", [5000], 1)
        await client.ping(GRACE_SECONDS)

    run(test, config.model_copy(update={"device_memory": ByteSize(100_000_000)}))


def test_shutdown_ends_running_requests(config: EngineConfig) -> None:
    async def test(client: EngineClient) -> None:
        submit = Submit("running", random_prompt(0, 7), 200, GREEDY, ignore_eos=True)
        async with aclosing(client.generate(submit)) as events:
            await anext(events)
            closing = asyncio.create_task(client.close(GRACE_SECONDS))
            last = [event async for event in events][-1]
            assert last == Finished("running", "abort")
            await closing

    run(test, config)


def test_an_engine_that_is_killed_fails_its_requests(config: EngineConfig) -> None:
    async def test(client: EngineClient) -> None:
        submit = Submit("running", random_prompt(0, 7), 200, GREEDY, ignore_eos=True)
        async with aclosing(client.generate(submit)) as events:
            await anext(events)
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineDiedError, match=r"SIGKILL|signal 9"):
                async for _ in events:
                    pass
        await client.died.wait()

    run(test, config)


def test_a_start_that_fails_says_why(config: EngineConfig) -> None:
    async def main() -> None:
        async with engine(config.model_copy(update={"device_memory": 1000})) as client:
            with pytest.raises(
                InsufficientMemoryError,
                match=r"needs \d+ MB more device memory than there is for it, 1 MB .* pass --device-memory \d+MB",
            ):
                await client.wait_ready(ignore_progress)

    asyncio.run(main())


def test_a_server_that_leaves_during_start_up_ends_the_engine(config: EngineConfig, tmp_path: Path) -> None:
    async def main() -> None:
        progress: asyncio.Event = asyncio.Event()
        fresh = config.model_copy(update={"cache": tmp_path})

        def on_progress(loading: Loading) -> None:
            progress.set()

        client = await EngineClient.start(fresh, "serve")
        waiting = asyncio.create_task(client.wait_ready(on_progress))
        await progress.wait()
        await client.close(GRACE_SECONDS)
        with pytest.raises(EngineDiedError):
            await waiting
        with pytest.raises(ProcessLookupError):
            os.kill(client.pid, 0)

    asyncio.run(main())


def test_the_task_bench_takes_what_only_a_comparison_needs(config: EngineConfig, mixtral: Path) -> None:
    settings = {"draft": "ngram", "max_slots": 5, "prefetch": False, "link_bandwidth": 10**9, "trace": True}
    bench = BenchConfig.model_validate(config.model_dump() | settings)
    prompt = random_prompt(0, 7)

    async def main() -> None:
        client = await EngineClient.start(bench, "bench")
        try:
            assert await client.wait_located(ignore_progress) == str(mixtral)
            capabilities = await client.wait_ready(ignore_progress)
            assert (capabilities.drafter, capabilities.plan.num_slots) == ("ngram", 5)
            assert all(rate <= 10**9 for rate in capabilities.plan.bandwidths.values())
            async with aclosing(client.generate(Submit("a", prompt, 12, GREEDY, ignore_eos=True))) as events:
                got = [event async for event in events]
        finally:
            await client.close(GRACE_SECONDS)
        assert got[-1] == Finished("a", "length")
        assert isinstance(got[-2], Traced)
        assert {event.track for event in got[-2].events} >= {"cycle", "phase", "layer", "transfer"}
        tokens = [event for event in got if isinstance(event, Tokens)]
        assert [token for event in tokens for token in event.token_ids] == reference_tokens(
            mixtral, prompt, 12, ignore_eos=True
        )
        assert sum(event.cycle.prefetch_bytes for event in tokens) == 0

    asyncio.run(main())


def test_a_task_is_not_told_what_it_does_not_take(config: EngineConfig) -> None:
    bench = BenchConfig.model_validate(config.model_dump() | {"max_slots": 5})

    async def main() -> None:
        client = await EngineClient.start(bench, "serve")
        try:
            with pytest.raises(EngineDiedError):
                await client.wait_ready(ignore_progress)
        finally:
            await client.close(GRACE_SECONDS)

    asyncio.run(main())
