import asyncio

import pytest

from server.admission import Admission, QueueFullError, Ticket

pytestmark = pytest.mark.anyio


async def test_first_come_first_served() -> None:
    admission = Admission(queue_length=2)
    order: list[int] = []

    async def use(number: int, ticket: Ticket) -> None:
        await ticket.turn()
        assert (admission.num_running, admission.num_waiting) == (1, 2 - number)
        order.append(number)
        await asyncio.sleep(0)
        ticket.leave()

    await asyncio.gather(*(use(number, admission.enter()) for number in range(3)))
    assert order == [0, 1, 2]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


@pytest.mark.parametrize("queue_length", [0, 2])
async def test_queue_is_bounded(queue_length: int) -> None:
    admission = Admission(queue_length)
    tickets = [admission.enter() for _ in range(queue_length + 1)]
    with pytest.raises(QueueFullError):
        admission.enter()
    tickets[-1].leave()
    admission.enter()
    assert admission.num_waiting == queue_length


async def test_leaving_the_queue_is_idempotent_and_keeps_the_order() -> None:
    admission = Admission(queue_length=2)
    first, second, third = (admission.enter() for _ in range(3))
    second.leave()
    second.leave()
    first.leave()
    await third.turn()
    assert (admission.num_running, admission.num_waiting) == (1, 0)
    first.leave()
    assert admission.num_running == 1
