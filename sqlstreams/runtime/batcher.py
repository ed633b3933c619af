"""The batcher: calls of many tasks share transactions, and no call waits for a timer.

A batch is what has arrived while the ones before it were being stored, so its size follows the arrivals. Each caller gets
its own outcome: one that Postgres refuses fails alone.

Cancelled   a caller whose message has not joined a batch stored nothing; afterwards it is stored or not, and the others
            notice nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from random import Random

import trio

from actors import Backoff
from sqlstreams.errors import (
    Contended,
    OutcomeUnknown,
    PartitionMissing,
    SQLStreamsError,
    StatementRefused,
    StoreUnavailable,
)
from sqlstreams.model.values import MessageId, StreamId
from sqlstreams.runtime.partitions import HEAL_TRIES, Runway
from sqlstreams.store import LogStore, OutgoingRow

__all__ = ["Batcher", "append"]

BATCH_MESSAGES = 1_000
BATCH_BYTES = 8 * 1024 * 1024
SENDERS = 2  # batches of one stream that are under way at once
PATIENCE_SECONDS = 5.0  # how long a produce waits for a Postgres that cannot be reached


class _Entry:
    """One caller's message."""

    __slots__ = ("abandoned", "done", "failure", "id", "row")

    def __init__(self, row: OutgoingRow) -> None:
        self.row = row
        self.done = trio.Event()
        self.abandoned = False
        self.id = MessageId(0)
        self.failure: SQLStreamsError | None = None


class Batcher:
    """Stores single messages of one stream, many at a time.

    Args:
        store: where the log is.
        stream: which.
        runway: makes partitions.
        stored: told after each commit, to ring the doorbell.
        spawn: starts a background task of the client.
        random: the jitter of tries after an outage.
    """

    def __init__(
        self,
        store: LogStore,
        stream: StreamId,
        runway: Runway,
        stored: Callable[[StreamId], None],
        spawn: Callable[..., None],
        random: Random,
    ) -> None:
        self._store = store
        self._stream = stream
        self._runway = runway
        self._stored = stored
        self._spawn = spawn
        self._random = random
        self._waiting: deque[_Entry] = deque()
        self._senders = 0
        self.batches = 0

    async def produce(self, row: OutgoingRow) -> MessageId:
        """Store one message with whatever else is waiting, and return its id.

        Cancelled: stored or not; nothing if it had not joined a batch.
        Raises: StoreUnavailable, PartitionMissing, StatementRefused (nothing was stored), OutcomeUnknown, NotFound.
        """
        entry = _Entry(row)
        self._waiting.append(entry)
        if self._senders < SENDERS:
            self._senders += 1
            self._spawn(self._send)
        try:
            await entry.done.wait()
        except BaseException:
            entry.abandoned = True
            raise
        if entry.failure is not None:
            raise entry.failure
        return entry.id

    async def _send(self) -> None:
        try:
            while batch := self._take():
                self.batches += 1
                await self._store_batch(batch)
        finally:
            self._senders -= 1
            if not self._senders and self._waiting:  # cancelled: the client is closing
                for entry in self._waiting:
                    _fail(entry, StoreUnavailable("the client closed before the message was sent"))
                self._waiting.clear()

    def _take(self) -> list[_Entry]:
        batch: list[_Entry] = []
        size = 0
        while self._waiting and len(batch) < BATCH_MESSAGES and size < BATCH_BYTES:
            entry = self._waiting.popleft()
            if not entry.abandoned:
                batch.append(entry)
                size += len(entry.row.payload)
        return batch

    async def _store_batch(self, batch: list[_Entry]) -> None:
        """Store a batch; one that Postgres refuses is cut in half until the refused ones stand alone."""
        todo = [batch]
        try:
            while todo:
                part = todo.pop()
                try:
                    ids = await append(
                        self._store, self._stream, self._runway, [each.row for each in part], self._random
                    )
                except StatementRefused as exc:
                    if len(part) > 1:
                        half = len(part) // 2
                        todo += [part[half:], part[:half]]
                    else:
                        _fail(part[0], exc)
                except SQLStreamsError as exc:
                    for entry in part:
                        _fail(entry, exc)
                else:
                    for entry, id_ in zip(part, ids, strict=True):
                        entry.id = id_
                        entry.done.set()
                    self._stored(self._stream)
        finally:
            for entry in batch:
                if not entry.done.is_set():  # cancelled: the client is closing
                    _fail(entry, OutcomeUnknown("the client closed while the message was under way"))


async def append(
    store: LogStore, stream: StreamId, runway: Runway, rows: Sequence[OutgoingRow], random: Random
) -> list[MessageId]:
    """Store messages in one transaction: partitions are made on demand, and an outage is waited out for 5 s.

    Only what certainly did not happen is repeated.

    Raises: OutcomeUnknown (stored or not), everything else: nothing was stored.
    """
    give_up = trio.current_time() + PATIENCE_SECONDS
    backoff = Backoff(0.02, 0.5, random=random, jitter=0.5)
    healed = 0
    while True:
        try:
            ids = await store.append(stream, rows)
        except PartitionMissing:
            healed += 1
            if healed > HEAL_TRIES:
                raise
            await runway.heal(len(rows) << healed)  # others use up what was made: more room with each try
        except (StoreUnavailable, Contended):
            if trio.current_time() >= give_up:
                raise
            await trio.sleep(backoff())
        else:
            runway.noticed(ids[-1])
            return ids


def _fail(entry: _Entry, failure: SQLStreamsError) -> None:
    """Give a caller an error of its own: one object raised in many tasks would collect their tracebacks."""
    own = copy(failure)  # with all its attributes: the SQLSTATE of a refusal too
    own.__cause__ = failure.__cause__
    entry.failure = own
    entry.done.set()
