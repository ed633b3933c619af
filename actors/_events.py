"""Typed events, and the hub that hands them to sinks.

Guarantee   emit() never blocks and never raises into the emitter, whatever a sink does.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, TypeVar

E = TypeVar("E", bound="Event")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. Subclasses are frozen dataclasses with a `kind` of their own."""

    kind: ClassVar[str] = "event"
    level: ClassVar[int] = logging.INFO


@dataclass(frozen=True, kw_only=True)
class ActorStarted(Event):
    """A child is usable; after a restart again."""

    kind: ClassVar[str] = "actor_started"
    level: ClassVar[int] = logging.DEBUG
    name: str


@dataclass(frozen=True, kw_only=True)
class ActorRestarted(Event):
    """A keeper starts a child again in `delay` seconds; `failure` is None when the child had just returned."""

    kind: ClassVar[str] = "actor_restarted"
    level: ClassVar[int] = logging.WARNING
    name: str
    failure: Exception | None
    delay: float


@dataclass(frozen=True, kw_only=True)
class ActorEnded(Event):
    """A child has ended for good; `failure` is None when it returned or was cancelled."""

    kind: ClassVar[str] = "actor_ended"
    name: str
    failure: Exception | None


@dataclass(frozen=True, kw_only=True)
class TickFailed(Event):
    """A tick failed and stays due."""

    kind: ClassVar[str] = "tick_failed"
    level: ClassVar[int] = logging.WARNING
    name: str
    failure: Exception


class Sink(Protocol):
    """Takes events. It must be quick: the emitter waits for it."""

    def __call__(self, event: Event) -> None:
        """Take one event. What it raises is counted by the hub and goes no further."""
        ...


@dataclass(frozen=True)
class EventStatistics:
    """A snapshot of a hub: how much was emitted, how often a sink raised, and what it raised last."""

    emitted: int
    sink_failures: int
    last_sink_failure: str | None


class Events:
    """Hands each event to every sink, in the order in which the sinks were added."""

    def __init__(self, *sinks: Sink) -> None:
        """Begin with these sinks."""
        self._sinks: list[Sink] = list(sinks)
        self._emitted = 0
        self._sink_failures = 0
        self._last_sink_failure: str | None = None

    def emit(self, event: Event) -> None:
        """Hand `event` to every sink. A sink that raises misses this event and is counted; the others get it."""
        self._emitted += 1
        for sink in tuple(self._sinks):
            try:
                sink(event)
            except Exception as exc:  # noqa: BLE001  # whatever a sink does must not reach the emitter
                self._sink_failures += 1
                self._last_sink_failure = repr(exc)

    def add(self, sink: Sink) -> None:
        """Hand events to `sink` from now on."""
        self._sinks.append(sink)

    @contextmanager
    def sink(self, sink: Sink) -> Iterator[None]:
        """Hand events to `sink` during a block."""
        self.add(sink)
        try:
            yield
        finally:
            self._sinks.remove(sink)

    def statistics(self) -> EventStatistics:
        """Return a snapshot."""
        return EventStatistics(self._emitted, self._sink_failures, self._last_sink_failure)


class MemorySink:
    """Keeps the newest events, for tests."""

    def __init__(self, limit: int = 10_000) -> None:
        """Keep at most `limit` events."""
        self._events: deque[Event] = deque(maxlen=limit)

    def __call__(self, event: Event) -> None:
        """Keep `event`."""
        self._events.append(event)

    @property
    def events(self) -> tuple[Event, ...]:
        """What is kept, oldest first."""
        return tuple(self._events)

    def of(self, kind: type[E]) -> tuple[E, ...]:
        """Return the kept events of one type, oldest first."""
        return tuple(event for event in self._events if isinstance(event, kind))


class LoggingSink:
    """Writes events to standard logging.

    The message is the event's kind, so that it never varies. The values are in the record's `fields`, a dict, and an
    exception in a field named `failure` becomes the record's exc_info.
    """

    def __init__(self, logger: logging.Logger) -> None:
        """Write to `logger`, each event at the level of its type."""
        self._logger = logger

    def __call__(self, event: Event) -> None:
        """Write `event`."""
        values = {field.name: getattr(event, field.name) for field in fields(event)}
        self._logger.log(event.level, event.kind, exc_info=values.get("failure"), extra={"fields": values})
