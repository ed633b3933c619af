"""One loop: calls from anywhere, errors that nobody waits for, the end of the block."""

import asyncio
import gc
import logging
from contextlib import suppress
from typing import Any

import pytest
import trio

from sqlstreams.errors import ClientClosed
from sqlstreams.postgres.bridge import Bridge, open_bridge
from sqlstreams.postgres.settle import settle


async def add(a: int, *, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


async def sleep_and_tell(ended: list[str]) -> None:
    try:
        await asyncio.sleep(60)  # because something must be there to cancel
    except asyncio.CancelledError:
        await asyncio.sleep(0.01)  # because asyncio's clean-up may wait
        ended.append("cancelled")
        raise


async def fail(exc: Exception) -> None:
    raise exc


async def test_a_call_returns_the_result_or_raises_the_error_itself():
    async with open_bridge() as bridge:
        assert await bridge.call(add, 1, b=2) == 3
        error = LookupError("this one")
        with pytest.raises(LookupError) as caught:
            await bridge.call(fail, error)
        assert caught.value is error


async def test_calls_work_from_tasks_that_are_older_than_the_loop_from_system_tasks_and_from_threads():
    results: list[int] = []
    bridges: list[Bridge] = []
    opened = trio.Event()

    async def older() -> None:
        await opened.wait()
        results.append(await bridges[0].call(add, 1, b=1))

    async def of_the_system() -> None:
        results.append(await bridges[0].call(add, 1, b=2))
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(older)
        await trio.testing.wait_all_tasks_blocked()
        async with open_bridge() as bridge:
            bridges.append(bridge)
            opened.set()
            done = trio.Event()
            trio.lowlevel.spawn_system_task(of_the_system)
            await done.wait()

            async def from_thread() -> int:
                return await bridge.call(add, 1, b=3)

            results.append(await trio.to_thread.run_sync(trio.from_thread.run, from_thread))
            await trio.testing.wait_all_tasks_blocked()
    assert sorted(results) == [2, 3, 4]


async def test_a_cancelled_call_has_ended_when_it_returns():
    ended: list[str] = []
    async with open_bridge() as bridge:
        with trio.move_on_after(0.01) as scope:
            await bridge.call(sleep_and_tell, ended)
        assert scope.cancelled_caught
        assert ended == ["cancelled"]


async def test_a_cancelled_scope_starts_nothing():
    ended: list[str] = []
    async with open_bridge() as bridge:
        with trio.CancelScope() as scope:
            scope.cancel()
            await bridge.call(sleep_and_tell, ended)
        assert scope.cancelled_caught
        assert ended == []


async def leave_an_error_behind(secret: str) -> None:
    asyncio.get_running_loop().call_soon(explode, secret)
    task = asyncio.ensure_future(fail(ValueError(secret)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task


def explode(secret: str) -> None:
    raise RuntimeError(secret)


async def test_errors_that_nobody_waits_for_are_counted_and_do_not_end_the_program(caplog):
    reports: list[str] = []
    async with open_bridge(reports.append) as bridge:
        await bridge.call(leave_an_error_behind, "the secret")
        gc.collect()  # asyncio reports an exception when its task is collected
        assert await bridge.call(add, 1, b=2) == 3
        assert bridge.reported == 2
    assert sorted(reports) == [
        "Exception in callback explode: RuntimeError",
        "Task exception was never retrieved: ValueError",
    ]
    assert len(caplog.records) == 2
    assert "secret" not in caplog.text


async def test_a_reporter_that_fails_does_not_end_the_program(caplog):
    caplog.set_level(logging.CRITICAL)

    def report(_text: str) -> None:
        raise ZeroDivisionError

    async with open_bridge(report) as bridge:
        await bridge.call(leave_an_error_behind, "x")
        gc.collect()
        assert bridge.reported == 2


async def test_after_the_block_a_call_says_that_it_is_closed():
    async with open_bridge() as bridge:
        pass
    with pytest.raises(ClientClosed, match="has been closed"):
        await bridge.call(add, 1, b=2)


async def test_a_call_that_the_end_of_the_block_catches_says_so_and_does_not_hang():
    bridges: list[Bridge] = []
    errors: list[BaseException] = []
    ended: list[str] = []

    async def outside(task_status: Any) -> None:
        task_status.started()
        try:
            await bridges[0].call(sleep_and_tell, ended)
        except ClientClosed as exc:
            errors.append(exc)

    with trio.fail_after(2):
        async with trio.open_nursery() as nursery, open_bridge() as bridge:
            bridges.append(bridge)
            await nursery.start(outside)
            await trio.testing.wait_all_tasks_blocked()
    assert len(errors) == 1
    assert ended == ["cancelled"]


async def test_an_error_of_the_block_leaves_it_as_it_is():
    error = LookupError()
    with pytest.raises(LookupError) as caught:
        async with open_bridge():
            raise error
    assert caught.value is error
    group = ExceptionGroup("of the block", [error])
    with pytest.RaisesGroup(LookupError, match="of the block"):
        async with open_bridge():
            raise group


async def test_a_cancel_from_outside_passes_through():
    with trio.move_on_after(0.01) as scope:
        async with open_bridge() as bridge:
            await bridge.call(sleep_and_tell, [])
    assert scope.cancelled_caught


async def fail_at_the_end(ended: list[str]) -> None:
    try:
        await asyncio.sleep(60)  # because something must be there to cancel
    except asyncio.CancelledError:
        await asyncio.sleep(0.01)  # because asyncio's clean-up may wait
        ended.append("failed")
        raise ClientClosed("its own words") from None


async def commit_at_the_end() -> str:
    return await settle(1.0, asyncio.sleep, 0.05, "committed")


async def test_calls_of_other_tasks_end_in_their_own_way_with_the_block_and_only_their_tasks_are_told():
    bridges: list[Bridge] = []
    told: list[object] = []
    ended: list[str] = []

    async def failing() -> None:
        try:
            await bridges[0].call(fail_at_the_end, ended)
        except ClientClosed as exc:
            told.append(exc.message)

    async def committing() -> None:
        told.append(await bridges[0].call(commit_at_the_end))

    with trio.fail_after(2):
        async with trio.open_nursery() as nursery:
            async with open_bridge() as bridge:
                bridges.append(bridge)
                nursery.start_soon(failing)
                nursery.start_soon(committing)
                await trio.testing.wait_all_tasks_blocked()
            assert ended == ["failed"]
    assert sorted(told, key=str) == ["committed", "its own words"]


async def test_what_a_task_without_a_caller_leaves_behind_is_not_raised_by_the_block():
    left: list[asyncio.Task[None]] = []

    async def leave_a_task() -> None:
        left.append(asyncio.ensure_future(fail_at_the_end([])))
        await asyncio.sleep(0)

    async with open_bridge() as bridge:
        await bridge.call(leave_a_task)
    error = LookupError()
    with pytest.RaisesGroup(LookupError, ClientClosed, flatten_subgroups=True):
        async with open_bridge() as bridge:
            await bridge.call(leave_a_task)
            raise error


async def test_the_end_of_the_block_waits_two_graces_for_a_call_that_does_not_end():
    bridges: list[Bridge] = []

    async def stubborn() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)  # because something must be there to cancel
        await asyncio.sleep(60)  # because it is stubborn

    async def outside() -> None:
        with suppress(ClientClosed):
            await bridges[0].call(stubborn)

    began = trio.current_time()
    async with trio.open_nursery() as nursery, open_bridge(grace=0.1) as bridge:
        bridges.append(bridge)
        nursery.start_soon(outside)
        await trio.testing.wait_all_tasks_blocked()
    assert 0.2 <= trio.current_time() - began < 1.5
