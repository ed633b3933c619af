"""The observer: one statement for all streams of the process says how far each log is settled.

It looks when a doorbell rang for a stream that somebody waits for, soon again while a writer keeps such a stream from
settling, and otherwise once a poll. A stream that nobody waits for costs its share of the poll.

Guarantee   `settled` of a watch never passes an id that may still appear, on the server run it names.
Cancelled   nothing is lost: the next observation starts where the memory of this process stands.
Outage      observing waits and tries again; consumers keep what they have.

Source: docs/explanation/fence.md
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import trio

from actors import Backoff, Due
from sqlstreams.errors import SQLStreamsError
from sqlstreams.model.fence import Observations
from sqlstreams.model.values import Observation, ServerRun, StreamId
from sqlstreams.store import LogRef, LogStore, Seen

__all__ = ["Observer", "StreamWatch"]

POLL_UP, POLL_DOWN = 1.0, 0.5  # seconds between two looks, with and without a listener
AGAIN_FIRST, AGAIN_CAP = 0.001, 0.25  # seconds until the next look while a writer is in the way
STREAMS_PER_STATEMENT = 256  # a statement of ours takes at most 512 locks
STALL_SECONDS = 5.0  # a head that did not settle for so long is explained once

_log = logging.getLogger("sqlstreams.observer")


class StreamWatch:
    """What this process knows of one stream's settled head, and who wants to know when it moves."""

    def __init__(self, stream: StreamId, poke: Callable[[], None]) -> None:
        self.stream = stream
        self.ref: LogRef | None = None
        self.gone = False
        self._poke = poke
        self._observations = Observations()
        self._subscribers: dict[Due, None] = {}
        self._wanting = 0
        self.users = 0
        self.rung = True  # nobody has looked yet
        self._again = AGAIN_FIRST
        self._looked_at = -math.inf
        self.stalled_since: float | None = None
        self.explained = False

    @property
    def settled(self) -> int:
        """Every id up to it is committed or aborted, on `run`."""
        return self._observations.settled

    @property
    def head(self) -> int:
        """The newest id that was drawn before the last look."""
        return self._observations.head

    @property
    def run(self) -> ServerRun | None:
        """The server run that `settled` holds on; None before the first look."""
        return self._observations.run

    @property
    def unsettled(self) -> bool:
        """Whether a writer keeps the head from settling."""
        return self._observations.unsettled

    @property
    def next_look(self) -> float:
        """The trio time at which this stream wants to be looked at, besides polls."""
        if not self._wanting:
            return math.inf
        if self.rung:
            return -math.inf
        return self._looked_at + self._again if self.unsettled else math.inf

    def begin_look(self) -> None:
        """Note that somebody is about to look: what rings from now on is for the next look."""
        self._looked_at, self.rung = trio.current_time(), False
        if self.unsettled:
            self._again = min(self._again * 2, AGAIN_CAP)

    def ring(self) -> None:
        """Look soon: something may have been committed."""
        self.rung = True
        if self._wanting:
            self._poke()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While in the block, the observer looks for this stream more often than a poll."""
        self._wanting += 1
        if self.rung or self.unsettled:
            self._poke()
        try:
            yield
        finally:
            self._wanting -= 1

    @contextmanager
    def subscribed(self, due: Due) -> Iterator[None]:
        """Mark `due` each time `settled` moves, or the stream turns out to be gone."""
        self._subscribers[due] = None
        try:
            yield
        finally:
            del self._subscribers[due]

    def take(self, seen: Seen) -> None:
        """Take in an observation."""
        before = self._observations.settled, self._observations.head, self._observations.run
        self._observations.add(Observation(seen.head, seen.writers, seen.run))
        moved = before[0] != self._observations.settled or before[2] != self._observations.run
        if moved or not self.unsettled or before[1] != self._observations.head:
            self._again = AGAIN_FIRST
        if moved or not self.unsettled:
            self.stalled_since, self.explained = None, False
        elif self.stalled_since is None:
            self.stalled_since = trio.current_time()
        if moved:
            self.tell()

    def tell(self) -> None:
        """Wake all subscribers."""
        for due in self._subscribers:
            due.mark()


class Observer:
    """Looks at the logs of all watched streams.

    Args:
        store: where the logs are.
        random: the jitter of polls and of tries after an outage.
        listening: says whether a listener is up, so that polls may be rare.
    """

    def __init__(self, store: LogStore, random: Random, listening: Callable[[], bool]) -> None:
        self._store = store
        self._random = random
        self._listening = listening
        self._watches: dict[StreamId, StreamWatch] = {}
        self._poked = trio.Event()

    @contextmanager
    def watch(self, stream: StreamId) -> Iterator[StreamWatch]:
        """Watch a stream for the block; watches of one stream share what is known."""
        watch = self._watches.get(stream)
        if watch is None:
            watch = self._watches[stream] = StreamWatch(stream, self.poke)
        watch.users += 1
        try:
            yield watch
        finally:
            watch.users -= 1
            if not watch.users:
                del self._watches[stream]

    def ring(self, stream: StreamId) -> None:
        """Say that something may have been committed to a stream."""
        if (watch := self._watches.get(stream)) is not None:
            watch.ring()

    def ring_all(self) -> None:
        """Say it for all streams: rings were missed."""
        for watch in self._watches.values():
            watch.ring()

    def poke(self) -> None:
        """Look again when to look."""
        self._poked.set()

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Look whenever it is worth it, for ever."""
        task_status.started()
        backoff = Backoff(0.1, 2.0, random=self._random, jitter=0.5)
        polled = -math.inf
        while True:
            self._poked = trio.Event()
            now, poll_at = trio.current_time(), polled + (POLL_UP if self._listening() else POLL_DOWN)
            at = min((watch.next_look for watch in self._watches.values()), default=math.inf)
            if self._watches:
                at = min(at, poll_at)
            if at > now:
                with trio.move_on_at(at):
                    await self._poked.wait()
                continue
            due = [watch for watch in self._watches.values() if now >= min(poll_at, watch.next_look)]
            if now >= poll_at:
                polled = now
            try:
                await self._look(due)
            except SQLStreamsError as exc:
                if not exc.may_retry:
                    _log.warning("observing failed and is tried again: %s", exc)
                for watch in due:
                    watch.rung = True
                await trio.sleep(backoff())
            else:
                backoff.reset()

    async def _look(self, watches: list[StreamWatch]) -> None:
        for watch in watches:
            watch.begin_look()
        unknown = [watch for watch in watches if watch.ref is None]
        if unknown:
            refs = {
                ref.stream: ref for ref in await self._store.log_refs([watch.stream for watch in unknown])
            }
            for watch in unknown:
                watch.ref = refs.get(watch.stream)
                watch.gone = watch.ref is None
                if watch.gone:
                    watch.tell()
        for start in range(0, len(watches), STREAMS_PER_STATEMENT):
            chunk = {watch.stream: watch for watch in watches[start : start + STREAMS_PER_STATEMENT]}
            logs = [watch.ref for watch in chunk.values() if watch.ref is not None]
            if not logs:
                continue
            for seen in await self._store.observe(logs):
                watch = chunk.pop(seen.stream)
                watch.take(seen)
                await self._explain(watch, seen)
            for watch in chunk.values():  # destroyed meanwhile
                watch.ref = None

    async def _explain(self, watch: StreamWatch, seen: Seen) -> None:
        """Say once a stall who keeps the head from settling."""
        since = watch.stalled_since
        if since is None or watch.explained or trio.current_time() - since < STALL_SECONDS:
            return
        watch.explained = True
        for holder in await self._store.holders(seen.pids):
            _log.warning(
                "stream %s has not settled above id %s for %.0f s: pid %s (%s) holds a transaction on its log",
                watch.stream,
                watch.settled,
                trio.current_time() - since,
                holder.pid,
                holder.application or "application not visible",
            )
