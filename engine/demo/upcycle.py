"""Turn a dense Llama model into a Mixtral model with the same answers, give or take each expert's own noise.

Every expert starts as the dense feed-forward network, and the router's top-k weights sum to 1, so without noise the
two models compute the same. This is upcycling without training: the experts differ, but none has learnt anything.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from engine.demo.router import router_rows

# Mixtral's names for the projections of an expert, and Llama's.
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

SHARED_SETTINGS = (
    *("vocab_size", "hidden_size", "intermediate_size", "hidden_act", "num_hidden_layers", "tie_word_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters", "max_position_embeddings"),
    *("rms_norm_eps", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
)

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """What makes an upcycled model; two builds of one recipe from one dense model are equal."""

    num_experts: int = 8
    num_experts_per_tok: int = 2
    noise: float = 0.05
    """Standard deviation of an expert's noise, as a share of the weight's own."""
    dtype: torch.dtype = torch.bfloat16
    seed: int = 9
    """Of the seeds 5 to 21 the one whose greedy answers to plain questions start most like the dense model's."""


def mixtral_config(dense: LlamaConfig, recipe: Recipe) -> MixtralConfig:
    """The configuration of the upcycled model; all that it shares with the dense one stays as it is."""
    return MixtralConfig(
        architectures=["MixtralForCausalLM"],
        dtype=recipe.dtype,
        num_local_experts=recipe.num_experts,
        num_experts_per_tok=recipe.num_experts_per_tok,
        **{name: getattr(dense, name) for name in SHARED_SETTINGS},
    )


def frame_tensors(dense: LlamaForCausalLM, recipe: Recipe) -> Tensors:
    """Everything outside the layers; a tied output head is stored once, as the embeddings."""
    return {
        name: tensor.to(recipe.dtype)
        for name, tensor in dense.state_dict().items()
        if ".layers." not in name and not (name == "lm_head.weight" and dense.config.tie_word_embeddings)
    }


def layer_tensors(dense: LlamaForCausalLM, index: int, mlp_inputs: Tensor, recipe: Recipe) -> Tensors:
    """One layer under the names of a published Mixtral checkpoint; `mlp_inputs` [N, H] are the router's sample."""
    layer, prefix = dense.model.layers[index], f"model.layers.{index}."
    # A generator of its own makes each layer independent of the others and of the order in which they are built.
    generator = torch.Generator().manual_seed(recipe.seed + index)
    tensors = {name: tensor for name, tensor in layer.state_dict().items() if not name.startswith("mlp.")}
    tensors["block_sparse_moe.gate.weight"] = router_rows(mlp_inputs, recipe.num_experts, generator)
    for expert in range(recipe.num_experts):
        for name, dense_name in PROJECTIONS.items():
            weight = getattr(layer.mlp, dense_name).weight.detach()
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            noisy = noise.mul_(recipe.noise * weight.std()).add_(weight)
            tensors[f"block_sparse_moe.experts.{expert}.{name}.weight"] = noisy.to(recipe.dtype)
    return {prefix + name: tensor.to(recipe.dtype) for name, tensor in tensors.items()}


def mlp_inputs(dense: LlamaForCausalLM, prompt: Tensor) -> list[Tensor]:
    """For each layer the input [T - 1, H] of its feed-forward network, as the model reads `prompt` [1, T].

    The first token is left out: it serves attention as a sink, and looks like no other.
    """
    collected: list[Tensor] = []

    def collect(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        collected.append(inputs[0][0, 1:])

    hooks = [layer.mlp.register_forward_pre_hook(collect) for layer in dense.model.layers]
    try:
        with torch.inference_mode():
            dense.model(prompt, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return collected
