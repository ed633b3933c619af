"""The lease: a time-limited right, and the scopes in which it may be used.

Guarantee   whoever works under guard() is cancelled `margin` seconds before the lease can end, or at once when it is lost.
Relies on   the grantor counts the time to live from when a request reaches it, which is never before it was sent.
Cancelled   a heartbeat that is cancelled renews nothing more: the guards run out at the deadline they have.
Outage      no answer changes nothing: the guards keep their deadline, and the next request follows soon.
"""

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random

import trio

JITTER = 0.1
"""The share by which waits between two heartbeats differ, either way."""
SOON = 0.2
"""The share of the usual wait after which a heartbeat without an answer is sent again."""


class Lease:
    """A time-limited right; whoever works under `guard()` is cancelled before it ends."""

    def __init__(self, asked: float, ttl: float, margin: float) -> None:
        """Hold a lease that was just granted.

        Args:
            asked: The trio time before the request was sent, not when the answer came.
            ttl: Seconds the grantor gave, counted by the grantor from when the request reached it.
            margin: Seconds before the end at which the guards are cut; above 0, below `ttl`.
        """
        if not 0 < margin < ttl:
            raise ValueError(f"margin is {margin} s, must lie between 0 and the ttl of {ttl} s")
        self._good_for = ttl - margin
        self._deadline = asked + self._good_for
        self._reason: str | None = None
        self._scopes: dict[trio.CancelScope, None] = {}

    @property
    def deadline(self) -> float:
        """The trio time at which the guards are cut; minus infinity once the lease is lost."""
        return self._deadline

    @property
    def lost(self) -> bool:
        """Whether the deadline has passed or the lease was lost. Never false again once it was true."""
        return trio.current_time() >= self._deadline

    @property
    def reason(self) -> str | None:
        """Why the lease was lost; None while it is held, and after a deadline that just passed."""
        return self._reason

    @contextmanager
    def guard(self) -> Iterator[trio.CancelScope]:
        """Run a block only as long as the lease is held.

        Guarantee: the block is cancelled at the deadline, which every renewal moves, and at once when the lease
        is lost. Any number of tasks may hold guards. Entered too late, the block is cut at its first checkpoint.
        Yields: the scope; after the block `cancelled_caught` says whether it was cut.
        """
        guard = trio.CancelScope()
        if self._reason is None:
            guard.deadline = self._deadline
        else:
            guard.cancel(reason=self._reason)
        self._scopes[guard] = None
        try:
            with guard:
                yield guard
        finally:
            del self._scopes[guard]

    def renewed(self, asked: float) -> bool:
        """Take in a yes to a request that was sent at trio time `asked`; move all guards.

        Guarantee: a slow answer stretches nothing, and a yes that comes after the deadline revives nothing.
        Returns: False when it came too late: the guards have fired.
        """
        if self.lost:
            return False
        self._deadline = max(self._deadline, asked + self._good_for)
        for scope in self._scopes:
            scope.deadline = self._deadline
        return True

    def lose(self, reason: str) -> None:
        """Cut all guards now, and every later one. The first reason stays."""
        if self._reason is None:
            self._reason = reason
        self._deadline = -math.inf
        for scope in self._scopes:
            scope.cancel(reason=reason)


async def heartbeat(
    lease: Lease,
    renew: Callable[[], Awaitable[bool]],
    every: float,
    random: Random,
    *,
    outage: type[Exception] | tuple[type[Exception], ...],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Renew the lease until it is lost.

    A request goes out `every` seconds after the last one was sent, 10 % jitter either way. No answer within `every`,
    or an error of `outage`, means nobody knows: it is asked again after a fifth of that, for as long as the lease
    lasts. A no loses the lease at once.

    Args:
        lease: What to renew; its guards move with each yes.
        renew: Sends one request. True: extended; False: refused for good.
        every: Seconds between two requests, a third of the ttl or less.
        random: Where the jitter comes from.
        outage: The errors of `renew` that count as no answer, unknown outcomes included.
        task_status: Called at once: a lease is held when this begins.

    Cancelled: nothing is renewed any more; the guards keep their deadline.
    Raises: whatever else `renew` raises, as itself; the guards keep their deadline.
    """
    if not every > 0:
        raise ValueError(f"every is {every} s, must be above 0")

    def jittered(seconds: float) -> float:
        return seconds * random.uniform(1 - JITTER, 1 + JITTER)

    due = trio.current_time() + jittered(every)
    task_status.started()
    with lease.guard():
        while True:
            await trio.sleep_until(due)
            asked, answer = trio.current_time(), None
            try:
                with trio.move_on_after(every):
                    answer = await renew()
            except outage:
                answer = None  # nobody knows: the lease stands until its deadline
            if answer is False:
                lease.lose("the renewal was refused")
            if answer and lease.renewed(asked):
                due = asked + jittered(every)  # from the sending: slow answers must not thin out the requests
            else:
                due = trio.current_time() + jittered(every * SOON)
