"""Exceptions in Postgres: handed out when due, recorded under their token, counted, listed.

Source: docs/explanation/delivery.md
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlstreams.errors import GroupDamaged, NotFound, StatementRefused
from sqlstreams.model.outcome import HistoryStatus, NextOutcome
from sqlstreams.model.progress import marks_of
from sqlstreams.model.values import GroupId, MessageId, NodeId, Progress, StreamId, Token
from sqlstreams.postgres.claims import progress_of
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.part import (
    GONE,
    Part,
    fetch,
    fetchval,
    gone_is_not_found,
    message_row,
    read_log_refs,
)
from sqlstreams.store import ClaimedException, DeadRow, Due, GroupDue, GroupRow, SnapshotRow, Watched

__all__ = ["Exceptions"]

GROUPS_PER_STATEMENT = (
    64  # each touches about 7 tables and indexes, and no statement of ours takes more than 512 locks
)


class Exceptions(Part):
    """ExceptionStore on Postgres."""

    async def claim_exceptions(
        self, group: GroupRow, node: NodeId, token: Token, *, reads: Sequence[int], limit: int
    ) -> list[ClaimedException]:
        """Take exceptions that are due and read their messages, in one crossing."""
        stream, config = group.stream_id, group.config

        async def take(conn: Connection) -> list[Any]:
            return await conn.fetch(
                self._sql("claim_exceptions", stream),
                group.id,
                node,
                token,
                list(reads),
                config.max_retries,
                limit,
                config.history != "none",
            )

        async def read(conn: Connection, taken: list[Any]) -> dict[int, Any]:
            ids = [row[0] for row in taken if row[1] != "dead"]
            if not ids:
                return {}
            rows = await conn.fetch(self._sql("read_messages", stream), ids)
            return {row[0]: message_row(row) for row in rows}

        with gone_is_not_found(stream):
            taken, messages = await self._pool.autocommit(take, then=read)
        return [
            ClaimedException(row[0], row[1] == "dead", row[2], row[3], row[4], messages.get(row[0]))
            for row in taken
        ]

    async def record_exception(
        self,
        group: GroupRow,
        message: MessageId,
        token: Token,
        outcome: NextOutcome,
        node: NodeId,
        *,
        seen_attempts: int,
        history: HistoryStatus | None,
    ) -> None:
        """Record what became of an exception, guarded by its token."""
        status = "done" if outcome.status == "resolved" else outcome.status
        with gone_is_not_found(group.stream_id):
            await self._pool.autocommit(
                fetchval,
                self._sql("record_exception", group.stream_id),
                group.id,
                message,
                token,
                status,
                outcome.attempts,
                outcome.delays,
                outcome.wait,
                outcome.error,
                node,
                seen_attempts,
                history,
            )

    async def due(self, watched: Sequence[Watched]) -> Due:
        """Say what there is to do; groups of streams that are gone are left out."""
        expired, groups = False, []
        for start in range(0, len(watched), GROUPS_PER_STATEMENT):
            chunk = watched[start : start + GROUPS_PER_STATEMENT]
            try:
                rows = await self._due(chunk)
            except StatementRefused as exc:
                if exc.sqlstate not in GONE:
                    raise
                there = {
                    ref.stream
                    for ref in await self._pool.read(
                        read_log_refs, self._sql, sorted({each.stream for each in chunk})
                    )
                }
                rows = await self._due([each for each in chunk if each.stream in there])
            for row in rows:
                if row[0] == 0:
                    expired = expired or row[11]
                else:
                    progress = progress_of((row[1], row[2], row[3], row[4], row[5], row[6], row[7]))
                    groups.append(GroupDue(row[0], progress, row[8], row[9], row[10], row[11]))
        return Due(expired, tuple(groups))

    async def snapshot(self, stream: StreamId, group: GroupId) -> SnapshotRow:
        """Count where a group stands, and look how old its oldest unresolved message is."""
        with gone_is_not_found(stream):
            row, age, dead = await self._pool.read(self._snapshot, stream, group)
        if row is None:
            raise NotFound("the group was destroyed", subject=f"group {group}")
        if row["newest_high"] is None:
            raise GroupDamaged("it has no claim rows", subject=f"group {group}")
        by_status = {name: row[name] for name in ("ready", "inflight", "deferred", "parked")}
        return SnapshotRow(
            newest_high=row["newest_high"],
            ranges_done=row["ranges_done"],
            committed=row["committed"],
            paused=row["paused"],
            open_ranges=row["ranges"],
            open_ids=row["ids"],
            open_low=row["open_low"],
            open_through=row["open_through"],
            holders=tuple(row["holders"] or ()),
            unresolved=row["unresolved"],
            lowest=row["lowest"],
            by_status=by_status | {"dead": dead},
            head=row["head"],
            age=None if age is None else timedelta(seconds=age),
        )

    async def dead_letters(
        self, stream: StreamId, group: GroupId, *, after: int, limit: int, error_contains: str | None
    ) -> list[DeadRow]:
        """Return dead letters in id order."""
        with gone_is_not_found(stream):
            rows = await self._pool.read(
                fetch, self._sql("dead_letters", stream), group, after, limit, error_contains
            )
        return [DeadRow(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7]) for row in rows]

    async def _snapshot(
        self, conn: Connection, stream: StreamId, group: GroupId
    ) -> tuple[Any, float | None, int]:
        row = await conn.fetchrow(self._sql("group_snapshot", stream), group)
        if row is None or row["newest_high"] is None:
            return row, None, 0
        marks = marks_of(
            Progress(
                0,
                row["ranges_done"],
                row["committed"],
                row["newest_high"],
                row["open_low"],
                row["open_through"],
                row["lowest"],
            )
        )
        above = max(marks.committed, row["committed"])
        age = await conn.fetchval(self._sql("age_above", stream), above, row["head"])
        return row, age, await conn.fetchval(self._sql("count_dead", stream), group)

    async def _due(self, watched: Sequence[Watched]) -> list[Any]:
        if not watched:
            return []
        streams = sorted({each.stream for each in watched})
        text = " union all ".join(
            [self._sql("due_head"), *(self._sql("due_part", stream) for stream in streams)]
        )
        return await self._db.watch.read(
            fetch,
            text,
            [each.group for each in watched],
            [each.stream for each in watched],
            ["{" + ",".join(map(str, each.reads)) + "}" for each in watched],
        )
