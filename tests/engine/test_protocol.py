import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import (
    HEADER,
    Abort,
    CycleStats,
    Estimates,
    Failed,
    Finished,
    Forecast,
    Loading,
    Located,
    Message,
    Ping,
    Planned,
    Pong,
    Prefill,
    Prepared,
    Ready,
    SamplingParams,
    Shutdown,
    Submit,
    Tokens,
    Traced,
    TraceEvent,
    decode_to_engine,
    decode_to_server,
    encode,
)
from tests.server.fake_engine import capabilities, model_plan


def payload_of(frame: bytes) -> bytes:
    (num_bytes,) = HEADER.unpack(frame[: HEADER.size])
    assert num_bytes == len(frame) - HEADER.size
    return frame[HEADER.size :]


@pytest.mark.parametrize(
    "message",
    [
        Submit("a", [1, 2], 3, SamplingParams(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=-1), True),
        Abort("a"),
        Ping(7),
        Shutdown(),
    ],
)
def test_messages_to_the_engine_survive_the_trip(message: Message) -> None:
    assert decode_to_engine(payload_of(encode(message))) == message


@pytest.mark.parametrize(
    "message",
    [
        Loading("reading weights", 1, 2, "bytes"),
        Located("/models/m"),
        Ready(capabilities()),
        Prepared("/cache"),
        Planned(model_plan(1)),
        Prefill("a", 1, 2, CycleStats(demand_bytes=3)),
        Tokens("a", [1, 2], CycleStats(num_draft_tokens=4)),
        Tokens("a", [1, 2], CycleStats(), Estimates(0.8, 0.1, 0.2, 3e6, 1e9, 2.5, 0.3)),
        Traced("a", [TraceEvent("experts", "layer", 1.5, 0.25, {"layer": 3, "kind": "x", "routes": [[1, 2], [0, 3]]})]),
        Finished("a", "length"),
        Failed(None, "PackError", "The pack is damaged."),
        Failed("a", "RequestError", "No."),
        Pong(7),
    ],
)
def test_messages_to_the_server_survive_the_trip(message: Message) -> None:
    assert decode_to_server(payload_of(encode(message))) == message


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_to_server(payload_of(encode(Abort("a"))))
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(b"\xc1")


@given(st.lists(st.integers(0, 2**31 - 1)), st.integers(-(2**63), 2**63 - 1))
def test_token_ids_and_seeds_survive_the_trip(token_ids: list[int], seed: int) -> None:
    message = Submit("a", token_ids, 1, SamplingParams(seed=seed))
    assert decode_to_engine(payload_of(encode(message))) == message


def test_cycle_stats_add_and_subtract_every_counter() -> None:
    one = CycleStats(*range(1, len(CycleStats.__struct_fields__) + 1))
    assert one + CycleStats() == one
    assert one + one - one == one
    assert (one + one).transfer_seconds == 2 * one.transfer_seconds


@pytest.mark.parametrize(
    ("host_bytes", "disk_bytes", "expected"),
    [(24.0, 0.0, 2.0), (0.0, 24.0, None), (24.0, 1.0, None), (0.0, 0.0, 0.0)],
)
def test_floor_is_unknown_where_a_needed_bandwidth_is(
    host_bytes: float, disk_bytes: float, expected: float | None
) -> None:
    assert Forecast(4, 1, host_bytes, disk_bytes).floor_seconds({"host": 12.0}) == expected


def test_the_slowest_tier_is_the_floor() -> None:
    assert Forecast(4, 1, 24.0, 4.0).floor_seconds({"host": 12.0, "disk": 1.0}) == 4.0


def test_a_plan_adds_up_its_tiers_and_says_whether_it_fits() -> None:
    plan = model_plan()
    assert (plan.tier_bytes("device"), plan.tier_bytes("host"), plan.tier_bytes("disk")) == (1_005_000, 6_000, 16_000)
    assert plan.fits
    assert not model_plan(1).fits
