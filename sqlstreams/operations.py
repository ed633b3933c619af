"""What a person does to a consumer group: pause it, move it, give dead letters another chance, look at one message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Literal

import msgspec
import trio

from sqlstreams.config import flag, one_of, whole
from sqlstreams.errors import ConfigurationError, NotFound, SettleTimeout
from sqlstreams.model.fence import Observations
from sqlstreams.model.values import MessageId, Observation, ServerRun, StreamId
from sqlstreams.runtime.core import Core
from sqlstreams.store import GroupRow, LogRef, Seen, StreamRow

__all__ = ["Inspection", "Operations", "Position", "Run", "Seeked"]

SETTLE_SECONDS = 10.0  # how long a look at the head waits for writers


class Position(msgspec.Struct, frozen=True):
    """Where `seek` moves a group to. Made by `beginning`, `head`, `at_id` and `at_time`."""

    kind: Literal["beginning", "head", "id", "time"]
    value: int | datetime | None = None

    def __post_init__(self) -> None:
        """Refuse what `seek` could not understand. Raises: ConfigurationError."""
        one_of("Position", "kind", self.kind, ("beginning", "head", "id", "time"))
        if self.kind == "id":
            whole("Position", "at_id", self.value, 1, 2**63 - 1)
        elif self.kind == "time":
            _check_instant(self.value)
        elif self.value is not None:
            raise ConfigurationError(f"{self.kind} has no value", subject="Position.value")

    @staticmethod
    def beginning() -> Position:
        """Before the oldest retained message."""
        return Position("beginning")

    @staticmethod
    def head() -> Position:
        """Behind everything that was drawn when `seek` was called."""
        return Position("head")

    @staticmethod
    def at_id(id_: int) -> Position:
        """So that the message with this id is the next, or the first one above it. Raises: ConfigurationError."""
        return Position("id", id_)

    @staticmethod
    def at_time(instant: datetime) -> Position:
        """So that the first message that is not older is the next; a future instant means the head.

        Raises: ConfigurationError for what is no datetime with a time zone.
        """
        return Position("time", instant)


class Seeked(msgspec.Struct, frozen=True):
    """What a seek did, or would do.

    Attributes:
        target: the group gets what lies above it next.
        count: messages above it that are there now. first, last: the lowest and highest of them, None without any.
        retained_above: everything at or below this id is gone for good; a position below it cannot bring it back.
        done: whether the group was moved; False for a dry run.
    """

    target: int
    count: int
    first: int | None
    last: int | None
    retained_above: int
    done: bool


class Run(msgspec.Struct, frozen=True):
    """One line of a message's history in a group: what the run that saw `attempt` came to."""

    attempt: int
    status: str
    error: str | None
    at: datetime


class Inspection(msgspec.Struct, frozen=True):
    """Where one message stands in a group.

    Attributes:
        state: "not drawn" (no such id yet), "waiting" (not handed out), "in a range" (handed out and not resolved), "ready",
            "inflight", "deferred", "parked", "dead" (an exception), or "resolved".
        present: whether it is in the log: it may be rolled back, open in a transaction, or removed by retention.
        explanation: the same in a sentence.
        attempts: runs that were counted; 0 without an exception. delays: those of them that the handler delayed.
        error: the last one. can_run_after: when an exception is due.
        owner: the node that has it. fence: of its last owner.
        history: its runs, as far as the group keeps them.
    """

    message_id: int
    state: str
    present: bool
    explanation: str
    attempts: int
    delays: int
    error: str | None
    can_run_after: datetime | None
    owner: str | None
    fence: int | None
    history: list[Run]


class Operations(ABC):
    """The part of a consumer group's handle that people use, and programs for people."""

    name: str
    _core: Core

    async def pause(self) -> bool:
        """Hand out nothing more: no fresh range, no retry. What runs goes on and is recorded.

        Returns: False when it was paused already. Cancelled: paused or not. Raises: NotFound.
        """
        group = await self._resolve()
        done = await self._core.store.pause(group.id)
        self._core.process.doorbell.freed(group.stream_id)
        return done

    async def resume(self) -> bool:
        """Hand out again; nothing was lost and nothing comes twice because of the pause.

        Returns: False when it was not paused. Cancelled: resumed or not. Raises: NotFound.
        """
        group = await self._resolve()
        done = await self._core.store.resume(group.id)
        self._core.process.doorbell.freed(group.stream_id)
        return done

    async def redrive(
        self,
        ids: Iterable[int] | None = None,
        *,
        error_contains: str | None = None,
        all: bool = False,  # noqa: A002 - the word a user looks for
    ) -> int:
        """Give dead letters a fresh budget; they are due at once. Say which in exactly one of the three ways.

        Guarantee: two redrives at once start a letter once; one that dies meanwhile is left alone.
        Returns: how many. Cancelled: some may have been started. Raises: ConfigurationError, NotFound.
        """
        return await self._on_dead_letters("redrive", ids, error_contains, all)

    async def discard(
        self,
        ids: Iterable[int] | None = None,
        *,
        error_contains: str | None = None,
        all: bool = False,  # noqa: A002 - the word a user looks for
    ) -> int:
        """Delete dead letters of this group for good; the messages stay in the log. As `redrive`."""
        return await self._on_dead_letters("discard", ids, error_contains, all)

    async def inspect(self, message_id: int) -> Inspection:
        """Say where one message stands in this group, and why. Raises: ConfigurationError, NotFound (the group)."""
        whole("inspect", "message_id", message_id, 1, 2**63 - 1)
        group = await self._resolve()
        row = await self._core.store.inspect(group.stream_id, group.id, MessageId(message_id))
        history = [Run(*line) for line in row.history]
        gone = "" if row.present else "; it is not in the log: rolled back, not committed yet, or removed"
        nothing = (None, 0, 0, None, None, None, None, None, None)
        status, attempts, delays, error, due, fence, node, pid, ended = row.exception or nothing
        owner = f"{node} ({pid})" if node and not ended else None
        if status is not None:
            state = status
            text = {
                "ready": f"it runs again from {due} on",
                "inflight": f"{owner or 'a node that is gone'} runs it",
                "deferred": "it waits for its message key",
                "parked": "it waits for a consumer that reads its payload version",
                "dead": "the group gave it up; redrive it to try again",
            }.get(status, status)
        elif message_id > row.head:
            state, text, gone = "not drawn", "no message has this id yet", ""
        elif message_id > (row.newest_high or 0):
            state, text = "waiting", "the group has not come so far"
        elif row.open_range is not None and message_id > row.open_range[2]:
            low, high, _, fence, reclaims, node, pid, ended = row.open_range
            owner = f"{node} ({pid})" if node and not ended else None
            state = "in a range"
            text = f"({low}, {high}] is with {owner or 'nobody: it waits to be taken'}, reclaimed {reclaims} times"
        else:
            state, text = "resolved", "the group is done with it"
        return Inspection(
            message_id, state, row.present, text + gone, attempts, delays, error, due, owner, fence, history
        )

    async def seek(self, position: Position, *, dry_run: bool = False, force: bool = False) -> Seeked:
        """Move the group: what lies above the position comes next, or again; exceptions above it are forgotten.

        Args:
            position: `Position.beginning()`, `head()`, `at_id(n)` or `at_time(instant)`.
            dry_run: only tell what it would do.
            force: also while consumers of the group run: what they hold then counts for nothing.

        Cancelled: moved or not. Raises: GroupBusy (without force), SettleTimeout (to the head, and a writer kept its
            transaction open for 10 s), ConfigurationError, NotFound.
        """
        if not isinstance(position, Position):
            raise ConfigurationError(f"a Position is needed, not {type(position).__name__}", subject="seek")
        group, stream = await self._resolve(), await self._stream_row()
        store = self._core.store
        retained = await store.oldest_retained(stream)
        seen = await self._observe_once(stream.id, await store.log_refs([stream.id]))
        run: ServerRun | None = None
        match position.kind:
            case "beginning":
                target = retained
            case "head":
                target, run = await self._settled_head(stream)
            case "id":
                assert isinstance(position.value, int)
                target = position.value - 1
            case _:
                assert isinstance(position.value, datetime)
                found = await store.before_instant(stream.id, retained, seen.head, position.value)
                if found is None:  # what a writer has drawn may still turn out to be it
                    target, run = await self._settled_head(stream)
                    found = await store.before_instant(stream.id, retained, target, position.value)
                target = target if found is None else found
        if target > seen.head and position.kind == "id":
            raise ConfigurationError(
                f"id {target + 1} is not drawn yet, the newest is {seen.head}", subject="Position.at_id"
            )
        target = max(target, retained)
        count, first, last = await store.count_between(stream.id, target, max(seen.head, target))
        if not dry_run:
            await store.seek(group, target, run=run, force=force)
            self._core.process.doorbell.freed(group.stream_id)
        return Seeked(target, count, first, last, retained, not dry_run)

    async def _on_dead_letters(
        self,
        what: Literal["redrive", "discard"],
        ids: Iterable[int] | None,
        text: str | None,
        everything: bool,  # noqa: FBT001
    ) -> int:
        if (ids is not None) + (text is not None) + (everything is not False) != 1:
            raise ConfigurationError(
                "say which: exactly one of ids, error_contains and all=True", subject=what
            )
        flag(what, "all", everything)
        given: object = ids
        if given is not None and (isinstance(given, str | bytes) or not isinstance(given, Iterable)):
            raise ConfigurationError(f"ids is {ids!r}, allowed are message ids", subject=f"{what}.ids")
        wanted = None if ids is None else list(ids)
        for id_ in wanted or ():
            whole(what, "ids", id_, 1, 2**63 - 1)
        if text is not None and not _searchable(text):
            raise ConfigurationError(
                f"error_contains is {text!r}, allowed is a text of one character and more; all=True means all",
                subject=f"{what}.error_contains",
            )
        group = await self._resolve()
        store = self._core.store
        call = store.redrive if what == "redrive" else store.discard
        done = await call(group.stream_id, group.id, ids=wanted, error_contains=text)
        if done:
            self._core.process.doorbell.freed(group.stream_id)
        return done

    async def _observe_once(self, stream: StreamId, refs: list[LogRef]) -> Seen:
        for seen in await self._core.store.observe(refs):
            return seen
        raise NotFound("it was destroyed", subject=f"stream {stream}")

    async def _settled_head(self, stream: StreamRow) -> tuple[int, ServerRun]:
        """Observe the head now and wait until its writers have ended."""
        store, observations = self._core.store, Observations()
        refs = await store.log_refs([stream.id])
        wanted: int | None = None
        pids: tuple[int, ...] = ()
        pause = 0.005
        with trio.move_on_after(SETTLE_SECONDS):
            while True:
                seen = await self._observe_once(stream.id, refs)
                if observations.run not in (None, seen.run):
                    wanted = None
                observations.add(Observation(seen.head, seen.writers, seen.run))
                wanted = seen.head if wanted is None else wanted
                if observations.settled >= wanted:
                    return wanted, seen.run
                pids = seen.pids
                await trio.sleep(pause)
                pause = min(pause * 2, 0.25)
        holders = await store.holders(pids)
        who = ", ".join(
            f"pid {holder.pid} ({holder.application or 'application not visible'})" for holder in holders
        )
        raise SettleTimeout(
            f"the head {wanted} did not settle within {SETTLE_SECONDS:g} s: {who or 'a writer'} holds a transaction open",
            subject=f"group {self.name!a}",
        )

    @abstractmethod
    async def _resolve(self) -> GroupRow:
        """Return what is declared now. Raises: NotFound."""

    @abstractmethod
    async def _stream_row(self) -> StreamRow:
        """Return the declared stream. Raises: NotFound."""


def _check_instant(value: object) -> None:
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise ConfigurationError("a datetime with a time zone is needed", subject="Position.at_time")
    try:
        value.astimezone(timezone.utc)  # noqa: UP017 - the name is as good on 3.11
    except OverflowError:
        raise ConfigurationError(f"{value} is no instant in UTC", subject="Position.at_time") from None


def _searchable(text: object) -> bool:
    """Say whether it is a text of one character and more that Postgres can have: no NUL, no lone surrogate."""
    try:
        return isinstance(text, str) and text != "" and b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False
