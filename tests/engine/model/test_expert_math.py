import random
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig, PreTrainedConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.model.dispatch import ExpertsModule
from engine.model.expert_math import RoutedTokens, expert_forward
from engine.model.structure import expert_parameters
from engine.speculative.verify import full_precision_linear

NUM_EXPERTS = 6
HIDDEN_SIZE = 32
INTERMEDIATE_SIZE = 48
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def random_experts(experts_class: type[nn.Module], config: PreTrainedConfig) -> nn.Module:
    """transformers' own module with random weights, which computes eagerly."""
    config._experts_implementation = "eager"
    module = experts_class(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / HIDDEN_SIZE**0.5)
    return module.requires_grad_(False).eval()


def mixtral() -> nn.Module:
    config = MixtralConfig(**SIZES, intermediate_size=INTERMEDIATE_SIZE, num_local_experts=NUM_EXPERTS)
    return random_experts(MixtralExperts, config)


def qwen3_moe() -> nn.Module:
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=INTERMEDIATE_SIZE, num_experts=NUM_EXPERTS)
    return random_experts(Qwen3MoeExperts, config)


def gpt_oss() -> nn.Module:
    """Transposed matrices, biases, and a gate of its own."""
    config = GptOssConfig(**SIZES, intermediate_size=INTERMEDIATE_SIZE, num_local_experts=NUM_EXPERTS)
    return random_experts(GptOssExperts, config)


def nemotron_h() -> nn.Module:
    """No gate."""
    config = NemotronHConfig(
        **SIZES | {"num_hidden_layers": 4},
        moe_intermediate_size=INTERMEDIATE_SIZE,
        n_routed_experts=NUM_EXPERTS,
    )
    return random_experts(NemotronHExperts, config)


MODULES = [mixtral, qwen3_moe, gpt_oss, nemotron_h]


def routes(num_tokens: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [T, H], experts [T, K] (distinct within a token) and weights [T, K]."""
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    top_k_weights, top_k_index = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(top_k, dim=-1)
    return hidden_states, top_k_index, top_k_weights


def compute(
    module: nn.Module, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, order_seed: int = 0
) -> torch.Tensor:
    """The layer's output, expert by expert in an order of chance."""
    experts = cast(ExpertsModule, module)
    parameters = expert_parameters(experts)
    routed = RoutedTokens(hidden_states, index)
    order = routed.experts
    random.Random(order_seed).shuffle(order)

    def linear(expert: int, name: str, inputs: torch.Tensor) -> torch.Tensor:
        bias = parameters.get(f"{name}_bias")
        return full_precision_linear(
            parameters[name][expert], None if bias is None else bias[expert], inputs, experts.is_transposed
        )

    for expert in order:
        routed.compute(expert, partial(expert_forward, experts, partial(linear, expert)))
    return routed.combine(weights)


@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (1, 3), (2, 2), (5, 2), (9, 4), (3, NUM_EXPERTS)])
@pytest.mark.parametrize("make_module", MODULES)
def test_it_is_what_transformers_computes(make_module: Any, num_tokens: int, top_k: int) -> None:
    module = make_module()
    inputs = routes(num_tokens, top_k, seed=num_tokens)
    expected = module(*inputs)
    torch.testing.assert_close(compute(module, *inputs), expected, rtol=1e-5, atol=1e-6)


def test_the_modules_cover_gates_biases_and_both_orientations() -> None:
    traits = {
        (module.has_gate, module.has_bias, module.is_transposed)
        for module in (cast(ExpertsModule, make_module()) for make_module in MODULES)
    }
    assert traits == {(True, False, False), (True, True, True), (False, False, False)}


@pytest.mark.parametrize("make_module", MODULES)
def test_the_order_of_arrival_does_not_show_in_a_single_bit(make_module: Any) -> None:
    module = make_module()
    inputs = routes(9, 3, seed=1)
    outputs = [compute(module, *inputs, order_seed=seed) for seed in range(6)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_what_follows_an_expert_is_applied_to_each_output_before_the_weights() -> None:
    module = cast(Any, mixtral())
    hidden_states, index, weights = routes(4, 2, seed=0)
    without = compute(module, hidden_states, index, weights)
    module.has_post_expert_norm = True
    module.post_expert_norm = lambda outputs: outputs + 1.0
    shifted = compute(module, hidden_states, index, weights)
    torch.testing.assert_close(shifted, without + weights.sum(dim=1, keepdim=True))


def test_experts_are_named_once_by_the_first_token_that_wants_them() -> None:
    index = torch.tensor([[4, 1], [1, 0], [4, 5]])
    assert RoutedTokens(torch.zeros(3, 8), index).experts == [4, 1, 0, 5]


def test_each_expert_sees_its_own_tokens_only() -> None:
    hidden_states = torch.arange(4.0).unsqueeze(1)
    routed = RoutedTokens(hidden_states, torch.tensor([[0, 1], [2, 1], [1, 0], [2, 3]]))
    seen: dict[int, list[float]] = {}

    def forward(expert: int, inputs: torch.Tensor) -> torch.Tensor:
        seen[expert] = inputs.flatten().tolist()
        return inputs + 10 * expert

    for expert in routed.experts:
        routed.compute(expert, partial(forward, expert))
    assert seen == {0: [0.0, 2.0], 1: [0.0, 1.0, 2.0], 2: [1.0, 3.0], 3: [3.0]}
    outputs = routed.combine(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5]]))
    assert outputs.flatten().tolist() == [0.0, 11.0, 12.0 + 2.0, 0.5 * (23.0 + 33.0)]


def test_half_precision_is_weighted_and_summed_in_the_type_of_the_weights() -> None:
    hidden_states = torch.ones(1, 1, dtype=torch.bfloat16)
    routed = RoutedTokens(hidden_states, torch.arange(2).view(1, 2))
    for expert, sign in enumerate((1.0, -1.0)):
        routed.compute(expert, partial(torch.mul, torch.tensor(sign)))
    # Rounded to bfloat16 before the sum, the first product would be 1 and nothing would remain.
    combined = routed.combine(torch.tensor([[1.0 + 2**-9, 1.0]]))
    assert combined.dtype is torch.bfloat16
    assert float(combined) == 2**-9
