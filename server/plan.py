"""A `ModelPlan` as people and scripts read it: where a model goes, and how fast it can be there."""

import json
from collections.abc import Collection, Mapping

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from engine.protocol import Forecast, MemoryRow, ModelPlan, Tier
from server.formats import size


def with_bandwidths(plan: ModelPlan, given: Mapping[Tier, float]) -> ModelPlan:
    """The plan with these bandwidths, in bytes per second, instead of what was measured."""
    return msgspec.structs.replace(plan, bandwidths={**plan.bandwidths, **given})


def plan_json(plan: ModelPlan) -> str:
    """All of the plan, with what follows from it: `fits`, and each forecast's `tpot_floor_seconds` (or null)."""
    content = msgspec.to_builtins(plan)
    for forecast, shown in zip(plan.forecasts, content["forecasts"], strict=True):
        shown["tpot_floor_seconds"] = forecast.floor_seconds(plan.bandwidths)
    return json.dumps({**content, "fits": plan.fits}, indent=2)


def plan_line(plan: ModelPlan) -> str:
    """What a log should hold."""
    line = (
        f"{plan.num_slots} slots for {plan.num_experts} experts of {size(plan.expert_bytes)}, "
        f"{plan.num_host_experts} read from host memory and {plan.num_disk_experts} from disk"
    )
    return "; ".join([line, *(f"{tier} {size(rate)}/s" for tier, rate in plan.bandwidths.items())])


def print_plan(plan: ModelPlan, console: Console, given: Collection[Tier] = ()) -> None:
    """Everything; the bandwidths of the tiers that are `given` were not measured."""
    console.print(Text(f"{plan.model} on {plan.device}: {_extent(plan)}"))
    console.print(_memory_table(plan))
    if plan.forecasts:
        console.print(_forecast_table(plan))
    if plan.bandwidths:
        rates = (
            f"{tier} {size(rate)}/s {'given' if tier in given else 'measured'}"
            for tier, rate in plan.bandwidths.items()
        )
        console.print(Text(f"Bandwidth: {', '.join(rates)}"))
    for decision in plan.decisions:
        console.print(Text(f"- {decision}"))
    if not plan.fits:
        hint = " Any one of these makes it fit:" if plan.remedies else ""
        shortages = " and ".join(f"{size(num_bytes)} of {tier} memory" for tier, num_bytes in plan.shortages.items())
        console.print(Text(f"Does not fit: {shortages} short.{hint}"))
        for remedy in plan.remedies:
            console.print(Text(f"  {remedy}"))


def _extent(plan: ModelPlan) -> str:
    return (
        f"{plan.num_experts} experts of {size(plan.expert_bytes)}, {plan.max_model_len} tokens of context at "
        f"{size(plan.kv_bytes_per_token)} each"
    )


def _memory_table(plan: ModelPlan) -> Table:
    table = Table()
    table.add_column("part")
    table.add_column("tier", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("note")
    for row in plan.memory:
        table.add_row(escape(row.part), row.tier, size(row.num_bytes), escape(row.note))
    table.add_section()
    for tier in _tiers(plan.memory):
        budget = plan.budget_bytes.get(tier)
        note = "" if budget is None else f"of a budget of {size(budget)}"
        table.add_row("total", tier, size(plan.tier_bytes(tier)), note)
    return table


def _tiers(rows: list[MemoryRow]) -> list[Tier]:
    return list(dict.fromkeys(row.tier for row in rows))


def _forecast_table(plan: ModelPlan) -> Table:
    table = Table(title="Moved per output token if routing is random", title_justify="left")
    table.add_column("mode", no_wrap=True)
    for title in ("slots", "from host", "from disk"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("TPOT floor", overflow="fold")
    for forecast in plan.forecasts:
        table.add_row(
            f"draft of {forecast.draft_length}" if forecast.draft_length else "no draft",
            str(forecast.num_slots),
            size(forecast.host_bytes_per_token),
            size(forecast.disk_bytes_per_token),
            _floor(forecast, plan.bandwidths),
        )
    return table


def _floor(forecast: Forecast, bandwidths: dict[Tier, float]) -> str:
    seconds = forecast.floor_seconds(bandwidths)
    if seconds is not None:
        return f"{1000 * seconds:.1f} ms"
    flags = []
    if forecast.host_bytes_per_token and "host" not in bandwidths:
        flags.append("--link-bandwidth")
    if forecast.disk_bytes_per_token and "disk" not in bandwidths:
        flags.append("--disk-bandwidth")
    return f"unknown: give {' and '.join(flags)}"
