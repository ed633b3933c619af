"""Runs a command's trio code: connects, watches signals, and turns how it ended into an exit code.

Guarantee   the first signal lets a command that drains end in order, and cancels any other; the second one ends the process
            at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import trio

import sqlstreams
from sqlstreams.cli._options import Settings
from sqlstreams.errors import NotInstalled

__all__ = ["SCHEMA", "Stop", "open_client", "run"]

SCHEMA = "sqlstreams"


class Stop:
    """What signals asked of this process.

    Attributes:
        number: of the first signal, None before it.
        asked: set by the first signal, for commands that called `drains`.
    """

    def __init__(self, scope: trio.CancelScope) -> None:
        self.number: int | None = None
        self.asked = trio.Event()
        self._scope = scope
        self._drains = False

    def drains(self) -> None:
        """From now on the command ends by itself when asked."""
        self._drains = True

    def signalled(self, number: int) -> None:
        """Take note of a signal. The second one does not return."""
        if self.number is not None:
            sys.stderr.flush()
            os._exit(128 + number)
        self.number = number
        self.asked.set()
        if not self._drains:
            self._scope.cancel(reason=signal.Signals(number).name)


def run(work: Callable[[Stop], Awaitable[int]], *, after_sigterm: int | None = None) -> int:
    """Run a command's code in trio and return its exit code.

    Args:
        work: returns an exit code.
        after_sigterm: the exit code after a first SIGTERM that cut `work` before it drains; None: 143.
    """
    return trio.run(_watched, work, 128 + signal.SIGTERM if after_sigterm is None else after_sigterm)


async def _watched(work: Callable[[Stop], Awaitable[int]], after_sigterm: int) -> int:
    code = after_sigterm
    async with trio.open_nursery() as nursery:
        stop = Stop(trio.CancelScope())
        await nursery.start(_watch_signals, stop)
        with stop._scope:  # noqa: SLF001 - our own
            code = await work(stop)
        nursery.cancel_scope.cancel(reason="the command has ended")
    return 128 + signal.SIGINT if stop.number == signal.SIGINT else code


async def _watch_signals(
    stop: Stop, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            stop.signalled(number)


@asynccontextmanager
async def open_client(
    settings: Settings,
    *,
    name: str = "sqlstreams",
    install: bool = False,
    listen: bool = False,
    allow_destroy: bool = False,
) -> AsyncIterator[sqlstreams.Client]:
    """Connect as the settings say; a command installs nothing unless it must.

    Args:
        settings: where to connect.
        name: of the node and in pg_stat_activity.
        install: create or update the schema.
        listen: be woken by LISTEN.
        allow_destroy: allow `destroy`.

    Raises: what `sqlstreams.connect` raises.
    """
    async with AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(
                sqlstreams.connect(
                    settings.database_url,
                    schema=settings.schema or SCHEMA,
                    install=install,
                    listen=listen,
                    allow_destroy=allow_destroy,
                    application_name=name,
                )
            )
        except NotInstalled as exc:
            raise NotInstalled(
                f"{exc.message}; `sqlstreams stream register` installs it", subject=exc.subject
            ) from None
        yield client
