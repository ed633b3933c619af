"""One running `consume`: its actors under the guard of the process' lease, and as the next node when that is lost.

Guarantee   handlers run only while the lease is held; what they did is recorded under tokens that nobody else has.
Cancelled   handlers are cancelled; what finished is recorded and the rest given back, bounded by 5 s.
Outage      it waits and goes on, for as long as it takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio

from actors import Actor, Due, Shutdown
from sqlstreams.config import ConsumeOptions
from sqlstreams.errors import LeaseLost, NotFound, SQLStreamsError
from sqlstreams.model.values import GroupId, StreamId, Token
from sqlstreams.runtime.context import Context, Counters, known_outcome
from sqlstreams.runtime.doorbell import Doorbell
from sqlstreams.runtime.exception_consumer import ExceptionConsumer
from sqlstreams.runtime.handler import HandlerRunner
from sqlstreams.runtime.holdings import Holdings
from sqlstreams.runtime.node import Node, Nodes
from sqlstreams.runtime.observer import Observer
from sqlstreams.runtime.pulse import Pulse
from sqlstreams.runtime.range_consumer import RangeConsumer
from sqlstreams.store import GroupRow, Store, Watched

__all__ = ["Consumer", "Process"]

SHUTDOWN_EXTRA = 2.0  # seconds over the handler's timeout that a drain may take
LEAVE_SECONDS = 1.0
JOIN_TRIES, JOIN_PAUSE = 40, 0.05  # consuming does not depend on it: after 2 s it goes on unlisted

AdvancerFactory = Callable[[StreamId, GroupId, Due], Actor]

_log = logging.getLogger("sqlstreams.consumer")


@dataclass(frozen=True)
class Process:
    """What all consumers of a process share."""

    store: Store
    nodes: Nodes
    observer: Observer
    pulse: Pulse
    doorbell: Doorbell
    shutdown: Shutdown
    make_token: Callable[[], Token]
    random: Random
    grace: float
    tokens: dict[Token, int] = field(default_factory=dict)  # in use by any task of the process


class Consumer:
    """Runs one group's messages in this process.

    Args:
        process: what it shares with other consumers.
        group: what to consume, as declared when it began; changes are followed.
        stream_name: for logs.
        runner: runs the handler.
        reads: payload versions that can be decoded here.
        options: how to run.
        advancer: makes the actor that moves the group's marks.
    """

    def __init__(
        self,
        process: Process,
        group: GroupRow,
        stream_name: str,
        runner: HandlerRunner[Any],
        reads: tuple[int, ...],
        options: ConsumeOptions,
        advancer: AdvancerFactory,
    ) -> None:
        self._process = process
        self._group = group
        self._stream_name = stream_name
        self._runner = runner
        self._reads = reads
        self._options = options
        self._advancer = advancer
        self._started = False
        self.counters = Counters()

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Consume until cancelled, or until a drain was asked for and is over. `started()` when claims can begin.

        Raises: NotFound (the group was destroyed), PermissionDenied and whatever else only a person can help with.
        """
        process = self._process
        extra = self._options.shutdown
        budget = (
            self._group.config.timeout.total_seconds() + SHUTDOWN_EXTRA
            if extra is None
            else extra.total_seconds()
        )
        with process.shutdown.draining(budget):
            while not process.shutdown.requested:
                node = await process.nodes.current()
                with node.lease.guard():
                    try:
                        await self._serve(node, task_status)
                    except BaseExceptionGroup as group:
                        _raise_cause(group)
                    return
                _log.info("group %s goes on as the next node", self._group.name)

    async def _serve(self, node: Node, task_status: trio.TaskStatus[Any]) -> None:
        process, group = self._process, self._group
        watched = Watched(group.id, group.stream_id, self._reads)
        with process.observer.watch(group.stream_id) as watch, process.pulse.watch(watched) as pulse:

            def freed() -> None:
                pulse.free()
                process.doorbell.freed(group.stream_id)

            every = process.nodes.config.heartbeat.total_seconds()
            context = Context(
                store=process.store,
                group=group,
                stream_name=self._stream_name,
                options=self._options,
                runner=self._runner,
                reads=self._reads,
                watch=watch,
                pulse=pulse,
                holdings=Holdings(process.store, pulse, every, freed, process.tokens),
                shutdown=process.shutdown,
                slots=trio.Semaphore(self._options.concurrency),
                make_token=process.make_token,
                random=process.random,
                grace=process.grace,
                freed=freed,
                counters=self.counters,
            )
            pulse.epoch, pulse.updated_at, pulse.paused = group.epoch, group.updated_at, group.paused
            token = process.make_token()
            try:
                await self._join(node, token)
                async with trio.open_nursery() as nursery:
                    await self._start(nursery, context, node)
                    if not self._started:
                        self._started = True
                        task_status.started()
                    await self._work(context, node)
                    nursery.cancel_scope.cancel(reason="the consumer has drained")
            finally:
                with (
                    trio.move_on_after(LEAVE_SECONDS, shield=True),
                    suppress(SQLStreamsError),
                ):  # bounded: LEAVE_SECONDS
                    await process.store.leave(token)

    async def _join(self, node: Node, token: Token) -> None:
        """Become an instance, so that others see that the group is consumed; somebody else may just be claiming its row."""
        process, worker = self._process, self._group.worker_id
        try:
            for _ in range(JOIN_TRIES):
                if await known_outcome(process.random, lambda: process.store.join(worker, node.id, token)):
                    break
                await trio.sleep(JOIN_PAUSE)
        except LeaseLost:
            node.lease.lose("the database has ended this node")
        if node.lease.lost:
            await trio.sleep_forever()  # the guard cuts it here, and the next node goes on

    async def _start(self, nursery: trio.Nursery, context: Context, node: Node) -> None:
        """Start what goes on beside the work."""
        group = context.group
        await nursery.start(self._advancer(group.stream_id, group.id, context.pulse.advance))
        await nursery.start(context.holdings.run, node)
        await nursery.start(self._follow, context)
        await nursery.start(self._wake_at_drain, context)

    async def _work(self, context: Context, node: Node) -> None:
        """Run ranges and exceptions; returns when both have drained."""
        ranges, exceptions = RangeConsumer(context, node), ExceptionConsumer(context, node)
        async with trio.open_nursery() as nursery:
            progress = trio.CancelScope()

            async def record_progress() -> None:
                with progress:
                    await ranges.record_progress()

            async def run_ranges() -> None:
                try:
                    await ranges.run()
                finally:
                    progress.cancel(reason="no range is running any more")

            nursery.start_soon(record_progress)
            nursery.start_soon(run_ranges)
            nursery.start_soon(exceptions.run)

    async def _follow(self, context: Context, *, task_status: trio.TaskStatus[Any]) -> None:
        """Take over a changed declaration, and notice that the group is gone."""
        task_status.started()
        while True:
            await context.pulse.changed.wait()
            context.pulse.changed.clear()
            group = await known_outcome(context.random, lambda: context.store.group_by_id(context.group.id))
            if group is None:
                raise NotFound(
                    "it was destroyed while it was consumed", subject=f"group {context.group.name!a}"
                )
            if group.config != context.group.config:
                _log.info("group %s has a new declaration: %s", group.name, group.config)
            context.group = self._group = group
            context.runner.timeout = group.config.timeout.total_seconds()

    async def _wake_at_drain(self, context: Context, *, task_status: trio.TaskStatus[Any]) -> None:
        """Wake those who wait for work when there shall be no more."""
        task_status.started()
        await context.shutdown.wait_requested()
        context.pulse.ranges.mark()
        context.pulse.exceptions.mark()


def _raise_cause(group: BaseExceptionGroup[BaseException]) -> None:
    """Raise what a group is about as itself: its only member, or the first of our errors when it holds nothing else."""
    leaves: list[BaseException] = []
    todo: list[BaseException] = [group]
    while todo:
        each = todo.pop(0)
        if isinstance(each, BaseExceptionGroup):
            todo.extend(each.exceptions)
        else:
            leaves.append(each)
    if len(leaves) > 1 and not all(isinstance(each, SQLStreamsError) for each in leaves):
        raise group
    cause = leaves[0]
    context = cause.__context__
    try:
        raise cause
    finally:
        cause.__context__ = context  # not the group: it would be told twice
