"""Places: the connections of a pool, given out to one caller at a time and taken back whatever happened to them.

Guarantee   a connection that was acquired and given back frees its place within two graces; one that is given out was not
            hung up on by the server, as far as its socket tells.
Cancelled   acquire: none was taken. give_back: the connection is cut, unless its release goes on by itself.
Outage      stale connections are replaced one by one; a caller that waits too long gets StoreUnavailable and the numbers.

All `async def` here are asyncio-flavoured; durations are seconds.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import asyncpg
import asyncpg.pool

from sqlstreams.errors import ClientClosed, StoreUnavailable
from sqlstreams.postgres.connect import Connection, DriverConnection, connect, is_stale
from sqlstreams.postgres.settings import PoolSettings

__all__ = ["Places", "PoolStatistics"]

WARN_AGAIN_AFTER = 1.0  # at most one line a second about callers that wait

_log = logging.getLogger("sqlstreams.pool")


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A snapshot: `size` places, `connected` of them with a connection, `in_use` given out, `waiting` callers."""

    size: int
    connected: int
    in_use: int
    waiting: int

    def describe(self) -> str:
        """Return the numbers in words."""
        return f"size {self.size}, connected {self.connected}, in use {self.in_use}, waiting {self.waiting}"


class Places:
    """At most `settings.size` connections, of which each has one user at a time."""

    def __init__(self, settings: PoolSettings, *, report: Callable[[str], None] | None = None) -> None:
        self._settings = settings
        self._grace = settings.grace
        self._report = report
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._closing = False
        self._in_use = 0
        self._waiting = 0
        self._warn_next = 0.0

    def statistics(self) -> PoolStatistics:
        """Return the numbers of this moment."""
        connected = self._pool.get_size() if self._pool is not None else 0
        return PoolStatistics(self._settings.size, connected, self._in_use, self._waiting)

    def refuse(self) -> None:
        """Give out no connection from now on."""
        self._closing = True

    def check_open(self) -> None:
        """Raise ClientClosed after `refuse`."""
        if self._closing:
            raise ClientClosed("its connections to Postgres have been closed")

    async def open(self) -> None:
        """Make the first connection. Raises: what `connect` does."""

        async def connect_one(*_args: object, **_kwargs: object) -> "asyncpg.Connection[asyncpg.Record]":
            return await connect(self._settings)

        self._pool = await asyncpg.create_pool(
            min_size=0,  # no task in the background that reconnects
            max_size=self._settings.size,
            connect=connect_one,
            connection_class=DriverConnection,
        )
        await self.give_back(await self.acquire())

    async def close(self) -> None:
        """Close all connections; after two graces they are cut, also those that are given out."""
        if self._pool is None:
            return
        try:
            async with asyncio.timeout(2 * self._grace):  # noqa: TID251 - asyncio-flavoured, and its owner
                await self._pool.close()  # cuts all connections when it is cancelled
        except Exception as exc:  # noqa: BLE001 - they are cut, and there is nobody to tell
            _log.info("connections were cut, not closed: %s", type(exc).__name__)

    async def acquire(self) -> Connection:
        """Wait for a connection; whoever gets it must `give_back`. Cancelled: none was taken."""
        if self._pool is None or self._closing:
            raise ClientClosed("its connections to Postgres have been closed")
        if self._pool.get_idle_size() and not self._waiting:  # then it does not wait, and needs no timers
            if not is_stale(conn := await self._pool.acquire()):
                self._in_use += 1
                return conn
            conn.terminate()
        late = asyncio.get_running_loop().call_later(self._settings.warn_after, self._warn_of_waiting)
        self._waiting += 1
        before = ""
        try:
            async with asyncio.timeout(self._settings.acquire_timeout):  # noqa: TID251 - asyncio-flavoured, and its owner
                while is_stale(conn := await self._pool.acquire()):
                    conn.terminate()  # the server has hung up and the driver has not read it yet; frees the place
                # nothing is awaited between here and the return
                self._in_use += 1
                return conn
        except TimeoutError:  # its own: `connect` raises ours
            before = self.statistics().describe()
        except asyncpg.InterfaceError:
            if not self._closing:
                raise
        finally:
            late.cancel()
            self._waiting -= 1
        self.check_open()
        raise StoreUnavailable(
            f"no connection became free within {self._settings.acquire_timeout:g} s (pool: {before})",
            subject=self._settings.where,
        )

    async def give_back(self, conn: Connection, *last_words: str, clean: bool = False) -> None:
        """Give the connection back, or cut it: after two graces at most its place in the pool is free.

        Args:
            conn: what `acquire` returned; exactly once.
            last_words: statements to end a transaction with.
            clean: no session state can be left behind, so the driver's reset would be a round trip for nothing.
        """
        assert self._pool is not None
        releasing = False
        try:
            for statement in last_words:  # first waits until the running statement's cancel is acknowledged
                await conn.execute(statement, timeout=self._grace)
            releasing = True
            if clean:
                conn.skip_reset()  # type: ignore[union-attr]
            await self._pool.release(conn, timeout=self._grace)  # type: ignore[arg-type]
        except BaseException as exc:
            cancelled = not isinstance(exc, Exception)
            if not (cancelled and releasing):  # a release goes on by itself
                with suppress(asyncpg.InterfaceError):  # the driver may have cut it already
                    conn.terminate()  # synchronous; frees the place in the pool
            if cancelled:
                raise
        finally:
            self._in_use -= 1

    def _warn_of_waiting(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._warn_next:
            return
        self._warn_next = now + WARN_AGAIN_AFTER
        text = f"a caller waits for a connection for more than {self._settings.warn_after:g} s (pool: {self.statistics().describe()})"
        _log.warning(text)
        if self._report is not None:
            with suppress(Exception):  # it would be an error in a callback of the loop
                self._report(text)
