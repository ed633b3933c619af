"""Shutdown: drain, then cancel; signals; exit codes of a real process."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import trio

from actors import Shutdown, draining_scope, watch_signals


async def test_request_wakes_who_waits_and_is_seen_by_who_comes_later(autojump_clock) -> None:
    shutdown = Shutdown()
    assert not shutdown.requested
    assert shutdown.reason is None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shutdown.wait_requested)
        await trio.sleep(1)
        shutdown.request("maintenance")
    await shutdown.wait_requested()
    assert shutdown.requested
    assert not shutdown.forced
    assert shutdown.reason == "maintenance"


async def test_second_request_is_forced_and_keeps_the_first_reason(autojump_clock) -> None:
    shutdown = Shutdown()
    shutdown.request("first")
    shutdown.request("second")
    assert shutdown.forced
    assert shutdown.reason == "first"


async def test_draining_scope_is_cut_its_budget_after_the_request_and_not_before(autojump_clock) -> None:
    shutdown = Shutdown()

    async def request_at_100() -> None:
        await trio.sleep(100)
        shutdown.request("stop")
        await trio.sleep(1)
        shutdown.request("now")  # moves nothing

    async with trio.open_nursery() as nursery:
        nursery.start_soon(request_at_100)
        async with draining_scope(shutdown, 30) as scope:
            async with draining_scope(shutdown, 10) as shorter:
                await trio.sleep_forever()
            assert trio.current_time() == 110
            assert shorter.cancelled_caught
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() == 130


async def test_draining_scope_entered_after_the_request_has_what_is_left(autojump_clock) -> None:
    shutdown = Shutdown()
    shutdown.request("stop")
    await trio.sleep(4)
    async with draining_scope(shutdown, 10):
        await trio.sleep_forever()
    assert trio.current_time() == 10
    async with draining_scope(shutdown, 5) as scope:
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() == 10


async def test_draining_scope_left_in_time_was_not_cut(autojump_clock) -> None:
    shutdown = Shutdown()
    async with draining_scope(shutdown, 10) as scope:
        await trio.sleep(100)
        shutdown.request("stop")
        await trio.sleep(9)
    assert not scope.cancelled_caught


async def test_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        async with draining_scope(Shutdown(), -1):
            pass


async def test_first_signal_requests_and_each_further_one_calls_back() -> None:
    shutdown, further = Shutdown(), []
    heard = trio.Event()

    def on_second(number: int) -> None:
        further.append(number)
        heard.set()

    before = signal.getsignal(signal.SIGUSR1)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            await nursery.start(
                partial(watch_signals, shutdown, (signal.SIGUSR1, signal.SIGUSR2), on_second=on_second)
            )
            os.kill(os.getpid(), signal.SIGUSR1)
            await shutdown.wait_requested()
            assert shutdown.reason == "SIGUSR1"
            assert not shutdown.forced
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                heard = trio.Event()
                os.kill(os.getpid(), number)
                await heard.wait()
            nursery.cancel_scope.cancel()
    assert further == [signal.SIGUSR1, signal.SIGUSR2]
    assert shutdown.forced
    assert signal.getsignal(signal.SIGUSR1) == before


async def test_first_signal_is_no_second_one_after_a_request_by_the_program() -> None:
    handled = trio.Event()

    class Watched(Shutdown):
        def request(self, reason: str) -> None:
            super().request(reason)
            if reason == "SIGUSR1":
                handled.set()

    shutdown = Watched()
    shutdown.request("maintenance")
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(watch_signals, shutdown, (signal.SIGUSR1,)))
            os.kill(os.getpid(), signal.SIGUSR1)
            await handled.wait()
            nursery.cancel_scope.cancel()
    assert shutdown.forced


async def test_second_signal_raises_system_exit_by_default() -> None:
    shutdown = Shutdown()
    with pytest.RaisesGroup(pytest.RaisesExc(SystemExit, check=lambda exc: exc.code == 128 + signal.SIGUSR1)):
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                await nursery.start(partial(watch_signals, shutdown, (signal.SIGUSR1,)))
                os.kill(os.getpid(), signal.SIGUSR1)
                await shutdown.wait_requested()
                os.kill(os.getpid(), signal.SIGUSR1)
                await trio.sleep_forever()


PROGRAM = """
from functools import partial
import trio
from actors import Shutdown, open_children, watch_signals

async def main():
    shutdown = Shutdown()
    async with open_children(grace=1) as children:
        await children.start("signals", partial(watch_signals, shutdown))
        print("ready", flush=True)
        await shutdown.wait_requested()
        print(shutdown.reason, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def test_process_that_gets_two_signals_ends_with_the_code_of_the_second() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "SIGTERM\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 128 + signal.SIGINT
        finally:
            process.kill()
