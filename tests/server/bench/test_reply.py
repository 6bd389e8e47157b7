from collections.abc import AsyncGenerator, Iterable
from typing import cast

import pytest

from engine.client import EngineClient
from engine.errors import RequestFailedError
from engine.mailbox import GenerationEvent
from engine.protocol import CycleStats, Finished, Prefill, Submit, Tokens, Traced, TraceEvent
from server.bench.reply import Reply, ask

SUBMIT = Submit("r", [1, 2], 4)
EVENT = TraceEvent("verify", "phase", 1.0, 0.5, {})


class ScriptedClient:
    def __init__(self, messages: Iterable[GenerationEvent]) -> None:
        self._messages = messages

    async def generate(self, submit: Submit) -> AsyncGenerator[GenerationEvent, None]:
        for message in self._messages:
            yield message


async def asked(*messages: GenerationEvent, times: Iterable[float]) -> Reply:
    clock = iter(times)
    return await ask(cast(EngineClient, ScriptedClient(messages)), SUBMIT, lambda: next(clock))


@pytest.mark.anyio
async def test_times_are_those_of_arrival_and_the_prefill_is_apart() -> None:
    reply = await asked(
        Prefill("r", 1, 2, CycleStats(demand_bytes=10)),
        Prefill("r", 2, 2, CycleStats(demand_bytes=20)),
        Tokens("r", [5], CycleStats(demand_bytes=1)),
        Tokens("r", [6, 7, 8], CycleStats(num_draft_tokens=4, num_accepted_tokens=2)),
        Tokens("r", [9], CycleStats(num_draft_tokens=2)),
        Traced("r", [EVENT]),
        Finished("r", "length"),
        times=[10.0, 12.0, 13.0, 14.0],
    )
    assert (reply.ttft_seconds, reply.decode_seconds) == (2.0, 2.0)
    assert reply.tpot_seconds == 0.5
    assert reply.token_ids == [5, 6, 7, 8, 9]
    assert reply.prefill.demand_bytes == 31
    assert reply.decode == CycleStats(num_draft_tokens=6, num_accepted_tokens=2)
    assert [cycle.num_draft_tokens for cycle in reply.cycles] == [4, 2]
    assert reply.events == [EVENT]
    assert reply.has_counters


@pytest.mark.anyio
async def test_one_token_has_no_tpot_and_none_is_an_error() -> None:
    reply = await asked(Tokens("r", [5], CycleStats()), Finished("r", "length"), times=[0.0, 1.0])
    assert reply.tpot_seconds is None
    assert not reply.has_counters
    with pytest.raises(RequestFailedError, match="before its first token"):
        await asked(Finished("r", "abort"), times=[0.0])
