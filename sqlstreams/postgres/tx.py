"""Tx: a transaction of the user over many crossings, statement by statement.

Guarantee   it belongs to one task: of two statements at once the second is refused and not sent; the transaction does not
            commit when nobody knows what one of its statements did.
Relies on   the pool begins it, ends it, and hands in how to cross the bridge.
Cancelled   the statement is stopped in the server, and the transaction can only be rolled back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, TypeVarTuple

import asyncpg

from sqlstreams.errors import ClientClosed, TransactionAborted, TransactionInUse
from sqlstreams.postgres.connect import Connection, is_closed
from sqlstreams.postgres.settings import NO_LIMIT

__all__ = ["Cross", "Tx", "TxState"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Cross(Protocol):
    """Runs fn(*args), asyncio-flavoured, from a trio task; errors are ours."""

    async def __call__(self, fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
        """Cross the bridge."""
        ...


@dataclass
class TxState:
    """Where a transaction stands: the pool and its Tx share it."""

    conn: Connection
    busy: bool = False
    over: bool = False
    committing: bool = False
    doomed: bool = False
    ended: bool = False

    def begin_statement(self) -> None:
        """Check that it may run a statement now."""
        if self.over:
            raise ClientClosed("the transaction has ended", subject="transaction")
        self._check_one_task()
        self._check_not_ended()
        self.busy = True

    def end(self) -> None:
        """Check that it may commit now."""
        self.over = True
        self._check_one_task()
        self._check_not_ended()
        if self.doomed:
            raise TransactionAborted(
                "a statement was cancelled or took too long, and its error was swallowed"
            )

    async def run(self, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
        """Run fn, asyncio-flavoured; remember when nobody knows what a statement did."""
        try:
            return await fn(self.conn, *args)
        except (asyncio.CancelledError, TimeoutError):
            self.doomed = True
            raise
        finally:
            self.ended = not is_closed(self.conn) and not self.conn.is_in_transaction()

    def _check_not_ended(self) -> None:
        if self.ended:
            raise TransactionAborted(
                "a statement inside the block ended the transaction itself (commit or rollback); nothing was sent after it"
            )

    def _check_one_task(self) -> None:
        if self.busy:
            raise TransactionInUse(
                "two tasks use one transaction at once; this statement was not sent", subject="transaction"
            )


class Tx:
    """The transaction inside `Pool.transaction`: statements with `$1` parameters, each one crossing.

    It belongs to one task. A statement that was cancelled, or took too long, may have been done or not: then the
    transaction cannot commit any more. Errors: TransactionInUse (two tasks use it at once: the second statement was not
    sent), TransactionAborted (one of its statements was a commit or a rollback), ClientClosed (the block has ended), and those of `Pool.unit_of_work`.
    """

    def __init__(self, cross: Cross, state: TxState) -> None:
        self._cross = cross
        self._state = state

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        """Run a statement, or a script when there are no arguments; return the tag of the last ("INSERT 0 1")."""
        return await self._call(_execute, query, args, timeout)

    async def fetch(self, query: str, *args: Any, timeout: float | None = None) -> "list[asyncpg.Record]":
        """Run a statement; return its rows, which can be read by name and by position."""
        return await self._call(_fetch, query, args, timeout)

    async def fetchrow(self, query: str, *args: Any, timeout: float | None = None) -> "asyncpg.Record | None":
        """Run a statement; return its first row, None without rows."""
        return await self._call(_fetchrow, query, args, timeout)

    async def fetchval(self, query: str, *args: Any, column: int = 0, timeout: float | None = None) -> Any:
        """Run a statement; return a value of its first row, None without rows."""
        return await self._call(_fetchval, query, args, timeout, column)

    async def run(self, fn: Callable[[Connection, *Ts], Awaitable[T]], *args: *Ts) -> T:
        """Run fn(conn, *args), asyncio-flavoured, inside the transaction: one crossing. For the store, not for users."""
        return await self._call(fn, *args)

    async def _call(self, fn: Callable[[Connection, *Ts], Awaitable[T]], *args: *Ts) -> T:
        state = self._state
        state.begin_statement()
        try:
            return await self._cross(state.run, fn, args)
        finally:
            state.busy = False


async def _execute(conn: Connection, query: str, args: tuple[Any, ...], timeout: float | None) -> str:
    return await conn.execute(query, *args, timeout=timeout or NO_LIMIT)


async def _fetch(
    conn: Connection, query: str, args: tuple[Any, ...], timeout: float | None
) -> "list[asyncpg.Record]":
    return await conn.fetch(query, *args, timeout=timeout or NO_LIMIT)


async def _fetchrow(
    conn: Connection, query: str, args: tuple[Any, ...], timeout: float | None
) -> "asyncpg.Record | None":
    return await conn.fetchrow(query, *args, timeout=timeout or NO_LIMIT)


async def _fetchval(
    conn: Connection, query: str, args: tuple[Any, ...], timeout: float | None, column: int
) -> Any:
    return await conn.fetchval(query, *args, column=column, timeout=timeout or NO_LIMIT)
