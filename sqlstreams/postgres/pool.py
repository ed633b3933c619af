"""The pool of connections to Postgres for trio: units of work, single statements, reads, transactions of the user.

Guarantee   cancelled means that nothing was done, returned means committed; where nobody can know, OutcomeUnknown says so.
            A call ends within two graces after its cancellation, also when the server is frozen, and gives its connection
            back. Errors are ours only, besides what the caller's function raises by itself.
Relies on   a trio cancel is one CancelledError on the asyncio side; what has to run to its end runs in a task of its own.
Cancelled   a statement that runs is cancelled in the server before its connection is used again.
Outage      StoreUnavailable, or OutcomeUnknown when the last statement may have been done; the pool recovers by itself.

Functions that are handed to a pool are asyncio-flavoured: `async def fn(conn, ...)`, and call nothing that is trio's.
Callers of `Pool` are trio-flavoured. All durations here are seconds.

Source: docs/explanation/cancellation.md
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, overload

import trio

from sqlstreams.errors import (
    ClientClosed,
    OutcomeUnknown,
    SQLStreamsError,
    StoreUnavailable,
    TransactionAborted,
)
from sqlstreams.postgres.bridge import Bridge
from sqlstreams.postgres.connect import Connection, is_closed, is_lost
from sqlstreams.postgres.places import Places, PoolStatistics
from sqlstreams.postgres.settings import PoolSettings
from sqlstreams.postgres.settle import settle
from sqlstreams.postgres.translate import is_database_error, never_sent, translate
from sqlstreams.postgres.tx import Tx, TxState

__all__ = ["Pool", "open_pool"]

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")
_Fn: TypeAlias = Callable[..., Awaitable[T]]
_Then: TypeAlias = Callable[[Connection, T], Awaitable[R]]


@asynccontextmanager
async def open_pool(
    bridge: Bridge, settings: PoolSettings, *, report: Callable[[str], None] | None = None
) -> AsyncIterator["Pool"]:
    """Open a pool for the block, with one connection to begin with.

    Args:
        bridge: the program's bridge.
        settings: how to connect, and how long to wait for what.
        report: told in one line what is also logged: that callers wait.

    Cancelled: all connections are closed, within two graces; calls that still have one lose it.
    Raises: ConfigurationError, AuthenticationFailed, PermissionDenied or StoreUnavailable when it cannot connect.
    """
    pool = Pool(bridge, settings, report=report)
    try:
        await pool._open()  # noqa: SLF001 - only this function may
        yield pool
    finally:
        with trio.CancelScope(shield=True):  # bounded: _close takes two graces
            await pool._close()  # noqa: SLF001


class Pool:
    """The pool. Made by `open_pool`."""

    def __init__(
        self, bridge: Bridge, settings: PoolSettings, *, report: Callable[[str], None] | None = None
    ) -> None:
        self.settings = settings
        self._bridge = bridge
        self._grace = settings.grace
        self._where = settings.where
        self._begin = settings.begin
        self._places = Places(settings, report=report)

    def statistics(self) -> PoolStatistics:
        """Return the numbers of this moment."""
        return self._places.statistics()

    async def unit_of_work(self, fn: Callable[[Connection, *Ts], Awaitable[T]], *args: *Ts) -> T:
        """Run fn(conn, *args) in one transaction, and return its result: one crossing.

        Returned: committed.
        Cancelled: nothing was done.
        Raises: OutcomeUnknown (the commit was sent and not answered), TransactionAborted (fn swallowed the error of a
            statement), StoreUnavailable and all others (nothing was done); what fn raises by itself (nothing was done).
        """
        return await self._cross(self._unit, fn, args)

    @overload
    async def autocommit(
        self, fn: Callable[[Connection, *Ts], Awaitable[T]], *args: *Ts, then: None = None
    ) -> T: ...
    @overload
    async def autocommit(
        self,
        fn: Callable[[Connection, *Ts], Awaitable[T]],
        *args: *Ts,
        then: Callable[[Connection, T], Awaitable[R]],
    ) -> tuple[T, R]: ...
    async def autocommit(  # type: ignore[misc] # mypy cannot compare `*args: *Ts` with `*args: Any`
        self, fn: "_Fn[Any]", *args: Any, then: "_Then[Any, Any] | None" = None
    ) -> Any:
        """Run fn(conn, *args), whose last statement commits by itself, and return its result: one crossing.

        Args:
            fn: may read, and write with one statement, which comes last: it is the point of no return.
            args: fn's.
            then: a read that follows on the same connection, as then(conn, result): both results are returned.

        Returned: committed.
        Cancelled: nothing was done.
        Raises: OutcomeUnknown (the statement was sent and not answered; or it **was** done, and the read after it found
            no server), StoreUnavailable and all others (nothing was done, unless `then` raised it: a read that Postgres
            refuses comes after the commit); what fn raises by itself.
        """
        return await self._cross(self._autocommit, fn, args, then)

    async def read(self, fn: Callable[[Connection, *Ts], Awaitable[T]], *args: *Ts) -> T:
        """Run fn(conn, *args), which only reads, outside any transaction: one crossing.

        Cancelled: the statement is stopped in the server, its connection is free, within a grace.
        Raises: StoreUnavailable, StatementRefused and others; what fn raises by itself.
        """
        return await self._cross(self._read, fn, args)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator["Tx"]:
        """A transaction over many crossings, for the user's own statements. Left without an exception: committed.

        Cancelled: nothing was done.
        Raises: OutcomeUnknown, TransactionAborted, StoreUnavailable as `unit_of_work` does; what the block raises, after
            the transaction was rolled back.
        """
        conn = await self._cross(self._open_transaction)
        state = TxState(conn)
        try:
            yield Tx(self._cross, state)
            state.end()
            await self._cross(self._commit_once, state)
        finally:
            state.over = True
            if not state.committing:
                await self._roll_back(conn)

    async def _roll_back(self, conn: Connection) -> None:
        with trio.CancelScope(shield=True), suppress(ClientClosed):  # bounded: give_back takes two graces
            await self._bridge.call(self._places.give_back, conn, "rollback")

    # From here on everything but _cross, _open and _close is asyncio-flavoured.

    async def _cross(self, fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
        """Cross the bridge; errors become ours, without a trace of the driver's."""
        self._places.check_open()
        try:
            return await self._bridge.call(fn, *args)
        except Exception as exc:
            if not is_database_error(exc):
                raise
            failure = translate(exc, subject=self._where)
        raise failure

    async def _open(self) -> None:
        await self._cross(self._places.open)

    async def _close(self) -> None:
        self._places.refuse()
        with suppress(ClientClosed):
            await self._bridge.call(self._places.close)

    async def _unit(self, fn: Callable[[Connection, *Ts], Awaitable[T]], args: tuple[*Ts]) -> T:
        conn = await self._begun(self._begin)
        try:
            result = await fn(conn, *args)
        except BaseException:
            await self._places.give_back(conn, "rollback")
            raise
        await settle(self._grace, self._commit, conn, True)  # noqa: FBT003 - positional: settle's; no return from here
        return result

    async def _begun(self, begin: str) -> Connection:
        """Acquire and begin. The server may have hung up on idle connections: then the next one is tried."""
        for left in reversed(range(self.settings.size + 1)):
            conn = await self._places.acquire()
            try:
                await conn.execute(begin)
            except BaseException as exc:
                await self._places.give_back(conn, "rollback")
                if not (left and is_lost(exc)):
                    raise
            else:
                return conn
        raise AssertionError("the last attempt returns or raises")

    async def _autocommit(
        self, fn: "_Fn[T]", args: tuple[Any, ...], then: "_Then[T, R] | None"
    ) -> T | tuple[T, R]:
        unsent = True

        async def last(conn: Connection) -> T:
            nonlocal unsent
            unsent = False
            try:
                return await fn(conn, *args)
            except Exception as exc:
                unsent = never_sent(exc)
                raise

        for left in reversed(range(self.settings.size + 1)):
            unsent = True
            conn = await self._places.acquire()
            try:
                return await settle(self._grace, self._last_and_then, conn, last, then)
            except StoreUnavailable:
                if not (left and unsent):
                    raise
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # settle caught our one cancel
                raise asyncio.CancelledError
        raise AssertionError("the last attempt returns or raises")

    async def _read(self, fn: "_Fn[T]", args: tuple[Any, ...]) -> T:
        for left in reversed(range(self.settings.size + 1)):
            conn = await self._places.acquire()
            try:
                result = await fn(conn, *args)
            except BaseException as exc:
                await self._places.give_back(conn)
                if not (left and never_sent(exc)):
                    raise
            else:
                await self._places.give_back(conn, clean=True)
                return result
        raise AssertionError("the last attempt returns or raises")

    async def _open_transaction(self) -> Connection:
        return await self._begun(self.settings.begin_plain)

    async def _commit_once(self, state: TxState) -> None:
        state.committing = True  # from here on _finish gives the connection back
        await settle(self._grace, self._commit, state.conn, False)  # noqa: FBT003 - positional: settle's

    async def _commit(self, conn: Connection, clean: bool) -> None:  # noqa: FBT001 - positional: settle's
        if await self._finish(conn, _send_commit, "rollback", clean=clean) != "COMMIT":
            raise TransactionAborted("a statement failed and its error was swallowed")

    async def _last_and_then(
        self, conn: Connection, last: Callable[[Connection], Awaitable[T]], then: "_Then[T, R] | None"
    ) -> T | tuple[T, R]:
        if then is None:
            return await self._finish(conn, last, clean=True)
        result = await self._finish(conn, last, keep=True)
        try:
            after = await then(conn, result)
        except BaseException as exc:
            await self._places.give_back(conn)
            if not is_database_error(exc):
                raise
            failure = translate(exc, subject=self._where)
        else:
            await self._places.give_back(conn, clean=True)
            return result, after
        if isinstance(failure, StoreUnavailable):  # would say that nothing was done
            raise OutcomeUnknown(
                f"committed, but the read after it failed: {failure.message}", subject=self._where
            )
        raise failure

    async def _finish(
        self,
        conn: Connection,
        last: Callable[[Connection], Awaitable[T]],
        *last_words: str,
        clean: bool = False,
        keep: bool = False,
    ) -> T:
        """Run the last statement and give the connection back. The error says whether it may have been done."""
        failure: SQLStreamsError
        if is_closed(conn):
            await self._places.give_back(conn)
            failure = StoreUnavailable(
                "the connection was lost before the last statement", subject=self._where
            )
        else:
            try:
                result = await last(conn)
            except BaseException as exc:
                await self._places.give_back(conn, *last_words)
                if not is_database_error(exc):
                    raise
                failure = translate(exc, subject=self._where, sent_last=True)
            else:
                if not keep:
                    await self._places.give_back(conn, clean=clean)
                return result
        raise failure


async def _send_commit(conn: Connection) -> str:
    return await conn.execute("commit")
