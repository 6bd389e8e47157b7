"""One reply as the client sees it: what came, and when."""

import time
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from engine.client import EngineClient
from engine.errors import RequestFailedError
from engine.protocol import CycleStats, Finished, Prefill, Submit, Tokens, Traced, TraceEvent


class Reply(msgspec.Struct, frozen=True):
    token_ids: list[int]
    num_first_tokens: int
    """That came at the end of the prefill: one, but for engines that keep it until there are more."""
    ttft_seconds: float
    """From the request to the first tokens."""
    decode_seconds: float
    """From the first tokens to the last."""
    prefill: CycleStats
    cycles: list[CycleStats]
    """Of each cycle after the first tokens."""
    events: list[TraceEvent] = []

    @property
    def num_decode_tokens(self) -> int:
        return len(self.token_ids) - self.num_first_tokens

    @property
    def tpot_seconds(self) -> float | None:
        """None where all tokens came at once."""
        return self.decode_seconds / self.num_decode_tokens if self.num_decode_tokens else None

    @property
    def decode(self) -> CycleStats:
        return sum(self.cycles, CycleStats())

    @property
    def has_counters(self) -> bool:
        """Engines of others count nothing."""
        return self.decode != CycleStats()


async def ask(client: EngineClient, submit: Submit, now: Callable[[], float] = time.perf_counter) -> Reply:
    """Have the engine reply; raises what `EngineClient.generate` raises, and RequestFailedError for no reply at all."""
    arrivals: list[tuple[float, Tokens]] = []
    prefill, events = CycleStats(), list[TraceEvent]()
    started = now()
    async with aclosing(client.generate(submit)) as messages:
        async for message in messages:
            match message:
                case Tokens():
                    arrivals.append((now(), message))
                case Prefill():
                    prefill += message.cycle
                case Traced():
                    events += message.events
                case Finished():
                    break
    return _reply(started, prefill, arrivals, events)


def _reply(
    started: float, prefill: CycleStats, arrivals: list[tuple[float, Tokens]], events: list[TraceEvent]
) -> Reply:
    if not arrivals:
        raise RequestFailedError("The engine ended the reply before its first token.")
    (first_seconds, first), *rest = arrivals
    last_seconds = arrivals[-1][0]
    return Reply(
        token_ids=[token_id for _, tokens in arrivals for token_id in tokens.token_ids],
        num_first_tokens=len(first.token_ids),
        ttft_seconds=first_seconds - started,
        decode_seconds=last_seconds - first_seconds,
        # What an engine counted until the first tokens belongs to the prefill.
        prefill=prefill + first.cycle,
        cycles=[tokens.cycle for _, tokens in rest],
        events=events,
    )
