import torch

from engine.device import CpuDevice, HostCopy
from engine.experts.planner import LookaheadBuffer
from engine.speculative.quantized import PendingRoutes, QuantizedExperts


class WatchedDevice(CpuDevice):
    """Counts the copies to the host."""

    def __init__(self) -> None:
        self.num_copies = 0

    def to_host(self, source: torch.Tensor) -> HostCopy:
        self.num_copies += 1
        return super().to_host(source)


def take(experts: QuantizedExperts, routes: list[torch.Tensor]) -> PendingRoutes:
    """As after a pass with these routes."""
    experts._routes.extend(routes)
    return experts.take_routes()


def test_a_pass_costs_one_copy_even_where_layers_differ_in_the_experts_per_token() -> None:
    device = WatchedDevice()
    experts = QuantizedExperts([], device)
    routes = [torch.tensor([[3, 1], [0, 2]]), torch.tensor([[7], [5]]), torch.tensor([[4, 6, 8], [1, 0, 2]])]
    read = take(experts, routes).read()
    assert device.num_copies == 1
    assert all(torch.equal(got, given) for got, given in zip(read, routes, strict=True))


def test_each_pass_gives_its_own_routes_in_the_order_of_the_layers() -> None:
    experts = QuantizedExperts([], CpuDevice())
    first = take(experts, [torch.tensor([[1, 0]]), torch.tensor([[2, 3]])])
    second = take(experts, [torch.tensor([[0, 4]]), torch.tensor([[3, 1]])])
    lookahead = LookaheadBuffer()
    lookahead.add(first.read())
    lookahead.add(second.read())
    assert lookahead.predicted() == [(0, 1), (0, 0), (0, 4), (1, 2), (1, 3), (1, 1)]
