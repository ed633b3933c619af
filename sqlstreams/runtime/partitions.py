"""The runway of one log: partitions are made before they are needed, by whoever notices, and on demand if nobody did."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random

import trio

from actors import Backoff
from sqlstreams.errors import ClientClosed, Contended, PartitionMissing, SQLStreamsError
from sqlstreams.model.values import StreamId
from sqlstreams.store import LogStore

__all__ = ["AHEAD_SHARE", "HEAL_TRIES", "Runway"]

AHEAD_SHARE = 5  # the next partition is made when the newest id passes 80 % of the last: its last fifth
HEAL_TRIES = 5  # each waits up to 2 s for a lock

_log = logging.getLogger("sqlstreams.partitions")


class Runway:
    """Knows how far the partitions of a log reach, and makes more.

    Args:
        store: where the log is.
        stream: its stream.
        size: ids per partition.
        spawn: starts a background task of the client.
        random: the jitter between tries.
    """

    def __init__(
        self, store: LogStore, stream: StreamId, size: int, spawn: Callable[..., None], random: Random
    ) -> None:
        self._store = store
        self._stream = stream
        self._size = size
        self._spawn = spawn
        self._random = random
        self._end: int | None = None
        self._newest = 0
        self._busy = False
        self._lock = trio.Lock()

    def noticed(self, newest: int) -> None:
        """Take in the newest id that was drawn; make the next partition in the background when it is time."""
        self._newest = max(self._newest, newest)
        if self._busy or not self._near_the_end:
            return
        self._busy = True
        try:
            self._spawn(self._ahead)
        except ClientClosed:  # what was stored is stored; the next process notices
            self._busy = False

    async def heal(self, rows: int) -> None:
        """Make the partitions that the next `rows` ids need; returns when they are there.

        Cancelled: a partition may have been made.
        Raises: PartitionMissing when somebody holds the log for too long (about 10 s), PermissionDenied.
        """
        async with self._lock:
            backoff = Backoff(0.05, 1.0, random=self._random, jitter=0.5)
            for attempt in range(HEAL_TRIES):
                try:
                    head, _ = await self._store.runway(self._stream, self._size)
                    self._end = await self._store.make_partitions(self._stream, self._size, head + rows)
                except Contended as exc:
                    if attempt == HEAL_TRIES - 1:
                        raise PartitionMissing(
                            f"somebody holds the log, {HEAL_TRIES} tries to make a partition found no way in",
                            subject=f"stream {self._stream}",
                        ) from exc
                    await trio.sleep(backoff())
                else:
                    return

    @property
    def _near_the_end(self) -> bool:
        return self._end is None or self._newest >= self._end - self._size // AHEAD_SHARE

    async def _ahead(self) -> None:
        try:
            async with self._lock:
                while self._near_the_end:  # again: ids that were drawn meanwhile count too
                    if self._end is None:
                        _, self._end = await self._store.runway(self._stream, self._size)
                    else:
                        self._end = await self._store.make_partitions(self._stream, self._size, self._end)
        except (
            SQLStreamsError
        ) as exc:  # the next produce notices again; at the boundary it heals, or says why not
            _log.info("the next partition of stream %s could not be made ahead: %s", self._stream, exc)
            await trio.sleep(self._random.uniform(0.5, 1.0))
        finally:
            self._busy = False
