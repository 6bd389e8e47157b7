import json
import shutil
from pathlib import Path

import pytest
import torch

from engine.device import CpuDevice, Device
from engine.errors import ConfigError, PackError, UnsupportedModelError
from engine.kernels.quantized_linear import DequantizingLinear, Int4Linear, Int8Linear
from engine.loading import LoadedModel, load_model, prepare_model
from engine.model.checkpoint import expert_parameters, experts_modules, load_whole
from engine.protocol import Loading
from tests.engine.harness import ignore_progress, load
from tests.engine.tiny import EOS_TOKEN_ID, VOCAB_SIZE, mixtral_config, save_checkpoint


@pytest.fixture
def own_mixtral(tmp_path: Path) -> Path:
    """A checkpoint that the test may change."""
    return save_checkpoint(mixtral_config(num_layers=1), tmp_path / "mixtral", dtype=torch.bfloat16)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def change_json(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in (content | changes).items() if value is not None}))


def test_what_the_configuration_says_is_known(mixtral: Path, model_cache: Path) -> None:
    loaded, _ = load(mixtral, model_cache)
    assert loaded.path == mixtral
    assert loaded.max_model_len == 256
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.eos_token_ids == {EOS_TOKEN_ID}


@pytest.mark.parametrize(("generation", "config", "expected"), [
    ({"eos_token_id": [5, 6]}, {}, {5, 6}),
    ({"eos_token_id": 5}, {}, {5}),
    ({"eos_token_id": None}, {"eos_token_id": 7}, {7}),
    (None, {"eos_token_id": 7}, {7}),
    (None, {"eos_token_id": [7, 8]}, {7, 8}),
    (None, {"eos_token_id": []}, set()),
])  # fmt: skip
def test_end_of_sequence_tokens_are_those_of_generation_or_else_of_the_model(
    generation: dict[str, object] | None, config: dict[str, object], expected: set[int], own_mixtral: Path, cache: Path
) -> None:
    if generation is None:
        (own_mixtral / "generation_config.json").unlink()
    else:
        change_json(own_mixtral / "generation_config.json", **generation)
    change_json(own_mixtral / "config.json", **config)
    assert load(own_mixtral, cache)[0].eos_token_ids == expected


def test_the_context_can_be_shortened_but_not_lengthened(mixtral: Path, model_cache: Path) -> None:
    assert load(mixtral, model_cache, max_model_len=256)[0].max_model_len == 256
    assert load(mixtral, model_cache, max_model_len=64)[0].max_model_len == 64
    with pytest.raises(ConfigError, match="max_model_len is 257, but the model's maximum is 256; lower it"):
        load(mixtral, model_cache, max_model_len=257)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}


def test_a_rotary_embedding_that_changes_within_the_context_is_refused(own_mixtral: Path, cache: Path) -> None:
    change_json(own_mixtral / "config.json", head_dim=16, rope_parameters=LONGROPE)
    with pytest.raises(UnsupportedModelError, match=r"beyond 32 tokens .* --max-model-len 32 or less \(it is 256\)"):
        load(own_mixtral, cache)
    assert not cache.exists()
    assert load(own_mixtral, cache, max_model_len=32)[0].max_model_len == 32


class OtherDevice(CpuDevice):
    """Computes like a CPU, but is not one."""

    kind = "cuda"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        (CpuDevice(), "auto", torch.float32),
        (CpuDevice(), "bfloat16", torch.bfloat16),
        (OtherDevice(), "auto", torch.bfloat16),
        (OtherDevice(), "float32", torch.float32),
    ],
)
@pytest.mark.parametrize("config_names_dtype", [True, False])
def test_the_type_to_compute_in(
    device: Device, dtype: str, expected: torch.dtype, config_names_dtype: bool, own_mixtral: Path, cache: Path
) -> None:
    if not config_names_dtype:
        change_json(own_mixtral / "config.json", dtype=None)
    _, config = load(own_mixtral, cache, dtype=dtype)
    loaded = load_model(config, device, ignore_progress)
    assert loaded.dtype is expected
    assert {parameter.dtype for parameter in loaded.model._model.parameters() if not parameter.is_meta} == {expected}
    assert str(expected).removeprefix("torch.") in loaded.decisions[0]
    record = torch.zeros(loaded.pack.layout.expert_bytes, dtype=torch.uint8)
    assert {weight.dtype for weight in loaded.codec.decode(0, record).values()} == {expected}


def test_slots_hold_the_checkpoints_own_type(own_mixtral: Path, cache: Path) -> None:
    loaded, _ = load(own_mixtral, cache)
    assert {tensor.dtype for layer in loaded.pack.layout.layers for tensor in layer.tensors} == {"bfloat16"}


@pytest.mark.parametrize(
    ("weights", "group_size", "kernel"),
    [
        ("qint4", 32, Int4Linear),
        ("qint4", 16, DequantizingLinear),
        ("qint8", 32, Int8Linear),
        ("qint2", 32, DequantizingLinear),
        ("qfloat8", 32, DequantizingLinear),
    ],
)
def test_every_matrix_of_the_draft_is_quantized(
    weights: str, group_size: int, kernel: type, mixtral: Path, model_cache: Path
) -> None:
    loaded, _ = load(mixtral, model_cache, draft_weights=weights, draft_group_size=group_size)
    assert loaded.draft is not None
    assert len(loaded.draft.layers) == 3
    for layer in loaded.draft.layers:
        assert set(layer.projections) == {"gate_up_proj", "down_proj"}
        assert layer.biases == {}
        assert all(isinstance(projection, kernel) for projection in layer.projections.values())
    assert ("no fast kernel" in loaded.decisions[-1]) == (kernel is DequantizingLinear)
    assert loaded.draft.num_bytes > 0


def quantized_share(loaded: LoadedModel) -> float:
    """By transformers' own parameters."""
    model = load_whole(loaded.path)
    num_experts = sum(
        parameter.numel() for _, module in experts_modules(model) for parameter in expert_parameters(module).values()
    )
    return num_experts / sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_share_of_quantized_parameters_is_told(
    name: str, model_cache: Path, request: pytest.FixtureRequest
) -> None:
    loaded, _ = load(request.getfixturevalue(name), model_cache)
    share = quantized_share(loaded)
    assert share > 0.6
    assert f"with qint4-g32 experts: {share:.1%} of all parameters quantized." in loaded.decisions[-1]


@pytest.mark.parametrize("settings", [{"draft": False}, {"draft_length": 0}])
def test_without_a_draft_nothing_is_quantized(settings: dict[str, object], own_mixtral: Path, cache: Path) -> None:
    loaded, _ = load(own_mixtral, cache, **settings)
    assert loaded.draft is None
    assert loaded.decisions[-1] == "No draft: every token is decoded by itself."
    assert not list(loaded.pack.directory.glob("draft-*"))


def test_a_group_size_that_does_not_fit_leaves_no_draft_file(mixtral: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft_group_size 64 does not divide .* 96 weights; .* such as 32\."):
        load(mixtral, cache, draft_group_size=64)
    assert not list(cache.rglob("draft-*"))
    assert load(mixtral, cache, draft_group_size=32)[0].draft is not None


def test_a_model_that_cannot_be_served_is_refused_before_any_long_work(own_mixtral: Path, cache: Path) -> None:
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "hidden_size": 32,
    }
    (own_mixtral / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="qwen3_next"):
        load(own_mixtral, cache)
    assert not cache.exists()


@pytest.mark.parametrize("file", ["dense.safetensors", "draft-qint4-g32.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_damaged_pack_is_said(file: str, damage: str, own_mixtral: Path, cache: Path) -> None:
    damaged = load(own_mixtral, cache)[0].pack.directory / file
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] if damage == "cut" else b"garbage" * 10)
    with pytest.raises(PackError, match=rf"{file} is damaged .*; delete its directory") as caught:
        load(own_mixtral, cache)
    assert "\n" not in str(caught.value)
    shutil.rmtree(damaged.parent)
    load(own_mixtral, cache)


def test_a_pack_without_its_dense_weights_is_said(own_mixtral: Path, cache: Path) -> None:
    pack = load(own_mixtral, cache)[0].pack
    pack.dense_file.unlink()
    with pytest.raises(PackError, match=r"dense\.safetensors is damaged"):
        load(own_mixtral, cache)


def test_progress_names_each_stage_once_and_in_order(own_mixtral: Path, cache: Path) -> None:
    progress: list[Loading] = []
    _, config = load(own_mixtral, cache / "elsewhere")
    load_model(config.model_copy(update={"cache": cache}), CpuDevice(), progress.append)
    assert list(dict.fromkeys(message.stage for message in progress)) == [
        "Loading the checkpoint",
        "Packing experts",
        "Quantizing experts to qint4-g32",
        "Loading draft experts",
        "Loading dense weights",
    ]
    progress.clear()
    load_model(config.model_copy(update={"cache": cache}), CpuDevice(), progress.append)
    assert list(dict.fromkeys(message.stage for message in progress)) == [
        "Loading draft experts",
        "Loading dense weights",
    ]


def test_preparing_the_demo_builds_it_in_the_cache(
    tmp_path: Path, cache: Path, mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = load(mixtral, tmp_path / "other")
    built: list[Path] = []

    def build_demo(cache: Path, on_progress: object) -> Path:
        built.append(cache)
        return mixtral

    monkeypatch.setattr("engine.loading.build_demo", build_demo)
    assert prepare_model(config.model_copy(update={"model": "demo", "cache": cache}), ignore_progress) == mixtral
    assert prepare_model(config, ignore_progress) == mixtral
    assert built == [cache]
