"""The mailbox: bound, order, answers, what a cancel and a close leave."""

from dataclasses import dataclass

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from actors import Mailbox, MailboxClosed, MailboxFull, MailboxStatistics, Reply


@dataclass(frozen=True)
class Double:
    number: int
    reply: Reply[int]


async def test_messages_arrive_in_the_order_in_which_they_were_told(autojump_clock) -> None:
    box = Mailbox[int](3)
    await box.tell(1)
    box.tell_nowait(2)
    await box.tell(3)
    assert [await box.receive() for _ in range(3)] == [1, 2, 3]


async def test_tell_waits_for_room_and_tell_nowait_does_not(autojump_clock) -> None:
    box = Mailbox[int](1)
    box.tell_nowait(1)
    with pytest.raises(MailboxFull, match="its 1 messages") as full:
        box.tell_nowait(2)
    assert full.value.size == 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(box.tell, 2)
        await wait_all_tasks_blocked()
        assert box.statistics().waiting_to_tell == 1
        assert await box.receive() == 1
    assert await box.receive() == 2


async def test_cancelled_tell_told_nothing_and_cancelled_receive_took_nothing(autojump_clock) -> None:
    box = Mailbox[int](1)
    with trio.move_on_after(1):
        await box.receive()
    box.tell_nowait(1)
    with trio.move_on_after(1):
        await box.tell(2)
    assert box.receive_many_nowait(10) == [1]


async def test_receive_many_takes_what_is_there_up_to_its_limit(autojump_clock) -> None:
    box = Mailbox[int](10)
    assert box.receive_many_nowait(5) == []
    for number in range(7):
        box.tell_nowait(number)
    assert box.receive_many_nowait(5) == [0, 1, 2, 3, 4]
    assert box.receive_many_nowait(5) == [5, 6]
    assert box.receive_many_nowait(0) == []


async def test_ask_returns_the_answer(autojump_clock) -> None:
    box = Mailbox[Double](1)

    async def serve() -> None:
        message = await box.receive()
        assert message.reply.waiting
        assert message.reply.answer(message.number * 2)
        assert not message.reply.waiting

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        assert await box.ask(lambda reply: Double(21, reply)) == 42
    assert box.statistics().open_asks == 0


async def test_ask_raises_what_the_receiver_puts_in(autojump_clock) -> None:
    box = Mailbox[Double](1)

    async def serve() -> None:
        assert (await box.receive()).reply.fail(ValueError("odd"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        with pytest.raises(ValueError, match="odd"):
            await box.ask(lambda reply: Double(21, reply))


async def test_only_the_first_answer_counts(autojump_clock) -> None:
    box = Mailbox[Double](1)

    async def serve() -> None:
        reply = (await box.receive()).reply
        assert reply.answer(1)
        assert not reply.answer(2)
        assert not reply.fail(ValueError())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        assert await box.ask(lambda reply: Double(21, reply)) == 1


async def test_cancelled_ask_leaves_a_harmless_message(autojump_clock) -> None:
    box = Mailbox[Double](1)
    with trio.move_on_after(1) as scope:
        await box.ask(lambda reply: Double(21, reply))
    assert scope.cancelled_caught
    message = await box.receive()
    assert not message.reply.waiting
    assert not message.reply.answer(42)
    assert box.statistics().open_asks == 0


async def test_ask_cancelled_while_it_waits_for_room_told_nothing(autojump_clock) -> None:
    box = Mailbox[Double | None](1)
    box.tell_nowait(None)
    with trio.move_on_after(1):
        await box.ask(lambda reply: Double(21, reply))
    assert box.receive_many_nowait(10) == [None]


async def test_close_refuses_new_messages_and_lets_the_rest_be_received_and_answered(autojump_clock) -> None:
    box = Mailbox[Double](1)
    answers: list[int] = []

    async def ask() -> None:
        answers.append(await box.ask(lambda reply: Double(21, reply)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        box.close()
        box.close()
        for refused in (box.tell, box.tell_nowait):
            with pytest.raises(MailboxClosed):
                result = refused(Double(1, Reply()))
                if result is not None:
                    await result
        (await box.receive()).reply.answer(42)
        with pytest.raises(MailboxClosed, match="closed and empty"):
            await box.receive()
        assert box.receive_many_nowait(10) == []
    assert answers == [42]


async def test_close_wakes_who_waits(autojump_clock) -> None:
    full, empty = Mailbox[int](1), Mailbox[int](1)
    full.tell_nowait(1)
    woken: list[str] = []

    async def expect_closed(call, *args) -> None:
        with pytest.raises(MailboxClosed):
            await call(*args)
        woken.append(call.__name__)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_closed, full.tell, 2)
        nursery.start_soon(expect_closed, empty.receive)
        await wait_all_tasks_blocked()
        full.close()
        empty.close()
    assert sorted(woken) == ["receive", "tell"]
    assert await full.receive() == 1


async def test_abandon_fails_every_open_ask_and_drops_what_is_queued(autojump_clock) -> None:
    box = Mailbox[Double](2)
    failed: list[int] = []

    async def ask(number: int) -> None:
        with pytest.raises(MailboxClosed):
            await box.ask(lambda reply: Double(number, reply))
        failed.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(ask, number)
        await wait_all_tasks_blocked()
        await box.receive()  # taken, never answered
        await wait_all_tasks_blocked()
        assert box.statistics() == MailboxStatistics(
            size=2, queued=2, waiting_to_tell=1, waiting_to_receive=0, open_asks=4, closed=False
        )
        box.abandon()
    assert sorted(failed) == [0, 1, 2, 3]
    assert box.receive_many_nowait(10) == []
    with pytest.raises(MailboxClosed):
        await box.receive()
    with pytest.raises(MailboxClosed):
        await box.tell(Double(1, Reply()))
    assert box.statistics().closed


async def test_size_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="size"):
        Mailbox[int](0)
