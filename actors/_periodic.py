"""Work that is done when it is due.

Guarantee   no mark is lost: work marked before, during or after a tick leads to a tick that begins after the mark.
Relies on   one actor a Due; a tick that looks for all there is to do, since many marks may make one tick.
Cancelled   the tick that was cut stays due: an actor started later with the same Due does it.
Outage      a tick that fails stays due and is tried again after a capped backoff; nothing restarts for it.
"""

import logging
import math
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import trio

from ._actor import Actor
from ._errors import TickOverrun
from ._restart import Backoff

FAILURE_WAIT = 1.0
"""Seconds before the first retry of a failed tick, unless its period is longer."""
FAILURE_WAIT_CAP = 60.0
"""The most seconds between two tries of a failing tick, unless its period is longer."""

logger = logging.getLogger(__name__)


class Due:
    """Says that there is something to do, now or from a time on. It stays said until somebody takes it."""

    def __init__(self) -> None:
        """Begin with nothing due."""
        self._marked = False
        self._at = math.inf
        self._changed = trio.Event()

    @property
    def is_due(self) -> bool:
        """Whether there is something to do now."""
        return self._marked or trio.current_time() >= self._at

    def mark(self) -> None:
        """Say that there is something to do now."""
        self._marked = True
        self._notify()

    def mark_at(self, when: float) -> None:
        """Say that there is something to do from the trio time `when` on. Of several times the earliest wins."""
        if when < self._at:
            self._at = when
            self._notify()

    def clear(self) -> None:
        """Take what is due now; a time that is still to come stays.

        Call it just before the work looks for what to do, never after: what is marked from then on is due again.
        """
        self._marked = False
        if trio.current_time() >= self._at:
            self._at = math.inf

    async def wait(self) -> None:
        """Return when there is something to do, at once if there is already. Nothing is taken.

        Cancelled: nothing was taken.
        """
        await trio.lowlevel.checkpoint()
        while not self.is_due:
            with trio.CancelScope(deadline=self._at):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def when_due(
    due: Due,
    tick: Callable[[], Awaitable[object]],
    *,
    at_most_every: float,
    deadline: float,
    random: Random,
    on_failure: Callable[[Exception], None] | None = None,
    failure_backoff: Backoff | None = None,
) -> Actor:
    """Make the actor that runs `tick()` when it is due. The first due tick runs at once; idle costs nothing.

    Args:
        due: Who says so; it belongs to this actor.
        tick: Does all there is to do.
        at_most_every: Seconds between the beginnings of two ticks, at least.
        deadline: Seconds after which a tick is cancelled, which makes it a failed one (`TickOverrun`).
        random: Where the jitter of the default backoff comes from.
        on_failure: Told each failure of a tick; what it raises ends the actor. By default failures are logged.
        failure_backoff: The wait after failures in a row; by default from 1 s, or the period, to 60 s.

    A tick that raises an Exception stays due. It never ends the actor.
    Cancelled: a tick that was running stays due.
    """
    if not at_most_every > 0:
        raise ValueError(f"at_most_every is {at_most_every} s, must be above 0")
    if not deadline > 0:
        raise ValueError(f"deadline is {deadline} s, must be above 0")
    report = on_failure or _log
    initial = max(at_most_every, FAILURE_WAIT)
    backoff = failure_backoff or Backoff(initial, max(initial, FAILURE_WAIT_CAP), random=random, jitter=0.5)

    async def run(*, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        not_before = -math.inf
        task_status.started()
        while True:
            await due.wait()
            await trio.sleep_until(not_before)
            due.clear()
            not_before = trio.current_time() + at_most_every
            try:
                failure = await _failure_of(tick, deadline)
            except BaseException:
                due.mark()
                raise
            if failure is None:
                backoff.reset()
            else:
                due.mark()
                not_before = max(not_before, trio.current_time() + backoff())
                report(failure)

    return run


async def _failure_of(tick: Callable[[], Awaitable[object]], deadline: float) -> Exception | None:
    """Run one tick and return its failure. A tick that returns late, since it could not be cut, overran too."""
    await trio.lowlevel.checkpoint()
    failure: Exception | None = None
    scope = trio.CancelScope(deadline=trio.current_time() + deadline)
    try:
        with scope:
            await tick()
    except Exception as exc:  # noqa: BLE001  # handed on: the caller reports it
        failure = exc
    if trio.current_time() < scope.deadline:
        return failure
    overrun = TickOverrun(deadline)
    overrun.__cause__ = failure
    return overrun


def _log(failure: Exception) -> None:
    logger.warning("a tick failed and stays due", exc_info=failure)
