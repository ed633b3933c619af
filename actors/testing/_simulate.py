"""Seeded simulation: a trio.run that takes the same course whenever it gets the same seed.

Guarantee   same program, same seed: same order of tasks and same virtual times, in any process.
Relies on   a program that does no real I/O, starts no threads, takes chance only from generators it seeds, and does not
            let the order of a set or an id() decide anything; and on two private switches of trio.
"""

import importlib
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

import trio

T = TypeVar("T")

SWITCHES = ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r")
"""The private names in trio._core._run: one makes the order of ready tasks depend on the other, a Random, alone."""


def simulate(
    main: Callable[[], Awaitable[T]],
    seed: int,
    *,
    clock: trio.abc.Clock | None = None,
    at_most: float = 7 * 86_400.0,
) -> T:
    """Run `main` as `trio.run` would, repeatably. Time is virtual and jumps when all tasks wait.

    The switches are global: nothing else in the process may run trio at the same time.

    Args:
        main: The program. It seeds its own generators.
        seed: Decides which of several ready tasks goes first.
        clock: Instead of a MockClock that jumps.
        at_most: Virtual seconds after which the run fails with trio.TooSlowError; this also ends a deadlock.

    Raises: what `main` raises, with a note that names the seed; RuntimeError when trio has lost the switches.
    """
    from trio.testing import MockClock  # here, so that production, which imports NoProbes, does not load it

    run = importlib.import_module("trio._core._run")
    missing = [name for name in SWITCHES if not hasattr(run, name)]
    if missing:
        raise RuntimeError(f"this trio cannot be seeded: trio._core._run has no {', '.join(missing)}")

    async def bounded() -> T:
        with trio.fail_after(at_most):
            return await main()

    before = [getattr(run, name) for name in SWITCHES]
    random = Random(seed)  # noqa: S311  # repeatable on purpose
    try:
        for name, value in zip(SWITCHES, (True, random), strict=True):
            setattr(run, name, value)
        return trio.run(bounded, clock=clock if clock is not None else MockClock(autojump_threshold=0))
    except BaseException as exc:
        exc.add_note(f"simulated with seed {seed}")
        raise
    finally:
        for name, value in zip(SWITCHES, before, strict=True):
            setattr(run, name, value)
