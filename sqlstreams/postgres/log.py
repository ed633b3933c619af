"""The log in Postgres: observing the fence, appending, partitions, reading.

Source: docs/explanation/fence.md, docs/explanation/partitions.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlstreams.errors import StatementRefused
from sqlstreams.model.values import MessageId, ServerRun, StreamId
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.part import (
    Part,
    execute,
    fetch,
    fetchrow,
    fetchval,
    gone_is_not_found,
    message_row,
    read_log_refs,
)
from sqlstreams.postgres.statements import Statements
from sqlstreams.store import Holder, LogRef, MessageRow, OutgoingRow, Seen

__all__ = ["Log", "insert_in", "insert_in_savepoint", "look_in_savepoint"]


class Log(Part):
    """LogStore on Postgres."""

    async def log_refs(self, streams: Sequence[StreamId]) -> list[LogRef]:
        """Return what observe needs; a destroyed stream is left out. Raises: PermissionDenied."""
        return await self._pool.read(read_log_refs, self._sql, streams)

    async def observe(self, logs: Sequence[LogRef]) -> list[Seen]:
        """Look at heads, then at writers, in one statement on the watching connection."""
        try:
            return await self._observe(logs)
        except StatementRefused:
            # one of them was destroyed between looking up its oids and now
            there = await self.log_refs([log.stream for log in logs])
            if len(there) == len(logs):
                raise
            return await self._observe(there)

    async def _observe(self, logs: Sequence[LogRef]) -> list[Seen]:
        if not logs:
            return []
        args = ([log.stream for log in logs], [log.sequence for log in logs], [log.log for log in logs])
        row = await self._db.watch.read(fetchrow, self._sql("observe"), *args)
        while row[2] is None:
            await self._pool.autocommit(execute, self._sql("server_run_ensure"), self._db.make_token())
            row = await self._db.watch.read(fetchrow, self._sql("observe"), *args)
        run = ServerRun(row[2], row[3])
        writers: dict[int, set[str]] = {}
        pids: dict[int, set[int]] = {}
        for log, writer, pid in zip(row[4] or (), row[5] or (), row[6] or (), strict=True):
            writers.setdefault(log, set()).add(writer)
            if pid is not None:
                pids.setdefault(log, set()).add(pid)
        return [
            Seen(
                ref.stream,
                head,
                frozenset(writers.get(ref.log, ())),
                tuple(sorted(pids.get(ref.log, ()))),
                run,
            )
            for ref, head in zip(logs, row[1], strict=True)
        ]

    async def holders(self, pids: Sequence[int]) -> list[Holder]:
        """Return what the role may see of transactions."""
        rows = await self._pool.read(fetch, self._sql("holders"), list(pids))
        return [Holder(row[0], row[1], row[2], row[3]) for row in rows]

    async def append(self, stream: StreamId, rows: Sequence[OutgoingRow]) -> list[MessageId]:
        """Append messages in one statement that commits by itself."""
        with gone_is_not_found(stream):
            return await self._pool.autocommit(insert_in, self._sql, stream, rows)

    async def make_partitions(self, stream: StreamId, partition_size: int, upto: int) -> int:
        """Make the missing partitions from the newest drawn id to `upto`, on a connection of its own."""
        with gone_is_not_found(stream):
            _, end = await self.runway(stream, partition_size)
            number = end // partition_size
            while number * partition_size <= upto:
                await self._db.ddl.autocommit(
                    fetchval, self._sql("make_partition", stream), number, partition_size
                )
                number += 1
            return number * partition_size

    async def runway(self, stream: StreamId, partition_size: int) -> tuple[int, int]:
        """Return the newest drawn id, and the first id from it on that has no partition.

        Not on a connection of the pool: those who wait for a partition inside their transactions may have all of them.
        """
        with gone_is_not_found(stream):
            numbers, head = await self._db.ddl.read(fetchrow, self._sql("partitions", stream))
        there = set(numbers)
        number = (head + 1) // partition_size  # of the next id that will be drawn
        while number in there:
            number += 1
        return head, number * partition_size

    async def read_range(
        self, stream: StreamId, low: int, high: int, *, rows: int, size: int
    ) -> list[MessageRow]:
        """Return the messages of (low, high], up to `rows` and about `size` bytes, at least one."""
        with gone_is_not_found(stream):
            found = await self._pool.read(fetch, self._sql("read_range", stream), low, high, rows, size)
        return [message_row(row) for row in found]


async def insert_in(
    conn: Connection, sql: Statements, stream: StreamId, rows: Sequence[OutgoingRow]
) -> list[MessageId]:
    """Insert on a connection, asyncio-flavoured: one statement whose target is the log, so its lock comes before the ids."""
    if len(rows) == 1:
        return [await conn.fetchval(sql("insert_message", stream), *rows[0])]
    found = await conn.fetch(sql("insert_messages", stream), *map(list, zip(*rows, strict=True)))
    return [row[0] for row in found]


async def insert_in_savepoint(
    conn: Connection,
    sql: Statements,
    stream: StreamId,
    rows: Sequence[OutgoingRow],
    again: bool,  # noqa: FBT001 - passed by position across the bridge
) -> list[MessageId]:
    """Insert inside a transaction of the application, asyncio-flavoured; refused, the transaction stands where it stood.

    `again`: a partition was made since the last try. Without a new lock this transaction would miss it as before.
    """
    await conn.execute("savepoint sqlstreams_produce")
    try:
        if again:
            await conn.execute(sql("lock_log_again", stream))
        ids = await insert_in(conn, sql, stream, rows)
    except Exception:
        await conn.execute("rollback to savepoint sqlstreams_produce; release savepoint sqlstreams_produce")
        raise
    await conn.execute("release savepoint sqlstreams_produce")
    return ids


async def look_in_savepoint(conn: Connection, text: str, key: str | StreamId) -> Any:
    """Read one row inside a transaction of the application, asyncio-flavoured; refused, the transaction stands where it stood."""
    await conn.execute("savepoint sqlstreams_look")
    try:
        row = await conn.fetchrow(text, key)
    except Exception:
        await conn.execute("rollback to savepoint sqlstreams_look; release savepoint sqlstreams_look")
        raise
    await conn.execute("release savepoint sqlstreams_look")
    return row
