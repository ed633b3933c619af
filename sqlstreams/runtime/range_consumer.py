"""The range consumer: claims one range after the other and runs it; freed ranges come before fresh ones.

Guarantee   a range is claimed only up to the settled head of the server run on which that was observed.
Cancelled   the range in hand is recorded as far as it came and given back.
Outage      claiming waits and tries again; the lease's guard ends the wait when the lease ends.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

import trio

from actors import Backoff
from sqlstreams.errors import GroupDamaged, LeaseLost, NotFound, ServerRunChanged
from sqlstreams.model.values import ServerRun, Token
from sqlstreams.runtime.context import Context
from sqlstreams.runtime.node import OUTAGES, Node
from sqlstreams.runtime.range_run import READ_BYTES, RangeRun, rows_at_once
from sqlstreams.store import Taken

__all__ = ["RangeConsumer"]

PROGRESS_SECONDS = 1.0  # how often the resolved prefix of a range is recorded while it runs

_log = logging.getLogger("sqlstreams.consumer")


class RangeConsumer:
    """Claims and runs ranges for one node.

    Args:
        context: what the consumer's actors share.
        node: who holds the ranges.
    """

    def __init__(self, context: Context, node: Node) -> None:
        self._context = context
        self._node = node
        self._running: RangeRun | None = None
        self._high = 0  # nothing above it is settled that we have not asked for
        self._high_of: tuple[ServerRun | None, int, datetime | None] = (None, -1, None)  # what makes it void
        self._looked = -1  # what pulse.freed was when nothing was free
        self._average = 8_192.0  # bytes of a payload, seen so far

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Claim and run until a drain is asked for."""
        context = self._context
        due, watch, pulse = context.pulse.ranges, context.watch, context.pulse
        backoff = Backoff(0.05, 1.0, random=context.random, jitter=0.5)
        with watch.subscribed(due):
            task_status.started()
            while not context.shutdown.requested:
                due.clear()
                if (watch.run, pulse.epoch, pulse.updated_at) != self._high_of:
                    self._high, self._high_of = 0, (watch.run, pulse.epoch, pulse.updated_at)
                if watch.run is None or not (pulse.freed != self._looked or watch.settled > self._high):
                    with watch.waiting():
                        await due.wait()
                    continue
                token = context.make_token()
                with context.holdings.using(token):
                    try:
                        taken = await self._claim(token)
                    except ServerRunChanged:
                        watch.ring()
                        await trio.sleep(0.01)
                        continue
                    except OUTAGES as exc:
                        context.holdings.doubt()  # it may have been claimed all the same
                        _log.debug("claiming waits: %s", exc)
                        await trio.sleep(backoff())
                        continue
                    backoff.reset()
                    if taken is not None:
                        await self._run(taken)

    async def record_progress(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Record the resolved prefix of the range in hand once a second."""
        task_status.started()
        while True:
            await trio.sleep(PROGRESS_SECONDS)
            if self._running is not None:
                await self._running.record_progress()

    async def _claim(self, token: Token) -> Taken | None:
        context = self._context
        watch, pulse = context.watch, context.pulse
        freed, settled, run = pulse.freed, watch.settled, watch.run
        assert run is not None
        try:
            taken = await context.store.claim(
                context.group,
                self._node.id,
                token,
                settled=settled,
                run=run,
                limit=context.options.batch,
                mark=pulse.mark,
                freed_first=freed != self._looked,
                reads=context.reads,
                rows=rows_at_once(self._average),
                size=READ_BYTES,
            )
        except LeaseLost:
            self._node.lease.lose("the database has ended this node")
            return None
        except GroupDamaged:
            if await context.store.group_by_id(context.group.id) is None:  # noqa: ASYNC120 - a cancel may win
                raise NotFound("it was destroyed", subject=f"group {context.group.name!a}") from None
            raise
        if taken is None or not taken.freed:
            self._looked = freed  # nothing more is free, unless it became free meanwhile
        if taken is None:
            self._high = max(self._high, settled)  # the newest range ends there or above
        elif not taken.freed:
            self._high = max(self._high, taken.claim.high)
        return taken

    async def _run(self, taken: Taken) -> None:
        context = self._context
        if taken.claim.reclaims:
            context.counters.reclaimed += 1
            _log.info(
                "took over ids (%s, %s] of group %s, which lost its owner (%s times now)",
                taken.claim.start_above,
                taken.claim.high,
                context.group.name,
                taken.claim.reclaims,
            )
        if taken.quarantined is not None:
            _log.warning(
                "ids (%s, %s] of group %s lost %s owners and were cut into %s single messages",
                taken.claim.start_above,
                taken.claim.high,
                context.group.name,
                taken.claim.reclaims,
                taken.quarantined,
            )
            context.pulse.exceptions.mark()
        if taken.empty or taken.quarantined is not None:
            context.pulse.advance.mark()
            return
        if taken.rows:
            average = sum(len(row.payload) for row in taken.rows) / len(taken.rows)
            self._average = 0.7 * average + 0.3 * self._average if average < self._average else average
        self._running = RangeRun(context, self._node, taken)
        try:
            await self._running.deliver()
        except LeaseLost as exc:
            _log.info(
                "ids above %s of group %s are somebody else's now: %s",
                taken.claim.low,
                context.group.name,
                exc,
            )
        finally:
            self._running = None
