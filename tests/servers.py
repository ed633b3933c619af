"""What tests do to real Postgres servers: run statements, wait for conditions, freeze and end backends.

The plain functions block: they run asyncpg in a thread with an asyncio loop of its own, so they work inside a
`trio.run` too. In a trio test use them only where nothing they wait for is up to the test itself, and the
`…_async` twins everywhere else.
"""

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import trio

from sqlstreams._postgres_binaries import Binaries, find, server_account
from sqlstreams.embedded import PostgresServer

T = TypeVar("T")

MEMORY = Path("/dev/shm")  # creating a database takes 7 ms there and 80 ms on a disk
MEMORY_NEEDED = 2 * 1024**3
POLL_SECONDS = 0.01
TEST_SETTINGS = {  # for servers whose data nobody needs after a crash
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "max_wal_size": "256MB",
}


# Servers.


def binaries_of(version: int) -> Binaries:
    """Return the programs of Postgres `version`. Raises: EmbeddedFailed when this machine has none."""
    return find(None, server_account(), version=version)


def fast_server(version: int) -> PostgresServer:
    """Return a server, not started yet, for tests that share one: in memory if it has room, without fsync."""
    binaries = binaries_of(version).directory
    settings = dict(TEST_SETTINGS)
    if any(
        (binaries.parent / folder / "pg_stat_statements.so").exists() for folder in ("lib", "lib/postgresql")
    ):
        settings["shared_preload_libraries"] = "pg_stat_statements"
    in_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_NEEDED
    return PostgresServer(binaries=binaries, settings=settings, temporary_in=MEMORY if in_memory else None)


# Statements.


def sql(dsn: str, statement: str, *args: Any) -> list[Any]:
    """Run one statement with `$1` parameters, or a script without; return the rows, none for a script."""
    return _in_thread(partial(_run_statement, dsn, statement, args))


def sql_value(dsn: str, statement: str, *args: Any) -> Any:
    """Run one statement; return the first column of its first row, None without rows."""
    rows = sql(dsn, statement, *args)
    return rows[0][0] if rows else None


async def sql_async(dsn: str, statement: str, *args: Any) -> list[Any]:
    """Do what `sql` does without blocking trio. Cancelled: the statement runs on."""
    return await trio.to_thread.run_sync(partial(sql, dsn, statement, *args), abandon_on_cancel=True)


def wait_until(dsn: str, query: str, expected: object = True, timeout: float = 10.0) -> Any:
    """Repeat `query` every 10 ms until its first value is `expected`; return the value.

    A server that cannot be reached counts as a wrong value.

    Args:
        dsn: where to ask; the connection is kept while it works.
        query: without parameters.
        expected: a value, or a function that says whether a value is right.
        timeout: seconds.

    Raises: AssertionError with the last value, or the last error of the server.
    """
    return _in_thread(partial(_poll, dsn, query, expected, timeout))


async def wait_until_async(
    dsn: str,
    query: str,
    expected: object = True,
    timeout: float = 10.0,  # noqa: ASYNC109 - the arguments of wait_until
) -> Any:
    """Do what `wait_until` does without blocking trio. Cancelled: at once; its thread ends by `timeout`."""
    return await trio.to_thread.run_sync(
        partial(wait_until, dsn, query, expected, timeout), abandon_on_cancel=True
    )


def wait_for(condition: Callable[[], T], timeout: float = 10.0) -> T:
    """Call `condition` every 10 ms until it is truthy; return it. Raises: AssertionError after `timeout`."""
    end = time.monotonic() + timeout
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end, f"still {value!r} after {timeout} s"
        pause.wait(POLL_SECONDS)
    return value


# Backends.


def freeze(pid: int) -> None:
    """SIGSTOP a process and wait until it is stopped. Prefer `frozen`: a stopped one outlives a test run."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] in "Tt")


def thaw(pid: int) -> None:
    """SIGCONT a process; one that is gone is fine."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Freeze a process for the block. Cancelled, or failed: it is thawed."""
    try:
        freeze(pid)
        yield
    finally:
        thaw(pid)


def backends(dsn: str, *, application_name: str | None = None) -> list[int]:
    """Return the process ids of the clients of the database of `dsn`, but our own."""
    rows = sql(
        dsn,
        "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        " and backend_type = 'client backend' and ($1::text is null or application_name = $1)"
        " order by backend_start",
        application_name,
    )
    return [row[0] for row in rows]


def terminate_backends(dsn: str, *, application_name: str | None = None, timeout: float = 10.0) -> list[int]:
    """End the connections that `backends` names, and wait until they are gone; return their process ids."""
    pids = backends(dsn, application_name=application_name)
    sql(dsn, "select pg_terminate_backend(pid, $2) from unnest($1::int[]) as pid", pids, int(timeout * 1000))
    return pids


# How it is done.


def _in_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run asyncio code in a thread, where no loop runs, whatever runs in this one."""

    def run() -> T:
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            return runner.run(work())

    with ThreadPoolExecutor(1, thread_name_prefix="sql of tests") as threads:
        return threads.submit(run).result()


async def _run_statement(dsn: str, statement: str, args: tuple[Any, ...]) -> list[Any]:
    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        rows: list[Any] = []
        if not args and ";" in statement.rstrip().rstrip(";"):
            await connection.execute(statement)
        else:
            rows = await connection.fetch(statement, *args)
        await connection.close(timeout=5)
        return rows
    finally:
        connection.terminate()  # does nothing after close


async def _poll(dsn: str, query: str, expected: object, timeout: float) -> Any:  # noqa: ASYNC109 - asyncio
    end = time.monotonic() + timeout
    seen: object = "nothing yet"
    connection: Any = None
    try:
        while True:
            try:
                if connection is None or connection.is_closed():
                    connection = await asyncpg.connect(dsn, timeout=5)
                seen = await connection.fetchval(query, timeout=5)
                if expected(seen) if callable(expected) else seen == expected:
                    await connection.close(timeout=5)
                    return seen
            except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError) as error:
                seen = error
            except asyncpg.OperatorInterventionError as error:  # it starts or stops
                seen = error
            assert time.monotonic() < end, f"still {seen!r}, not {expected!r}, after {timeout} s: {query}"
            await asyncio.sleep(POLL_SECONDS)  # because the condition is in another process
    finally:
        if connection is not None:
            connection.terminate()  # does nothing after close
