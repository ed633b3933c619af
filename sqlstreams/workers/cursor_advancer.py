"""cursor_advancer: moves a group's ranges_done and committed forward, deletes the done claims below ranges_done.

Guarantee   both marks only grow, except by a seek; the newest claim and every claim from ranges_done on stay.
Relies on   read_progress reads all blockers in one statement; a seek raises epoch, which guards our writes.
Cancelled   nothing is half done: each step is one statement, and the next tick goes on from what it finds.
Outage      the tick fails and is counted; nobody restarts anything for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from random import Random

import msgspec

from actors import Actor, Due, when_due
from sqlstreams.model.progress import forward, marks_of, movable
from sqlstreams.model.values import GroupId, Marks, StreamId
from sqlstreams.store import ClaimStore

__all__ = ["KIND", "Advanced", "CursorAdvancerConfig", "actor", "run_once"]

KIND = "cursor_advancer"

_log = logging.getLogger("sqlstreams.workers")


class CursorAdvancerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one cursor_advancer."""

    period: timedelta = timedelta(seconds=1)
    tick_deadline: timedelta = timedelta(seconds=30)
    max_deletes: int = 5_000  # of one statement; a tick goes on until nothing is left


class Advanced(msgspec.Struct, frozen=True):
    """What a tick did: the marks it wrote or found, and how many claims it deleted."""

    marks: Marks | None
    deleted: int


async def run_once(
    store: ClaimStore, stream: StreamId, group: GroupId, config: CursorAdvancerConfig
) -> Advanced:
    """Do one tick: read, decide in model/, write. Tests call this."""
    progress = await store.read_progress(stream, group)
    if progress is None:
        return Advanced(None, 0)
    marks = forward(progress, marks_of(progress))
    if movable(progress, marks):
        await store.advance(group, progress.epoch, marks.ranges_done, marks.committed)
    deleted = 0
    while True:
        step = await store.delete_done_claims(
            stream, group, progress.epoch, marks.ranges_done, limit=config.max_deletes
        )
        deleted += step
        if step < config.max_deletes:
            return Advanced(marks, deleted)


def actor(
    store: ClaimStore,
    stream: StreamId,
    group: GroupId,
    config: CursorAdvancerConfig,
    due: Due,
    *,
    random: Random,
    on_failure: Callable[[Exception], None] | None = None,
) -> Actor:
    """Tick when there is something due, at most once a period, each tick under its deadline. Idle costs no statement."""
    return when_due(
        due,
        partial(run_once, store, stream, group, config),
        at_most_every=config.period.total_seconds(),
        deadline=config.tick_deadline.total_seconds(),
        random=random,
        on_failure=on_failure or _report,
    )


def _report(failure: Exception) -> None:
    _log.info("a tick of %s failed and is tried again: %s", KIND, failure)
