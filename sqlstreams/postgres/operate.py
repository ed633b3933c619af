"""What an operator does to a group in Postgres: pause, seek, redrive, discard, and looking at one message.

Source: docs/how-to/operate-a-group.md
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlstreams.errors import GroupBusy, GroupDamaged, NotFound, ServerRunChanged
from sqlstreams.model.values import GroupId, MessageId, ServerRun, StreamId
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.part import Part, fetch, fetchrow, fetchval, gone_is_not_found, patiently
from sqlstreams.store import GroupRow, InspectedRow, StreamRow

__all__ = ["Operate"]

ROWS_AT_ONCE = 5_000  # of a redrive or discard: each step is a transaction of its own


class Operate(Part):
    """OperateStore on Postgres."""

    async def pause(self, group: GroupId) -> bool:
        """Hand nothing out from the commit on; False when it was paused already."""
        return await self._pool.autocommit(fetchval, self._sql("group_pause"), group) is not None

    async def resume(self, group: GroupId) -> bool:
        """Hand out again; False when it was not paused."""
        return await self._pool.autocommit(fetchval, self._sql("group_resume"), group) is not None

    async def redrive(
        self, stream: StreamId, group: GroupId, *, ids: Sequence[int] | None, error_contains: str | None
    ) -> int:
        """Give dead letters a fresh budget, in bounded steps."""
        return await self._in_steps("redrive", stream, group, ids, error_contains)

    async def discard(
        self, stream: StreamId, group: GroupId, *, ids: Sequence[int] | None, error_contains: str | None
    ) -> int:
        """Delete dead letters, in bounded steps."""
        return await self._in_steps("discard", stream, group, ids, error_contains)

    async def inspect(self, stream: StreamId, group: GroupId, message: MessageId) -> InspectedRow:
        """Look at one message of a group, in one crossing."""
        with gone_is_not_found(stream):
            return await self._pool.read(self._inspect, stream, group, message)

    async def before_instant(self, stream: StreamId, low: int, high: int, instant: datetime) -> int | None:
        """Return the newest id that is there below the first message of (low, high] that is not older than an instant.

        Ids are drawn with the instant of their row, so both grow together but for what runs at the same moment.
        """
        with gone_is_not_found(stream):
            return await self._pool.read(self._before_instant, stream, low, high, instant)

    async def oldest_retained(self, stream: StreamRow) -> int:
        """Return the id above which everything retained lies."""
        with gone_is_not_found(stream.id):
            return int(
                await self._pool.read(fetchval, self._sql("group_start", stream.id), stream.partition_size)
            )

    async def count_between(
        self, stream: StreamId, low: int, high: int
    ) -> tuple[int, int | None, int | None]:
        """Return how many messages (low, high] holds, the first and the last."""
        with gone_is_not_found(stream):
            row = await self._pool.read(fetchrow, self._sql("seek_range", stream), low, high)
        return row[0], row[1], row[2]

    async def seek(self, group: GroupRow, target: int, *, run: ServerRun | None, force: bool) -> int:
        """Move a group; whoever holds a range of it can record nothing any more. Returns the new epoch."""
        with gone_is_not_found(group.stream_id):
            return await patiently(lambda: self._pool.unit_of_work(self._seek, group, target, run, force))

    async def _in_steps(
        self, what: str, stream: StreamId, group: GroupId, ids: Sequence[int] | None, text: str | None
    ) -> int:
        done = 0
        began = await self._pool.read(fetchval, self._sql("instant"))
        wanted = None if ids is None else list(ids)
        with gone_is_not_found(stream):
            while True:
                step = await patiently(
                    lambda: self._pool.unit_of_work(self._step, what, stream, group, wanted, text, began)
                )
                done += step
                if step < ROWS_AT_ONCE:
                    return done

    async def _step(
        self,
        conn: Connection,
        what: str,
        stream: StreamId,
        group: GroupId,
        ids: list[int] | None,
        text: str | None,
        began: datetime,
    ) -> int:
        await conn.execute(self._sql("stream_lock", stream))
        rows = await fetch(conn, self._sql(what, stream), group, ids, text, began, ROWS_AT_ONCE)
        return len(rows)

    async def _inspect(
        self, conn: Connection, stream: StreamId, group: GroupId, message: MessageId
    ) -> InspectedRow:
        where = await conn.fetchrow(self._sql("inspect_message", stream), group, message)
        open_range = await conn.fetchrow(self._sql("inspect_range", stream), group, message)
        exception = await conn.fetchrow(self._sql("inspect_exception", stream), group, message)
        history = await conn.fetch(self._sql("inspect_history", stream), group, message)
        assert where is not None
        if where[1] is None:
            raise GroupDamaged("it has no claim rows", subject=f"group {group}")
        return InspectedRow(
            present=where[0],
            newest_high=where[1],
            head=where[2],
            committed=where[3],
            open_range=None if open_range is None else tuple(open_range),
            exception=None if exception is None else tuple(exception),
            history=tuple(tuple(line) for line in history),
        )

    async def _before_instant(
        self, conn: Connection, stream: StreamId, low: int, high: int, instant: datetime
    ) -> int | None:
        below, above = low, high + 1  # below: older or nothing there; above: not older, or the end
        while above - below > SCAN_IDS:
            middle = (below + above) // 2
            row = await conn.fetchrow(self._sql("created_at", stream), middle)
            if row is None or row[0] >= above or row[1] >= instant:
                above = middle
            else:
                below = row[0]
        start = max(below - SCAN_IDS, low + 1)
        found: Any = await conn.fetchrow(self._sql("before_instant", stream), start, instant)
        return None if found is None or found[0] > high else max(found[1] or 0, low)

    async def _seek(
        self,
        conn: Connection,
        group: GroupRow,
        target: int,
        run: ServerRun | None,
        force: bool,  # noqa: FBT001 - private
    ) -> int:
        stream = group.stream_id
        await conn.execute(self._sql("stream_lock", stream))
        await conn.execute(self._sql("claim_lock", stream), group.id)
        if not force and (live := await conn.fetchval(self._sql("group_live"), group.id)):
            raise GroupBusy(f"{live} consumers of it run", subject=f"group {group.name!a}")
        if run is not None and not await conn.fetchval(self._sql("same_run"), run.run):
            raise ServerRunChanged(
                "the server restarted while the head was looked for", subject=f"group {group.name!a}"
            )
        await conn.execute(self._sql("seek_claims", stream), group.id)
        await conn.execute(self._sql("seek_exceptions", stream), group.id, target)
        await conn.execute(self._sql("group_sentinel", stream), group.id, target)
        epoch = await conn.fetchval(self._sql("seek_marks", stream), group.id, target)
        if epoch is None:
            raise NotFound("it was destroyed", subject=f"group {group.name!a}")
        return int(epoch)


SCAN_IDS = 1_000  # ids looked through one by one around the instant that a search found
