"""The store protocols: what an actor may rely on, one docstring per method.

"Cancelled: nothing was done" means that the call ended and the store holds nothing of it. "Cancelled: it may have been
done" means that the caller asks again with the same token, or lets the node's comparison of holdings sort it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Protocol

from sqlstreams.config import GroupConfig, StreamConfig
from sqlstreams.model.outcome import HistoryStatus, NextOutcome
from sqlstreams.model.values import GroupId, MessageId, NodeId, Progress, ServerRun, StreamId, Token
from sqlstreams.store.values import (
    ClaimedException,
    DeadRow,
    Due,
    GroupRow,
    Held,
    Holder,
    InspectedRow,
    LogRef,
    MessageRow,
    NodeRow,
    OutgoingRow,
    RangeRecord,
    Seen,
    SnapshotRow,
    StreamRow,
    Taken,
    Watched,
)

__all__ = ["ClaimStore", "ExceptionStore", "LogStore", "NodeStore", "OperateStore", "RegistryStore", "Store"]


class RegistryStore(Protocol):
    """Declared streams and groups."""

    async def register_stream(self, name: str, config: StreamConfig) -> StreamRow:
        """Declare a stream with its log and first two partitions; the newest declaration wins as a whole.

        Guarantee: all of it or nothing; safe from many processes at once; an unchanged declaration writes nothing.
        Cancelled: nothing was done, or all of it; the next call completes it.
        Raises: ConfigurationError (another partition size), PermissionDenied.
        """

    async def stream_by_name(self, name: str) -> StreamRow | None:
        """Return a stream, None when there is none of this name."""

    async def stream_by_id(self, stream: StreamId) -> StreamRow | None:
        """Return a stream, None when it was destroyed."""

    async def streams(self) -> list[StreamRow]:
        """Return all streams by name."""

    async def rename_stream(self, stream: StreamId, name: str) -> None:
        """Give a stream another name. Raises: AlreadyExists, NotFound. Cancelled: done or not."""

    async def destroy_stream(self, stream: StreamId, *, force: bool) -> None:
        """Drop a stream: its partitions one transaction each, the log last.

        Guarantee: once it has begun the stream counts as gone; cut off anywhere, the next call goes on.
        Raises: DestroyRefused (messages or groups, without force), NotFound, Contended (a producer is in the way).
        """

    async def register_group(
        self, stream: StreamRow, name: str, config: GroupConfig, *, start: int | None, run: ServerRun | None
    ) -> GroupRow:
        """Declare a group; `start` (above which id, None: the beginning) counts only at creation.

        Guarantee: as register_stream. A start that was observed on another server run is refused.
        Raises: ServerRunChanged, NotFound.
        """

    async def group_by_name(self, stream: StreamId, name: str) -> GroupRow | None:
        """Return a group, None when there is none of this name."""

    async def group_by_id(self, group: GroupId) -> GroupRow | None:
        """Return a group, None when it was destroyed."""

    async def groups(self, stream: StreamId) -> list[GroupRow]:
        """Return all groups of a stream by name."""

    async def destroy_group(self, group: GroupRow, *, force: bool) -> None:
        """Delete a group with its claims, exceptions and history, in one transaction.

        Raises: DestroyRefused (a consumer of it lives, without force), NotFound.
        """


class LogStore(Protocol):
    """Messages and the fence."""

    async def log_refs(self, streams: Sequence[StreamId]) -> list[LogRef]:
        """Return what observe needs; a destroyed stream is left out."""

    async def observe(self, logs: Sequence[LogRef]) -> list[Seen]:
        """Look at the head and the writers of logs, in one statement: the heads strictly before the writers.

        Guarantee: takes no lock on a log and no transaction id. Names the server run, and gives it a name if it has none.
        """

    async def holders(self, pids: Sequence[int]) -> list[Holder]:
        """Return what the role may see of transactions."""

    async def append(self, stream: StreamId, rows: Sequence[OutgoingRow]) -> list[MessageId]:
        """Append messages in one transaction; ids come back in the order of the rows.

        Guarantee: all or nothing. Cancelled: stored or not; `OutcomeUnknown` only when Postgres never answered.
        Raises: PartitionMissing (nothing stored; make it, then repeat), NotFound (the stream was destroyed).
        """

    async def make_partitions(self, stream: StreamId, partition_size: int, upto: int) -> int:
        """Make the partitions for ids from the newest drawn one to `upto` that are missing; return the end of the last.

        Guarantee: never waits for a producer's transaction; waits at most 2 s for others.
        Raises: Contended (somebody maintains the log), PermissionDenied (the role does not own it).
        """

    async def runway(self, stream: StreamId, partition_size: int) -> tuple[int, int]:
        """Return the newest drawn id, and the first id that has no partition."""

    async def read_range(
        self, stream: StreamId, low: int, high: int, *, rows: int, size: int
    ) -> list[MessageRow]:
        """Return the messages of (low, high] in id order: at most `rows`, at most about `size` bytes, at least one."""


class ClaimStore(Protocol):
    """The claim log of groups."""

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
        """Take a range for a node: a freed one if asked to look for it, else the next (low, high] with high <= settled.

        Guarantee: ranges of a group are disjoint and contiguous; no id above `settled` is in one. The first messages of
        the range come with it, at most `rows` and about `size` bytes.
        Args: `token` is minted by the caller; `limit` counts ids from low, and a wider hole is a range of its own; `mark` is
            ranges_done.
        Returns: None when nothing is free and nothing above the newest range is settled.
        Cancelled: it may have been claimed.
        Raises: LeaseLost (the node has ended), ServerRunChanged, GroupDamaged, LogDamaged.
        """

    async def record(self, stream: StreamId, record: RangeRecord) -> bool:
        """Record what became of a range; exceptions, history and the claim row in one transaction.

        Guarantee: all or nothing, and once: a repeated call that had committed before is told so, by False. A range whose
            row the clean-up has deleted was recorded by somebody: that is False as well, and nothing is written.
        Raises: LeaseLost (another token holds it; nothing was written).
        """

    async def read_progress(self, stream: StreamId, group: GroupId) -> Progress | None:
        """Return all that a group's marks depend on, in one snapshot; None when the group was destroyed."""

    async def advance(self, group: GroupId, epoch: int, ranges_done: int, committed: int) -> bool:
        """Move the marks forward, never back; False when neither moved or a seek came between."""

    async def delete_done_claims(
        self, stream: StreamId, group: GroupId, epoch: int, ranges_done: int, *, limit: int
    ) -> int:
        """Delete done ranges below ranges_done, never the newest; return how many."""

    async def held(self, stream: StreamId, group: GroupId, node: NodeId, mark: int) -> list[Held]:
        """Return the ranges and exceptions of a group that the store says a node holds."""

    async def release(self, stream: StreamId, group: GroupId, held: Held) -> bool:
        """Give back something that nobody runs; costs neither a reclaim nor an attempt. False when the token is over."""


class ExceptionStore(Protocol):
    """The exceptions of groups."""

    async def claim_exceptions(
        self, group: GroupRow, node: NodeId, token: Token, *, reads: Sequence[int], limit: int
    ) -> list[ClaimedException]:
        """Take exceptions that are due, first those whose owner died (which costs them an attempt).

        Cancelled: they may have been claimed. Raises: LeaseLost (the node has ended; nothing was claimed).
        """

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
        """Record what became of an exception, and its history. Raises: LeaseLost (nothing was written)."""

    async def due(self, watched: Sequence[Watched]) -> Due:
        """Say what there is to do, for all groups of the process in one statement per 64 groups."""

    async def snapshot(self, stream: StreamId, group: GroupId) -> SnapshotRow:
        """Count where a group stands. Raises: GroupDamaged, NotFound."""

    async def dead_letters(
        self, stream: StreamId, group: GroupId, *, after: int, limit: int, error_contains: str | None
    ) -> list[DeadRow]:
        """Return dead letters in id order."""


class NodeStore(Protocol):
    """Nodes: one lease per process."""

    async def register_node(
        self,
        name: str,
        host: str,
        pid: int,
        version: str,
        ttl: timedelta,
        token: Token,
        former: tuple[NodeId, Token] | None,
    ) -> NodeId:
        """Register this process, and end the node it was before in the same statement.

        Cancelled: it may have been registered; nobody holds anything by it, and it runs out.
        """

    async def heartbeat(self, node: NodeId, token: Token, ttl: timedelta) -> bool:
        """Extend the lease. False: the node has ended, and nothing brings it back."""

    async def end_own_node(self, node: NodeId, token: Token) -> bool:
        """End our own node: everything it holds is free at once. False: it had ended, or its row is locked."""

    async def end_expired_nodes(self) -> int:
        """End nodes whose lease is over and that have not beaten since we looked; never waits for one."""

    async def beats(self, own: NodeId) -> dict[NodeId, tuple[int, float]]:
        """Return the beats, and the ttl in seconds, of every other node that has not ended."""

    async def end_silent_node(self, node: NodeId, beats: int) -> bool:
        """End a node whose beats stood still for twice its lease by the watcher's own clock."""

    async def nodes(self, *, ended: bool) -> list[NodeRow]:
        """Return the nodes, newest first."""

    async def join(self, worker_id: int, node: NodeId, token: Token) -> bool:
        """Become an instance of a worker; False when its target is reached or somebody else is just claiming."""

    async def leave(self, token: Token) -> None:
        """Stop being an instance."""


class OperateStore(Protocol):
    """What an operator does to a group."""

    async def pause(self, group: GroupId) -> bool:
        """Hand out neither fresh ranges nor exceptions from the commit on. False: it was paused. Cancelled: done or not."""

    async def resume(self, group: GroupId) -> bool:
        """Hand out again. False: it was not paused. Cancelled: done or not."""

    async def redrive(
        self, stream: StreamId, group: GroupId, *, ids: Sequence[int] | None, error_contains: str | None
    ) -> int:
        """Make dead letters ready with a fresh budget: those named, those with a text in their error, or all (both None).

        Guarantee: two at once start a letter once; letters that die meanwhile are left alone. Holds the stream's lock, so
            retention drops none of them. Returns how many.
        Cancelled: some may have been started; each step of 5,000 is one transaction.
        """

    async def discard(
        self, stream: StreamId, group: GroupId, *, ids: Sequence[int] | None, error_contains: str | None
    ) -> int:
        """Delete dead letters, and note it in the history. As redrive."""

    async def inspect(self, stream: StreamId, group: GroupId, message: MessageId) -> InspectedRow:
        """Look at one message of a group."""

    async def before_instant(self, stream: StreamId, low: int, high: int, instant: datetime) -> int | None:
        """Return the position right before the first message of (low, high] that is not older than an instant.

        It is the newest id below it that is there, since an id between the two may still appear, or `low`.
        Returns: None when every message there is older.
        """

    async def oldest_retained(self, stream: StreamRow) -> int:
        """Return the id above which everything retained lies."""

    async def count_between(
        self, stream: StreamId, low: int, high: int
    ) -> tuple[int, int | None, int | None]:
        """Return how many messages (low, high] holds, the first and the last."""

    async def seek(self, group: GroupRow, target: int, *, run: ServerRun | None, force: bool) -> int:
        """Move a group so that it gets what lies above `target` next; its exceptions above are forgotten.

        Guarantee: one transaction. Owners of its ranges get LeaseLost; an advancer that read before changes nothing.
        Returns: the new epoch. Cancelled: nothing was done, or all.
        Raises: GroupBusy (without force), ServerRunChanged (`run` is not the current one), NotFound.
        """


class Store(RegistryStore, LogStore, ClaimStore, ExceptionStore, NodeStore, OperateStore, Protocol):
    """All of it, and the doorbell."""

    async def ring(self, what: str) -> None:
        """Wake whoever listens; a hint, lost if nobody does."""
