"""The pulse: one statement for all groups of the process says what there is to do, once a second.

It finds freed ranges, exceptions that are due or may be read now, marks that can move, changed declarations, groups that
were destroyed, and nodes that can be ended. A ring that something was freed makes it look at once.

Cancelled   nothing is lost. Outage: it waits and tries again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from random import Random
from typing import Any

import trio

from actors import Backoff, Due
from sqlstreams.errors import SQLStreamsError
from sqlstreams.model.progress import marks_of, movable
from sqlstreams.model.values import StreamId
from sqlstreams.runtime.node import Nodes
from sqlstreams.store import GroupDue, Store, Watched

__all__ = ["GroupPulse", "Pulse"]

PERIOD = 1.0
GAP = 0.05  # seconds between two looks, however much rings

_log = logging.getLogger("sqlstreams.pulse")


class GroupPulse:
    """What the pulse knows of one group, and whom it wakes.

    Attributes:
        freed: grows each time a range or an exception may have become free.
        ranges: marked when a range may be free. exceptions: when one is due. advance: when a mark can move.
        changed: marked when the declaration changed, or the group is gone.
        paused: whether nothing is handed out. updated_at: when the declaration, or this, was changed last.
        mark: the group's ranges_done, from where scans for open ranges start. epoch: raised by each seek.
    """

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.ranges = Due()
        self.exceptions = Due()
        self.advance = Due()
        self.changed = Due()
        self.freed = 0
        self.mark = 0
        self.epoch = 0
        self.committed = 0
        self.gone = False
        self.paused = False
        self.updated_at: datetime | None = None

    def take(self, due: GroupDue) -> None:
        """Take in what was seen."""
        progress = due.progress
        if (progress.epoch, due.updated_at) != (self.epoch, self.updated_at):
            self.free()  # after a seek, a pause or a resume everything is to be looked for anew
        self.paused = due.paused
        self.mark, self.epoch, self.committed = progress.ranges_done, progress.epoch, progress.committed
        if due.work:
            self.free()
        if due.due_in is not None:
            self.exceptions.mark_at(trio.current_time() + max(due.due_in, 0.0))
        if movable(progress, marks_of(progress)) or progress.newest_high > progress.ranges_done:
            self.advance.mark()
        if self.updated_at not in (None, due.updated_at):
            self.changed.mark()
        self.updated_at = due.updated_at

    def free(self) -> None:
        """Note that ranges or exceptions may be free."""
        self.freed += 1
        self.ranges.mark()
        self.exceptions.mark()

    def lost(self) -> None:
        """Note that the group is gone."""
        self.gone = True
        self.changed.mark()
        self.ranges.mark()


class Pulse:
    """Looks for work of all watched groups.

    Args:
        store: where the groups are.
        nodes: who may end nodes that ran out.
        random: the jitter of the period and of tries after an outage.
    """

    def __init__(self, store: Store, nodes: Nodes, random: Random) -> None:
        self._store = store
        self._nodes = nodes
        self._random = random
        self._groups: dict[GroupPulse, None] = {}
        self._now = trio.Event()

    @contextmanager
    def watch(self, watched: Watched) -> Iterator[GroupPulse]:
        """Look at a group for the block."""
        group = GroupPulse(watched)
        self._groups[group] = None
        self.look()
        try:
            yield group
        finally:
            del self._groups[group]

    def ring(self, stream: StreamId) -> None:
        """Say that something of a stream's groups became free or due."""
        if any(group.watched.stream == stream for group in self._groups):
            self.look()

    def look(self) -> None:
        """Look now."""
        self._now.set()

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Look once a second, and when something rings; silent while nothing is watched."""
        task_status.started()
        backoff = Backoff(0.1, 2.0, random=self._random, jitter=0.5)
        silent_at = trio.current_time()
        while True:
            with trio.move_on_after(
                PERIOD * self._random.uniform(0.9, 1.0) if self._groups else float("inf")
            ):
                await self._now.wait()
            self._now = trio.Event()
            groups = list(self._groups)
            try:
                await self._look(groups)
                if trio.current_time() - silent_at >= self._nodes.config.heartbeat.total_seconds():
                    silent_at = trio.current_time()
                    await self._nodes.watch_silent()
            except SQLStreamsError as exc:
                if not exc.may_retry:
                    _log.warning("looking for work failed and is tried again: %s", exc)
                await trio.sleep(backoff())
                self.look()
            else:
                backoff.reset()
                await trio.sleep(GAP)

    async def _look(self, groups: list[GroupPulse]) -> None:
        if not groups:
            return
        watched = list({group.watched: None for group in groups})
        seen = await self._store.due(watched)
        if seen.node_expired:
            await self._nodes.end_others()
            seen = await self._store.due(watched)
        for group in groups:
            answers = [each for each in seen.groups if each.group == group.watched.group]
            if not answers:
                group.lost()
            for answer in answers:
                group.take(answer)
