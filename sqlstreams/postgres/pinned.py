"""Pinned: one connection for one purpose, beside the pool.

Guarantee   nobody waits for it but its own callers; a call ends within its timeout and two graces, with an error of ours.
Cancelled   a read is stopped in the server; an autocommit returned means committed, and nobody knows is OutcomeUnknown.
Outage      each call tries to connect once; it recovers by itself.

Source: docs/explanation/cancellation.md
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

import trio

from sqlstreams.errors import ClientClosed
from sqlstreams.postgres.bridge import Bridge
from sqlstreams.postgres.connect import Connection, DriverConnection, connect, hang_up, is_stale
from sqlstreams.postgres.settings import PoolSettings
from sqlstreams.postgres.settle import settle
from sqlstreams.postgres.translate import is_database_error, translate

__all__ = ["Pinned"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Pinned:
    """One connection for one purpose (heartbeats, observations), beside the pool, so that nobody waits for it.

    It opens at the first call, and again by itself after a loss: a call tries once. One call at a time; others wait.
    Every call ends within its timeout and two graces. Nothing is opened by making one.
    """

    def __init__(self, bridge: Bridge, settings: PoolSettings, *, name: str) -> None:
        self._bridge = bridge
        self._settings = settings
        self._grace = settings.grace
        self._name = name
        self._lock = trio.Lock()
        self._idle: DriverConnection | None = None
        self._all: set[DriverConnection] = set()
        self._closed = False

    async def read(
        self, fn: Callable[[Connection, *Ts], Awaitable[T]], *args: *Ts, timeout: float | None = None
    ) -> T:
        """Run fn(conn, *args), which only reads; all of it within `timeout` seconds (default: command_timeout).

        Cancelled: the statement is stopped in the server.
        Raises: StoreUnavailable and others; what fn raises by itself.
        """
        return await self._cross(self._read, timeout or self._settings.command_timeout, fn, args)

    async def autocommit(
        self, fn: Callable[[Connection, *Ts], Awaitable[T]], *args: *Ts, timeout: float | None = None
    ) -> T:
        """Run fn(conn, *args), whose last statement commits by itself. Returned: committed.

        Connecting and the statement are each bounded by `timeout` seconds (default: command_timeout).

        Cancelled: nothing was done.
        Raises: OutcomeUnknown (no answer), StoreUnavailable and others (nothing was done); what fn raises by itself.
        """
        return await self._cross(self._autocommit, timeout or self._settings.command_timeout, fn, args)

    async def close(self) -> None:
        """Close the connection; calls that wait get ClientClosed. Takes a grace at most, also when it is cancelled."""
        self._closed = True
        with trio.CancelScope(shield=True), suppress(ClientClosed):  # bounded: _close_all takes one grace
            await self._bridge.call(self._close_all)

    # From here on everything but _cross is asyncio-flavoured.

    async def _cross(self, fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
        async with self._lock:
            if self._closed:
                raise ClientClosed("its connections to Postgres have been closed")
            try:
                return await self._bridge.call(fn, *args)
            except Exception as exc:
                if not is_database_error(exc):
                    raise
                failure = translate(exc, subject=self._settings.where)
        raise failure

    async def _read(self, timeout: float, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
        async with asyncio.timeout(timeout):  # noqa: TID251 - asyncio-flavoured, and its owner
            conn = await self._take()
            try:
                result = await fn(conn, *args)
            except BaseException:
                await self._clean_up(conn)
                raise
            self._put_back(conn)
            return result

    async def _autocommit(self, timeout: float, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
        async with asyncio.timeout(timeout):  # noqa: TID251 - asyncio-flavoured, and its owner
            conn = await self._take()
        return await settle(self._grace, self._finish, timeout, conn, fn, args)

    async def _finish(
        self, timeout: float, conn: DriverConnection, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]
    ) -> T:
        try:
            async with asyncio.timeout(timeout):  # noqa: TID251 - asyncio-flavoured, and its owner
                result = await fn(conn, *args)
        except BaseException as exc:
            await self._clean_up(conn)
            if not is_database_error(exc):
                raise
            failure = translate(exc, subject=self._settings.where, sent_last=True)
        else:
            self._put_back(conn)
            return result
        raise failure

    async def _take(self) -> DriverConnection:
        conn, self._idle = self._idle, None
        if conn is not None:
            if not is_stale(conn):
                return conn
            self._cut(conn)
        conn = await connect(self._settings, self._name)
        self._all.add(conn)
        return conn

    def _put_back(self, conn: DriverConnection) -> None:
        if self._closed or self._idle is not None or conn.is_closed() or conn.is_in_transaction():
            self._cut(conn)
        else:
            self._idle = conn

    async def _clean_up(self, conn: DriverConnection) -> None:
        """Wait for a grace until the server has stopped the statement, then keep the connection, or cut it."""
        try:
            await conn.execute("select 1", timeout=self._grace)
        except BaseException as exc:
            self._cut(conn)
            if not isinstance(exc, Exception):
                raise
        else:
            self._put_back(conn)

    def _cut(self, conn: DriverConnection) -> None:
        self._all.discard(conn)
        conn.terminate()

    async def _close_all(self) -> None:
        conn, self._idle = self._idle, None
        if conn is not None:
            self._all.discard(conn)
            await hang_up(conn, self._grace)
        for other in list(self._all):  # a call that nobody waits for any more
            self._cut(other)
