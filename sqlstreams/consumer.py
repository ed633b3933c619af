"""The handle of a consumer group. Making one does no I/O."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec
import trio

from sqlstreams.config import ConsumeOptions, GroupConfig
from sqlstreams.errors import ConfigurationError, DestroyRefused, NotBuiltYet, NotFound
from sqlstreams.model.lag import Lag, lag_of
from sqlstreams.model.names import check_name
from sqlstreams.model.progress import marks_of
from sqlstreams.model.values import Progress, ServerRun
from sqlstreams.operations import Operations
from sqlstreams.runtime.consumer import Consumer
from sqlstreams.runtime.core import Core
from sqlstreams.runtime.handler import Handler, HandlerRunner, check_handler
from sqlstreams.store import GroupRow, SnapshotRow, StreamRow
from sqlstreams.workers import cursor_advancer

if TYPE_CHECKING:
    from sqlstreams.stream import Stream

__all__ = ["ConsumerGroup", "DeadLetter", "GroupSnapshot"]

T = TypeVar("T")


class GroupSnapshot(msgspec.Struct, frozen=True):
    """Where a group stands.

    Attributes:
        lag: how far it is behind.
        open_ranges: ranges that are handed out, or were given back and wait. in_flight: ids of them that are not resolved,
            and exceptions that run.
        by_status: exceptions by status, dead ones too.
        oldest_unresolved: the lowest message that is not finally resolved, None when there is none.
        held_by: what holds `committed` there, in words, None when nothing does.
        paused: whether it takes nothing new.
    """

    lag: Lag
    open_ranges: int
    in_flight: int
    by_status: dict[str, int]
    oldest_unresolved: int | None
    held_by: str | None
    paused: bool


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that the group gave up; `payload` is as produced, None when it is no longer in the log."""

    message_id: int
    attempts: int
    delays: int
    error: str | None
    message_key: str | None
    created_at: datetime
    died_at: datetime
    payload: msgspec.Raw | None


class ConsumerGroup(Operations, Generic[T]):
    """A consumer group by its name. Made by `stream.consumer(name)`."""

    def __init__(self, core: Core, stream: Stream[T], name: str) -> None:
        check_name("group", name)
        self.name = name
        self._core = core
        self._stream = stream
        self._row: GroupRow | None = None

    async def register(
        self, config: GroupConfig | None = None, *, start: Literal["beginning", "head"] = "beginning"
    ) -> GroupRow:
        """Declare the group and return what is declared now.

        Guarantee: idempotent and safe from many processes at once; the newest declaration wins as a whole and reaches
        running consumers within 30 s.

        Args:
            config: how it treats its messages.
            start: where a new group starts: everything retained, or what commits after this call. For a group that exists
                it counts for nothing.

        Cancelled: declared or not.
        Raises: NotFound (the stream), SettleTimeout (start="head", and a writer kept its transaction open for 10 s),
            ConfigurationError.
        """
        if start not in ("beginning", "head"):
            raise ConfigurationError(
                f"start is {start!r}, allowed is 'beginning' or 'head'", subject=self._subject
            )
        config = GroupConfig() if config is None else config
        if not isinstance(config, GroupConfig):
            raise ConfigurationError(
                f"a GroupConfig is needed, not {type(config).__name__}", subject=self._subject
            )
        stream = await self._stream.resolve()
        store = self._core.store
        at: int | None = None
        run: ServerRun | None = None
        if start == "head" and await store.group_by_name(stream.id, self.name) is None:
            at, run = await self._settled_head(stream)
        self._row = await store.register_group(stream, self.name, config, start=at, run=run)
        self._core.process.doorbell.freed(stream.id)  # running consumers look, and find a changed declaration
        return self._row

    async def get(self) -> GroupRow | None:
        """Return what is declared, None when there is no such group."""
        stream = await self._stream.get()
        if stream is None:
            return None
        if self._row is not None:
            return await self._core.store.group_by_id(self._row.id)
        return await self._core.store.group_by_name(stream.id, self.name)

    async def destroy(self, *, force: bool = False) -> None:
        """Delete the group with its progress, exceptions and history.

        Raises: DestroyRefused (without `allow_destroy`; or a consumer of it runs, without `force`), NotFound.
        """
        if not self._core.allow_destroy:
            raise DestroyRefused("this client may not destroy anything", subject=self._subject)
        await self._core.store.destroy_group(await self._resolve(), force=force)

    async def consume(
        self,
        handler: Handler,
        options: ConsumeOptions | None = None,
        *,
        task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Hand the group's messages to a handler until cancelled, or until the client drains.

        Guarantee: at least once: every message whose handler did not return in time, or was cut short, comes again. A
        message is never handled by two live processes of the group at once.

        Args:
            handler: `async def handle(message)` or `(message, meta)`; a plain function runs in a thread. Returning is
                success, raising `Delay(duration)` means later, `Terminal(reason)` dead now, anything else is a failure.
            options: how to run.
            task_status: `await nursery.start(group.consume, handler)` returns when claims can begin.

        Cancelled: handlers are cancelled; what finished is recorded, the rest is free at once, within about 5 s.
        Raises: ConfigurationError (before any I/O), NotFound, PermissionDenied and what else only a person can help with.
        """
        self._core.check_open()
        check_handler(handler)
        options = ConsumeOptions() if options is None else options
        if not isinstance(options, ConsumeOptions):
            raise ConfigurationError(
                f"ConsumeOptions are needed, not {type(options).__name__}", subject=self._subject
            )
        if options.transactional:
            raise NotBuiltYet(
                "transactional consume is not in this release", subject="ConsumeOptions.transactional"
            )
        group = await self._resolve()
        stream = await self._stream.resolve()
        names = (stream.name, group.name)
        timeout = group.config.timeout.total_seconds()
        runner: HandlerRunner[T] = HandlerRunner(
            handler, self._stream.codec, names, timeout, options.concurrency
        )
        random = self._core.random
        config = cursor_advancer.CursorAdvancerConfig()
        consumer = Consumer(
            self._core.process,
            group,
            stream.name,
            runner,
            (self._stream.version,),
            options,
            lambda of, group_id, due: cursor_advancer.actor(
                self._core.store, of, group_id, config, due, random=random
            ),
        )
        await consumer.run(task_status=task_status)

    async def lag(self) -> Lag:
        """Return how far the group is behind. Raises: GroupDamaged, NotFound."""
        return (await self._look())[0]

    async def snapshot(self) -> GroupSnapshot:
        """Return where the group stands, and what holds it back. Raises: GroupDamaged, NotFound."""
        lag, row, marks = await self._look()
        oldest, held_by = None, None
        if row.lowest is not None and row.lowest - 1 == marks:
            oldest = row.lowest
            held_by = f"message {row.lowest} is an unresolved exception"
        elif row.open_low is not None:
            oldest = marks + 1
            held_by = f"ids above {marks} are in a range of {', '.join(row.holders) or 'nobody: it waits to be taken'}"
        elif lag.head > row.newest_high:
            oldest = row.newest_high + 1
            nobody = "the group is paused" if row.paused else "nobody has claimed further"
            held_by = nobody if lag.settled > row.newest_high else "a writer's transaction is open"
        return GroupSnapshot(
            lag=lag,
            open_ranges=row.open_ranges,
            in_flight=row.open_ids + row.by_status["inflight"],
            by_status=row.by_status,
            oldest_unresolved=oldest,
            held_by=held_by,
            paused=row.paused,
        )

    async def dead_letters(
        self, *, after: int = 0, limit: int = 100, error_contains: str | None = None
    ) -> list[DeadLetter]:
        """Return dead letters in id order: above `after`, at most `limit`, with this text in their error."""
        group = await self._resolve()
        rows = await self._core.store.dead_letters(
            group.stream_id, group.id, after=after, limit=limit, error_contains=error_contains
        )
        return [
            DeadLetter(
                row.message_id,
                row.attempts,
                row.delays,
                row.error,
                row.message_key,
                row.created_at,
                row.died_at,
                None if row.payload is None else msgspec.Raw(row.payload),
            )
            for row in rows
        ]

    async def _look(self) -> tuple[Lag, SnapshotRow, int]:
        group = await self._resolve()
        store = self._core.store
        seen = await self._observe_once(group.stream_id, await store.log_refs([group.stream_id]))
        row = await store.snapshot(group.stream_id, group.id)
        progress = Progress(
            0, row.ranges_done, row.committed, row.newest_high, row.open_low, row.open_through, row.lowest
        )
        marks = max(marks_of(progress).committed, row.committed)
        lag = lag_of(
            head=row.head,
            settled=row.newest_high if seen.writers else max(seen.head, row.newest_high),
            committed=marks,  # the stored mark follows within a second, while a consumer runs
            newest_high=row.newest_high,
            open_ids=row.open_ids,
            unresolved=row.unresolved,
            oldest_age=row.age,
        )
        return lag, row, marks

    async def _stream_row(self) -> StreamRow:  # type: ignore[explicit-override]  # typing has none on 3.11
        return await self._stream.resolve()

    async def _resolve(self) -> GroupRow:  # type: ignore[explicit-override]
        stream = await self._stream.resolve()
        store = self._core.store
        if self._row is not None:
            row = await store.group_by_id(self._row.id)
        else:
            row = await store.group_by_name(stream.id, self.name)
        if row is None:
            raise NotFound("it is not registered", subject=f"{self._subject} of stream {self._stream.name!a}")
        self._row = row
        return row

    @property
    def _subject(self) -> str:
        return f"group {self.name!a}"
