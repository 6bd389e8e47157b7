import json
import shutil
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.description import describe_model
from engine.device import CpuDevice
from engine.errors import PackError
from engine.kernels.quantized_linear import DequantizingLinear, Int4Linear, Int8Linear
from engine.loading import load_model, locate_configuration, locate_model
from engine.phases import PhaseClock
from engine.protocol import Loading
from tests.engine.harness import ignore_progress, load
from tests.engine.tiny import mixtral_config, save_checkpoint


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config_names_dtype", [True, False])
def test_weights_are_computed_with_in_the_chosen_type_and_kept_in_the_checkpoints(
    dtype: str, config_names_dtype: bool, own_mixtral: Path, cache: Path
) -> None:
    if not config_names_dtype:
        change_json(own_mixtral / "config.json", dtype=None)
    loaded, _ = load(own_mixtral, cache, dtype=dtype)
    expected = getattr(torch, dtype)
    assert {parameter.dtype for parameter in loaded.model._model.parameters() if not parameter.is_meta} == {expected}
    assert {tensor.dtype for layer in loaded.pack.layout.layers for tensor in layer.tensors} == {"bfloat16"}
    record = torch.zeros(loaded.pack.layout.expert_bytes, dtype=torch.uint8)
    assert {weight.dtype for weight in loaded.codec.decode(0, record).values()} == {expected}


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
    assert loaded.draft.num_bytes > 0


@pytest.mark.parametrize("settings", [{"draft": "none"}, {"draft_length": 0}])
def test_without_a_draft_nothing_is_quantized(settings: dict[str, object], own_mixtral: Path, cache: Path) -> None:
    loaded, _ = load(own_mixtral, cache, **settings)
    assert loaded.draft is None
    assert not list(loaded.pack.directory.glob("draft-*"))


@pytest.mark.parametrize("file", ["dense-000.safetensors", "draft-qint4-g32/000.safetensors"])
@pytest.mark.parametrize(
    ("damage", "message"), [("cut", "bytes long instead of"), ("flip", "is damaged"), ("delete", "is missing")]
)
def test_a_damaged_pack_is_said_and_can_be_made_anew(
    file: str, damage: str, message: str, own_mixtral: Path, cache: Path
) -> None:
    damaged = load(own_mixtral, cache)[0].pack.directory / file
    content = damaged.read_bytes()
    if damage == "delete":
        damaged.unlink()
    else:
        damaged.write_bytes(content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(PackError, match=rf"{file} .*{message}|{file} {message}.*; delete {damaged.parent}") as caught:
        load(own_mixtral, cache)
    assert "\n" not in str(caught.value)
    shutil.rmtree(damaged.parent)
    load(own_mixtral, cache)


def stages(progress: list[Loading]) -> list[str]:
    return list(dict.fromkeys(message.stage for message in progress))


def test_progress_names_each_stage_once_and_in_order(own_mixtral: Path, cache: Path) -> None:
    config = EngineConfig(model=str(own_mixtral), cache=cache, draft_group_size=32)
    device = CpuDevice()
    model = describe_model(config, own_mixtral, device.torch_device)
    first: list[Loading] = []
    load_model(config, model, device, PhaseClock(), first.append)
    loading = ["Loading draft experts", "Loading dense weights"]
    packing = ["Packing dense weights", "Packing experts", "Quantizing experts to qint4-g32"]
    assert stages(first) == [*packing, *loading]
    second: list[Loading] = []
    load_model(config, model, device, PhaseClock(), second.append)
    assert stages(second) == loading


def test_the_demo_is_built_in_the_cache_whether_it_is_served_or_planned(
    cache: Path, mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []

    def build_demo(cache: Path, on_progress: object) -> Path:
        built.append(cache)
        return mixtral

    monkeypatch.setattr("engine.loading.build_demo", build_demo)
    demo = EngineConfig(model="demo", cache=cache)
    assert locate_model(demo, ignore_progress) == mixtral
    assert locate_configuration(demo, ignore_progress) == mixtral
    other = demo.model_copy(update={"model": str(mixtral)})
    assert locate_model(other, ignore_progress) == locate_configuration(other, ignore_progress) == mixtral
    assert built == [cache, cache]
