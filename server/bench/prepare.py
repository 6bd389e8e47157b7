"""Everything before the first cell: budgets, the packed model, how fast this machine is, the prompts' tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.client import EngineClient
from engine.config import EngineConfig, PackConfig
from engine.errors import ConfigError
from engine.protocol import ModelPlan
from server.bench.budgets import default_budgets, raised_budgets
from server.bench.cell import CUDA_RUNTIME_BYTES, RUNTIME_BYTES, Cell, Setup
from server.bench.cgroup import MemoryGroups
from server.bench.engine import BenchEngine, engine_command
from server.bench.links import COLD_TOKEN_COMPUTES, PACED, Link, LinkChoice
from server.bench.machine import is_cpu
from server.bench.modes import MODES, REFERENCE, Mode, bench_config
from server.bench.prompts import NUM_QUICK, PROMPTS, WARM_UP, Prompt, TokenizedPrompt, fitting, tokenized
from server.formats import size
from server.progress import LoadProgress
from server.task import run_task


@dataclass(frozen=True)
class Plan:
    """What is going to be done."""

    modes: Sequence[Mode]
    links: Sequence[LinkChoice]
    budgets: Sequence[int] | None
    """None: those that follow from the model."""
    quick: bool
    num_tokens: int
    num_rounds: int
    trace: bool


@dataclass(frozen=True)
class Preparation:
    setup: Setup
    cells: list[Cell]
    notes: list[str]


async def prepare(
    plan: Plan, config: EngineConfig, groups: MemoryGroups, stand_in: Sequence[str] | None
) -> Preparation:
    """Raises SpecterError where there is nothing to measure."""
    budgets, notes = await _budgets(plan, config, stand_in)
    pack = await _pack(plan.modes, config, stand_in)
    if any(mode.settings.get("draft") == "auto" for mode in plan.modes):
        # The first engine that chooses makes a profile of the model, which no other has to do inside its group.
        await (await _start_engine(MODES["auto"], config, max(budgets), groups, stand_in)).close()
    engine = await _start_engine(MODES[REFERENCE], config, max(budgets), groups, stand_in)
    model_path, capabilities = engine.model_path, engine.capabilities
    await engine.close()
    warm_up, *prompts = await asyncio.to_thread(
        _tokenize, model_path, (WARM_UP, *(PROMPTS[:NUM_QUICK] if plan.quick else PROMPTS))
    )
    prompts, left_out = fitting(prompts, plan.num_tokens, capabilities.plan.max_model_len)
    if not prompts:
        raise ConfigError(f"No prompt fits the context of {capabilities.plan.max_model_len}; raise --max-model-len.")
    links = [Link.resolve(choice, capabilities) for choice in plan.links]
    setup = Setup(
        config=config,
        modes=plan.modes,
        prompts=prompts,
        warm_up=warm_up,
        num_tokens=plan.num_tokens,
        num_rounds=plan.num_rounds,
        plan=capabilities.plan,
        directories=[model_path, pack],
        groups=groups,
        engine_command=stand_in,
    )
    cells = [Cell(budget, link) for budget in budgets for link in links]
    pacing = [_about_pacing(link, capabilities.token_compute_seconds) for link in links if link.kind == PACED]
    return Preparation(
        setup, cells, [*notes, *left_out, *pacing, _about_groups(setup), _about_lengths(plan.modes, plan.num_tokens)]
    )


async def _budgets(plan: Plan, config: EngineConfig, stand_in: Sequence[str] | None) -> tuple[list[int], list[str]]:
    if plan.budgets is not None:
        return list(plan.budgets), []
    plain = await _plan_model(config.model_copy(update={"draft": "none"}), stand_in)
    budgets = default_budgets(plain, plan.quick)
    if not any(mode.settings.get("draft") == "quantized" for mode in plan.modes):
        return budgets, []
    drafting = config.model_copy(update={"draft": "quantized", "device_memory": min(budgets)})
    return raised_budgets(budgets, await _plan_model(drafting, stand_in))


async def _plan_model(config: EngineConfig, stand_in: Sequence[str] | None) -> ModelPlan:
    return await run_task("plan", config, EngineClient.wait_planned, stand_in)


async def _pack(modes: Sequence[Mode], config: EngineConfig, stand_in: Sequence[str] | None) -> Path:
    """The pack's directory. No engine has to pack inside its group, or while another one is measured."""
    drafts = {mode.settings.get("draft") for mode in modes}
    draft = "quantized" if drafts & {"quantized", "auto"} else "none"
    pack_config = PackConfig.model_validate({**dict(config), "draft": draft})
    return Path(await run_task("pack", pack_config, EngineClient.wait_prepared, stand_in))


async def _start_engine(
    mode: Mode, config: EngineConfig, budget_bytes: int, groups: MemoryGroups, stand_in: Sequence[str] | None
) -> BenchEngine:
    """At the largest budget: where that is too small, nothing fits."""
    with LoadProgress() as show:
        return await BenchEngine.start(
            bench_config(config, mode, budget_bytes, None), engine_command(mode.module, stand_in), groups, None, show
        )


def _tokenize(model_path: Path, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
    from server.tokenizer import Tokenizer

    tokenizer = Tokenizer(model_path)
    return [tokenized(prompt, tokenizer) for prompt in prompts]


def _about_pacing(link: Link, token_compute_seconds: float) -> str:
    sentence = (
        f"The paced link moves {size(link.limit or 0)}/s, at which a token without any resident expert takes "
        f"{COLD_TOKEN_COMPUTES:.0f} times its computation ({1e3 * token_compute_seconds:.0f} ms)."
    )
    if link.limit and link.bandwidth and link.bandwidth < link.limit:
        sentence += f" This machine's own link is slower: {size(link.bandwidth)}/s."
    return sentence


def _about_groups(setup: Setup) -> str:
    if setup.groups.version is None:
        return (
            f"No control group can be made ({setup.groups.reason}), so the page cache may serve as a second cache for "
            "experts, outside of the budget."
        )
    runtime_bytes = RUNTIME_BYTES if is_cpu(setup.plan) else CUDA_RUNTIME_BYTES
    return (
        f"Each engine runs in a control group (version {setup.groups.version}) of its budget of RAM and "
        f"{size(runtime_bytes)} for the runtime, so that the page cache is no second cache for experts."
    )


def _about_lengths(modes: Sequence[Mode], num_tokens: int) -> str:
    shorter = [f"{n} with {mode.name}" for mode in modes if (n := mode.max_tokens(num_tokens)) < num_tokens]
    exceptions = f" ({', '.join(shorter)}, which are slow: times are per token)" if shorter else ""
    return f"A reply has {num_tokens} tokens{exceptions}."
