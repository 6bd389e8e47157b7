from pathlib import Path

import pytest

from engine.model.probe import NUM_PROBE_TOKENS, ModelProbe, probe_model
from tests.engine.harness import load
from tests.engine.tiny import mixtral_config, save_checkpoint

BYTES_PER_LAYER = 2 * 2 * 16  # key and value, heads, head size


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_mixtral(mixtral: Path, model_cache: Path, dtype: str, itemsize: int) -> None:
    model = load(mixtral, model_cache, dtype=dtype)[0].model
    assert probe_model(model) == ModelProbe(kv_bytes_per_token=3 * BYTES_PER_LAYER * itemsize, top_k=2)


def test_dense_layers_have_keys_and_values_too(qwen3_moe: Path, model_cache: Path) -> None:
    model = load(qwen3_moe, model_cache)[0].model
    assert probe_model(model) == ModelProbe(kv_bytes_per_token=4 * BYTES_PER_LAYER * 4, top_k=3)


def test_a_sliding_window_does_not_hide_what_a_token_takes(tmp_path: Path) -> None:
    config = mixtral_config()
    config.sliding_window = NUM_PROBE_TOKENS // 2
    model = load(save_checkpoint(config, tmp_path / "sliding"), tmp_path / "cache")[0].model
    assert probe_model(model).kv_bytes_per_token == 3 * BYTES_PER_LAYER * 4


def test_probing_leaves_the_model_as_it_was(mixtral: Path, model_cache: Path) -> None:
    model = load(mixtral, model_cache)[0].model
    before = model.num_bytes
    assert probe_model(model) == probe_model(model)
    assert model.num_bytes == before
