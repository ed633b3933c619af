"""The words of the protocols as types: identifiers, observations, claims, progress.

All of them are immutable. Positions in a log (`head`, `low`, `high`, marks) are plain integers, since arithmetic is
done on them; an identifier of one thing is a NewType.
"""

from datetime import datetime
from typing import NewType
from uuid import UUID

import msgspec

__all__ = [
    "Claim",
    "Fence",
    "GroupId",
    "Marks",
    "MessageId",
    "NodeId",
    "Observation",
    "Progress",
    "ServerRun",
    "StreamId",
    "Token",
]

MessageId = NewType("MessageId", int)
GroupId = NewType("GroupId", int)
StreamId = NewType("StreamId", int)
NodeId = NewType("NodeId", int)
Fence = NewType("Fence", int)
Token = NewType("Token", UUID)


class ServerRun(msgspec.Struct, frozen=True):
    """One life of the database server: another one after crash recovery, promotion or restart.

    Both parts are needed: the uuid survives a clean restart, the start time survives the recovery from a killed backend.

    Source: docs/explanation/fence.md
    """

    run: UUID
    started: datetime


class Observation(msgspec.Struct, frozen=True):
    """What one statement saw of a log: first its sequence, then who held the parent table's writer lock.

    Guarantee (by the order of the two reads): whoever drew an id up to `head` was in `writers`, or had ended before.
    """

    head: int
    writers: frozenset[str]
    run: ServerRun


class Claim(msgspec.Struct, frozen=True):
    """A range (low, high] that this process owns; messages above `start_above` are its work.

    `start_above` is `low` for a fresh range and the recorded `done_through` for one that was taken over.
    """

    low: int
    high: int
    start_above: int
    token: Token
    fence: Fence
    reclaims: int


class Marks(msgspec.Struct, frozen=True):
    """The two marks of a group's cursor: where scans of the claim log start, and what people see and retention obeys."""

    ranges_done: int
    committed: int


class Progress(msgspec.Struct, frozen=True):
    """All that decides a group's marks, read in one statement; the first three are the stored cursor.

    `lowest_open_low` and `lowest_open_through` are the lowest `low` and the lowest greatest(low, done_through) among the
    ranges that are not done, None without such a range. `lowest_unresolved` is the lowest message with an unresolved
    exception, None without one.
    """

    epoch: int
    ranges_done: int
    committed: int
    newest_high: int
    lowest_open_low: int | None
    lowest_open_through: int | None
    lowest_unresolved: int | None
