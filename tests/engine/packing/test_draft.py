import shutil
from pathlib import Path

import pytest
import torch

from engine.config import DraftWeights
from engine.errors import ConfigError
from engine.experts.records import RecordFile
from engine.kernels.quantization import QuantizationSpec, QuantizedStack, dequantize, quantize, stack_bytes
from engine.packing import Pack
from engine.protocol import Loading
from tests.engine.families import FAMILIES
from tests.engine.oracle import assert_same_weights, experts_of, load_whole
from tests.engine.packing.harness import QINT4, draft_of, names, pack_of, written
from tests.engine.tiny import save_checkpoint

WEIGHTS: list[DraftWeights] = ["qint2", "qint4", "qint8", "qfloat8"]
SPECS = [QuantizationSpec(weights, 32) for weights in WEIGHTS]


@pytest.fixture
def pack(own_pack: Path) -> Pack:
    """Without a draft."""
    shutil.rmtree(own_pack / "draft-qint4-g32")
    return pack_of(own_pack, own_pack)


def expected_layer(
    parameters: dict[str, torch.Tensor], spec: QuantizationSpec, is_transposed: bool
) -> dict[str, torch.Tensor]:
    """What quantizing all experts at once makes of a layer."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in parameters.items():
        if name.endswith("_bias"):
            tensors[name] = weight
            continue
        matrices = weight.transpose(1, 2) if is_transposed else weight
        for part, tensor in quantize(matrices, spec)._asdict().items():
            tensors[f"{name}.{part}"] = tensor
    return tensors


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((name, torch.bfloat16) for name in FAMILIES), ("mixtral", torch.float32), ("qwen3_moe", torch.float32)],
)
def test_a_draft_is_the_experts_quantized(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(FAMILIES[family](), tmp_path / family, dtype=dtype)
    pack = pack_of(checkpoint, tmp_path / "cache")
    layers = list(draft_of(pack).layers())
    whole = experts_of(load_whole(checkpoint))
    assert len(layers) == len(whole)
    for layer, layout, parameters in zip(layers, pack.layout.layers, whole, strict=True):
        assert_same_weights(layer, expected_layer(parameters, QINT4, layout.is_transposed))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_precision_is_near_what_it_stands_for(checkpoint: Path, pack: Pack, spec: QuantizationSpec) -> None:
    largest_errors: dict[DraftWeights, float] = {"qint2": 0.6, "qint4": 0.12, "qint8": 0.012, "qfloat8": 0.07}
    for layer, parameters in zip(draft_of(pack, spec).layers(), experts_of(load_whole(checkpoint)), strict=True):
        for name, weight in parameters.items():
            stack = QuantizedStack(*(layer[f"{name}.{part}"] for part in QuantizedStack._fields))
            for expert, matrix in enumerate(weight):
                error = (dequantize(stack, expert, spec, matrix.shape) - matrix).abs().max() / matrix.abs().max()
                assert error < largest_errors[spec.weights]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_draft_takes_the_bytes_that_are_planned_for_it(pack: Pack, spec: QuantizationSpec) -> None:
    planned = [
        sum(stack_bytes(spec, layer.num_experts, shape, torch.bfloat16) for shape in layer.matrix_shapes.values())
        for layer in pack.layout.layers
    ]
    draft = draft_of(pack, spec)
    assert [sum(tensor.nbytes for tensor in layer.values()) for layer in draft.layers()] == planned


def test_a_draft_is_made_once(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = draft_of(pack)
    before = written(pack.directory)
    progress: list[Loading] = []
    monkeypatch.setattr(RecordFile, "read", None)
    assert draft_of(pack, on_progress=progress.append) == draft
    assert progress == []
    assert written(pack.directory) == before


def test_a_draft_is_a_directory_with_a_file_per_layer(pack: Pack) -> None:
    draft = draft_of(pack)
    assert draft.directory == pack.directory / "draft-qint4-g32"
    layers = ["000.safetensors", "001.safetensors", "002.safetensors"]
    assert [entry.name for entry in draft.files] == layers
    assert names(draft.directory) == {"manifest.json", *layers}
    assert [entry.num_bytes for entry in draft.files] == [(draft.directory / f).stat().st_size for f in layers]


def test_drafts_of_several_precisions_lie_side_by_side_and_it_is_said(pack: Pack) -> None:
    progress: list[Loading] = []
    specs = [QINT4, QuantizationSpec("qint4", 16), QuantizationSpec("qint8", 32)]
    drafts = [draft_of(pack, spec, progress.append) for spec in specs]
    assert len({draft.directory for draft in drafts}) == len(specs)
    assert list(dict.fromkeys(message.stage for message in progress)) == [
        "Quantizing experts to qint4-g32",
        "Quantizing experts to qint4-g16 (the pack has qint4-g32)",
        "Quantizing experts to qint8 (the pack has qint4-g16, qint4-g32)",
    ]
    for spec, draft in zip(specs, drafts, strict=True):
        assert draft_of(pack, spec) == draft
    # For the 8-bit types the group size says nothing.
    assert draft_of(pack, QuantizationSpec("qint8", 64)) == drafts[-1]


def test_a_group_size_that_does_not_fit_is_refused_before_anything_is_written(pack: Pack) -> None:
    before = names(pack.directory)
    with pytest.raises(ConfigError, match="draft_group_size 48 does not divide the experts' rows of 64 weights"):
        draft_of(pack, QuantizationSpec("qint4", 48))
    assert names(pack.directory) == before


@pytest.mark.parametrize("version", [1, 3])
def test_a_draft_of_another_format_is_made_anew(pack: Pack, version: int) -> None:
    draft = draft_of(pack)
    manifest = draft.directory / "manifest.json"
    before = manifest.read_bytes()
    manifest.write_text(f'{{"format_version":{version}}}')
    (draft.directory / "000.safetensors").unlink()
    assert draft_of(pack) == draft
    assert manifest.read_bytes() == before
    assert len(list(draft.layers())) == 3


def test_other_errors_leave_no_draft(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(message: Loading) -> None:
        if message.done == 2:
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        draft_of(pack, on_progress=fail)
    assert not [path for path in pack.directory.glob("*draft*") if path.is_dir()]
