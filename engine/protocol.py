"""The boundary between the server process and the engine process.

One inherited socket pair carries length-prefixed msgpack messages both ways: four bytes, big-endian, then that many
bytes of payload. End-of-file on either side is the notice that the other process is gone. Within one direction,
messages arrive in the order in which they were sent; for one request the engine sends

    Prefill*  Tokens*  Traced?  (Finished | Failed)

and nothing after it. An `Abort` for a request that is unknown or already over does nothing.

The engine process is started as `python -m engine.process FD TASK CONFIG`: the number of the inherited socket, a
`Task`, and an `EngineConfig` (for "pack" a `PackConfig`, for "bench" a `BenchConfig`) as JSON. It sends `Loading` any
number of times, and in the end the task's answer, or `Failed` without a request id:

    serve    Located as soon as the model's directory is known; Ready; and then serves until `Shutdown`
    bench    as "serve", with what only a comparison needs
    prepare  Prepared: the model has been fetched or built
    pack     Prepared: the model has been packed, with its draft
    plan     Planned: where everything would go, told without loading weights
"""

import struct
from collections.abc import Callable
from typing import Literal

import msgspec

from engine.config import DrafterName

HEADER = struct.Struct(">I")
MAX_MESSAGE_BYTES = 256 * 1024 * 1024

Task = Literal["serve", "bench", "prepare", "pack", "plan"]
FinishReason = Literal["stop", "length", "abort"]
Tier = Literal["device", "host", "disk"]
Track = Literal["cycle", "phase", "layer", "wait", "transfer"]
"""What lies side by side in a timeline; within one track (but "transfer") events do not overlap, or are nested."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that crosses the boundary."""


class SamplingParams(msgspec.Struct, frozen=True):
    """How the next token is chosen from the target's logits; `temperature == 0` is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None


# server -> engine


class Submit(Message, frozen=True):
    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    ignore_eos: bool = False


class Abort(Message, frozen=True):
    request_id: str


class Ping(Message, frozen=True):
    nonce: int


class Shutdown(Message, frozen=True):
    """End after the current step; running and queued requests finish with reason "abort"."""


ToEngine = Submit | Abort | Ping | Shutdown


# engine -> server


class MemoryRow(msgspec.Struct, frozen=True):
    """One line of the memory table: what lies in which tier."""

    part: str
    tier: Tier
    num_bytes: int
    note: str = ""


class Forecast(msgspec.Struct, frozen=True):
    """Expert bytes that an output token is expected to move (see `engine.forecast` for what is assumed)."""

    draft_length: int
    """0: plain decoding, with the draft's memory given to slots."""
    num_slots: int
    host_bytes_per_token: float
    """From host memory to the device."""
    disk_bytes_per_token: float
    """From disk; on a GPU these cross the link from host memory too."""

    def floor_seconds(self, bandwidths: "dict[Tier, float]") -> float | None:
        """Time per output token below which the links cannot go; `bandwidths` in bytes per second out of each tier.

        None where the bandwidth of a tier that is read from is not known.
        """
        needed: dict[Tier, float] = {"host": self.host_bytes_per_token, "disk": self.disk_bytes_per_token}
        if any(num_bytes and not bandwidths.get(tier) for tier, num_bytes in needed.items()):
            return None
        # The tiers are read side by side.
        return max((num_bytes / bandwidths[tier] for tier, num_bytes in needed.items() if num_bytes), default=0.0)


class ModelPlan(msgspec.Struct, frozen=True):
    """Where every part of a model goes, in bytes, and what that costs; the same before the load and after it."""

    model: str
    drafter: DrafterName
    """Never "auto"."""
    device: str
    """For people, such as "CPU (2 threads)"."""
    memory: list[MemoryRow]
    budget_bytes: dict[Tier, int]
    """What may be used of a tier; tiers without a budget are absent."""
    shortages: dict[Tier, int]
    """Bytes by which a tier is too small; empty where the model fits."""
    remedies: list[str]
    """Settings each of which would make the model fit; empty where it does."""
    num_experts: int
    expert_bytes: int
    cold_token_bytes: int
    """Expert bytes that one token visits."""
    num_slots: int
    num_host_experts: int
    """Experts that are read from host memory; the others are read from disk."""
    max_model_len: int
    kv_bytes_per_token: int
    bandwidths: dict[Tier, float]
    """Measured, bytes per second out of a tier; absent where there was nothing to measure."""
    forecasts: list[Forecast]
    decisions: list[str]
    """What was decided and why, one sentence each."""

    @property
    def num_disk_experts(self) -> int:
        """Experts that are read from disk."""
        return self.num_experts - self.num_host_experts

    @property
    def fits(self) -> bool:
        return not self.shortages

    def tier_bytes(self, tier: Tier) -> int:
        return sum(row.num_bytes for row in self.memory if row.tier == tier)


class Capabilities(msgspec.Struct, frozen=True):
    """What the loaded model and engine can do; fixed for the life of the engine."""

    vocab_size: int
    eos_token_ids: list[int]
    draft_length: int
    """Tokens drafted per cycle at most."""
    token_compute_seconds: float
    """Of one token with all its experts resident, measured at the start."""
    plan: ModelPlan
    startup_seconds: dict[str, float]
    """How long each stage of the start took, in order."""

    @property
    def drafter(self) -> DrafterName:
        return self.plan.drafter


class Estimates(msgspec.Struct, frozen=True):
    """What the governor of the draft length expects, and decided by; about one cycle."""

    acceptance_rate: float
    """Probability that the next drafted token would have been accepted, were the ones before it."""
    draft_seconds: float
    """Of one drafted token."""
    verify_seconds: float
    """Of the pass over the tokens that were drafted, without waiting."""
    transfer_bytes: float
    """That the cycle moves."""
    bandwidth: float
    """Of the link, bytes per second."""
    num_tokens: float
    """That the cycle yields."""
    cycle_seconds: float


class TraceEvent(msgspec.Struct, frozen=True):
    """What the engine did from one moment to another."""

    name: str
    track: Track
    start_seconds: float
    """By the system's monotonic clock."""
    seconds: float
    arguments: dict[str, int | float | str | list[list[int]]]


class CycleStats(msgspec.Struct, frozen=True):
    """Raw counters of one cycle (or, summed, of one request); seconds are wall-clock time of the step loop."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafted tokens that the target agreed with; the recovered or bonus token is not counted."""
    draft_seconds: float = 0.0
    plan_seconds: float = 0.0
    transfer_wait_seconds: float = 0.0
    """Part of the verify pass (or prefill) that was spent waiting for experts."""
    verify_seconds: float = 0.0
    """Time of the verify pass without `transfer_wait_seconds`."""
    num_expert_hits: int = 0
    num_expert_misses: int = 0
    num_evictions: int = 0
    num_prefetches_used: int = 0
    num_prefetches_wasted: int = 0
    num_demand_fetches: int = 0
    prefetch_bytes: int = 0
    demand_bytes: int = 0
    transfer_seconds: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """Of prefetches and demand fetches together."""
        return self.prefetch_bytes + self.demand_bytes

    def __add__(self, other: "CycleStats") -> "CycleStats":
        return CycleStats(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def __sub__(self, other: "CycleStats") -> "CycleStats":
        return CycleStats(*(getattr(self, name) - getattr(other, name) for name in self.__struct_fields__))


class Loading(Message, frozen=True):
    """Progress of start-up; `total == 0` means that the end is not known."""

    stage: str
    done: int
    total: int
    unit: Literal["bytes", "items"] = "items"


class Located(Message, frozen=True):
    """Where the model's tokenizer and configuration are; sent before any long work on its weights."""

    model_path: str


class Ready(Message, frozen=True):
    capabilities: Capabilities


class Prepared(Message, frozen=True):
    """Answer to the tasks "prepare" and "pack"; the process is about to end."""

    model_path: str
    """The directory of the model, or of its pack."""


class Planned(Message, frozen=True):
    """Answer to the task "plan"; the process is about to end."""

    plan: ModelPlan


class Prefill(Message, frozen=True):
    request_id: str
    done: int
    total: int
    cycle: CycleStats = CycleStats()


class Tokens(Message, frozen=True):
    """Newly decided tokens, in order; an end-of-sequence token that stopped the request is the last of them."""

    request_id: str
    token_ids: list[int]
    cycle: CycleStats
    estimates: Estimates | None = None
    """Absent where nothing was decided: after prefill, and with a draft of fixed length."""


class Traced(Message, frozen=True):
    """All events of a request, where the task "bench" asks for them."""

    request_id: str
    events: list[TraceEvent]


class Finished(Message, frozen=True):
    request_id: str
    reason: FinishReason


class Failed(Message, frozen=True):
    """`request_id is None`: start-up failed, or the engine cannot go on and is about to exit."""

    request_id: str | None
    kind: str
    """Name of the class in `engine.errors`, or "InternalError"."""
    message: str


class Pong(Message, frozen=True):
    nonce: int


OnProgress = Callable[[Loading], None]
"""Whoever does long work reports it through one of these."""

ToServer = Loading | Located | Ready | Prepared | Planned | Prefill | Tokens | Traced | Finished | Failed | Pong

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_server = msgspec.msgpack.Decoder(ToServer)


def encode(message: Message) -> bytes:
    """The message with its length prefix, ready to be written."""
    payload = _encoder.encode(message)
    return HEADER.pack(len(payload)) + payload


def decode_to_engine(payload: bytes) -> ToEngine:
    """Raises `msgspec.DecodeError` where the payload is not a message for the engine."""
    return _to_engine.decode(payload)


def decode_to_server(payload: bytes) -> ToServer:
    """Raises `msgspec.DecodeError` where the payload is not a message for the server."""
    return _to_server.decode(payload)
