"""The doorbell: wakes consumers here and in other processes after a commit, at most once per stream in 5 ms.

A ring is a hint: one that gets lost costs the next poll. Rings are sent in a transaction of their own, never in a
producer's, since NOTIFY serialises commits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import trio

from sqlstreams.errors import SQLStreamsError
from sqlstreams.model.values import StreamId
from sqlstreams.store import Store

__all__ = ["Doorbell", "Rings"]

GAP_SECONDS = 0.005
MOST_AT_ONCE = 400  # of streams in one ring: a notification's text has at most 8,000 bytes

_log = logging.getLogger("sqlstreams.doorbell")


class Rings:
    """Where rings arrive, from this process or from others."""

    def __init__(
        self,
        produced: Callable[[StreamId], None],
        freed: Callable[[StreamId], None],
        everything: Callable[[], None],
    ) -> None:
        self.produced = produced
        self.freed = freed
        self.everything = everything

    def arrived(self, text: str, own: str) -> None:
        """Take a ring from the channel: `sender;p1,f2,…`. What cannot be read is a hint to look at everything."""
        sender, _, items = text.partition(";")
        if sender == own:
            return
        for item in items.split(","):
            number = item[1:]
            if item[:1] in ("p", "f") and number.isascii() and number.isdigit() and len(number) < 19:
                (self.produced if item[0] == "p" else self.freed)(StreamId(int(number)))
            else:
                self.everything()


class Doorbell:
    """Collects what happened and rings for it.

    Args:
        store: how to ring in other processes.
        rings: how to ring in this one, which costs nothing and comes at once.
        sender: names this process in a ring, so that it ignores its own.
    """

    def __init__(self, store: Store, rings: Rings, sender: str) -> None:
        self._store = store
        self._rings = rings
        self._sender = sender
        self._pending: dict[str, None] = {}
        self._wake = trio.Event()
        self.sent = 0

    def produced(self, stream: StreamId) -> None:
        """Something was committed to a stream."""
        self._rings.produced(stream)
        self._ring(f"p{stream}")

    def freed(self, stream: StreamId) -> None:
        """Something of a stream's groups became free or due, or a declaration changed."""
        self._rings.freed(stream)
        self._ring(f"f{stream}")

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Ring for what is pending. Cancelled: what is pending is not rung for; polls find it."""
        task_status.started()
        while True:
            await self._wake.wait()
            next_at = (
                trio.current_time() + GAP_SECONDS
            )  # from the beginning: what a ring takes is no extra pause
            await self.flush()
            await trio.sleep_until(next_at)

    async def flush(self) -> None:
        """Ring now for what is pending."""
        self._wake = trio.Event()
        items, self._pending = list(self._pending), {}
        for start in range(0, len(items), MOST_AT_ONCE):
            try:
                await self._store.ring(f"{self._sender};{','.join(items[start : start + MOST_AT_ONCE])}")
            except SQLStreamsError as exc:  # a hint: the next poll finds what this would have told
                _log.debug("a ring was lost: %s", exc)
            else:
                self.sent += 1

    def _ring(self, item: str) -> None:
        self._pending[item] = None
        self._wake.set()
