"""What the replies of one mode in one cell come to. Pure functions; seconds and bytes unless a name says otherwise.

The floor of the TPOT is the one of the design: with X bytes moved per cycle and A tokens per cycle,
`max(X / bandwidth, T_draft + T_verify) / A`. Per token that is `max(bytes / bandwidth, draft + verify)`, with bytes and
times divided by the tokens. The floor of the TTFT is the prefill's bytes over the bandwidth.
"""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from engine.protocol import CycleStats
from server.bench.reply import Reply


class Position(msgspec.Struct, frozen=True):
    """How often the token at one position of the draft was judged, because all before it had been accepted."""

    num_judged: int
    num_accepted: int

    @property
    def rate(self) -> float:
        return self.num_accepted / self.num_judged


class Counters(msgspec.Struct, frozen=True):
    """What follows from the engine's counters of decoding; absent for engines that count nothing."""

    draft_seconds_per_token: float
    plan_seconds_per_token: float
    wait_seconds_per_token: float
    verify_seconds_per_token: float
    bytes_per_token: float
    hit_rate: float | None
    num_prefetches_used: int
    num_prefetches_wasted: int
    num_demand_fetches: int
    acceptance_by_position: list[Position]
    acceptance_rate: float | None
    """Accepted of all drafted tokens; None where nothing was drafted."""
    tokens_per_cycle: float
    mean_draft_length: float
    link_utilisation: float
    """Share of the decoding in which some transfer was under way."""
    link_bandwidth: float | None
    """Achieved while transfers were under way."""
    floor_seconds: float | None
    tpot_over_floor: float | None
    ttft_floor_seconds: float | None
    ttft_over_floor: float | None


class Measures(msgspec.Struct, frozen=True):
    num_replies: int
    num_decode_tokens: int
    tpot_median_seconds: float | None
    tpot_low_seconds: float | None
    tpot_high_seconds: float | None
    tpot_p90_seconds: float | None
    ttft_median_seconds: float
    counters: Counters | None


def measure(replies: Sequence[Reply], bandwidth: float | None) -> Measures:
    """Of at least one reply; `bandwidth` is what experts can come at, None where that is not known."""
    tpots = _known(reply.tpot_seconds for reply in replies)
    return Measures(
        num_replies=len(replies),
        num_decode_tokens=sum(reply.num_decode_tokens for reply in replies),
        tpot_median_seconds=median(tpots),
        tpot_low_seconds=min(tpots, default=None),
        tpot_high_seconds=max(tpots, default=None),
        tpot_p90_seconds=quantile(tpots, 0.9) if tpots else None,
        ttft_median_seconds=statistics.median(reply.ttft_seconds for reply in replies),
        counters=count(replies, bandwidth) if any(reply.has_counters for reply in replies) else None,
    )


def count(replies: Sequence[Reply], bandwidth: float | None) -> Counters:
    cycles = [cycle for reply in replies for cycle in reply.cycles]
    total = sum(cycles, CycleStats())
    num_tokens = sum(reply.num_decode_tokens for reply in replies)
    seconds = sum(reply.decode_seconds for reply in replies)
    num_visits = total.num_expert_hits + total.num_expert_misses
    floors = [(reply, floor_seconds(reply, bandwidth), ttft_floor_seconds(reply, bandwidth)) for reply in replies]
    return Counters(
        draft_seconds_per_token=total.draft_seconds / num_tokens,
        plan_seconds_per_token=total.plan_seconds / num_tokens,
        wait_seconds_per_token=total.transfer_wait_seconds / num_tokens,
        verify_seconds_per_token=total.verify_seconds / num_tokens,
        bytes_per_token=total.moved_bytes / num_tokens,
        hit_rate=total.num_expert_hits / num_visits if num_visits else None,
        num_prefetches_used=total.num_prefetches_used,
        num_prefetches_wasted=total.num_prefetches_wasted,
        num_demand_fetches=total.num_demand_fetches,
        acceptance_by_position=acceptance_by_position(cycles),
        acceptance_rate=total.num_accepted_tokens / total.num_draft_tokens if total.num_draft_tokens else None,
        tokens_per_cycle=num_tokens / len(cycles),
        mean_draft_length=total.num_draft_tokens / len(cycles),
        link_utilisation=total.transfer_seconds / seconds,
        link_bandwidth=total.moved_bytes / total.transfer_seconds if total.transfer_seconds else None,
        floor_seconds=median(_known(floor for _, floor, _ in floors)),
        tpot_over_floor=median(_known(_over(reply.tpot_seconds, floor) for reply, floor, _ in floors)),
        ttft_floor_seconds=median(_known(floor for _, _, floor in floors)),
        ttft_over_floor=median(_known(_over(reply.ttft_seconds, floor) for reply, _, floor in floors)),
    )


def acceptance_by_position(cycles: Iterable[CycleStats]) -> list[Position]:
    """From the first drafted token on, as far as any was judged."""
    judged: list[list[bool]] = []
    for cycle in cycles:
        num_judged = min(cycle.num_draft_tokens, cycle.num_accepted_tokens + 1)
        while len(judged) < num_judged:
            judged.append([])
        for i in range(num_judged):
            judged[i].append(i < cycle.num_accepted_tokens)
    return [Position(len(verdicts), sum(verdicts)) for verdicts in judged]


def floor_seconds(reply: Reply, bandwidth: float | None) -> float | None:
    """Below which the reply's TPOT could not have been, with what it moved and computed."""
    if bandwidth is None or not reply.num_decode_tokens:
        return None
    total = reply.decode
    link_seconds = total.moved_bytes / bandwidth
    return max(link_seconds, total.draft_seconds + total.verify_seconds) / reply.num_decode_tokens


def ttft_floor_seconds(reply: Reply, bandwidth: float | None) -> float | None:
    return None if bandwidth is None else reply.prefill.moved_bytes / bandwidth


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def quantile(values: Sequence[float], share: float) -> float:
    """Interpolated between the two nearest of the sorted values."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _over(seconds: float | None, floor: float | None) -> float | None:
    return seconds / floor if seconds is not None and floor else None
