import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OlmoeConfig, PhimoeConfig, PreTrainedConfig

from engine.description import _require_constant_rope, describe_model
from engine.errors import ConfigError, ModelNotFoundError, SpecterError, UnsupportedModelError
from engine.kernels.quantization import QuantizationSpec
from tests.engine.families import FAMILIES
from tests.engine.harness import load
from tests.engine.plans import describe, save_config, settings_of
from tests.engine.tiny import mixtral_config, save_checkpoint

LIMIT = 32
"""Tokens beyond which the longrope of these tests would take other frequencies."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 256 tokens at most."""
    return save_config(mixtral_config(), tmp_path_factory.mktemp("configurations") / "mixtral")


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = mixtral_config()
    config.sliding_window = 16
    return save_config(config, tmp_path_factory.mktemp("configurations") / "sliding")


def refused(error: type[SpecterError], path: Path, **settings: Any) -> str:
    with pytest.raises(error) as refusal:
        describe(path, **settings)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_on_a_cpu_auto_computes_in_float32(model: Path) -> None:
    choices = describe(model).choices
    assert choices.dtype is choices.kv_dtype is torch.float32
    assert choices.stored_kv_dtype is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_cuda_auto_computes_in_the_type_of_the_checkpoint(tmp_path: Path, dtype: torch.dtype) -> None:
    path = save_config(mixtral_config(), tmp_path, dtype)
    choices = describe(path, "cuda").choices
    assert choices.dtype is choices.kv_dtype is dtype
    assert describe(path, "cuda", dtype="float32").choices.dtype is torch.float32


def test_a_pack_is_described_as_its_checkpoint(mixtral: Path, model_cache: Path) -> None:
    pack = load(mixtral, model_cache)[0].pack
    of_checkpoint, of_pack = describe(mixtral, dtype="bfloat16"), describe(pack.directory, dtype="bfloat16")
    assert of_pack.skeleton.dtype is of_checkpoint.skeleton.dtype is torch.float32
    assert of_pack.choices == of_checkpoint.choices
    assert of_pack.sizes.layout == of_checkpoint.sizes.layout == pack.layout
    assert of_pack.sizes.needs(of_pack.choices) == of_checkpoint.sizes.needs(of_checkpoint.choices)


def test_a_pack_knows_the_type_that_its_configuration_does_not_name(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(mixtral_config(), tmp_path / "checkpoint", dtype=torch.bfloat16)
    config = json.loads((checkpoint / "config.json").read_text())
    del config["dtype"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    pack = load(checkpoint, tmp_path / "cache", draft="none")[0].pack
    assert describe(checkpoint).skeleton.dtype is describe(pack.directory).skeleton.dtype is torch.bfloat16


def test_the_context_is_the_model_s_own_or_shorter(model: Path) -> None:
    assert describe(model).choices.max_model_len == 256
    assert describe(model, max_model_len=256).choices.max_model_len == 256
    assert describe(model, max_model_len=1).choices.max_model_len == 1
    message = refused(ConfigError, model, max_model_len=257)
    assert message == "max_model_len is 257, but the model's maximum is 256; lower it."


def test_a_draft_is_as_set(model: Path) -> None:
    choices = describe(model).choices
    assert choices.draft == QuantizationSpec("qint4", 32)
    assert choices.draft_length == 4
    assert describe(model, draft_weights="qint8").choices.draft == QuantizationSpec("qint8", 32)


@pytest.mark.parametrize("settings", [{"draft": "none"}, {"draft_length": 0}])
def test_drafting_no_tokens_needs_no_draft(model: Path, settings: dict[str, Any]) -> None:
    choices = describe(model, **settings).choices
    assert choices.draft is None
    assert choices.draft_length == 0


def test_a_group_size_that_does_not_fit_is_refused_with_one_that_does(model: Path) -> None:
    message = refused(ConfigError, model, draft_group_size=48)
    assert "draft_group_size 48 does not divide" in message
    assert "such as 64" in message
    assert describe(model, draft_group_size=48, draft="none").choices.draft is None
    assert describe(model, draft_group_size=48, draft_weights="qint8").choices.draft is not None


def test_a_kv_cache_of_another_type_than_compute_is_converted(model: Path) -> None:
    converted = describe(model, kv_dtype="bfloat16")
    assert converted.choices.stored_kv_dtype is torch.bfloat16
    needs, plain = converted.sizes.needs(converted.choices), converted.sizes.needs(describe(model).choices)
    assert 2 * needs.kv_cache == plain.kv_cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_kv_cache_of_the_type_of_compute_is_no_conversion(model: Path, sliding: Path, dtype: str) -> None:
    for path in (model, sliding):
        named, auto = describe(path, dtype=dtype, kv_dtype=dtype), describe(path, dtype=dtype)
        assert named.choices == auto.choices
        assert named.choices.stored_kv_dtype is None
        assert named.sizes.needs(named.choices) == auto.sizes.needs(auto.choices)


def test_a_sliding_window_is_not_converted(sliding: Path) -> None:
    message = refused(ConfigError, sliding, kv_dtype="bfloat16")
    assert message.startswith("kv_dtype is bfloat16, but mixtral keeps context in DynamicSlidingWindowLayer")
    assert "leave --kv-dtype at auto" in message


def longrope(config: PreTrainedConfig, **parameters: object) -> PreTrainedConfig:
    factors = config.hidden_size // config.num_attention_heads // 2
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors * [1.0],
        "long_factor": factors * [2.0],
        "original_max_position_embeddings": LIMIT,
        **parameters,
    }
    return config


def olmoe_config() -> PreTrainedConfig:
    """64 tokens at most."""
    config = FAMILIES["olmoe"]()
    assert isinstance(config, OlmoeConfig)
    config.num_hidden_layers = 1
    return config


def phimoe_config() -> PreTrainedConfig:
    """64 tokens at most. Its frequencies never change, only this scale may."""
    config = FAMILIES["phimoe"]()
    assert isinstance(config, PhimoeConfig)
    return config


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(longrope(olmoe_config()), id="other frequencies"),
        pytest.param(longrope(phimoe_config(), short_mscale=1.0, long_mscale=1.2), id="another scale"),
    ],
)
def test_longrope_is_served_up_to_where_it_changes(tmp_path: Path, config: PreTrainedConfig) -> None:
    path = save_config(config, tmp_path)
    assert describe(path, max_model_len=LIMIT).choices.max_model_len == LIMIT
    expected = (
        f"{config.model_type} changes its rotary embedding beyond 32 tokens (longrope), which cannot be served yet; "
        "pass --max-model-len 32 or less (it is "
    )
    assert refused(UnsupportedModelError, path, max_model_len=LIMIT + 1) == f"{expected}33)."
    assert refused(UnsupportedModelError, path) == f"{expected}64)."


def test_longrope_that_never_changes_is_served(tmp_path: Path) -> None:
    path = save_config(longrope(phimoe_config(), short_mscale=1.2, long_mscale=1.2), tmp_path)
    assert describe(path).choices.max_model_len == 64


def test_longrope_is_found_where_rope_differs_by_layer() -> None:
    config = mixtral_config()
    by_layer = longrope(mixtral_config()).rope_parameters
    config.rope_parameters = {"sliding_attention": {"rope_type": "default"}, "full_attention": by_layer}
    _require_constant_rope(config, LIMIT)
    with pytest.raises(UnsupportedModelError, match="beyond 32 tokens"):
        _require_constant_rope(config, LIMIT + 1)


def test_a_directory_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    assert "has no config.json" in refused(ModelNotFoundError, tmp_path)


def test_a_quantized_release_is_refused_by_its_method(tmp_path: Path) -> None:
    config = mixtral_config()
    config.quantization_config = {"quant_method": "mxfp4"}
    message = refused(UnsupportedModelError, save_config(config, tmp_path))
    assert "a quantized release (mxfp4)" in message


def test_nothing_but_the_configuration_is_read(model: Path) -> None:
    assert [path.name for path in model.iterdir()] == ["config.json"]
    described = describe_model(settings_of(model), model, torch.device("cuda"))
    assert described.path == model
    assert described.sizes.num_experts == 18
