"""The mailbox: a bounded, typed queue in front of an actor, with answers.

Guarantee   messages arrive once, in the order in which they were told; none is dropped but by abandon().
Cancelled   tell: the message was not told. receive: nothing was taken. ask: see there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import trio

from ._errors import MailboxClosed, MailboxFull

T = TypeVar("T")
A = TypeVar("A")


@dataclass(frozen=True)
class MailboxStatistics:
    """A snapshot of a mailbox."""

    size: int
    queued: int
    waiting_to_tell: int
    waiting_to_receive: int
    open_asks: int
    closed: bool


class Reply(Generic[A]):
    """Where the receiver of an ask puts its answer, once."""

    def __init__(self) -> None:
        """Begin with a caller who waits."""
        self._waiting = True
        self._done = trio.Event()
        self._value: A
        self._error: Exception | None = None

    @property
    def waiting(self) -> bool:
        """Whether anybody still waits: false after the answer, or when the caller was cancelled."""
        return self._waiting

    def answer(self, value: A) -> bool:
        """Give the answer. Returns: False, and nothing happens, when nobody waits any more."""
        if not self._waiting:
            return False
        self._value = value
        self._finish()
        return True

    def fail(self, error: Exception) -> bool:
        """Raise `error` in the caller. Returns: False, and nothing happens, when nobody waits any more."""
        if not self._waiting:
            return False
        self._error = error
        self._finish()
        return True

    async def wait(self) -> A:
        """Return the answer; the caller's side of an ask. Cancelled: a later answer goes nowhere."""
        try:
            await self._done.wait()
        finally:
            self._waiting = False
        if self._error is not None:
            raise self._error
        return self._value

    def _finish(self) -> None:
        self._waiting = False
        self._done.set()


class Mailbox(Generic[T]):
    """A bounded, typed queue in front of an actor. Any task may tell and ask; its owner receives."""

    def __init__(self, size: int) -> None:
        """Hold at most `size` messages, 1 or more."""
        if size < 1:
            raise ValueError(f"size is {size}, must be 1 or more")
        self._size = size
        self._closed = False
        self._asks: dict[Reply[Any], None] = {}
        self._in, self._out = trio.open_memory_channel[T](size)

    async def tell(self, item: T) -> None:
        """Put `item` into the queue, waiting for room.

        Cancelled: it was not told.
        Raises: MailboxClosed (it was not told), also when the mailbox is closed while this waits.
        """
        try:
            await self._in.send(item)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise MailboxClosed("nobody receives from this mailbox any more") from None

    def tell_nowait(self, item: T) -> None:
        """Put `item` into the queue. Raises: MailboxFull, MailboxClosed; then it was not told."""
        try:
            self._in.send_nowait(item)
        except trio.WouldBlock:
            raise MailboxFull(self._size) from None
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise MailboxClosed("nobody receives from this mailbox any more") from None

    async def ask(self, make_message: Callable[[Reply[A]], T]) -> A:
        """Tell the message that `make_message` builds around a reply slot, and return the answer.

        Cancelled: while it waits for room, nothing was told. Later the message stays in the queue, harmless: its
        reply says that nobody waits, and an answer goes nowhere. Whether it is acted on is up to the receiver.
        Raises: what the receiver put in with `fail`; MailboxClosed when it was not told or nobody will answer.
        """
        reply: Reply[A] = Reply()
        self._asks[reply] = None
        try:
            await self.tell(make_message(reply))
            return await reply.wait()
        finally:
            del self._asks[reply]

    async def receive(self) -> T:
        """Take the oldest message, waiting for one.

        Cancelled: nothing was taken.
        Raises: MailboxClosed when it is closed and empty.
        """
        try:
            return await self._out.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise MailboxClosed("the mailbox is closed and empty") from None

    def receive_many_nowait(self, limit: int) -> list[T]:
        """Take up to `limit` messages that are there now, oldest first; none when it is empty, closed or not."""
        taken: list[T] = []
        while len(taken) < limit:
            try:
                taken.append(self._out.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                break
        return taken

    def close(self) -> None:
        """Take no more messages; what is queued can still be received and answered. May be called again."""
        self._closed = True
        self._in.close()

    def abandon(self) -> None:
        """Close for good, as a receiver that ends must: drop what is queued, fail every open ask (MailboxClosed)."""
        self.close()
        self._out.close()
        for reply in self._asks:
            reply.fail(MailboxClosed("the receiver has gone without an answer"))

    def statistics(self) -> MailboxStatistics:
        """Return a snapshot."""
        channel = self._out.statistics()
        return MailboxStatistics(
            size=self._size,
            queued=channel.current_buffer_used,
            waiting_to_tell=channel.tasks_waiting_send,
            waiting_to_receive=channel.tasks_waiting_receive,
            open_asks=len(self._asks),
            closed=self._closed,
        )
