"""The claim log in Postgres: ranges are taken, recorded and given back, and the marks move.

Source: docs/explanation/claim-log.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlstreams.model.values import Claim, GroupId, NodeId, Progress, ServerRun, StreamId, Token
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.part import Part, execute, fetch, fetchrow, fetchval, gone_is_not_found, message_row
from sqlstreams.store import GroupRow, Held, MessageRow, RangeRecord, Taken

__all__ = ["Claims", "all_read", "progress_of"]


class Claims(Part):
    """ClaimStore on Postgres."""

    async def claim(
        self,
        group: GroupRow,
        node: NodeId,
        token: Token,
        *,
        settled: int,
        run: ServerRun,
        limit: int,
        mark: int,
        freed_first: bool,
        reads: Sequence[int],
        rows: int,
        size: int,
    ) -> Taken | None:
        """Take a range and read its first messages, in one crossing."""
        stream = group.stream_id

        async def take(conn: Connection) -> Any:
            if freed_first:
                row = await conn.fetchrow(
                    self._sql("reclaim_range", stream),
                    group.id,
                    node,
                    token,
                    mark,
                    group.config.max_range_reclaims,
                    list(reads),
                    group.config.unknown_version == "park",
                )
                if row is not None:
                    return row[0], row[1], row[2], row[3], row[4], row[5], False, True
            row = await conn.fetchrow(
                self._sql("claim_range", stream), group.id, limit, settled, run.run, node, token
            )
            return None if row is None else (row[0], row[1], row[0], row[2], 0, None, row[3], False)

        async def read(conn: Connection, taken: Any) -> list[MessageRow]:
            if taken is None or taken[5] is not None or taken[6]:
                return []
            found = await conn.fetch(self._sql("read_range", stream), taken[2], taken[1], rows, size)
            return [message_row(row) for row in found]

        with gone_is_not_found(stream):
            taken, first = await self._pool.autocommit(take, then=read)
        if taken is None:
            return None
        low, high, start_above, fence, reclaims, quarantined, empty, freed = taken
        claim = Claim(low, high, start_above, token, fence, reclaims)
        return Taken(claim, first, all_read(first, high - start_above, rows, size), freed, empty, quarantined)

    async def record(self, stream: StreamId, record: RangeRecord) -> bool:
        """Record a range; what needs one row only is one plain statement."""
        with gone_is_not_found(stream):
            if record.action == "finish" and not record.exceptions and not record.history:
                low = await self._pool.autocommit(
                    fetchval, self._sql("finish_range", stream), record.group, record.low, record.token
                )
                if low is not None:
                    return True
            answer = await self._pool.autocommit(
                fetchval, self._sql("record_range", stream), *_arguments(record)
            )
        return bool(answer == "recorded")

    async def read_progress(self, stream: StreamId, group: GroupId) -> Progress | None:
        """Return all that a group's marks depend on, in one snapshot."""
        with gone_is_not_found(stream):
            row = await self._pool.read(fetchrow, self._sql("read_progress", stream), group)
        return None if row is None else progress_of(row)

    async def advance(self, group: GroupId, epoch: int, ranges_done: int, committed: int) -> bool:
        """Move the marks forward, guarded by the epoch."""
        row = await self._pool.autocommit(
            fetchrow, self._sql("advance"), group, epoch, ranges_done, committed
        )
        return row is not None

    async def delete_done_claims(
        self, stream: StreamId, group: GroupId, epoch: int, ranges_done: int, *, limit: int
    ) -> int:
        """Delete done ranges below ranges_done, never the newest."""
        with gone_is_not_found(stream):
            tag = await self._pool.autocommit(
                execute, self._sql("delete_done_claims", stream), group, epoch, ranges_done, limit
            )
        return int(tag.rsplit(" ", 1)[-1])

    async def held(self, stream: StreamId, group: GroupId, node: NodeId, mark: int) -> list[Held]:
        """Return what Postgres says a node holds of a group."""
        with gone_is_not_found(stream):
            rows = await self._pool.read(fetch, self._sql("held", stream), group, node, mark)
        return [Held(row[0], row[1], row[2]) for row in rows]

    async def release(self, stream: StreamId, group: GroupId, held: Held) -> bool:
        """Give something back, guarded by its token."""
        with gone_is_not_found(stream):
            row = await self._pool.autocommit(
                fetchval, self._sql(f"release_{held.kind}", stream), group, held.id, held.token
            )
        return row is not None


def all_read(found: Sequence[MessageRow], ids: int, rows: int, size: int) -> bool:
    """Say whether a read of `ids` ids that asked for `rows` rows and `size` bytes has surely seen the end of its range."""
    if len(found) == ids:
        return True
    return len(found) < rows and sum(len(row.payload) for row in found) + 4 * len(found) < size


def progress_of(row: Any) -> Progress:
    """Turn (epoch, ranges_done, committed, newest_high, open_low, open_through, unresolved) into a value."""
    return Progress(row[0], row[1], row[2], row[1] if row[3] is None else row[3], row[4], row[5], row[6])


def _arguments(record: RangeRecord) -> tuple[Any, ...]:
    rows, lines = record.exceptions, record.history
    return (
        record.group,
        record.low,
        record.token,
        record.epoch,
        record.action,
        record.through,
        record.node,
        [row.message_id for row in rows],
        [row.status for row in rows],
        [row.attempts for row in rows],
        [row.delays for row in rows],
        [row.wait for row in rows],
        [row.error for row in rows],
        [row.message_key for row in rows],
        [row.schema_version for row in rows],
        [line.message_id for line in lines],
        [line.attempt for line in lines],
        [line.status for line in lines],
        [line.error for line in lines],
    )
