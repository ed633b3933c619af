"""One range in the hands of this process: its messages go to the handler, and what became of them is recorded together.

Guarantee   every id up to what is recorded is finished or has an exception row, in the same transaction. A record whose
            answer was lost is repeated as it was, until its outcome is known, before anything else is recorded.
Cancelled   what finished is recorded, what was cut short is free at once with its attempts unchanged, and so is the rest of
            the range; bounded, and within the lease's margin when the lease was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import trio

from sqlstreams.config import READ_AHEAD_LIMIT_BYTES
from sqlstreams.errors import LeaseLost, SQLStreamsError
from sqlstreams.model.outcome import (
    ExceptionRow,
    HistoryRow,
    Result,
    Success,
    first_outcome,
    handed_back,
    parked,
)
from sqlstreams.model.progress import RangeProgress
from sqlstreams.runtime.context import Context, known_outcome
from sqlstreams.runtime.node import Node
from sqlstreams.store import Held, MessageRow, RangeRecord, Taken

__all__ = ["RangeRun", "rows_at_once"]

BREATH_SECONDS = 0.005  # handlers that never wait still let others run this often
READ_BYTES = (
    READ_AHEAD_LIMIT_BYTES // 2
)  # of one read: the driver holds the answer beside our copy for a moment
MOST_ROWS = 8_192

_log = logging.getLogger("sqlstreams.consumer")


def rows_at_once(average: float) -> int:
    """How many rows to ask for, so that the server looks at the sizes of not many more than fit."""
    return max(16, min(MOST_ROWS, int(2 * READ_BYTES / max(average, 1.0))))


class RangeRun:
    """Runs one range.

    Args:
        context: what the consumer's actors share.
        node: who holds the range.
        taken: the range and its first messages.
    """

    def __init__(self, context: Context, node: Node, taken: Taken) -> None:
        self._context = context
        self._node = node
        self._claim = taken.claim
        self._epoch = context.pulse.epoch  # a seek raises it, and then nothing is recorded any more
        self._rows: Sequence[MessageRow] = taken.rows
        self._complete = taken.complete
        self._progress = RangeProgress(
            taken.claim.start_above, self._end_of(taken.rows), [row.id for row in taken.rows]
        )
        self._started: set[int] = set()  # positions in self._rows whose run has not ended
        self._next = 0
        self._pending: list[tuple[int, ExceptionRow | None, HistoryRow | None]] = []
        self._recorded = taken.claim.start_above
        self._doubtful: RangeRecord | None = None
        self._lock = trio.Lock()
        self._scope = trio.CancelScope()
        self._lost: LeaseLost | None = None
        self._closed = False

    async def deliver(self) -> None:
        """Run the range to its end, or until a drain is asked for, and record it.

        Raises: LeaseLost (it is not ours any more; nothing was written), and what recording raises for good.
        """
        try:
            with self._scope:
                while True:
                    await self._run_chunk()
                    if self._progress.left or self._complete or self._end_of(self._rows) >= self._claim.high:
                        break
                    await self._read_on()
                await self._close()
        except BaseException as exc:
            if not isinstance(exc, LeaseLost):
                await self._rescue()  # noqa: ASYNC102 - it shields itself, bounded
            raise
        if self._lost is not None:
            raise self._lost

    async def record_progress(self) -> None:
        """Record the resolved prefix, if there is something new and the range is still running."""
        async with self._lock:
            through = self._progress.through
            if self._closed or through <= self._recorded or through >= self._claim.high:
                return
            try:
                await self._record("progress", through)
            except LeaseLost as exc:
                self._lost, self._closed = exc, True
                self._scope.cancel(reason="the range is held under another token")

    async def _run_chunk(self) -> None:
        concurrency = min(self._context.options.concurrency, len(self._rows))
        if concurrency <= 1:
            await self._slot()
            return
        async with trio.open_nursery() as nursery:
            for _ in range(concurrency):
                nursery.start_soon(self._slot)

    async def _slot(self) -> None:
        """Take one message after the other, in id order."""
        context, rows, claim = self._context, self._rows, self._claim
        slots, runner, stop = context.slots, context.runner, context.shutdown
        breath = trio.current_time() + BREATH_SECONDS
        while self._next < len(rows) and not stop.requested:
            try:
                slots.acquire_nowait()
            except trio.WouldBlock:
                await slots.acquire()
                if self._next >= len(rows) or stop.requested:
                    slots.release()
                    return
            at = self._next
            self._next = at + 1
            row = rows[at]
            try:
                if row.schema_version in context.reads:
                    self._started.add(at)
                    result = await runner.run(row, 0, 0, claim.fence)
                    self._started.discard(at)
                    self._settle(at, row, result)
                else:
                    self._unreadable(at, row)
            finally:
                slots.release()
            if trio.current_time() >= breath:
                await trio.lowlevel.checkpoint()
                breath = trio.current_time() + BREATH_SECONDS

    def _settle(self, at: int, row: MessageRow, result: Result) -> None:
        context = self._context
        context.counters.handled += 1
        history = context.group.config.history
        if isinstance(result, Success):
            if history == "all":
                self._pending.append((row.id, None, HistoryRow(row.id, 0, "succeeded", None)))
            self._progress.finish_index(at)
            return
        context.counters.failed += 1
        exception, line = first_outcome(result, row, context.policy, context.random.random(), history)
        self._pending.append((row.id, exception, line))
        self._progress.except_index(at)

    def _unreadable(self, at: int, row: MessageRow) -> None:
        """Park a message of another version for an instance that reads it, or step over it where the group says so."""
        if self._context.group.config.unknown_version == "park":
            why = f"version {row.schema_version} is not among those read here ({', '.join(map(str, self._context.reads))})"
            self._pending.append((row.id, parked(row, why), None))
            self._progress.except_index(at)
        else:
            self._progress.finish_index(at)

    async def _read_on(self) -> None:
        low, high = self._end_of(self._rows), self._claim.high
        average = sum(len(row.payload) for row in self._rows) / len(self._rows)
        rows = await known_outcome(
            self._context.random,
            lambda: self._context.store.read_range(
                self._context.group.stream_id, low, high, rows=rows_at_once(average), size=READ_BYTES
            ),
        )
        async with self._lock:
            self._rows, self._complete = rows, not rows
            self._progress = RangeProgress(low, self._end_of(rows), [row.id for row in rows])
            self._next = 0

    def _end_of(self, rows: Sequence[MessageRow]) -> int:
        return self._claim.high if self._complete or not rows else rows[-1].id

    async def _close(self) -> None:
        async with self._lock:
            self._closed = True
            if self._progress.left:
                await self._hand_back()
            else:
                await self._record("finish", self._claim.high)
                self._context.counters.ranges += 1

    async def _rescue(self) -> None:
        """After a cancel or an error: record what finished and give the rest back, bounded."""
        if self._lost is not None or (self._closed and self._doubtful is None):
            return
        bound = self._context.hand_back_seconds(self._node)
        with trio.move_on_after(bound, shield=True):  # bounded: hand_back_seconds, and two graces of the call
            try:
                async with self._lock:
                    self._closed = True
                    for at in sorted(self._started):
                        row = self._rows[at]
                        exception, line = handed_back(row)
                        keep = line if self._context.group.config.history == "all" else None
                        self._pending.append((row.id, exception, keep))
                        self._progress.except_index(at)
                    self._started.clear()
                    await self._hand_back()
            except SQLStreamsError as exc:
                _log.info("what finished above id %s could not be recorded: %s", self._claim.low, exc)
                if not isinstance(exc, LeaseLost):
                    await self._let_go()

    async def _let_go(self) -> None:
        """Give the range back as it is recorded: a live node must not hold what it does not run."""
        context, claim = self._context, self._claim
        try:
            held = Held(claim.low, claim.token, "range")
            await context.store.release(context.group.stream_id, context.group.id, held)
            context.freed()
        except SQLStreamsError as exc:
            _log.info("the range above id %s stays held until its lease ends: %s", claim.low, exc)

    async def _hand_back(self) -> None:
        """Give the range back above what is resolved."""
        if (doubtful := self._doubtful) is not None:
            await self._send(doubtful)
            if doubtful.action != "progress":
                return
        through = self._progress.through
        if through >= self._claim.high:
            await self._record("finish", self._claim.high)
            return
        await self._record("hand back", through)
        self._context.counters.handed_back += 1
        self._context.freed()

    async def _record(self, action: Literal["finish", "progress", "hand back"], through: int) -> None:
        """Record all that is pending up to `through`."""
        if self._doubtful is not None:
            await self._send(self._doubtful)
        ready = sorted((each for each in self._pending if each[0] <= through), key=lambda each: each[0])
        await self._send(
            RangeRecord(
                group=self._context.group.id,
                low=self._claim.low,
                token=self._claim.token,
                epoch=self._epoch,
                action=action,
                through=through,
                node=self._node.id,
                exceptions=tuple(each[1] for each in ready if each[1] is not None),
                history=tuple(each[2] for each in ready if each[2] is not None),
            )
        )

    async def _send(self, record: RangeRecord) -> None:
        """Send a record until its outcome is known; what it held is then no longer pending."""
        context = self._context
        self._doubtful = record
        await known_outcome(context.random, lambda: context.store.record(context.group.stream_id, record))
        self._doubtful = None
        self._recorded = max(self._recorded, record.through)
        self._pending = [each for each in self._pending if each[0] > record.through]
        context.pulse.advance.mark()
        waits = [row.wait or timedelta(0) for row in record.exceptions if row.status == "ready"]
        if waits:
            context.pulse.exceptions.mark_at(trio.current_time() + min(waits).total_seconds())
