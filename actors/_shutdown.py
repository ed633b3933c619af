"""Shutdown: drain first, cancel after a budget; and the signals that ask for it.

Guarantee   a request is never missed: who asks, waits or drains only later learns of it too.
"""

import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import trio

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""What asks a process to stop."""


class Shutdown:
    """A request to stop: made once it means drain, made again it is forced."""

    def __init__(self) -> None:
        """Begin with nothing requested."""
        self._event = trio.Event()
        self._at: float | None = None
        self._reason: str | None = None
        self._forced = False
        self._draining: dict[trio.CancelScope, float] = {}

    @property
    def requested(self) -> bool:
        """Whether a shutdown was requested."""
        return self._at is not None

    @property
    def forced(self) -> bool:
        """Whether it was requested more than once."""
        return self._forced

    @property
    def reason(self) -> str | None:
        """The reason of the first request; None before it."""
        return self._reason

    def request(self, reason: str) -> None:
        """Ask everybody to drain. A second request sets `forced` and changes nothing else. Call it inside trio."""
        if self._at is not None:
            self._forced = True
            return
        self._at = trio.current_time()
        self._reason = reason
        self._event.set()
        for scope, budget in self._draining.items():
            scope.deadline = self._at + budget

    async def wait_requested(self) -> None:
        """Return once a shutdown was requested, at once if it already was."""
        await self._event.wait()

    @contextmanager
    def draining(self, budget: float) -> Iterator[trio.CancelScope]:
        """Do what `draining_scope` does, without a checkpoint of its own."""
        if not budget >= 0:
            raise ValueError(f"budget is {budget} s, must be 0 or more")
        with trio.CancelScope() as scope:
            if self._at is not None:
                scope.deadline = self._at + budget
            self._draining[scope] = budget
            try:
                yield scope
            finally:
                del self._draining[scope]


@asynccontextmanager
async def draining_scope(shutdown: Shutdown, budget: float) -> AsyncIterator[trio.CancelScope]:
    """Run a block that may go on for `budget` seconds after the shutdown was requested, then is cancelled.

    Guarantee: never cut before; entered after the request, the block has what is left of the budget. A forced
    shutdown does not cut it: cancel the scope for that.
    Yields: the scope; after the block `cancelled_caught` says whether it was cut.
    """
    await trio.lowlevel.checkpoint()
    with shutdown.draining(budget) as scope:
        yield scope


async def watch_signals(
    shutdown: Shutdown,
    signals: Sequence[int] = SIGNALS,
    *,
    on_second: Callable[[int], None] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Request the shutdown at the first signal; call `on_second` with the number of each further one.

    Two equal signals that arrive before the first could be handled count as one. Only the main thread may run this.

    Args:
        shutdown: What to request.
        signals: Their numbers; this actor alone handles them while it runs.
        on_second: By default `SystemExit(128 + number)` is raised, which leaves every nursery inside a group.
        task_status: Called when the signals are being watched.

    Cancelled: the former handlers are back.
    """
    with trio.open_signal_receiver(*signals) as received:
        task_status.started()
        first = True
        async for number in received:
            shutdown.request(signal.Signals(number).name)
            if not first:
                (on_second or _exit)(number)
            first = False


def _exit(number: int) -> None:
    raise SystemExit(128 + number)
