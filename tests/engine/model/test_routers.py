"""What routers would choose: found in every family, and as the model itself chooses where they do nothing else."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedConfig, PreTrainedModel

from engine.model.routers import NextRouters, Router, find_routers
from engine.model.structure import experts_modules
from tests.engine.families import FAMILIES, deepseek_config
from tests.engine.tiny import mixtral_config

OTHERS = {"deepseek_v3", "deepseek_v4", "ernie4_5_moe"}
"""Their routers choose among groups, by the token, or with a correction: what is guessed is not what they choose."""


class Visit(NamedTuple):
    hidden_states: torch.Tensor
    top_k_index: torch.Tensor


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.0 / parameter.shape[-1] ** 0.5)
    model.eval()
    return model


def visits_of(model: PreTrainedModel) -> list[Visit]:
    """What each layer's experts are called with in a pass over a random text."""
    visits = []

    def record(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        visits.append(Visit(*arguments[:2]))

    for _, experts in experts_modules(model):
        assert isinstance(experts, nn.Module)
        experts.register_forward_pre_hook(record)
    with torch.no_grad():
        model(torch.randint(3, 96, (1, 20)))
    return visits


def assert_choices_are_real(config: PreTrainedConfig) -> None:
    model = model_of(config)
    found, visits = find_routers(model), visits_of(model)
    assert found is not None
    assert len(found) == len(visits) > 0
    for layer, (hidden_states, top_k_index) in enumerate(visits):
        routers = NextRouters(found, top_k_index.shape[-1])
        assert routers.num_layers == len(visits)
        for asked in range(layer + 1):  # of whatever layer it is asked, the router is that of `layer`
            with torch.no_grad():
                choices = routers.choices(asked, layer - asked, hidden_states)
            assert torch.equal(choices.sort().values, top_k_index.sort().values)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_routers_of_every_family_are_found(name: str) -> None:
    model = model_of(FAMILIES[name]())
    found, modules = find_routers(model), list(experts_modules(model))
    assert found is not None
    assert len(found) == len(modules)
    hidden_size = model.config.get_text_config().hidden_size
    for (weight, bias), (experts_name, _) in zip(found, modules, strict=True):
        (name_of_weight,) = (name for name, parameter in model.named_parameters() if parameter is weight)
        assert weight.shape[1] == hidden_size
        assert name_of_weight.startswith(experts_name.rpartition(".")[0])
        assert not name_of_weight.startswith(f"{experts_name}.")
        assert (bias is not None) == (name == "gpt_oss")


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - OTHERS))
def test_what_a_router_would_choose_is_what_it_chooses(name: str) -> None:
    assert_choices_are_real(FAMILIES[name]())


def test_with_one_group_deepseek_chooses_by_its_scores_too() -> None:
    assert_choices_are_real(deepseek_config(DeepseekV3Config, n_group=1, topk_group=1))


def test_a_bias_counts() -> None:
    model = model_of(FAMILIES["gpt_oss"]())
    for name, parameter in model.named_parameters():
        if name.endswith("router.bias"):
            with torch.no_grad():
                parameter.copy_(torch.tensor([0.0, 5.0, -5.0]))
    found = find_routers(model)
    assert found is not None
    with torch.no_grad():
        choices = NextRouters(found, 2).choices(0, 1, torch.randn(50, 32))
    assert (choices[:, 0] == 1).float().mean() > 0.9


def test_where_two_things_look_like_a_router_none_is_found() -> None:
    model: Any = model_of(mixtral_config())
    model.model.layers[1].mlp.another = nn.Linear(64, 6, bias=False)
    assert find_routers(model) is None


def test_the_best_choice_comes_first_and_there_are_no_more_than_experts() -> None:
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.bfloat16)
    hidden_states = torch.tensor([[2.0, 1.0], [-3.0, 1.0]])
    assert NextRouters([Router(weight, None)], 2).choices(0, 0, hidden_states).tolist() == [[0, 1], [2, 1]]
    assert NextRouters([Router(weight, None)], 9).choices(0, 0, hidden_states).tolist() == [[0, 1, 2], [2, 1, 0]]
