"""Probes: named inner moments of an actor that a test can wait for, or hold the actor at.

Guarantee   a hit that nobody holds is no checkpoint: a probed actor can be cancelled where an unprobed one can.
"""

from collections import defaultdict, deque
from collections.abc import Awaitable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import trio

LIMIT = 1_000
"""How many hits of one name are kept for a test that has not asked yet; of more, the newest."""


class Probe(Protocol):
    """What an actor is handed: `NoProbes()` in production, `Probes()` in a test."""

    def hit(self, name: str, /, **facts: object) -> Awaitable[None]:
        """Say that the moment `name` is here. Await the result where a test may hold the actor; else ignore it."""
        ...


class NoProbes:
    """Probes that do nothing; no hit is a checkpoint."""

    def hit(self, name: str, /, **facts: object) -> Awaitable[None]:  # noqa: ARG002  # the protocol's
        """Do nothing."""
        return _Hit(None)


class Probes:
    """Probes for a test: it waits for moments, reads their facts, and holds actors."""

    def __init__(self) -> None:
        """Begin with no hits and nothing held."""
        self._hits: defaultdict[str, deque[Mapping[str, object]]] = defaultdict(lambda: deque(maxlen=LIMIT))
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._waiting: defaultdict[str, trio.lowlevel.ParkingLot] = defaultdict(trio.lowlevel.ParkingLot)
        self._held: dict[str, trio.Event] = {}

    def hit(self, name: str, /, **facts: object) -> Awaitable[None]:
        """Record the moment at once. Awaiting the result pauses for as long as the name is held.

        Cancelled: while it pauses, like any wait; the moment stays recorded.
        """
        self._counts[name] += 1
        self._hits[name].append(facts)
        self._waiting[name].unpark()
        return _Hit(self._held.get(name))

    async def reached(self, name: str) -> Mapping[str, object]:
        """Return the facts of the oldest hit of `name` not yet returned, waiting for one. Put a deadline around it.

        Cancelled: no hit was used up.
        """
        await trio.lowlevel.checkpoint()
        while not self._hits[name]:
            await self._waiting[name].park()
        return self._hits[name].popleft()

    def count(self, name: str) -> int:
        """Return how often `name` was hit."""
        return self._counts[name]

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """During the block, pause every actor that awaits a hit of `name`; afterwards they go on."""
        if name in self._held:
            raise ValueError(f"{name} is held already")
        go_on = self._held[name] = trio.Event()
        try:
            yield
        finally:
            del self._held[name]
            go_on.set()


class _Hit:
    """Awaitable: pauses until `go_on`, or not at all."""

    def __init__(self, go_on: trio.Event | None) -> None:
        self._go_on = go_on

    def __await__(self) -> Generator[Any, Any, None]:
        if self._go_on is not None:
            yield from self._go_on.wait().__await__()
