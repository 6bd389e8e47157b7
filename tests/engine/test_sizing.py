"""The sizes that are planned by, against what is really packed and loaded: equal to the byte."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from engine.config import DraftWeights
from engine.description import ModelDescription
from engine.dtypes import dtype_name
from engine.loading import LoadedModel
from engine.model.kv_cache import BufferedLayer, KvCache
from tests.engine.families import FAMILIES
from tests.engine.harness import load
from tests.engine.plans import describe, save_config
from tests.engine.tiny import mixtral_config, random_prompt, save_checkpoint

NAMES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Packing collects garbage layer by layer; to look through all of transformers each time takes most of the time."""
    gc.freeze()
    yield
    gc.unfreeze()


class Checkpoint(NamedTuple):
    path: Path
    cache: Path
    dtype: torch.dtype

    def load(self, **settings: object) -> LoadedModel:
        return load(self.path, self.cache, **settings)[0]


@pytest.fixture(scope="module", params=[(name, dtype) for name in NAMES for dtype in DTYPES], ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    name, dtype = request.param
    config = FAMILIES[name]()
    config.dtype = dtype
    directory = tmp_path_factory.mktemp(name)
    return Checkpoint(save_checkpoint(config, directory / "checkpoint", dtype=dtype), directory / "cache", dtype)


def needs_of(model: ModelDescription) -> dict[str, int]:
    return model.sizes.needs(model.choices)._asdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_dense_weights_and_conversion_buffers(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    loaded = checkpoint.load(dtype=dtype_name(dtype), draft="none")
    model = loaded.description
    assert model.skeleton.dtype is checkpoint.dtype
    assert needs_of(model)["dense"] == loaded.model.num_bytes
    loaded_parameters = [weight for weight in loaded.model._model.parameters() if not weight.is_meta]
    assert model.skeleton.num_dense_parameters == sum(weight.numel() for weight in loaded_parameters)
    buffer_bytes = sum(buffer.nbytes for buffer in loaded.codec._buffers.values())
    assert loaded.codec.buffer_bytes(model.sizes.layout, dtype) == buffer_bytes
    assert (buffer_bytes > 0) == (dtype is not checkpoint.dtype)
    assert needs_of(model)["workspace"] > buffer_bytes


@pytest.mark.parametrize("weights", get_args(DraftWeights))
def test_packs_and_drafts(checkpoint: Checkpoint, weights: DraftWeights) -> None:
    loaded = checkpoint.load(draft_weights=weights)
    model, spec = loaded.description, loaded.description.choices.draft
    assert spec is not None
    assert loaded.draft is not None
    assert model.sizes.layout == loaded.pack.layout
    assert needs_of(model)["draft"] == loaded.draft.num_bytes
    records_bytes = loaded.pack.records_path.stat().st_size
    dense_bytes = sum(map(content_bytes, loaded.pack.directory.glob("dense-*.safetensors")))
    draft_bytes = sum(map(content_bytes, (loaded.pack.directory / f"draft-{spec}").glob("*.safetensors")))
    assert model.sizes.draft_file_bytes(spec) == draft_bytes
    assert model.sizes.pack_bytes(None) == dense_bytes + records_bytes
    assert model.sizes.pack_bytes(spec) == dense_bytes + records_bytes + draft_bytes


def content_bytes(file: Path) -> int:
    """What the tensors of a file take, without its header."""
    with safe_open(file, "pt") as tensors:
        return sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118 - it is no dict


def test_tied_weights_count_once(tmp_path: Path) -> None:
    sizes = {}
    for is_tied in (False, True):
        config = mixtral_config(is_tied=is_tied)
        path = save_checkpoint(config, tmp_path / f"tied-{is_tied}", dtype=torch.bfloat16)
        loaded = load(path, tmp_path / "cache", draft="none")[0]
        sizes[is_tied] = needs_of(loaded.description)["dense"]
        assert sizes[is_tied] == loaded.model.num_bytes
    assert sizes[False] - sizes[True] == config.vocab_size * config.hidden_size * 4


CHUNK_TOKENS = 5
WINDOW = 8
NUM_TOKENS = 20


def sliding_config() -> PreTrainedConfig:
    """Windows in one of two layers."""
    config = FAMILIES["gpt_oss"]()
    config.num_hidden_layers = 2
    config.layer_types = ["sliding_attention", "full_attention"]
    config.sliding_window = WINDOW
    return config


def head_elements(config: PreTrainedConfig) -> int:
    """Keys and values of a token in one layer."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_key_value_heads * head_dim)


def latent_elements(config: PreTrainedConfig) -> int:
    """The latent and the rotary keys that stand for all heads of a token in one layer."""
    return int(config.kv_lora_rank + config.qk_rope_head_dim)


def cache_of(name: str) -> tuple[PreTrainedConfig, int]:
    """A configuration and the elements of its full cache."""
    config = sliding_config() if name == "sliding" else FAMILIES[name]()
    if name == "sliding":
        # In the window: what the next token sees besides itself, and a pass.
        return config, (NUM_TOKENS + WINDOW - 1 + CHUNK_TOKENS) * head_elements(config)
    elements = latent_elements(config) if name.startswith("deepseek") else head_elements(config)
    return config, config.num_hidden_layers * NUM_TOKENS * elements


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [(name, "auto") for name in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "sliding")]
    + [(name, "bfloat16") for name in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")],
)
def test_the_kv_cache(name: str, kv_dtype: str, tmp_path: Path) -> None:
    config, elements = cache_of(name)
    path = save_checkpoint(config, tmp_path / "checkpoint", dtype=torch.bfloat16)
    settings = {"kv_dtype": kv_dtype, "max_model_len": NUM_TOKENS, "prefill_chunk_tokens": CHUNK_TOKENS}
    loaded = load(path, tmp_path / "cache", draft_length=CHUNK_TOKENS - 1, **settings)[0]
    itemsize = 4 if kv_dtype == "auto" else 2
    assert needs_of(loaded.description)["kv_cache"] == elements * itemsize
    cache = loaded.model.new_cache(NUM_TOKENS)
    held = []
    for start in range(0, NUM_TOKENS, CHUNK_TOKENS):
        forward(loaded, random_prompt(start, CHUNK_TOKENS), cache)
        held.append(cache.num_bytes)
        cache.drop(0)
    assert max(held) == elements * itemsize
    # What the buffers take when the context is full is no more than that.
    buffers = [
        buffer
        for layer in cache.transformers_cache.layers
        if isinstance(layer, BufferedLayer)
        for buffer in (layer._key_buffer, layer._value_buffer)
    ]
    assert {buffer.shape[-2] for buffer in buffers if buffer is not None} == {NUM_TOKENS}


def forward(loaded: LoadedModel, token_ids: list[int], cache: KvCache) -> None:
    assert loaded.draft is not None
    loaded.model.forward(token_ids, cache, loaded.draft)
    loaded.draft.take_routes()


def test_a_window_holds_the_tokens_of_the_longest_pass_too(tmp_path: Path) -> None:
    config = sliding_config()
    path = save_config(config, tmp_path)

    def kv_bytes(chunk: int, draft_length: int) -> int:
        settings = {"prefill_chunk_tokens": chunk, "draft_length": draft_length, "max_model_len": 64}
        return needs_of(describe(path, "cpu", **settings))["kv_cache"]

    assert kv_bytes(1, 4) == kv_bytes(5, 4) == kv_bytes(5, 0)
    assert kv_bytes(6, 4) - kv_bytes(5, 4) == 4 * head_elements(config)


def test_the_workspace_grows_with_what_a_pass_takes(tmp_path: Path) -> None:
    config = mixtral_config()
    path = save_config(config, tmp_path)

    def workspace(**settings: object) -> int:
        defaults: dict[str, object] = {"prefill_chunk_tokens": 8, "max_model_len": 128}
        return needs_of(describe(path, "cpu", **defaults | settings))["workspace"]

    usual = workspace()
    # Besides the states, the outputs of the routed experts.
    per_row = (1 + config.num_experts_per_tok) * config.hidden_size
    assert workspace(prefill_chunk_tokens=9) - usual > per_row * 4
    # Half a layer's KV while it grows, and at least the keys and values that are repeated for all heads.
    assert workspace(max_model_len=256) - usual > 128 * head_elements(config) * (2 + 4)
    assert workspace(draft_length=5) - usual == 4 * config.vocab_size * 4  # a row of logits, and what becomes of it
    # Half a layer's KV in two bytes instead of four, and a layer that is converted while it is used.
    assert workspace(kv_dtype="bfloat16") - usual == 128 * head_elements(config) * (4 - 1)
    # A draft that is longer than a chunk is verified in a longer pass.
    assert workspace(draft_length=8) - workspace(draft_length=7) > per_row * 4 + 4 * config.vocab_size * 4
