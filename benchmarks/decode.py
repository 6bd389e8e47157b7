"""Decoding with and without a draft, at the same device memory, in turn on the same prompts.

    python -m benchmarks.decode [MODEL] [--max-tokens N] [--rounds N] [--device-memory SIZE] [--json FILE] ...

Both engines live in this process; only one works at a time. Without a draft, its memory holds more expert slots. The
result is the ratio of the times per output token, prompt by prompt; absolute times depend on the machine's other work.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the engine process does

from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from engine.build import Engine, open_engine
from engine.config import EngineConfig
from engine.loading import locate_model
from engine.phases import PhaseClock
from engine.process import quiet_libraries
from engine.protocol import CycleStats, Prefill, SamplingParams, Submit, Tokens, ToServer

ENGINE_SETTINGS = ("cache", "device", "device_memory", "host_memory", "draft_length", "draft_weights", "dtype")

PROMPTS = (
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain how a bicycle stays upright, for a curious child.",
    "List ten things to pack for a hike in the mountains, with a reason for each.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
)


@dataclass
class Run:
    """One reply."""

    mode: str
    prompt: str
    token_ids: list[int]
    ttft_seconds: float
    tpot_seconds: float
    bytes_per_token: float
    acceptance: float
    hit_rate: float
    wait_share: float


def generate(engine: Engine, mode: str, prompt: str, prompt_token_ids: list[int], max_tokens: int) -> Run:
    """Serve one greedy request and measure it from outside the step loop."""
    arrivals: list[float] = []
    token_ids: list[int] = []
    decode = CycleStats()

    def take(message: ToServer) -> None:
        nonlocal decode
        if isinstance(message, Tokens):
            arrivals.append(time.perf_counter())
            token_ids.extend(message.token_ids)
            decode = decode + message.cycle
        elif not isinstance(message, Prefill):
            assert type(message).__name__ == "Finished", message

    engine.core.send = take
    started = time.perf_counter()
    engine.core.submit(Submit("bench", prompt_token_ids, max_tokens, SamplingParams(temperature=0.0)))
    while engine.core.has_work:
        engine.core.step()
    num_decoded = max(1, len(token_ids) - 1)
    seconds = arrivals[-1] - arrivals[0]
    num_visits = decode.num_expert_hits + decode.num_expert_misses
    return Run(
        mode=mode,
        prompt=prompt,
        token_ids=token_ids,
        ttft_seconds=arrivals[0] - started,
        tpot_seconds=seconds / num_decoded,
        bytes_per_token=(decode.prefetch_bytes + decode.demand_bytes) / num_decoded,
        acceptance=decode.num_accepted_tokens / max(1, decode.num_draft_tokens),
        hit_rate=decode.num_expert_hits / max(1, num_visits),
        wait_share=decode.transfer_wait_seconds / seconds if seconds else 0.0,
    )


def report(console: Console, runs: list[Run]) -> dict[str, float]:
    """Print the table of medians and return the ratios, draft over no draft."""
    table = Table("mode", "TPOT ms", "p90 ms", "TTFT s", "MB/token", "acceptance", "hits", "waiting")
    for mode in ("draft", "no draft"):
        mine = [run for run in runs if run.mode == mode]
        tpots = sorted(run.tpot_seconds * 1e3 for run in mine)

        def median(name: str, mine: list[Run] = mine) -> float:
            return float(statistics.median(getattr(run, name) for run in mine))

        table.add_row(
            mode,
            f"{statistics.median(tpots):.1f}",
            f"{tpots[int(0.9 * (len(tpots) - 1))]:.1f}",
            f"{median('ttft_seconds'):.2f}",
            f"{median('bytes_per_token') / 1e6:.0f}",
            f"{median('acceptance'):.0%}" if mode == "draft" else "-",
            f"{median('hit_rate'):.0%}",
            f"{median('wait_share'):.0%}",
        )
    console.print(table)
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    ratios = [plain.tpot_seconds / drafted.tpot_seconds for drafted, plain in pairs]
    same = sum(drafted.token_ids == plain.token_ids for drafted, plain in pairs)
    summary = {
        "speedup_median": statistics.median(ratios),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
        "same_output_share": same / len(pairs),
    }
    console.print(
        f"Time per output token without a draft over with it: {summary['speedup_median']:.2f} "
        f"({summary['speedup_min']:.2f} to {summary['speedup_max']:.2f}). "
        f"Same tokens in {same} of {len(pairs)} replies."
    )
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write every run and the summary to this file")
    for name in ENGINE_SETTINGS:
        parser.add_argument(f"--{name.replace('_', '-')}", help=EngineConfig.model_fields[name].description)
    arguments = parser.parse_args()
    settings = {name: value for name in ENGINE_SETTINGS if (value := getattr(arguments, name)) is not None}
    console = Console()
    quiet_libraries()
    with ExitStack() as stack:
        config = EngineConfig.model_validate({"model": arguments.model, **settings})
        drafted = stack.enter_context(open_engine(config, lambda message: None, PhaseClock()))
        model_path = locate_model(config, lambda message: None)
        memory = drafted.capabilities.plan.budget_bytes["device"]
        plain_config = config.model_copy(update={"draft": False, "device_memory": memory})
        plain = stack.enter_context(open_engine(plain_config, lambda message: None, PhaseClock()))
        slots = {"draft": drafted.capabilities.plan.num_slots, "no draft": plain.capabilities.plan.num_slots}
        console.print(f"{memory / 1e6:.0f} MB of device memory; expert slots: {slots}")
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        runs = []
        for prompt in track(PROMPTS * arguments.rounds, "decoding", console=console):
            chat = [{"role": "user", "content": prompt}]
            token_ids = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
            for mode, engine in (("draft", drafted), ("no draft", plain)):
                runs.append(generate(engine, mode, prompt, token_ids, arguments.max_tokens))
    summary = report(console, runs)
    if arguments.json:
        arguments.json.write_text(json.dumps({"summary": summary, "runs": [asdict(run) for run in runs]}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
