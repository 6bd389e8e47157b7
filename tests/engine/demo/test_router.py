import pytest
import torch
from torch import Tensor

from engine.demo.router import router_rows

NUM_EXPERTS = 8


@pytest.fixture
def inputs() -> Tensor:
    """[N, H] with a strong common mean and directions of unequal strength, as in a language model."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(1, -2, 32)
    return torch.randn(2000, 32, generator=generator) * spread + 5 * torch.randn(32, generator=generator)


@pytest.fixture
def rows(inputs: Tensor) -> Tensor:
    return router_rows(inputs, NUM_EXPERTS, torch.Generator().manual_seed(1))


def test_logits_have_mean_zero_and_unit_variance(inputs: Tensor, rows: Tensor) -> None:
    logits = inputs @ rows.T
    torch.testing.assert_close(logits.mean(dim=0), torch.zeros(NUM_EXPERTS), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits.var(dim=0, correction=0), torch.ones(NUM_EXPERTS), atol=1e-4, rtol=0)


def test_rows_are_orthogonal_to_the_mean_and_to_one_another(inputs: Tensor, rows: Tensor) -> None:
    units = torch.nn.functional.normalize(rows, dim=1)
    mean = torch.nn.functional.normalize(inputs.mean(dim=0), dim=0)
    torch.testing.assert_close(units @ units.T, torch.eye(NUM_EXPERTS), atol=1e-5, rtol=0)
    torch.testing.assert_close(units @ mean, torch.zeros(NUM_EXPERTS), atol=1e-5, rtol=0)


def test_rows_span_the_leading_principal_directions() -> None:
    inputs = torch.diag(torch.tensor([1.0, 9.0, 8.0, 2.0, 7.0]))
    inputs = torch.cat([inputs, -inputs])
    inputs[:, 3] += 3.0  # the mean lies along the fourth axis, which the rows must leave out
    rows = router_rows(inputs, 3, torch.Generator().manual_seed(0))
    assert rows[:, [0, 3]].abs().max() < 1e-6
    assert rows[:, [1, 2, 4]].abs().amax(dim=0).min() > 1e-3


def test_the_load_is_balanced_on_what_the_rows_were_made_from(inputs: Tensor, rows: Tensor) -> None:
    top_k = (inputs @ rows.T).topk(2, dim=1).indices
    load = torch.bincount(top_k.flatten(), minlength=NUM_EXPERTS) / top_k.numel()
    assert load.min() > 0.5 / NUM_EXPERTS
    assert load.max() < 2 / NUM_EXPERTS


def test_a_seed_decides_the_rows(inputs: Tensor, rows: Tensor) -> None:
    again = router_rows(inputs, NUM_EXPERTS, torch.Generator().manual_seed(1))
    other = router_rows(inputs, NUM_EXPERTS, torch.Generator().manual_seed(2))
    assert torch.equal(rows, again)
    assert not torch.allclose(rows, other)
