"""What the engine can be told. The server's settings extend this tree; nothing here reads the environment."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

DEMO_MODEL = "demo"

DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Budget = ByteSize | Literal["auto"]
DraftWeights = Literal["qint2", "qint4", "qint8", "qfloat8"]


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
    draft: bool = Field(True, description="Draft with quantized experts; off: plain decoding with the same cache.")
    draft_length: int = Field(4, ge=0, le=32, description="Tokens to draft per cycle.")
    draft_weights: DraftWeights = Field("qint4", description="Quanto type of the draft's experts.")
    draft_group_size: int = Field(
        64, ge=1, description="Weights that share one scale in qint2 and qint4; the 8-bit types have one per row."
    )
    prefill_chunk_tokens: int = Field(512, ge=1, description="Prompt tokens per prefill step; an abort waits for one.")


class PackConfig(EngineConfig):
    """What the task "pack" is told."""

    out: Path | None = Field(
        None, description="Directory for the packed model, which can then be served by itself; by default the cache's."
    )
