"""Simulation: same seed, same trace, in any process; and the private switches of trio it turns."""

import importlib
import os
import subprocess
import sys
from random import Random

import pytest
import trio

from actors.testing import Trace, simulate
from actors.testing._simulate import SWITCHES


def trace_of(seed: int) -> str:
    """Run tasks that race each other in every way trio knows."""

    async def main() -> str:
        trace, random = Trace(), Random(seed)
        ready = trio.Event()
        send, receive = trio.open_memory_channel[str](2)

        async def racer(name: str) -> None:
            await ready.wait()
            for step in range(5):
                await trio.sleep(random.choice([0, 0, 0.5]))
                trace.add("step", name=name, step=step)
                with trio.move_on_after(random.uniform(0, 1)) as scope:
                    await send.send(name)
                trace.add("sent", name=name, cut=scope.cancelled_caught)

        async def reader() -> None:
            while True:
                trace.add("received", name=await receive.receive())
                await trio.sleep(0.2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            async with trio.open_nursery() as racers:
                for name in "abcdef":
                    racers.start_soon(racer, name)
                await trio.sleep(1)
                ready.set()
            nursery.cancel_scope.cancel()
        return trace.text()

    return simulate(main, seed)


def test_same_seed_gives_the_same_trace() -> None:
    assert trace_of(7) == trace_of(7)


def test_same_seed_gives_the_same_trace_in_a_fresh_process_with_other_hashes() -> None:
    script = "import sys; from tests.actors.test_simulate import trace_of; sys.stdout.write(trace_of(7))"
    environment = os.environ | {
        "PYTHONHASHSEED": "4242",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == trace_of(7)


def test_other_seeds_give_other_traces() -> None:
    assert len({trace_of(seed) for seed in range(10)}) == 10


def test_the_seed_alone_decides_the_order_of_ready_tasks() -> None:
    def order(seed: int) -> str:
        async def main() -> str:
            went: list[str] = []

            async def go(name: str) -> None:
                await trio.lowlevel.checkpoint()
                went.append(name)

            async with trio.open_nursery() as nursery:
                for name in "abcdef":
                    nursery.start_soon(go, name)
            return "".join(went)

        return simulate(main, seed)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(20)}) > 5


def test_trio_still_has_the_private_switches_that_simulate_turns() -> None:
    run = importlib.import_module("trio._core._run")
    assert isinstance(run._ALLOW_DETERMINISTIC_SCHEDULING, bool)  # true already where hypothesis has run
    assert isinstance(run._r, Random)


def test_switches_are_turned_back_also_after_a_failure() -> None:
    run = importlib.import_module("trio._core._run")
    before = [getattr(run, name) for name in SWITCHES]

    async def main() -> None:
        raise ValueError("in the simulation")

    with pytest.raises(ValueError, match="in the simulation") as caught:
        simulate(main, 3)
    assert [getattr(run, name) for name in SWITCHES] == before
    assert caught.value.__notes__ == ["simulated with seed 3"]


def test_trio_without_the_switches_is_refused(monkeypatch) -> None:
    monkeypatch.delattr("trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING")
    with pytest.raises(RuntimeError, match="has no _ALLOW_DETERMINISTIC_SCHEDULING"):
        simulate(trio.lowlevel.checkpoint, 0)


def test_deadlock_ends_at_the_limit() -> None:
    with pytest.raises(trio.TooSlowError):
        simulate(trio.sleep_forever, 0)


def test_clock_of_the_caller_is_used() -> None:
    clock = trio.testing.MockClock(rate=1e6)

    async def main() -> float:
        await trio.sleep(100)
        return trio.current_time()

    assert simulate(main, 0, clock=clock) >= 100


def test_trace_keeps_the_newest_and_says_what_it_dropped() -> None:
    async def main() -> Trace:
        await trio.sleep(5)
        trace = Trace(limit=2)
        for number in range(3):
            trace.add("step", number=number, again="yes")
            await trio.sleep(0.25)
        return trace

    trace = simulate(main, 0)
    assert trace.dropped == 1
    assert [step.facts for step in trace.steps] == [(("again", "yes"), ("number", n)) for n in (1, 2)]
    assert trace.text() == (
        "... 1 earlier\n0.250000 step again='yes' number=1\n0.500000 step again='yes' number=2"
    )
