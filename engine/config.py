"""What the engine can be told. The server's settings extend this tree; nothing here reads the environment."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

DEMO_MODEL = "demo"

DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Budget = ByteSize | Literal["auto"]
DrafterName = Literal["auto", "quantized", "ngram", "none"]
DraftWeights = Literal["qint2", "qint4", "qint8", "qfloat8"]
CachePolicyName = Literal["lookahead", "lru"]

MAX_DRAFT_LENGTH = 32
MAX_AUTO_DRAFT_LENGTH = 16


class EngineConfig(BaseModel):
    """Settings of the engine process. Sizes take units (`900MB`, `1.5GiB`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        DEMO_MODEL, description="A directory in Hugging Face format, a hub id, or 'demo' for the built-in demo model."
    )
    cache: Path = Field(
        Path("~/.cache/specter"), description="Directory for the demo model, downloads and packed models."
    )
    device: DeviceName = Field("auto", description="Where to compute; auto takes CUDA where there is one.")
    dtype: DtypeName = Field(
        "auto", description="Type to compute in; auto takes the checkpoint's on CUDA, and float32 on a CPU."
    )
    device_memory: Budget | None = Field(
        None,
        description="Budget for dense weights, draft, KV cache and expert slots, or auto: what is free less a margin, "
        "which is the default but for the demo model; that one gets room for a quarter of its experts.",
    )
    host_memory: Budget = Field(
        "auto",
        description="Budget for full-precision experts in RAM; the others are read from disk. auto: as many as fit "
        "what is free less a margin, and none on a CPU, whose device memory is RAM already.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest prompt plus output, in tokens; by default the model's own maximum."
    )
    kv_dtype: DtypeName = Field("auto", description="Type of the KV cache; auto takes the one computed in.")
    draft: DrafterName = Field(
        "auto",
        description="What proposes tokens: a quantized copy of the experts, n-grams of the text so far, or nothing; "
        "auto takes what is predicted to be fastest here.",
    )
    draft_length: Annotated[int, Field(ge=0, le=MAX_DRAFT_LENGTH)] | Literal["auto"] = Field(
        "auto", description="Tokens to draft per cycle; auto decides in each cycle, by what is expected to be fastest."
    )
    max_cycle_seconds: float = Field(
        10.0,
        gt=0,
        allow_inf_nan=False,
        description="Time that a cycle with a draft of automatic length is expected to take at most, so that tokens do "
        "not come in rare bursts.",
    )
    draft_weights: DraftWeights | Literal["auto"] = Field(
        "auto",
        description="Quanto type of the quantized draft's experts; auto: qint4, or qint8 where an automatic drafter is "
        "predicted to be faster with it.",
    )
    draft_group_size: int = Field(
        64, ge=1, description="Weights that share one scale in qint2 and qint4; the 8-bit types have one per row."
    )
    cache_policy: CachePolicyName = Field(
        "lookahead",
        description="What leaves the expert cache first: what no plan needs and was used least of late (lookahead), or "
        "what its layer has not used for longest (lru).",
    )
    prefill_chunk_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Prompt tokens per prefill step; auto: as many as memory allows, since each step moves most "
        "experts again. An abort waits for one step.",
    )


class PackConfig(EngineConfig):
    """What the task "pack" is told."""

    out: Path | None = Field(
        None, description="Directory for the packed model, which can then be served by itself; by default the cache's."
    )


class BenchConfig(EngineConfig):
    """What the task "bench" is told: settings for comparisons, which nobody would serve with."""

    prefetch: bool = Field(
        True, description="Whether experts are moved before they are asked for where no draft plans that."
    )
    max_slots: int | None = Field(None, ge=1, description="Slots for experts at most; by default as many as fit.")
    link_bandwidth: int | None = Field(
        None, ge=1, description="Bytes per second that experts are moved at, at most; by default as fast as they go."
    )
    trace: bool = Field(False, description="Whether each request's `TraceEvent`s are sent.")
