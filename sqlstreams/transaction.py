"""A transaction of the application: its SQL and any produce commit together.

Guarantee   all or nothing; ids are known before the commit, delivery comes after it, and nothing rings after a rollback.
Relies on   a produce runs in a savepoint: one that finds no partition costs the transaction nothing but that.
Cancelled   nothing was done, unless the commit was under way: then it has committed, or OutcomeUnknown says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlstreams.errors import PartitionMissing
from sqlstreams.model.values import MessageId, StreamId
from sqlstreams.postgres.log import insert_in_savepoint, look_in_savepoint
from sqlstreams.postgres.part import gone_is_not_found
from sqlstreams.postgres.registry import stream_there
from sqlstreams.postgres.statements import Statements
from sqlstreams.postgres.tx import Tx
from sqlstreams.runtime.partitions import HEAL_TRIES, Runway
from sqlstreams.store import OutgoingRow, StreamRow

__all__ = ["Transaction"]


class Transaction:
    """What `client.transaction()` gives. It belongs to one task; two at once get TransactionInUse.

    Statements take `$1` parameters. One that Postgres refuses leaves the transaction able to roll back only, as in psql;
    a refused produce does not. Cancelled in the middle of a statement: the transaction can only be rolled back.
    """

    def __init__(self, tx: Tx, sql: Statements) -> None:
        self._tx = tx
        self._sql = sql
        self._streams: dict[StreamId, tuple[Runway, int]] = {}

    async def execute(self, query: str, *args: Any) -> str:
        """Run a statement, or several without arguments; return the tag of the last ("INSERT 0 1")."""
        return await self._tx.execute(query, *args)

    async def fetch(self, query: str, *args: Any) -> list[Any]:
        """Run a statement and return its rows, readable by name and by position."""
        return list(await self._tx.fetch(query, *args))

    async def fetchrow(self, query: str, *args: Any) -> Any:
        """Run a statement and return its first row, or None."""
        return await self._tx.fetchrow(query, *args)

    async def fetchval(self, query: str, *args: Any) -> Any:
        """Run a statement and return the first value of its first row, or None."""
        return await self._tx.fetchval(query, *args)

    async def stream_by_name(self, name: str) -> StreamRow | None:
        """Return a stream, looked up on this transaction's connection; called by `produce(…, tx=tx)`."""
        return stream_there(await self._tx.run(look_in_savepoint, self._sql("stream_by_name"), name))

    async def stream_by_id(self, stream: StreamId) -> StreamRow | None:
        """Return a stream, looked up on this transaction's connection; called by `produce(…, tx=tx)`."""
        return stream_there(await self._tx.run(look_in_savepoint, self._sql("stream_by_id"), stream))

    async def append(self, stream: StreamId, rows: Sequence[OutgoingRow], runway: Runway) -> list[MessageId]:
        """Append messages; called by `produce(…, tx=tx)` and `produce_batch(…, tx=tx)`.

        A missing partition is made on another connection, and only the savepoint runs again: earlier work survives.

        Raises: PartitionMissing, StatementRefused (the transaction goes on as before), NotFound.
        """
        attempt = 0
        while True:
            try:
                with gone_is_not_found(stream):
                    ids = await self._tx.run(insert_in_savepoint, self._sql, stream, rows, attempt > 0)
            except PartitionMissing:
                attempt += 1
                if attempt > HEAL_TRIES:
                    raise
                await runway.heal(len(rows))
            else:
                self._streams[stream] = runway, ids[-1]
                return ids

    def committed(self) -> list[StreamId]:
        """After the commit: look at the runways, and say for which streams to ring."""
        for runway, newest in self._streams.values():
            runway.noticed(newest)
        return list(self._streams)
