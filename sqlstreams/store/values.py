"""The rows that a store takes and gives. Plain values: nothing here does I/O or holds a connection."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple
from uuid import UUID

import msgspec

from sqlstreams.config import GroupConfig, StreamConfig
from sqlstreams.model.outcome import ExceptionRow, HistoryRow
from sqlstreams.model.values import (
    Claim,
    Fence,
    GroupId,
    MessageId,
    NodeId,
    Progress,
    ServerRun,
    StreamId,
    Token,
)

__all__ = [
    "ClaimedException",
    "DeadRow",
    "Due",
    "GroupDue",
    "GroupRow",
    "Held",
    "Holder",
    "InspectedRow",
    "LogRef",
    "MessageRow",
    "NodeRow",
    "OutgoingRow",
    "RangeRecord",
    "Seen",
    "SnapshotRow",
    "StreamRow",
    "Taken",
    "Watched",
]


class StreamRow(msgspec.Struct, frozen=True):
    """A declared stream."""

    id: StreamId
    name: str
    partition_size: int
    config: StreamConfig
    created_at: datetime
    updated_at: datetime


class GroupRow(msgspec.Struct, frozen=True):
    """A declared group. `worker_id` is what its consumers are instances of."""

    id: GroupId
    stream_id: StreamId
    name: str
    config: GroupConfig
    epoch: int
    worker_id: int
    paused: bool
    created_at: datetime
    updated_at: datetime


class LogRef(msgspec.Struct, frozen=True):
    """What an observation needs of a stream: the oids of its log and of its sequence."""

    stream: StreamId
    log: int
    sequence: int


class Seen(msgspec.Struct, frozen=True):
    """What one observation saw of one log; `pids` are the server processes behind `writers`."""

    stream: StreamId
    head: int
    writers: frozenset[str]
    pids: tuple[int, ...]
    run: ServerRun


class Holder(msgspec.Struct, frozen=True):
    """A transaction that keeps a log's head from settling; what the role may not see is None."""

    pid: int
    application: str | None
    age: float | None
    query: str | None


class OutgoingRow(NamedTuple):
    """A message ready to be appended."""

    schema_version: int
    routing_key: str | None
    message_key: str | None
    headers: bytes | None
    payload: bytes


class MessageRow(NamedTuple):
    """A message as it is stored."""

    id: MessageId
    payload: bytes
    schema_version: int
    created_at: datetime
    message_key: str | None
    routing_key: str | None
    headers: bytes | None


class Taken(msgspec.Struct, frozen=True):
    """What a claim got. `rows` are the first messages of the range; `complete` says that there are no more.

    `freed` ranges had an owner before. `empty` ones are done already, `quarantined` ones were cut into that many exceptions:
    nobody runs these.
    """

    claim: Claim
    rows: list[MessageRow]
    complete: bool
    freed: bool = False
    empty: bool = False
    quarantined: int | None = None


class RangeRecord(msgspec.Struct, frozen=True):
    """What is recorded of a range: all of it ("finish"), a resolved prefix ("progress"), or that it is given back."""

    group: GroupId
    low: int
    token: Token
    epoch: int
    action: Literal["finish", "progress", "hand back"]
    through: int
    node: NodeId
    exceptions: tuple[ExceptionRow, ...] = ()
    history: tuple[HistoryRow, ...] = ()


class ClaimedException(msgspec.Struct, frozen=True):
    """An exception that was handed out; `dead` ones are beyond their budget and must not run."""

    message_id: MessageId
    dead: bool
    attempts: int
    delays: int
    fence: Fence
    row: MessageRow | None


class Held(NamedTuple):
    """Something that Postgres says a node holds."""

    id: int
    token: UUID
    kind: str


class Watched(NamedTuple):
    """A group that a process wants to know about, and the payload versions it reads."""

    group: GroupId
    stream: StreamId
    reads: tuple[int, ...]


class GroupDue(msgspec.Struct, frozen=True):
    """What there is to do for a group: its progress, freed or readable work, and the seconds to the next exception."""

    group: GroupId
    progress: Progress
    updated_at: datetime
    paused: bool
    due_in: float | None
    work: bool


class Due(msgspec.Struct, frozen=True):
    """What there is to do for a process."""

    node_expired: bool
    groups: tuple[GroupDue, ...]


class NodeRow(msgspec.Struct, frozen=True):
    """A registered process. `lease_left` is in seconds, below zero when it could be ended."""

    id: NodeId
    name: str
    host: str
    pid: int
    version: str
    started_at: datetime
    ended_at: datetime | None
    lease_left: float
    holds: int


class SnapshotRow(msgspec.Struct, frozen=True):
    """Where a group stands, as counted in one statement."""

    newest_high: int
    ranges_done: int
    committed: int
    paused: bool
    open_ranges: int
    open_ids: int
    open_low: int | None
    open_through: int | None
    holders: tuple[str, ...]
    unresolved: int
    lowest: int | None
    by_status: dict[str, int]
    head: int
    age: timedelta | None


class InspectedRow(msgspec.Struct, frozen=True):
    """What is known of one message in one group.

    `open_range` is (low, high, done_through, fence, reclaims, node name, pid, whether the node has ended), `exception` is (status,
    attempts, delays, error, can run after, fence, node name, pid, whether the node has ended), a line of `history` (attempt, status, error, at).
    """

    present: bool
    newest_high: int | None
    head: int
    committed: int | None
    open_range: tuple[Any, ...] | None
    exception: tuple[Any, ...] | None
    history: tuple[tuple[Any, ...], ...]


class DeadRow(msgspec.Struct, frozen=True):
    """A dead letter; `payload` is None when the message is gone."""

    message_id: MessageId
    attempts: int
    delays: int
    error: str | None
    message_key: str | None
    created_at: datetime
    died_at: datetime
    payload: bytes | None
