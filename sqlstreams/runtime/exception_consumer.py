"""The exception consumer: runs retries, delayed, deferred and taken-over messages of a group when they are due.

Guarantee   an exception runs under a token of its own, and its outcome is written under that token or not at all.
Cancelled   what was cut short is ready again at once, its attempts unchanged.
Outage      claiming waits and tries again; outcomes are repeated until they are known, as long as the lease lasts.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import trio

from actors import Backoff
from sqlstreams.errors import LeaseLost, SQLStreamsError
from sqlstreams.model.outcome import HistoryStatus, NextOutcome, Success, next_outcome
from sqlstreams.model.values import Token
from sqlstreams.runtime.context import Context, known_outcome
from sqlstreams.runtime.node import OUTAGES, Node
from sqlstreams.store import ClaimedException, Held

__all__ = ["ExceptionConsumer"]

AT_ONCE = 16  # exceptions of one claim; each also needs a free slot

_log = logging.getLogger("sqlstreams.consumer")


class ExceptionConsumer:
    """Claims and runs exceptions for one node.

    Args:
        context: what the consumer's actors share.
        node: who holds them.
    """

    def __init__(self, context: Context, node: Node) -> None:
        self._context = context
        self._node = node

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Run what is due until a drain is asked for; returns when the last one has ended."""
        context, due = self._context, self._context.pulse.exceptions
        backoff = Backoff(0.05, 1.0, random=context.random, jitter=0.5)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while not context.shutdown.requested:
                await due.wait()
                if context.shutdown.requested:
                    break
                try:
                    await self._turn(nursery)
                except OUTAGES as exc:
                    context.holdings.doubt()  # it may have been claimed all the same
                    _log.debug("claiming exceptions waits: %s", exc)
                    due.mark()
                    await trio.sleep(backoff())
                else:
                    backoff.reset()

    async def _turn(self, nursery: trio.Nursery) -> None:
        """Claim as many as there are free slots, at least one, and start them."""
        context, due = self._context, self._context.pulse.exceptions
        token = context.make_token()
        free = await self._slots()
        if context.shutdown.requested:  # asked for while we waited for the slot
            due.mark()
            for _ in range(free):
                context.slots.release()
            return
        try:
            due.clear()
            with context.holdings.using(token):
                claimed = await self._claim(token, free)
                if len(claimed) >= free:
                    due.mark()  # there may be more; else the pulse, or whoever records one, says when
                for each in claimed:
                    if each.dead:
                        context.pulse.advance.mark()
                        continue
                    free -= 1
                    context.holdings.use(token)
                    nursery.start_soon(self._run, each, token)
        finally:
            for _ in range(free):
                context.slots.release()

    async def _slots(self) -> int:
        """Wait for one slot and take what else is free; return how many."""
        slots, taken = self._context.slots, 1
        await slots.acquire()
        while taken < min(AT_ONCE, self._context.options.concurrency):
            try:
                slots.acquire_nowait()
            except trio.WouldBlock:
                break
            taken += 1
        return taken

    async def _claim(self, token: Token, limit: int) -> list[ClaimedException]:
        context = self._context
        try:
            return await context.store.claim_exceptions(
                context.group, self._node.id, token, reads=context.reads, limit=limit
            )
        except LeaseLost:
            self._node.lease.lose(
                "the database has ended this node"
            )  # the guard cuts us at the next checkpoint
        return []

    async def _run(self, claimed: ClaimedException, token: Token) -> None:
        """Run one; its slot and its use of the token end with it."""
        context = self._context
        try:
            outcome = await self._outcome(claimed)
            await self._record(claimed, token, outcome)
        except LeaseLost as exc:
            _log.info(
                "message %s of group %s is somebody else's now: %s",
                claimed.message_id,
                context.group.name,
                exc,
            )
        except BaseException:
            await self._give_back(claimed, token)  # noqa: ASYNC102 - it shields itself, bounded
            raise
        finally:
            context.slots.release()
            context.holdings.done(token)

    async def _outcome(self, claimed: ClaimedException) -> NextOutcome:
        context, row = self._context, claimed.row
        if row is None:
            return NextOutcome(
                "dead", claimed.attempts, claimed.delays, None, "the message is no longer in the log", "dead"
            )
        result = await context.runner.run(row, claimed.attempts, claimed.delays, claimed.fence)
        context.counters.handled += 1
        context.counters.failed += not isinstance(result, Success)
        return next_outcome(result, claimed.attempts, claimed.delays, context.policy, context.random.random())

    async def _record(self, claimed: ClaimedException, token: Token, outcome: NextOutcome) -> None:
        context = self._context
        kept = context.group.config.history
        wanted = kept == "all" or (kept == "failures" and outcome.history != "succeeded")
        history: HistoryStatus | None = outcome.history if wanted else None
        await known_outcome(
            context.random,
            lambda: context.store.record_exception(
                context.group,
                claimed.message_id,
                token,
                outcome,
                self._node.id,
                seen_attempts=claimed.attempts,
                history=history,
            ),
        )
        if outcome.status == "ready":
            context.pulse.exceptions.mark_at(
                trio.current_time() + (outcome.wait or timedelta(0)).total_seconds()
            )
        else:
            context.pulse.advance.mark()

    async def _give_back(self, claimed: ClaimedException, token: Token) -> None:
        """After a cancel or an error: make it ready at once, bounded."""
        context = self._context
        with trio.move_on_after(
            context.hand_back_seconds(self._node), shield=True
        ):  # bounded: hand_back_seconds, two graces
            try:
                held = Held(claimed.message_id, token, "exception")
                if await context.store.release(context.group.stream_id, context.group.id, held):
                    context.counters.handed_back += 1
                    context.freed()
            except SQLStreamsError as exc:
                _log.info(
                    "message %s could not be handed back; its lease ends by itself: %s",
                    claimed.message_id,
                    exc,
                )
