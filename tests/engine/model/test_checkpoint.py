import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelNotFoundError, UnsupportedModelError
from engine.model.causal_lm import CausalLM
from engine.model.checkpoint import build_model, read_config
from engine.model.dispatch import ExpertsModule
from engine.model.structure import dense_parameters, fused_names
from engine.model.weights import CheckpointReader
from tests.engine.families import FAMILIES
from tests.engine.oracle import dense_of, load_whole
from tests.engine.tiny import VOCAB_SIZE, mixtral_config, save_checkpoint

CPU = torch.device("cpu")

Parts = list[dict[str, torch.Tensor]]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    return save_checkpoint(FAMILIES[name](), tmp_path_factory.mktemp("checkpoints") / name, dtype=torch.bfloat16)


@pytest.fixture
def own_mixtral(tmp_path: Path) -> Path:
    """A checkpoint that the test may change."""
    return save_checkpoint(mixtral_config(), tmp_path / "mixtral", dtype=torch.bfloat16)


def dense_parts(checkpoint: Path) -> Parts:
    return list(CheckpointReader(checkpoint, read_config(checkpoint)).dense_parts())


def build(checkpoint: Path, parts: Parts | None = None, *, dtype: torch.dtype | None = None) -> CausalLM:
    """In the checkpoint's own type by default."""
    config = read_config(checkpoint)
    stored_dtype = CheckpointReader(checkpoint, config).dtype
    return build_model(
        config,
        dense_parts(checkpoint) if parts is None else parts,
        stored_dtype=stored_dtype,
        dtype=dtype or stored_dtype,
        device=CPU,
    )


def test_the_built_model_has_the_dense_weights_and_no_experts(checkpoint: Path) -> None:
    whole, model = load_whole(checkpoint), build(checkpoint)._model
    built, fused = model.state_dict(), {name for names in fused_names(whole) for name in names}
    assert built.keys() == whole.state_dict().keys()
    assert {name for name, tensor in built.items() if tensor.is_meta} == fused
    for name, tensor in dense_of(whole).items():
        assert built[name].dtype is tensor.dtype
        assert torch.equal(built[name], tensor)
    assert not model.training


def test_what_is_computed_rather_than_stored_is_there_too(checkpoint: Path) -> None:
    whole, model = load_whole(checkpoint), build(checkpoint)._model
    expected = dict(whole.named_buffers())
    assert set(expected) - set(whole.state_dict())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected.pop(name))
    assert not expected


@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_tied_weights_are_one(tmp_path: Path, names: list[str]) -> None:
    checkpoint = save_checkpoint(mixtral_config(is_tied=True), tmp_path / "tied")
    tensors = load_file(checkpoint / "model.safetensors")
    embeddings = tensors.pop("model.embed_tokens.weight")
    stored_as = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
    tensors |= {stored_as[name]: embeddings.clone() for name in names}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    whole, model = load_whole(checkpoint), build(checkpoint)
    head = model._model.get_parameter("lm_head.weight")
    assert head is model._model.get_parameter("model.embed_tokens.weight")
    assert torch.equal(head, embeddings)
    # By transformers' own count, in which tied weights count once.
    num_parameters = sum(parameter.numel() for parameter in model._model.parameters() if not parameter.is_meta)
    assert num_parameters == sum(parameter.numel() for parameter in dense_parameters(whole))
    num_buffer_bytes = sum(tensor.nbytes for _, tensor in whole.named_buffers())
    assert num_parameters * 4 <= model.num_bytes <= num_parameters * 4 + num_buffer_bytes


def test_tied_weights_that_differ_stay_two_as_transformers_keeps_them(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(mixtral_config(is_tied=True), tmp_path / "tied")
    head = torch.randn(VOCAB_SIZE, 64, generator=torch.Generator().manual_seed(0))
    tensors = load_file(checkpoint / "model.safetensors") | {"lm_head.weight": head}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    model = build(checkpoint)._model
    assert torch.equal(model.get_parameter("lm_head.weight"), head)
    assert torch.equal(model.get_parameter("model.embed_tokens.weight"), tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_checkpoints_type_is_converted_and_others_stay(own_mixtral: Path, dtype: torch.dtype) -> None:
    parts = dense_parts(own_mixtral)
    for part in parts:
        if "model.norm.weight" in part:
            part["model.norm.weight"] = part["model.norm.weight"].double()
    dtypes = {
        name: parameter.dtype
        for name, parameter in build(own_mixtral, parts, dtype=dtype)._model.named_parameters()
        if not parameter.is_meta
    }
    assert dtypes.pop("model.norm.weight") is torch.float64
    assert set(dtypes.values()) == {dtype}


def test_buffers_that_transformers_keeps_in_float32_stay(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(FAMILIES["deepseek_v3"](), tmp_path / "model", dtype=torch.bfloat16)
    model = build(checkpoint, dtype=torch.float16)._model
    biases = {name: t.dtype for name, t in model.state_dict().items() if name.endswith("e_score_correction_bias")}
    assert set(biases.values()) == {torch.float32}
    assert model.get_parameter("lm_head.weight").dtype is torch.float16


def test_the_parts_may_be_of_any_size_and_are_not_all_held_at_once(own_mixtral: Path) -> None:
    weights = {name: tensor for part in dense_parts(own_mixtral) for name, tensor in part.items()}

    def one_by_one() -> Iterator[dict[str, torch.Tensor]]:
        for name in reversed(weights):
            yield {name: weights[name]}

    config = read_config(own_mixtral)
    options = {"stored_dtype": torch.bfloat16, "dtype": torch.bfloat16}
    model = build_model(config, one_by_one(), **options, device=CPU)
    for name, tensor in model._model.state_dict().items():
        assert tensor.is_meta or torch.equal(tensor, weights[name])


def test_the_model_runs_with_the_experts_that_the_caller_brings(mixtral: Path) -> None:
    model = build(mixtral)
    layers: list[int] = []

    def experts(
        module: ExpertsModule,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        layers.append(layer)
        assert top_k_index.shape == top_k_weights.shape == (4, 2)
        return torch.zeros_like(hidden_states)

    logits = model.forward([3, 4, 5, 6], model.new_cache(4), experts, num_logits=2)
    assert logits.shape == (2, VOCAB_SIZE)
    assert logits.dtype is torch.float32
    assert layers == [0, 1, 2]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.self_attn.q_proj.weight"])
def test_without_all_dense_weights_there_is_no_model(own_mixtral: Path, name: str) -> None:
    parts = dense_parts(own_mixtral)
    for part in parts:
        part.pop(name, None)
    with pytest.raises(UnsupportedModelError, match=rf"MixtralForCausalLM needs .* lacks: {name}\."):
        build(own_mixtral, parts)


def test_a_buffer_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(FAMILIES["deepseek_v3"](), tmp_path / "model", dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    parts = dense_parts(checkpoint)
    assert any(part.pop(name, None) is not None for part in parts)
    with pytest.raises(UnsupportedModelError, match=f"lacks: {name}"):
        build(checkpoint, parts)


def test_of_many_missing_weights_some_are_named(own_mixtral: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"lacks: lm_head\.weight, .* and \d+ more\.$"):
        build(own_mixtral, [])


@pytest.mark.parametrize(
    "content",
    [
        *(None, "", "{", "{}", "[]", "null", '"mixtral"', "1"),
        '{"model_type": "from-the-future"}',
        '{"model_type": "mixtral", "num_hidden_layers": "x"}',
        '{"model_type": "mixtral", "rope_parameters": 1}',
    ],
)
def test_a_directory_without_a_configuration_is_said(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        ModelNotFoundError, match=r"has no (config\.json|configuration that transformers can read)"
    ) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["mxfp4", "fp8", "awq", "bitsandbytes"])
def test_a_quantized_release_is_refused_by_its_method(own_mixtral: Path, method: str) -> None:
    file = own_mixtral / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=rf"is a quantized release \({method}\).* choose one in bfloat16"):
        read_config(own_mixtral)
