"""Events: every sink gets each, and nothing a sink does reaches the emitter."""

import logging
from dataclasses import dataclass
from typing import ClassVar

import pytest

from actors import (
    ActorEnded,
    ActorStarted,
    Event,
    Events,
    EventStatistics,
    LoggingSink,
    MemorySink,
    TickFailed,
)


@dataclass(frozen=True, kw_only=True)
class RangeClaimed(Event):
    kind: ClassVar[str] = "range_claimed"
    low: int
    name: str = "taken by LogRecord"


def test_every_sink_gets_each_event_in_order() -> None:
    first, second = MemorySink(), MemorySink()
    events = Events(first)
    events.add(second)
    emitted = [RangeClaimed(low=1), RangeClaimed(low=2)]
    for event in emitted:
        events.emit(event)
    assert first.events == second.events == tuple(emitted)
    assert events.statistics() == EventStatistics(emitted=2, sink_failures=0, last_sink_failure=None)


def test_sink_that_raises_misses_that_event_alone_and_is_counted() -> None:
    def picky(event: Event) -> None:
        if event == RangeClaimed(low=1):
            raise ValueError("not this one")
        good.append(event)

    good: list[Event] = []
    after = MemorySink()
    events = Events(picky, after)
    events.emit(RangeClaimed(low=1))
    events.emit(RangeClaimed(low=2))
    assert good == [RangeClaimed(low=2)]
    assert len(after.events) == 2
    assert events.statistics() == EventStatistics(2, 1, "ValueError('not this one')")


def test_what_ends_the_program_passes_through_emit() -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Events(interrupted).emit(RangeClaimed(low=1))


def test_sink_that_emits_on_its_own_hub_does_not_reach_the_emitter() -> None:
    events = Events()
    events.add(lambda event: events.emit(event))
    events.emit(RangeClaimed(low=1))
    assert events.statistics().sink_failures > 0


def test_sink_of_a_block_hears_of_that_block_alone() -> None:
    events, sink = Events(), MemorySink()
    events.emit(RangeClaimed(low=1))
    with events.sink(sink):
        events.emit(RangeClaimed(low=2))
    events.emit(RangeClaimed(low=3))
    assert sink.events == (RangeClaimed(low=2),)


def test_sink_may_leave_while_an_event_is_handed_out() -> None:
    events, last = Events(), MemorySink()
    block = events.sink(lambda _event: block.__exit__(None, None, None))
    block.__enter__()
    events.add(last)
    events.emit(RangeClaimed(low=1))
    events.emit(RangeClaimed(low=2))
    assert len(last.events) == 2
    assert events.statistics().sink_failures == 0


def test_memory_sink_keeps_the_newest_and_sorts_by_type() -> None:
    sink = MemorySink(limit=2)
    for event in (RangeClaimed(low=1), ActorStarted(name="a"), RangeClaimed(low=2)):
        sink(event)
    assert sink.events == (ActorStarted(name="a"), RangeClaimed(low=2))
    assert sink.of(RangeClaimed) == (RangeClaimed(low=2),)


def test_logging_sink_writes_a_constant_message_with_fields(caplog) -> None:
    sink = LoggingSink(logging.getLogger("sqlstreams.test"))
    failure = ValueError("no")
    with caplog.at_level(logging.DEBUG):
        sink(RangeClaimed(low=1))
        sink(TickFailed(name="janitor", failure=failure))
        sink(ActorEnded(name="janitor", failure=None))
    claimed, failed, ended = caplog.records
    assert (claimed.msg, claimed.levelno, claimed.args) == ("range_claimed", logging.INFO, ())
    assert claimed.fields == {"low": 1, "name": "taken by LogRecord"}
    assert (failed.msg, failed.levelno) == ("tick_failed", logging.WARNING)
    assert failed.exc_info[1] is failure
    assert ended.exc_info is None


def test_kinds_differ() -> None:
    kinds = [kind.kind for kind in Event.__subclasses__()]
    assert len(set(kinds)) == len(kinds)
