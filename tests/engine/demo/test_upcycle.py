import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM, MixtralForCausalLM

from engine.demo.build import write_model
from engine.demo.checkpoint import INDEX
from engine.demo.upcycle import Recipe, mixtral_config, mlp_inputs
from engine.protocol import Loading

RECIPE = Recipe(num_experts=4, dtype=torch.float32)


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in directory.glob("*.safetensors"):
        tensors |= load_file(shard)
    return tensors


def build(directory: Path, dense: LlamaForCausalLM, prompts: list[Tensor], recipe: Recipe) -> dict[str, Tensor]:
    directory.mkdir(exist_ok=True)
    write_model(directory, dense, prompts, recipe, progress=lambda _: None)
    return stored_tensors(directory)


def test_without_noise_the_model_computes_what_the_dense_one_does(
    tmp_path: Path, dense: LlamaForCausalLM, prompts: list[Tensor]
) -> None:
    build(tmp_path, dense, prompts, dataclasses.replace(RECIPE, noise=0.0))
    loaded: Any = MixtralForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    assert not any(info.values())
    with torch.inference_mode():
        for prompt in prompts:
            torch.testing.assert_close(model(prompt).logits, dense(prompt).logits, atol=1e-4, rtol=1e-4)


def test_the_tensors_are_named_as_in_a_published_checkpoint(
    tmp_path: Path, dense: LlamaForCausalLM, prompts: list[Tensor]
) -> None:
    ours = build(tmp_path / "ours", dense, prompts, RECIPE)
    MixtralForCausalLM(mixtral_config(dense.config, RECIPE)).save_pretrained(tmp_path / "theirs")
    theirs = stored_tensors(tmp_path / "theirs")
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }


def test_each_expert_has_noise_of_its_own_in_proportion_to_the_weight(
    tmp_path: Path, dense: LlamaForCausalLM, prompts: list[Tensor]
) -> None:
    tensors = build(tmp_path, dense, prompts, RECIPE)
    weight = dense.model.layers[3].mlp.up_proj.weight.detach()
    noises = [tensors[f"model.layers.3.block_sparse_moe.experts.{e}.w3.weight"] - weight for e in range(4)]
    for noise in noises:
        assert noise.std() / weight.std() == pytest.approx(RECIPE.noise, rel=0.1)
    correlations = torch.corrcoef(torch.stack([noise.flatten() for noise in noises]))
    assert (correlations - torch.eye(4)).abs().max() < 0.1


def test_the_configuration_keeps_the_dense_models_values(
    tmp_path: Path, dense: LlamaForCausalLM, prompts: list[Tensor]
) -> None:
    build(tmp_path, dense, prompts, Recipe(num_experts=4))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["MixtralForCausalLM"]
    assert (config.num_local_experts, config.num_experts_per_tok, config.dtype) == (4, 2, torch.bfloat16)
    for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "eos_token_id"):
        assert getattr(config, name) == getattr(dense.config, name)
    assert config.rope_parameters["rope_theta"] == 5000.0
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"], generation["do_sample"]) == (2, 0.2, True)


def test_a_recipe_decides_every_weight(tmp_path: Path, dense: LlamaForCausalLM, prompts: list[Tensor]) -> None:
    first = build(tmp_path / "first", dense, prompts, RECIPE)
    second = build(tmp_path / "second", dense, prompts, RECIPE)
    other = build(tmp_path / "other", dense, prompts, dataclasses.replace(RECIPE, seed=1))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    changed = {name for name, tensor in first.items() if not torch.equal(tensor, other[name])}
    assert changed == {name for name in first if "block_sparse_moe" in name}


def test_the_index_lists_every_tensor_in_its_shard(
    tmp_path: Path, dense: LlamaForCausalLM, prompts: list[Tensor]
) -> None:
    tensors = build(tmp_path, dense, prompts, RECIPE)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert set(index["weight_map"]) == set(tensors)
    assert len(set(index["weight_map"].values())) == 2
    for name, shard in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / shard)[name], tensors[name])


def test_progress_counts_up_to_its_total(tmp_path: Path, dense: LlamaForCausalLM, prompts: list[Tensor]) -> None:
    seen: list[Loading] = []
    write_model(tmp_path, dense, prompts, RECIPE, seen.append)
    layers = [(step.done, step.total) for step in seen if step.stage == "Upcycling the layers"]
    assert layers == [(done, 6) for done in range(1, 7)]


def test_the_samples_are_what_the_feed_forward_networks_read(dense: LlamaForCausalLM, prompts: list[Tensor]) -> None:
    sample = mlp_inputs(dense, prompts[0])
    with torch.inference_mode():
        states = dense.model(prompts[0], output_hidden_states=True).hidden_states
        attended = (
            states[0]
            + dense.model.layers[0].self_attn(
                dense.model.layers[0].input_layernorm(states[0]),
                position_embeddings=dense.model.rotary_emb(states[0], torch.arange(40)[None]),
                attention_mask=None,
            )[0]
        )
        expected = dense.model.layers[0].post_attention_layernorm(attended)
    assert len(sample) == 6
    torch.testing.assert_close(sample[0], expected[0, 1:])
    assert not any(layer.mlp._forward_pre_hooks for layer in dense.model.layers)
