"""A paced read takes as long as its bytes need, and no longer."""

from collections.abc import Iterator, Mapping

import pytest
import torch

from engine.peers.pacing import PacedWeights


class Time:
    """A clock that advances when it is told to, or slept on."""

    now = 100.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class SlowWeights(Mapping[str, torch.Tensor]):
    """1,000 bytes each, which take a while to be read."""

    def __init__(self, time: Time, seconds: float) -> None:
        self._time = time
        self._seconds = seconds

    def __getitem__(self, name: str) -> torch.Tensor:
        self._time.now += self._seconds
        return {"w": torch.arange(500, dtype=torch.bfloat16)}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(["w"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(("read_seconds", "expected"), [(0.0, 2.0), (0.5, 2.0), (2.0, 2.0), (3.0, 3.0)])
def test_a_read_takes_at_least_its_bytes_over_the_rate(read_seconds: float, expected: float) -> None:
    time = Time()
    paced = PacedWeights(SlowWeights(time, read_seconds), 500.0, lambda: time.now, time.sleep)
    for num_reads in (1, 2):
        assert torch.equal(paced["w"], torch.arange(500, dtype=torch.bfloat16))
        assert time.now == pytest.approx(100.0 + num_reads * expected)


@pytest.mark.parametrize("tensor", [torch.tensor(1.0), torch.empty(0), torch.ones(3, 5000, dtype=torch.float8_e4m3fn)])
def test_any_tensor_can_be_paced(tensor: torch.Tensor) -> None:
    time = Time()
    assert PacedWeights({"w": tensor}, 8.0, lambda: time.now, time.sleep)["w"] is tensor
    assert time.now == 100.0 + tensor.nbytes / 8.0


def test_names_are_those_of_the_weights_and_cost_nothing() -> None:
    time = Time()
    paced = PacedWeights({"w": torch.zeros(5)}, 1.0, lambda: time.now, time.sleep)
    assert list(paced) == ["w"]
    assert len(paced) == 1
    assert "w" in paced
    assert "v" not in paced
    assert time.now == 100.0
