import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from engine.errors import ModelNotFoundError, UnsupportedModelError
from engine.model.causal_lm import CausalLM
from engine.model.checkpoint import (
    build_model,
    dense_state,
    expert_parameters,
    experts_modules,
    load_whole,
    main_dtype,
    read_config,
)
from engine.model.dispatch import ExpertsModule
from tests.engine.tiny import VOCAB_SIZE, mixtral_config, save_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tied_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(mixtral_config(is_tied=True), tmp_path_factory.mktemp("checkpoints") / "tied-mixtral")


@pytest.fixture(params=["mixtral", "tied_mixtral", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
def own_mixtral(tmp_path: Path) -> Path:
    """A checkpoint that the test may damage."""
    return save_checkpoint(mixtral_config(), tmp_path / "mixtral", dtype=torch.bfloat16)


def dense_file(model: PreTrainedModel, path: Path) -> Path:
    save_file(dense_state(model), path)
    return path


def num_dense_parameters(model: PreTrainedModel) -> int:
    """By transformers' own count, in which tied weights count once."""
    num_experts_parameters = sum(
        parameter.numel() for _, module in experts_modules(model) for parameter in expert_parameters(module).values()
    )
    return sum(parameter.numel() for parameter in model.parameters()) - num_experts_parameters


def tiny_llama() -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )


def test_a_dense_model_is_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(tiny_llama())
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no experts") as caught:
        experts_modules(model)
    assert "mixture-of-experts" in str(caught.value)


def test_experts_modules_come_in_order_and_without_the_dense_layers(mixtral: Path, qwen3_moe: Path) -> None:
    names = [name for name, _ in experts_modules(load_whole(mixtral))]
    assert names == [f"model.layers.{layer}.mlp.experts" for layer in range(3)]
    names = [name for name, _ in experts_modules(load_whole(qwen3_moe))]
    assert names == [f"model.layers.{layer}.mlp.experts" for layer in (0, 2, 3)]


def test_expert_parameters_are_the_fused_weights(qwen3_moe: Path) -> None:
    for _, module in experts_modules(load_whole(qwen3_moe)):
        shapes = {name: tuple(parameter.shape) for name, parameter in expert_parameters(module).items()}
        assert shapes == {"gate_up_proj": (8, 128, 64), "down_proj": (8, 64, 64)}


def test_dense_state_is_everything_but_the_experts(checkpoint: Path) -> None:
    model = load_whole(checkpoint)
    dense = dense_state(model)
    assert not any("experts." in name for name in dense)
    assert sum(tensor.numel() for tensor in dense.values()) == num_dense_parameters(model)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in dense.items())


def test_tied_weights_are_stored_once(mixtral: Path, tied_mixtral: Path) -> None:
    tied, untied = dense_state(load_whole(tied_mixtral)), dense_state(load_whole(mixtral))
    assert len({"lm_head.weight", "model.embed_tokens.weight"} & tied.keys()) == 1
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= untied.keys()


def test_the_built_model_has_the_dense_weights_and_no_experts(checkpoint: Path, tmp_path: Path) -> None:
    whole = load_whole(checkpoint)
    model = build_model(read_config(checkpoint), dense_file(whole, tmp_path / "dense.safetensors"), torch.float32, CPU)
    built = dict(model._model.named_parameters())
    for name, parameter in whole.named_parameters():
        if ".experts." in name:
            assert built[name].is_meta
        else:
            assert torch.equal(built[name], parameter)
    for name, buffer in whole.named_buffers():
        assert torch.equal(model._model.get_buffer(name), buffer)
    assert not model._model.training


def test_tied_weights_count_once(checkpoint: Path, tmp_path: Path) -> None:
    whole = load_whole(checkpoint)
    model = build_model(read_config(checkpoint), dense_file(whole, tmp_path / "dense.safetensors"), torch.float32, CPU)
    is_tied = whole.config.tie_word_embeddings
    embeddings, head = (
        model._model.get_parameter("model.embed_tokens.weight"),
        model._model.get_parameter("lm_head.weight"),
    )
    assert (embeddings is head) == is_tied
    assert model.num_parameters == num_dense_parameters(whole)
    num_buffer_bytes = sum(tensor.nbytes for _, tensor in whole.named_buffers())
    assert model.num_parameters * 4 <= model.num_bytes <= model.num_parameters * 4 + num_buffer_bytes


def test_the_main_type_is_converted_and_others_stay(own_mixtral: Path, tmp_path: Path) -> None:
    dense = dense_state(load_whole(own_mixtral))
    dense["model.norm.weight"] = dense["model.norm.weight"].float()
    save_file(dense, tmp_path / "dense.safetensors")
    model = build_model(read_config(own_mixtral), tmp_path / "dense.safetensors", torch.float16, CPU)
    dtypes = {name: p.dtype for name, p in model._model.named_parameters() if not p.is_meta}
    assert dtypes.pop("model.norm.weight") is torch.float32
    assert set(dtypes.values()) == {torch.float16}


def test_a_configuration_need_not_name_the_type(own_mixtral: Path, tmp_path: Path) -> None:
    config_file = own_mixtral / "config.json"
    config = json.loads(config_file.read_text())
    assert config.pop("dtype") == "bfloat16"
    config_file.write_text(json.dumps(config))
    whole = load_whole(own_mixtral)
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.bfloat16}
    model = build_model(read_config(own_mixtral), dense_file(whole, tmp_path / "dense.safetensors"), torch.float32, CPU)
    assert {parameter.dtype for parameter in model._model.parameters()} == {torch.float32}


def test_main_dtype_is_that_of_most_weights_not_of_most_tensors() -> None:
    weights = [torch.zeros(2), torch.zeros(3), torch.zeros(6, dtype=torch.bfloat16)]
    assert main_dtype(weights) is torch.bfloat16


def test_the_model_runs_with_the_experts_that_the_caller_brings(mixtral: Path, tmp_path: Path) -> None:
    model: CausalLM = build_model(
        read_config(mixtral), dense_file(load_whole(mixtral), tmp_path / "dense.safetensors"), torch.float32, CPU
    )
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


def remove_weights(path: Path, part: str) -> None:
    file = path / "model.safetensors"
    save_file({name: w for name, w in load_file(file).items() if part not in name}, file, metadata={"format": "pt"})


def test_weights_that_are_missing_are_not_made_up(own_mixtral: Path) -> None:
    remove_weights(own_mixtral, "layernorm")
    with pytest.raises(
        UnsupportedModelError, match=r"needs weights that the checkpoint lacks: .*layernorm.* and 1 more"
    ):
        load_whole(own_mixtral)


def test_a_missing_expert_is_said(own_mixtral: Path) -> None:
    remove_weights(own_mixtral, "layers.1.block_sparse_moe.experts.2.")
    with pytest.raises((ModelNotFoundError, UnsupportedModelError)) as caught:
        load_whole(own_mixtral)
    assert "\n" not in str(caught.value)


def test_weights_that_cannot_be_read_are_said(own_mixtral: Path) -> None:
    (own_mixtral / "model.safetensors").write_bytes(b"not weights" * 10)
    with pytest.raises(ModelNotFoundError, match="has no weights that transformers can load"):
        load_whole(own_mixtral)
    (own_mixtral / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="has no weights that transformers can load") as caught:
        load_whole(own_mixtral)
    assert "\n" not in str(caught.value)


def test_a_pack_that_lacks_dense_weights_is_not_served(mixtral: Path, tmp_path: Path) -> None:
    dense = dense_state(load_whole(mixtral))
    del dense["model.norm.weight"]
    save_file(dense, tmp_path / "dense.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"lacks: model\.norm\.weight\."):
        build_model(read_config(mixtral), tmp_path / "dense.safetensors", torch.float32, CPU)


@pytest.mark.parametrize(
    "content",
    [None, "{", "{}", '{"model_type": "from-the-future"}', '{"model_type": "mixtral", "num_hidden_layers": "many"}'],
)
def test_a_directory_without_a_configuration_is_said(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelNotFoundError, match="has no configuration that transformers can read") as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
