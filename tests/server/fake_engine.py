"""A scripted engine process without a model: `fake_engine.py [options] FD TASK CONFIG`.

It speaks `engine.protocol`. `--startup` chooses how it starts; a request's seed chooses how it is answered (see
SCRIPTS), and without a seed the prompt is echoed. Its start and every message from the server are appended to
`--log`, one JSON object a line.
"""

import argparse
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.config import DrafterName
from engine.protocol import (
    HEADER,
    Abort,
    Capabilities,
    CycleStats,
    Estimates,
    Failed,
    Finished,
    FinishReason,
    Forecast,
    Loading,
    Located,
    MemoryRow,
    Message,
    ModelPlan,
    Ping,
    Planned,
    Pong,
    Prefill,
    Prepared,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
    Tokens,
    Traced,
    TraceEvent,
    decode_to_engine,
    encode,
)

NUM_BYTES = 256
EOS_TOKEN_ID = 257
VOCAB_SIZE = 258
MAX_MODEL_LEN = 2000
TOKENS_PER_CYCLE = 3
STEP_SECONDS = 0.001

ECHO, ENDLESS, DIE, FAIL, SILENT, FAULT = None, 1, 2, 3, 4, 5
"""Seeds that choose the script."""

CYCLE = CycleStats(
    num_draft_tokens=4,
    num_accepted_tokens=2,
    draft_seconds=0.001,
    verify_seconds=0.002,
    num_expert_hits=6,
    num_expert_misses=2,
    num_evictions=1,
    num_prefetches_used=2,
    num_prefetches_wasted=1,
    num_demand_fetches=1,
    prefetch_bytes=3000,
    demand_bytes=1000,
    transfer_seconds=0.001,
)

ESTIMATES = Estimates(0.8, 0.001, 0.002, 4000.0, 4e6, 2.5, 0.003)


def answer(submit: Submit, token_ids: list[int], reason: FinishReason) -> Iterator[Message]:
    num_prompt_tokens = len(submit.prompt_token_ids)
    yield Prefill(submit.request_id, num_prompt_tokens, num_prompt_tokens)
    for start in range(0, len(token_ids), TOKENS_PER_CYCLE):
        # Not every cycle decides the length of a draft.
        estimates = None if start else ESTIMATES
        yield Tokens(submit.request_id, token_ids[start : start + TOKENS_PER_CYCLE], CYCLE, estimates)
    yield Finished(submit.request_id, reason)


def echo(submit: Submit) -> Iterator[Message]:
    token_ids = [token_id for token_id in submit.prompt_token_ids if token_id < NUM_BYTES] + [EOS_TOKEN_ID]
    reason: FinishReason = "stop" if len(token_ids) <= submit.max_tokens else "length"
    return answer(submit, token_ids[: submit.max_tokens], reason)


def endless(submit: Submit) -> Iterator[Message]:
    token_id = next(token_id for token_id in submit.prompt_token_ids if token_id < NUM_BYTES)
    return answer(submit, [token_id] * submit.max_tokens, "length")


def die(submit: Submit) -> Iterator[Message]:
    yield Tokens(submit.request_id, submit.prompt_token_ids[1:2], CYCLE)
    os.kill(os.getpid(), signal.SIGKILL)


def fail(submit: Submit) -> Iterator[Message]:
    yield Failed(submit.request_id, "RequestError", "The engine refuses this request.")


def fault(submit: Submit) -> Iterator[Message]:
    yield Failed(submit.request_id, "InternalError", "The engine has a fault.")


def silent(submit: Submit) -> Iterator[Message]:
    while True:
        yield Loading("ignored by a server that is ready", 0, 0)


def bench(submit: Submit, config: dict[str, Any]) -> Iterator[Message]:
    """As an engine with this `BenchConfig` would: the same tokens for the same prompt, in cycles where it drafts."""
    num_prompt_tokens = len(submit.prompt_token_ids)
    token_ids = [(num_prompt_tokens + 7 * i) % NUM_BYTES for i in range(submit.max_tokens)]
    cycle = CYCLE
    if not drafts(config):
        cycle = msgspec.structs.replace(CYCLE, num_draft_tokens=0, num_accepted_tokens=0)
    size = TOKENS_PER_CYCLE if drafts(config) else 1
    prefill = CycleStats(verify_seconds=0.001, prefetch_bytes=16000, transfer_seconds=0.001)
    yield Prefill(submit.request_id, num_prompt_tokens, num_prompt_tokens, prefill)
    yield Tokens(submit.request_id, token_ids[:1], CycleStats())
    for start in range(1, len(token_ids), size):
        yield Tokens(submit.request_id, token_ids[start : start + size], cycle)
    if config["trace"]:
        yield Traced(submit.request_id, [TraceEvent("verify", "phase", 5.0, 0.002, {"num_tokens": 4})])
    yield Finished(submit.request_id, "length")


def drafts(config: dict[str, Any]) -> bool:
    return bool(config["draft"] != "none")


SCRIPTS: dict[int | None, Callable[[Submit], Iterator[Message]]] = {
    ECHO: echo,
    ENDLESS: endless,
    DIE: die,
    FAIL: fail,
    FAULT: fault,
    SILENT: silent,
}


class FakeEngine:
    def __init__(
        self, sock: socket.socket, log: Path | None, script: Callable[[Submit], Iterator[Message]] | None = None
    ) -> None:
        """`script` answers every request; without it, its seed says which one does."""
        self.sock = sock
        self.log = log
        self.script = script
        self.running: dict[str, Iterator[Message]] = {}
        self.shutting_down = False

    def send(self, message: Message) -> None:
        self.sock.sendall(encode(message))

    def receive(self) -> ToEngine | None:
        header = self.sock.recv(HEADER.size, socket.MSG_WAITALL)
        if len(header) < HEADER.size:
            return None
        payload = self.sock.recv(HEADER.unpack(header)[0], socket.MSG_WAITALL)
        message = decode_to_engine(payload)
        self.record(message)
        return message

    def record(self, entry: object) -> None:
        if self.log:
            with self.log.open("ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")

    def run(self) -> None:
        while self.running or not self.shutting_down:
            if select.select([self.sock], [], [], STEP_SECONDS if self.running else None)[0]:
                message = self.receive()
                if message is None:
                    return
                self.handle(message)
            elif self.running:
                self.step()

    def handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                script = self.script or SCRIPTS[message.sampling.seed]
                self.running[message.request_id] = script(message)
            case Abort():
                if self.running.pop(message.request_id, None):
                    self.send(Finished(message.request_id, "abort"))
            case Ping():
                self.send(Pong(message.nonce))
            case Shutdown():
                self.shutting_down = True
                for request_id in self.running:
                    self.send(Finished(request_id, "abort"))
                self.running.clear()

    def step(self) -> None:
        request_id, script = next(iter(self.running.items()))
        message = next(script)
        if isinstance(message, Finished | Failed):
            del self.running[request_id]
        self.send(message)


def model_plan(shortage_bytes: int = 0) -> ModelPlan:
    return ModelPlan(
        model="demo",
        drafter="quantized",
        device="CPU (2 threads)",
        memory=[
            MemoryRow("dense weights", "device", 1_000_000),
            MemoryRow("expert slots", "device", 5_000, "5, for 31% of the experts"),
            MemoryRow("experts", "host", 6_000),
            MemoryRow("experts", "disk", 16_000, "all of them, in the pack"),
        ],
        budget_bytes={"device": 2_000_000, "host": 7_000},
        shortages={"device": shortage_bytes} if shortage_bytes else {},
        remedies=["--device-memory 3GB", "--draft none"] if shortage_bytes else [],
        num_experts=16,
        expert_bytes=1000,
        cold_token_bytes=4000,
        num_slots=5,
        num_host_experts=6,
        max_model_len=MAX_MODEL_LEN,
        kv_bytes_per_token=64,
        bandwidths={"disk": 1_300_000_000.0},
        forecasts=[Forecast(4, 5, 0.0, 13_000_000.0), Forecast(0, 7, 2_000_000.0, 26_000_000.0)],
        decisions=["Drafting with qint4 experts: the test says so."],
    )


def capabilities(drafter: DrafterName = "quantized") -> Capabilities:
    return Capabilities(
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS_TOKEN_ID],
        draft_length=4,
        token_compute_seconds=0.01,
        plan=msgspec.structs.replace(model_plan(), drafter=drafter),
        startup_seconds={"imports": 2.1, "dense weights": 0.01, "draft experts": 1.2},
    )


def start(engine: FakeEngine, options: argparse.Namespace) -> bool:
    """Whether there is something to serve."""
    if options.task in ("serve", "bench"):
        engine.send(Located(options.model_path))
    for done in range(1, 3):
        engine.send(Loading("reading weights", done * 1000, 4000, "bytes"))
    config = json.loads(options.config)
    match "fail" if is_chosen(options.fails, config) else options.startup:
        case "fail":
            engine.send(Failed(None, "InsufficientMemoryError", "The model needs 3 GB; pass --device-memory 3GB."))
            return False
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "garbage":
            engine.sock.sendall(HEADER.pack(3) + b"\xc1\xc1\xc1")
        case "wait":
            while not options.gate.exists():
                if select.select([engine.sock], [], [], STEP_SECONDS)[0]:
                    return False
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.pause()
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answers = {
        "serve": Ready(capabilities()),
        "bench": Ready(capabilities("quantized" if config["draft"] == "auto" else config["draft"])),
        "prepare": Prepared("/cache/demo"),
        "pack": Prepared("/cache/packs/demo"),
        "plan": Planned(model_plan(options.shortage_bytes)),
    }
    engine.send(answers[options.task])
    if options.task not in ("serve", "bench"):
        return False
    if options.startup == "stubborn":
        signal.pause()
    return True


def is_chosen(choice: str | None, config: dict[str, Any]) -> bool:
    """Whether the configuration has the setting of a choice such as "draft=ngram"."""
    name, _, value = (choice or "").partition("=")
    return name in config and str(config[name]) == value


def bench_script(options: argparse.Namespace) -> Callable[[Submit], Iterator[Message]]:
    config = json.loads(options.config)
    if is_chosen(options.dies, config):
        return die
    return silent if is_chosen(options.hangs, config) else lambda submit: bench(submit, config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--startup", default="echo")
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--model-path", default="/nowhere")
    parser.add_argument("--shortage-bytes", type=int, default=0)
    for choice in ("--fails", "--dies", "--hangs"):
        parser.add_argument(choice, metavar="SETTING=VALUE", help="which engines do so, in the start or a reply")
    parser.add_argument("fd", type=int)
    parser.add_argument("task")
    parser.add_argument("config")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=options.fd) as sock:
        engine = FakeEngine(sock, options.log, bench_script(options) if options.task == "bench" else None)
        engine.record(
            {"type": "Started", "pid": os.getpid(), "task": options.task, "config": json.loads(options.config)}
        )
        if start(engine, options):
            engine.run()


if __name__ == "__main__":
    main()
