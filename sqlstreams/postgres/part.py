"""What every part of the Postgres store shares: the pool, the pinned connections, the statements."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlstreams.errors import Contended, NotFound, PermissionDenied, StatementRefused
from sqlstreams.model.values import StreamId, Token
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.pinned import Pinned
from sqlstreams.postgres.pool import Pool
from sqlstreams.postgres.statements import Statements
from sqlstreams.store import LogRef, MessageRow

__all__ = [
    "GONE",
    "Database",
    "Part",
    "execute",
    "fetch",
    "fetchrow",
    "fetchval",
    "gone_is_not_found",
    "message_row",
    "patiently",
    "read_log_refs",
]

T = TypeVar("T")

PATIENT_TRIES = 10
GONE = ("42P01", "42883", "3F000")  # no such table, function or schema: the stream was destroyed


@dataclass(frozen=True)
class Database:
    """The connections and statements of one installation.

    `node` is a connection of its own for heartbeats, `watch` one for observations, `ddl` one for partitions:
    none of them waits for the pool, which callers with open transactions may have exhausted.
    """

    pool: Pool
    node: Pinned
    watch: Pinned
    ddl: Pinned
    sql: Statements
    make_token: Callable[[], Token]


class Part:
    """One part of the store."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._pool = database.pool
        self._sql = database.sql


async def fetch(conn: Connection, text: str, *args: Any) -> list[Any]:
    """Run one statement, asyncio-flavoured; all rows."""
    return await conn.fetch(text, *args)


async def fetchrow(conn: Connection, text: str, *args: Any) -> Any:
    """Run one statement, asyncio-flavoured; its first row or None."""
    return await conn.fetchrow(text, *args)


async def fetchval(conn: Connection, text: str, *args: Any) -> Any:
    """Run one statement, asyncio-flavoured; the first value of its first row, or None."""
    return await conn.fetchval(text, *args)


async def execute(conn: Connection, text: str, *args: Any) -> str:
    """Run one statement, asyncio-flavoured; its tag."""
    return await conn.execute(text, *args)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a declaration while others hold its lock: each try waits up to the lock timeout (2 s) by itself.

    Raises: Contended after PATIENT_TRIES tries; nothing was done.
    """
    for _ in range(PATIENT_TRIES - 1):
        try:
            return await call()
        except Contended:
            continue  # many processes may start at once, and each waits its turn
    return await call()


@contextmanager
def gone_is_not_found(stream: StreamId | int) -> Iterator[None]:
    """Say NotFound where a stream's tables are not there any more."""
    try:
        yield
    except StatementRefused as exc:
        if exc.sqlstate in GONE:
            raise NotFound("its tables are gone: it was destroyed", subject=f"stream {stream}") from exc
        raise


def message_row(record: Any) -> MessageRow:
    """Turn a row of read_range or read_messages into a value; by position, since that is the fastest."""
    return MessageRow(record[0], record[1], record[2], record[3], record[4], record[5], record[6])


async def read_log_refs(conn: Connection, sql: Statements, streams: Sequence[StreamId]) -> list[LogRef]:
    """Look up what an observation needs, asyncio-flavoured; a destroyed stream is left out.

    Raises: PermissionDenied without a right on a log's sequence: its head would look like 0, or not at all.
    """
    refs = []
    for stream in streams:
        row = await conn.fetchrow(sql("log_oids", stream))
        if row is not None and row[0] is not None and row[1] is not None:
            if not row[2]:
                raise PermissionDenied(
                    f"it needs USAGE or SELECT on the sequence {row[3]}", subject=f"stream {stream}"
                )
            refs.append(LogRef(stream, row[0], row[1]))
    return refs
