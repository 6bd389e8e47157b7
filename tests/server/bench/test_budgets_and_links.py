from typing import Any

import msgspec
import pytest

from engine.errors import ConfigError
from engine.protocol import MemoryRow, ModelPlan
from server.bench.budgets import default_budgets, parse_budgets, raised_budgets
from server.bench.links import Link, LinkChoice, measured_bandwidth, parse_links
from tests.server.fake_engine import capabilities, model_plan

MB = 10**6


def plan(**changes: Any) -> ModelPlan:
    """100 MB of weights and 4 of 10 experts of 10 MB in slots."""
    rows = [MemoryRow("dense weights", "device", 100 * MB), MemoryRow("expert slots", "device", 40 * MB)]
    values = {"memory": rows, "num_experts": 10, "expert_bytes": 10 * MB, "num_slots": 4, **changes}
    return msgspec.structs.replace(model_plan(), **values)


def test_defaults_are_all_but_the_slots_and_a_share_of_the_experts() -> None:
    assert default_budgets(plan(), quick=False) == [135 * MB, 150 * MB, 175 * MB]
    assert default_budgets(plan(), quick=True) == [135 * MB, 150 * MB]
    # Up to whole megabytes, and each once.
    assert default_budgets(plan(num_experts=1, expert_bytes=1, num_slots=0), quick=False) == [141 * MB]


def test_budgets_that_do_not_hold_a_draft_are_raised() -> None:
    budgets, notes = raised_budgets([135 * MB, 150 * MB, 175 * MB], plan(shortages={"device": 17 * MB + 1}))
    assert budgets == [153 * MB, 175 * MB]
    assert len(notes) == 2
    assert "135 MB does not hold the quantized draft and a slot: it becomes 153 MB" in notes[0]
    assert raised_budgets([135 * MB], plan()) == ([135 * MB], [])


def test_budgets_as_given() -> None:
    assert parse_budgets("700MB, 1.5GB,700MB") == [700 * MB, 1500 * MB]
    for wrong in ("much", "1GB,", "0"):
        with pytest.raises(ConfigError, match=r"write sizes such as 700MB,1.5GB"):
            parse_budgets(wrong)


def test_links_as_given() -> None:
    assert parse_links("real,paced,1.5GB/s,real") == [
        LinkChoice("real"),
        LinkChoice("paced"),
        LinkChoice("set", 1500 * MB),
    ]
    with pytest.raises(ConfigError, match="Unknown link 'slow'; known are real, paced, and bandwidths"):
        parse_links("real,slow")


def test_the_paced_link_takes_a_cold_token_twelve_times_its_computation() -> None:
    """4000 bytes, and 10 ms of computation."""
    link = Link.resolve(LinkChoice("paced"), capabilities())
    assert (link.limit, link.bandwidth) == (33333, 33333)
    assert str(link) == "paced link of 33.3 KB/s"


def disk_only(**changes: Any) -> ModelPlan:
    return plan(num_host_experts=0, bandwidths={"disk": 1000.0}, **changes)


def test_a_link_is_no_faster_than_this_machines() -> None:
    slow = msgspec.structs.replace(capabilities(), plan=disk_only())
    assert Link.resolve(LinkChoice("real"), slow) == Link("real", None, 1000.0)
    assert Link.resolve(LinkChoice("set", 600), slow) == Link("set", 600, 600)
    assert Link.resolve(LinkChoice("set", 6000), slow) == Link("set", 6000, 1000.0)


def test_tiers_are_read_side_by_side() -> None:
    """A quarter of the experts comes from the disk at 1000, the others from RAM at 2000 bytes per second."""
    both = plan(num_experts=4, num_host_experts=3, bandwidths={"host": 2000.0, "disk": 1000.0})
    assert measured_bandwidth(both) == pytest.approx(2000 / 0.75)
    assert measured_bandwidth(plan(num_host_experts=3, bandwidths={"disk": 1000.0})) is None
    assert measured_bandwidth(plan(num_host_experts=0, bandwidths={})) is None
