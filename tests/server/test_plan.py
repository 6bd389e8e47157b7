"""What is printed of a plan: everything fits 80 columns, in a pipe too."""

import io
import json
from collections.abc import Collection
from typing import Any

import msgspec
import pytest
from rich.console import Console

from engine.protocol import Forecast, ModelPlan, Tier
from server.plan import plan_json, plan_line, print_plan, with_bandwidths
from tests.server.fake_engine import model_plan


def printed(plan: ModelPlan, given: Collection[Tier] = ()) -> list[str]:
    """Lines as they reach a pipe, with each table row's cells separated by one space."""
    file = io.StringIO()
    print_plan(plan, Console(file=file, _environ={"COLUMNS": "80"}), given)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return [" ".join(line.replace("│", " ").split()) for line in lines]


def changed(**values: Any) -> ModelPlan:
    return msgspec.structs.replace(model_plan(), **values)


def test_parts_and_totals_with_budgets() -> None:
    lines = printed(model_plan())
    assert " ".join(lines[:2]) == ("demo on CPU (2 threads): 16 experts of 1.0 KB, 2000 tokens of context at 64 B each")
    for line in (
        "dense weights device 1.0 MB",
        "expert slots device 5.0 KB 5, for 31% of the experts",
        "total device 1.0 MB of a budget of 2.0 MB",
        "total host 6.0 KB of a budget of 7.0 KB",
        "total disk 16.0 KB",
        "- Drafting with qint4 experts: the test says so.",
    ):
        assert line in lines
    assert not any("fit" in line for line in lines)


def test_forecasts_and_where_a_bandwidth_is_needed() -> None:
    lines = printed(model_plan())
    assert "draft of 4 5 0 B 13.0 MB 10.0 ms" in lines
    assert "no draft 7 2.0 MB 26.0 MB unknown: give --link-bandwidth" in lines
    assert "Bandwidth: disk 1.3 GB/s measured" in lines
    lines = printed(with_bandwidths(model_plan(), {"host": 50e6}), given=["host"])
    assert "no draft 7 2.0 MB 26.0 MB 40.0 ms" in lines
    assert "Bandwidth: disk 1.3 GB/s measured, host 50.0 MB/s given" in lines


def test_nothing_is_known_of_any_link() -> None:
    lines = printed(changed(bandwidths={}))
    assert any("unknown: give --disk-bandwidth" in line for line in lines)
    assert not any(line.startswith("Bandwidth") for line in lines)


@pytest.mark.parametrize("num_bytes", [999.9e6, 123.4e9, 999.9e12])
def test_large_numbers_are_whole(num_bytes: float) -> None:
    forecast = Forecast(32, 10**6, num_bytes, num_bytes)
    lines = printed(changed(forecasts=[forecast], bandwidths={"host": 24e9, "disk": 1e9}))
    (row,) = (line for line in lines if line.startswith("draft of 32"))
    assert row.endswith(f"{1000 * num_bytes / 1e9:.1f} ms")
    assert "…" not in row


def test_a_model_that_does_not_fit() -> None:
    assert printed(model_plan(1_200_000))[-3:] == [
        "Does not fit: 1.2 MB of device memory short. Any one of these makes it fit:",
        "--device-memory 3GB",
        "--draft none",
    ]
    assert printed(changed(shortages={"device": 1_200_000}))[-1] == "Does not fit: 1.2 MB of device memory short."


def test_json_holds_the_plan_and_what_follows() -> None:
    plan = model_plan()
    content = json.loads(plan_json(plan))
    assert [forecast.pop("tpot_floor_seconds") for forecast in content["forecasts"]] == [0.01, None]
    assert content.pop("fits") is True
    assert msgspec.convert(content, ModelPlan) == plan
    assert json.loads(plan_json(model_plan(1)))["fits"] is False


def test_a_line_for_the_log() -> None:
    assert plan_line(model_plan()) == (
        "5 slots for 16 experts of 1.0 KB, 6 read from host memory and 10 from disk; disk 1.3 GB/s"
    )
