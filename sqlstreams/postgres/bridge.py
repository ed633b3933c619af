"""The one asyncio loop of the program, and the only way into it: the driver speaks asyncio, everything else speaks trio.

Guarantee   a crossing that is cancelled has ended on the asyncio side when `Bridge.call` returns: nothing runs on.
Relies on   trio-asyncio runs its loop inside trio, in trio's thread; the loop is kept in the object, since the context
            variable that trio-asyncio looks in is not set in tasks that were started before the loop, nor in system tasks.
Cancelled   the asyncio side gets one CancelledError, and may use the time it needs to put its own things in order. At the
            end of the block too: the loop itself would cancel every task of a call, also those that must run to their end.
Outage      an error that nobody waits for (a task whose exception nobody read, a callback that raised) is counted and
            reported; the loop's default would end the program.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import trio
import trio_asyncio

from sqlstreams.errors import ClientClosed

__all__ = ["Bridge", "open_bridge"]

P = ParamSpec("P")
T = TypeVar("T")

GRACE = 0.5  # seconds; a call takes two graces at most to end after its cancellation
NURSERIES_OF_THE_LOOP = 2  # each wraps an error of the block once

_log = logging.getLogger("sqlstreams.bridge")


class Bridge:
    """Runs asyncio-flavoured functions from trio tasks, system tasks and `trio.from_thread`.

    Attributes:
        reported: how many errors the loop had that nobody waited for. It stays 0 unless something is wrong.
    """

    def __init__(self, loop: Any, report: Callable[[str], None] | None = None) -> None:
        self._loop = loop
        self._report = report
        self._closed = False
        self._calls: set[trio.CancelScope] = set()
        self._idle = trio.Event()
        self.reported = 0

    async def call(self, fn: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn(*args, **kwargs)`, asyncio-flavoured, and return its result: one crossing.

        Cancelled: fn got one CancelledError, and has ended by the time this returns; a scope that was cancelled before
            never starts it.
        Raises: what fn raises; ClientClosed after the end of `open_bridge`, or when it ends under this call.
        """
        if self._closed or self._loop.is_closed():
            raise _closed()
        scope = trio.CancelScope()
        self._calls.add(scope)
        try:
            with scope:  # cancelled by `close`
                result: T = await self._loop.run_aio_coroutine(fn(*args, **kwargs))
                return result
        except (
            asyncio.CancelledError
        ):  # not by a scope, that would be trio.Cancelled: by the loop, which ends
            if not self._closed:
                raise
        finally:
            self._calls.discard(scope)
            if self._closed and not self._calls:
                self._idle.set()
        raise _closed()

    async def close(self, grace: float) -> None:
        """Refuse calls from now on, cancel those that are under way, and wait until they have ended: two graces at most."""
        self._closed = True
        for call in self._calls:
            call.cancel(reason="the bridge closes")
        if self._calls:
            with trio.move_on_after(2 * grace, shield=True):  # bounded: two graces
                await self._idle.wait()

    def handle(self, _loop: object, context: dict[str, Any]) -> None:
        """Count and report an error that nobody waits for.

        The context holds objects, whose texts may quote arguments, and so may the message behind its first bracket. Only
        the beginning of the message and the type of the exception are told.
        """
        exc = context.get("exception")
        if isinstance(exc, ConnectionError) and "unexpected connection_lost" in str(exc):
            return  # asyncpg leaves this one when connecting is cancelled between the socket and the first answer
        self.reported += 1
        what = str(context.get("message") or "error in the asyncio loop").partition("(")[0].strip()
        text = what if exc is None else f"{what}: {type(exc).__name__}"
        _log.error("nobody waited for this error: %s", text)
        if self._report is not None:
            with suppress(Exception):  # a reporter that fails must not end the program either
                self._report(text)


@asynccontextmanager
async def open_bridge(
    report: Callable[[str], None] | None = None, *, grace: float = GRACE
) -> AsyncIterator[Bridge]:
    """Open the loop for the block; one for the program.

    Args:
        report: told of each error that nobody waited for, in one line without any values. It is logged in any case, by
            `sqlstreams.bridge`.
        grace: at the end of the block, calls that are under way have two of them to end, in seconds.

    Cancelled: calls that are under way get their CancelledError and end first.
    Raises: what the block raises, without the groups of one that the loop's nurseries wrap around it.
    """
    failure: BaseException | None
    block_failed = False
    try:
        async with trio_asyncio.open_loop() as loop:
            bridge = Bridge(loop, report)
            loop.set_exception_handler(bridge.handle)  # before anything else runs
            try:
                yield bridge
            except BaseException:
                block_failed = True
                raise
            finally:
                await bridge.close(grace)
    except BaseExceptionGroup as group:
        failure = group if block_failed else group.split(_is_leftover)[1]
        for _ in range(NURSERIES_OF_THE_LOOP):
            if isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
                failure = failure.exceptions[0]
    except (ClientClosed, asyncio.CancelledError) as exc:
        failure = exc if block_failed else None
    else:
        return
    if failure is not None:
        raise failure


def _is_leftover(exc: BaseException) -> bool:
    """Say whether it is what a task of somebody else ended with as the loop ended; who waits for it has been told."""
    return isinstance(exc, ClientClosed | asyncio.CancelledError)


def _closed() -> ClientClosed:
    return ClientClosed("the connection to Postgres has been closed, so nothing can be sent any more")
