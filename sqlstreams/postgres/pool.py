"""Connections to Postgres for trio: units of work, single statements, reads, transactions of the user, pinned connections.

Guarantee   cancelled means that nothing was done, returned means committed; where nobody can know, OutcomeUnknown says so.
            A call ends within two graces after its cancellation, also when the server is frozen, and gives its connection
            back. Errors are ours only, besides what the caller's function raises by itself.
Relies on   a trio cancel is one CancelledError on the asyncio side; what has to run to its end runs in a task of its own.
Cancelled   a statement that runs is cancelled in the server before its connection is used again.
Outage      StoreUnavailable, or OutcomeUnknown when the last statement may have been done; the pool recovers by itself.

Functions that are handed to a pool are asyncio-flavoured: `async def fn(conn, ...)`, and call nothing that is trio's.
Callers of `Pool`, `Tx` and `Pinned` are trio-flavoured. All durations here are seconds.

Source: docs/explanation/cancellation.md
"""

import asyncio
import logging
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, overload
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import asyncpg.pool
import trio

from sqlstreams.errors import (
    ClientClosed,
    ConfigurationError,
    OutcomeUnknown,
    SQLStreamsError,
    StoreUnavailable,
    TransactionAborted,
)
from sqlstreams.postgres.bridge import Bridge
from sqlstreams.postgres.translate import address, is_database_error, never_sent, translate

__all__ = [
    "Connection",
    "Pinned",
    "Pool",
    "PoolSettings",
    "PoolStatistics",
    "Tx",
    "connect",
    "hang_up",
    "open_pool",
    "settle",
]

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")
Connection: TypeAlias = (
    "asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"
)

WARN_AGAIN_AFTER = 1.0  # at most one line a second about callers that wait
NO_LIMIT = 10 * 365 * 86_400.0  # the driver takes None for command_timeout
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 10, 5, 3  # a host that vanished is noticed after 25 s

_log = logging.getLogger("sqlstreams.pool")
_left_alone: set[asyncio.Task[Any]] = (
    set()
)  # tasks whose caller did not wait any longer; asyncio itself holds them weakly


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """How to connect, and how long to wait for what, in seconds. Its text does not show the URL.

    Args:
        dsn: a database URL, `postgresql://…`; several hosts are tried in order.
        size: how many connections the pool may open.
        grace: how long a call may go on after its cancellation, at each of two steps.
        command_timeout: bound of each statement but the user's own.
        connect_timeout: bound of connecting, all hosts together.
        acquire_timeout: bound of the wait for a connection of the pool.
        warn_after: a caller that waits for a connection longer than this is logged.
        lock_timeout: the server's, for every statement.
        idle_in_transaction: after this the server ends a unit of work whose process does not go on.
        application_name: shown by `pg_stat_activity`; None: that of the URL, else "sqlstreams".
        pooler: there is a transaction pooler (PgBouncer) in between: no session state, no prepared statements, no LISTEN.
    """

    dsn: str = field(repr=False)
    size: int = 4
    grace: float = 0.5
    command_timeout: float = 30.0
    connect_timeout: float = 10.0
    acquire_timeout: float = 30.0
    warn_after: float = 1.0
    lock_timeout: float = 2.0
    idle_in_transaction: float = 15.0
    application_name: str | None = None
    pooler: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigurationError(f"must be at least 1, not {self.size}", subject="pool_size")
        for name in (
            "grace",
            "command_timeout",
            "connect_timeout",
            "acquire_timeout",
            "warn_after",
            "lock_timeout",
            "idle_in_transaction",
        ):
            if not 0 < getattr(self, name) < NO_LIMIT:
                raise ConfigurationError(f"must be above 0 s, not {getattr(self, name)}", subject=name)

    @property
    def where(self) -> str:
        """What errors call the server: host and port, where they can be told from a password for certain."""
        return f"database server {address(self.dsn) or '(URL not shown)'}"

    @property
    def begin(self) -> str:
        """The first round trip of a unit of work."""
        idle = f"set local idle_in_transaction_session_timeout = {round(self.idle_in_transaction * 1000)}"
        return f"{self.begin_plain}; {idle}"

    @property
    def begin_plain(self) -> str:
        """The first round trip of a transaction of the user."""
        begin = "begin isolation level read committed"
        if not self.pooler:
            return begin
        return f"{begin}; set local lock_timeout = {round(self.lock_timeout * 1000)}; set local jit = off"

    def server_settings(self, name: str | None) -> dict[str, str]:
        """Return what is told the server when a connection starts, and survives the pool's resets."""
        settings = {}
        if self.application_name is not None or name is not None or "application_name=" not in self.dsn:
            settings["application_name"] = " ".join(
                filter(None, (self.application_name or "sqlstreams", name))
            )
        if not self.pooler:
            settings |= {
                "jit": "off",
                "lock_timeout": str(round(self.lock_timeout * 1000)),
                "default_transaction_isolation": "read committed",
                # A client whose host vanished holds its locks until the server notices.
                "tcp_keepalives_idle": str(KEEPALIVE_IDLE),
                "tcp_keepalives_interval": str(KEEPALIVE_INTERVAL),
                "tcp_keepalives_count": str(KEEPALIVE_COUNT),
                "tcp_user_timeout": str(1000 * (KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_COUNT)),
                "client_connection_check_interval": str(1000 * KEEPALIVE_INTERVAL),
            }
        return settings


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


async def settle(grace: float, fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
    """Run `fn(*args)` to its end though the caller is cancelled: for at most `grace` seconds more. asyncio-flavoured.

    Cancelled: returns what fn returns, or raises what it raises, if it ends within the grace.
    Raises: OutcomeUnknown after the grace; fn then gets its CancelledError, and nobody waits for it.
    """
    task = asyncio.ensure_future(fn(*args))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=grace)
        if not task.done():
            _leave_alone(task)
            task.cancel()  # fn's own except branch stops the server and gives back
            raise OutcomeUnknown("no answer within the grace after the call was cancelled") from None
    return task.result()


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
        self._report = report
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._closing = False
        self._in_use = 0
        self._waiting = 0
        self._warn_next = 0.0

    def statistics(self) -> PoolStatistics:
        """Return the numbers of this moment."""
        connected = self._pool.get_size() if self._pool is not None else 0
        return PoolStatistics(self.settings.size, connected, self._in_use, self._waiting)

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
        state = _State(conn)
        try:
            yield Tx(self, state)
            state.end()
            await self._cross(self._commit_once, state)
        finally:
            state.over = True
            if not state.committing:
                await self._roll_back(conn)

    async def _roll_back(self, conn: Connection) -> None:
        with trio.CancelScope(shield=True), suppress(ClientClosed):  # bounded: _give_back takes two graces
            await self._bridge.call(self._give_back, conn, "rollback")

    # From here on everything but _cross, _open and _close is asyncio-flavoured.

    async def _cross(self, fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
        """Cross the bridge; errors become ours, without a trace of the driver's."""
        if self._closing:
            raise ClientClosed("its connections to Postgres have been closed")
        try:
            return await self._bridge.call(fn, *args)
        except Exception as exc:
            if not is_database_error(exc):
                raise
            failure = translate(exc, subject=self._where)
        raise failure

    async def _open(self) -> None:
        await self._cross(self._open_first)

    async def _open_first(self) -> None:
        async def connect_one(*_args: object, **_kwargs: object) -> "asyncpg.Connection[asyncpg.Record]":
            return await connect(self.settings)

        self._pool = await asyncpg.create_pool(
            min_size=0,  # no task in the background that reconnects
            max_size=self.settings.size,
            connect=connect_one,
            connection_class=_Connection,
        )
        await self._give_back(await self._acquire())

    async def _close(self) -> None:
        self._closing = True
        with suppress(ClientClosed):
            await self._bridge.call(self._close_all)

    async def _close_all(self) -> None:
        if self._pool is None:
            return
        try:
            async with asyncio.timeout(2 * self._grace):  # noqa: TID251 - asyncio-flavoured, and its owner
                await self._pool.close()  # cuts all connections when it is cancelled
        except Exception as exc:  # noqa: BLE001 - they are cut, and there is nobody to tell
            _log.info("connections were cut, not closed: %s", type(exc).__name__)

    async def _acquire(self) -> Connection:
        """Wait for a connection; whoever gets it must `_give_back`. Cancelled: none was taken."""
        if self._pool is None or self._closing:
            raise ClientClosed("its connections to Postgres have been closed")
        if self._pool.get_idle_size() and not self._waiting:  # then it does not wait, and needs no timers
            if not _is_stale(conn := await self._pool.acquire()):
                self._in_use += 1
                return conn
            conn.terminate()
        late = asyncio.get_running_loop().call_later(self.settings.warn_after, self._warn_of_waiting)
        self._waiting += 1
        before = ""
        try:
            async with asyncio.timeout(self.settings.acquire_timeout):  # noqa: TID251 - asyncio-flavoured, and its owner
                while _is_stale(conn := await self._pool.acquire()):
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
        if self._closing:
            raise ClientClosed("its connections to Postgres have been closed")
        raise StoreUnavailable(
            f"no connection became free within {self.settings.acquire_timeout:g} s (pool: {before})",
            subject=self._where,
        )

    def _warn_of_waiting(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._warn_next:
            return
        self._warn_next = now + WARN_AGAIN_AFTER
        text = f"a caller waits for a connection for more than {self.settings.warn_after:g} s (pool: {self.statistics().describe()})"
        _log.warning(text)
        if self._report is not None:
            with suppress(Exception):  # it would be an error in a callback of the loop
                self._report(text)

    async def _unit(self, fn: Callable[[Connection, *Ts], Awaitable[T]], args: tuple[*Ts]) -> T:
        conn = await self._begun(self._begin)
        try:
            result = await fn(conn, *args)
        except BaseException:
            await self._give_back(conn, "rollback")
            raise
        await settle(self._grace, self._commit, conn, True)  # noqa: FBT003 - positional: settle's; no return from here
        return result

    async def _begun(self, begin: str) -> Connection:
        """Acquire and begin. The server may have hung up on idle connections: then the next one is tried."""
        for left in reversed(range(self.settings.size + 1)):
            conn = await self._acquire()
            try:
                await conn.execute(begin)
            except BaseException as exc:
                await self._give_back(conn, "rollback")
                if not (left and _lost(exc)):
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
            conn = await self._acquire()
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
            conn = await self._acquire()
            try:
                result = await fn(conn, *args)
            except BaseException as exc:
                await self._give_back(conn)
                if not (left and never_sent(exc)):
                    raise
            else:
                await self._give_back(conn, clean=True)
                return result
        raise AssertionError("the last attempt returns or raises")

    async def _open_transaction(self) -> Connection:
        return await self._begun(self.settings.begin_plain)

    async def _commit_once(self, state: "_State") -> None:
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
            await self._give_back(conn)
            if not is_database_error(exc):
                raise
            failure = translate(exc, subject=self._where)
        else:
            await self._give_back(conn, clean=True)
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
        if _is_closed(conn):
            await self._give_back(conn)
            failure = StoreUnavailable(
                "the connection was lost before the last statement", subject=self._where
            )
        else:
            try:
                result = await last(conn)
            except BaseException as exc:
                await self._give_back(conn, *last_words)
                if not is_database_error(exc):
                    raise
                failure = translate(exc, subject=self._where, sent_last=True)
            else:
                if not keep:
                    await self._give_back(conn, clean=clean)
                return result
        raise failure

    async def _give_back(self, conn: Connection, *last_words: str, clean: bool = False) -> None:
        """Give the connection back, or cut it: after two graces at most its place in the pool is free.

        Args:
            conn: what `_acquire` returned; exactly once.
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


class Tx:
    """The transaction inside `Pool.transaction`: statements with `$1` parameters, each one crossing.

    It belongs to one task. A statement that was cancelled, or took too long, may have been done or not: then the
    transaction cannot commit any more. Errors: ConfigurationError (two tasks use it at once: the second statement was not
    sent), ClientClosed (the block has ended), and those of `Pool.unit_of_work`.
    """

    def __init__(self, pool: Pool, state: "_State") -> None:
        self._pool = pool
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
            return await self._pool._cross(state.run, fn, args)  # noqa: SLF001 - one thing in two classes
        finally:
            state.busy = False


@dataclass
class _State:
    """Where a transaction of the user stands."""

    conn: Connection
    busy: bool = False
    over: bool = False
    committing: bool = False
    doomed: bool = False

    def begin_statement(self) -> None:
        """Check that it may run a statement now."""
        if self.over:
            raise ClientClosed("the transaction has ended", subject="transaction")
        self._check_one_task()
        self.busy = True

    def end(self) -> None:
        """Check that it may commit now."""
        self.over = True
        self._check_one_task()
        if self.doomed:
            raise TransactionAborted(
                "a statement was cancelled or took too long, and its error was swallowed"
            )

    async def run(self, fn: "_Fn[T]", args: tuple[Any, ...]) -> T:
        """Run fn, asyncio-flavoured; remember when nobody knows what a statement did."""
        try:
            return await fn(self.conn, *args)
        except (asyncio.CancelledError, TimeoutError):
            self.doomed = True
            raise

    def _check_one_task(self) -> None:
        if self.busy:
            raise ConfigurationError(
                "two tasks use one transaction at once; it belongs to one task, and this statement was not sent",
                subject="transaction",
            )


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
        self._idle: _Connection | None = None
        self._all: set[_Connection] = set()
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

    async def _read(self, timeout: float, fn: "_Fn[T]", args: tuple[Any, ...]) -> T:
        async with asyncio.timeout(timeout):  # noqa: TID251 - asyncio-flavoured, and its owner
            conn = await self._take()
            try:
                result = await fn(conn, *args)
            except BaseException:
                await self._clean_up(conn)
                raise
            self._put_back(conn)
            return result

    async def _autocommit(self, timeout: float, fn: "_Fn[T]", args: tuple[Any, ...]) -> T:
        async with asyncio.timeout(timeout):  # noqa: TID251 - asyncio-flavoured, and its owner
            conn = await self._take()
        return await settle(self._grace, self._finish, timeout, conn, fn, args)

    async def _finish(self, timeout: float, conn: "_Connection", fn: "_Fn[T]", args: tuple[Any, ...]) -> T:
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

    async def _take(self) -> "_Connection":
        conn, self._idle = self._idle, None
        if conn is not None:
            if not _is_stale(conn):
                return conn
            self._cut(conn)
        conn = await connect(self._settings, self._name)
        self._all.add(conn)
        return conn

    def _put_back(self, conn: "_Connection") -> None:
        if self._closed or self._idle is not None or conn.is_closed() or conn.is_in_transaction():
            self._cut(conn)
        else:
            self._idle = conn

    async def _clean_up(self, conn: "_Connection") -> None:
        """Wait for a grace until the server has stopped the statement, then keep the connection, or cut it."""
        try:
            await conn.execute("select 1", timeout=self._grace)
        except BaseException as exc:
            self._cut(conn)
            if not isinstance(exc, Exception):
                raise
        else:
            self._put_back(conn)

    def _cut(self, conn: "_Connection") -> None:
        self._all.discard(conn)
        conn.terminate()

    async def _close_all(self) -> None:
        conn, self._idle = self._idle, None
        if conn is not None:
            self._all.discard(conn)
            await hang_up(conn, self._grace)
        for other in list(self._all):  # a call that nobody waits for any more
            self._cut(other)


async def connect(settings: PoolSettings, name: str | None = None) -> "_Connection":
    """Connect to the first host of the URL that answers. asyncio-flavoured.

    Args:
        settings: where, and how long it may take.
        name: what the connection is for; added to the application name.

    Cancelled: there is no connection.
    Raises: ConfigurationError, AuthenticationFailed, PermissionDenied or StoreUnavailable.
    """
    urls = _each_host(settings.dsn)
    failure: SQLStreamsError | None = None
    for url in urls:
        try:
            return await _connect_to(url, settings, name, settings.connect_timeout / len(urls))
        except Exception as exc:  # noqa: BLE001 - what is not the database's is a URL that could not be read
            failure = _failure_to_connect(exc, settings.where)
            if not isinstance(
                exc, OSError | asyncpg.TargetServerAttributeNotMatched | asyncpg.CannotConnectNowError
            ):
                break
    assert failure is not None
    raise failure


class _Connection(asyncpg.Connection):
    """The driver's connection, which can be told that there is nothing to reset."""

    pooler = False
    _skip = False

    def skip_reset(self) -> None:
        """Save the next reset its round trip."""
        self._skip = True

    def get_reset_query(self) -> str:  # type: ignore[explicit-override, unused-ignore]
        """Return what the pool sends when the connection is given back."""
        skip, self._skip = self._skip, False
        return "" if skip or self.pooler else str(super().get_reset_query())


_Fn: TypeAlias = Callable[..., Awaitable[T]]
_Then: TypeAlias = Callable[[Connection, T], Awaitable[R]]


async def _connect_to(url: str, settings: PoolSettings, name: str | None, limit: float) -> _Connection:
    if not url.startswith(("postgresql://", "postgres://")):
        raise ConfigurationError("it must start with postgresql://", subject="database URL")
    _ = urlsplit(url).port  # ValueError when it is out of range; the driver would connect to another one
    wanted = settings.server_settings(name)
    try:
        conn = await _dial(url, settings, wanted, limit)
    except (
        asyncpg.InvalidParameterValueError,
        asyncpg.UndefinedObjectError,
        asyncpg.FeatureNotSupportedError,
    ):
        # not every system can watch a connection, and then the server refuses to be asked
        wanted = {key: value for key, value in wanted.items() if not key.startswith(("tcp_", "client_"))}
        conn = await _dial(url, settings, wanted, limit)
    try:
        conn.pooler = settings.pooler
        _keep_alive(conn)
        await conn.set_type_codec(
            "json", schema="pg_catalog", encoder=_as_is, decoder=_as_is, format="binary"
        )
    except BaseException:
        conn.terminate()
        raise
    return conn


async def _dial(url: str, settings: PoolSettings, wanted: dict[str, str], limit: float) -> _Connection:
    conn: _Connection = await asyncpg.connect(
        url,
        timeout=limit,
        command_timeout=settings.command_timeout,
        statement_cache_size=0 if settings.pooler else 1024,  # texts carry the stream's id, so there are many
        server_settings=wanted,
        connection_class=_Connection,
    )
    return conn


def _failure_to_connect(exc: Exception, where: str) -> SQLStreamsError:
    if isinstance(exc, asyncpg.ProtocolViolationError):
        return ConfigurationError(
            "the server refused a startup parameter; behind PgBouncer, connect with pooler=True",
            subject=where,
        )
    if isinstance(exc, TimeoutError):
        return StoreUnavailable("connecting took too long", subject=where)
    if is_database_error(exc) or isinstance(exc, SQLStreamsError):
        return translate(exc, subject=where)
    return ConfigurationError(f"it is not valid ({type(exc).__name__})", subject="database URL")


def _each_host(dsn: str) -> list[str]:
    """Split a URL of several hosts into one for each: the driver would spend all the time on the first that is silent."""
    with suppress(ValueError):
        parts = urlsplit(dsn)
        user, at, hosts = parts.netloc.rpartition("@")
        if "," in hosts and "prefer-standby" not in parts.query:  # that one has to see all of them
            return [urlunsplit(parts._replace(netloc=f"{user}{at}{host}")) for host in hosts.split(",")]
    return [dsn]


def _lost(exc: BaseException) -> bool:
    """Say whether the connection failed, as against a slow or an unwilling server."""
    ours = translate(exc) if is_database_error(exc) and not isinstance(exc, TimeoutError) else None
    return isinstance(ours, StoreUnavailable)


def _is_closed(conn: Connection) -> bool:
    try:
        return conn.is_closed()
    except asyncpg.InterfaceError:  # the driver has taken it back by itself, and then refuses to say
        return True


def _socket(conn: Connection) -> socket.socket | None:
    transport = getattr(conn, "_transport", None)  # the driver has no public way
    found: socket.socket | None = None if transport is None else transport.get_extra_info("socket")
    return found


def _keep_alive(conn: Connection) -> None:
    """Let the kernel notice a server that vanished, under statements without a timeout too."""
    sock = _socket(conn)
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", 1000 * (KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_COUNT)),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _is_stale(conn: Connection) -> bool:
    """Say whether the server has hung up, also when the driver has not read that yet: an idle socket has nothing to read."""
    if _is_closed(conn):
        return True
    sock = _socket(conn)
    if sock is None or not hasattr(select, "poll"):
        return False
    readable = select.poll()
    readable.register(sock.fileno(), select.POLLIN)
    return bool(readable.poll(0))


async def hang_up(conn: "asyncpg.Connection[asyncpg.Record]", grace: float) -> None:
    """Close a connection that is not the pool's; after the grace it is cut. asyncio-flavoured."""
    try:
        await conn.close(timeout=grace)
    except Exception:  # noqa: BLE001 - the server does not answer; the driver has cut the connection
        conn.terminate()


def _leave_alone(task: asyncio.Task[Any]) -> None:
    _left_alone.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _left_alone.discard(task)
    if not task.cancelled():
        task.exception()  # or the loop would report that nobody read it


def _as_is(value: bytes) -> bytes:
    return value


async def _send_commit(conn: Connection) -> str:
    return await conn.execute("commit")


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
