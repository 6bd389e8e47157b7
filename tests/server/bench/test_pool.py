import pytest

from server.bench.pool import EnginePool, num_side_by_side


class Engine:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    async def close(self) -> None:
        self.log.append(f"close {self.name}")


class Starter:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.broken: str | None = None

    async def __call__(self, name: str) -> Engine:
        if name == self.broken:
            raise ValueError(name)
        self.log.append(f"start {name}")
        return Engine(name, self.log)


def test_as_many_as_fit_and_one_in_any_case() -> None:
    assert [num_side_by_side(10, free_bytes) for free_bytes in (35, 9, 0)] == [3, 1, 1]


@pytest.mark.anyio
async def test_the_least_recently_used_engine_makes_room() -> None:
    start = Starter()
    async with EnginePool(start, 2) as pool:
        for name in ("a", "b", "a", "c", "a", "b"):
            assert (await pool.get(name)).name == name
        assert start.log == ["start a", "start b", "close b", "start c", "close c", "start b"]
    assert start.log[-2:] == ["close a", "close b"]


@pytest.mark.anyio
async def test_an_engine_that_does_not_start_is_not_there() -> None:
    start = Starter()
    async with EnginePool(start, 1) as pool:
        await pool.get("a")
        start.broken = "b"
        with pytest.raises(ValueError, match="b"):
            await pool.get("b")
        await pool.discard("b")
        await pool.get("a")
    assert start.log == ["start a", "close a", "start a", "close a"]


@pytest.mark.anyio
async def test_all_are_closed_where_the_work_fails() -> None:
    start = Starter()

    async def work() -> None:
        async with EnginePool(start, 2) as pool:
            await pool.get("a")
            raise KeyError

    with pytest.raises(KeyError):
        await work()
    assert start.log == ["start a", "close a"]
