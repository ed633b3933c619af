"""What a run of a handler came to, and the rows that record it.

Returning is success. `Delay` means later and is no failure, `Terminal` means dead now, anything else raised is a failure,
and so is a handler that had not ended at its timeout, whatever it does afterwards.

Source: docs/explanation/delivery.md
"""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal, Protocol, assert_never

import msgspec

from sqlstreams.model.retry import MAX_WAIT, Dead, RetryPolicy, after_failure
from sqlstreams.model.values import MessageId

__all__ = [
    "MAX_ERROR_BYTES",
    "Delay",
    "Delayed",
    "ExceptionRow",
    "ExceptionStatus",
    "Failed",
    "HistoryKept",
    "HistoryRow",
    "HistoryStatus",
    "Identified",
    "NextOutcome",
    "Result",
    "Success",
    "Terminal",
    "TerminalOutcome",
    "classify",
    "clean_text",
    "deferred",
    "error_text",
    "first_outcome",
    "handed_back",
    "next_outcome",
    "parked",
]

MAX_ERROR_BYTES = 8_192  # of UTF-8, the mark of a cut included
_CUT = "…"
_NOT_STORABLE = re.compile("[\x00\ud800-\udfff]")  # Postgres text takes neither U+0000 nor lone surrogates

ExceptionStatus = Literal["ready", "deferred", "parked", "dead"]
HistoryStatus = Literal["failed", "delayed", "dead", "expired", "succeeded", "handed back"]
HistoryKept = Literal["failures", "all", "none"]


class Delay(Exception):
    """Raise it in a handler to get the message again after `duration`; it is no failure and costs no retry.

    It may arrive in an exception group that holds nothing else. More than 100 years are cut to 100 years.

    Raises: TypeError unless `duration` is a timedelta, ValueError when it is negative.
    """

    def __init__(self, duration: timedelta) -> None:
        if not isinstance(duration, timedelta):
            raise TypeError(f"Delay needs a timedelta, not {type(duration).__name__}")
        if duration < timedelta(0):
            raise ValueError(f"Delay needs a duration of 0 or more, not {duration}")
        super().__init__(duration)
        self.duration = duration


class Terminal(Exception):
    """Raise it in a handler to make the message a dead letter now; `reason` is stored and shown.

    It may arrive in an exception group that holds nothing else.

    Raises: TypeError unless `reason` is a str.
    """

    def __init__(self, reason: str) -> None:
        if not isinstance(reason, str):
            raise TypeError(f"Terminal needs a reason as str, not {type(reason).__name__}")
        super().__init__(reason)
        self.reason = reason


class Success(msgspec.Struct, frozen=True):
    """The handler returned in time."""


class Failed(msgspec.Struct, frozen=True):
    """The handler raised, or ran out of time; `text` can be stored as it is."""

    text: str


class Delayed(msgspec.Struct, frozen=True):
    """The handler asked to get the message again after `duration`."""

    duration: timedelta


class TerminalOutcome(msgspec.Struct, frozen=True):
    """The handler, or the decoder before it, gave the message up; `reason` can be stored as it is."""

    reason: str


Result = Success | Failed | Delayed | TerminalOutcome


class Identified(Protocol):
    """What the rows need to know of a message."""

    @property
    def id(self) -> MessageId:
        """Its position in the log."""

    @property
    def message_key(self) -> str | None:
        """Its key, if it has one."""

    @property
    def schema_version(self) -> int:
        """The version of its payload's type."""


class ExceptionRow(msgspec.Struct, frozen=True):
    """A new row of the exception queue. It can run after `wait`; None means never (dead) or not by time (parked)."""

    message_id: MessageId
    status: ExceptionStatus
    attempts: int
    delays: int
    wait: timedelta | None
    error: str | None
    message_key: str | None
    schema_version: int


class HistoryRow(msgspec.Struct, frozen=True):
    """One line of the delivery log: what the run that saw `attempt` came to."""

    message_id: MessageId
    attempt: int
    status: HistoryStatus
    error: str | None


class NextOutcome(msgspec.Struct, frozen=True):
    """What becomes of an exception after its run: "resolved" deletes the row, the others write these numbers to it.

    `history` is the status of the run's line in the delivery log, whose attempt is the number that the run saw.
    """

    status: Literal["resolved", "ready", "dead"]
    attempts: int
    delays: int
    wait: timedelta | None
    error: str | None
    history: HistoryStatus


def classify(exc: BaseException | None, timed_out: bool) -> Result:  # noqa: FBT001 - a fact, not a switch
    """Say what a run came to, from what the handler raised (None: it returned) and whether its timeout had passed.

    A timeout beats everything: a result that comes too late is a failure that says so. Out of an exception group that
    holds only `Delay` and `Terminal`, at any depth, a `Terminal` wins over every `Delay`, the first one over the others,
    and the longest `Delay` over shorter ones. Anything else in it makes the group a failure.
    """
    if timed_out:
        ended = "" if exc is None else f"; it ended with {error_text(exc)}"
        return Failed(clean_text(f"Timed out: the handler had not finished at its timeout{ended}"))
    if exc is None:
        return Success()
    reason: str | None = None
    longest = timedelta(0)
    for leaf in _leaves(exc):
        match leaf:
            case Terminal(reason=str() as text):
                reason = text if reason is None else reason
            case Delay(duration=timedelta() as duration):
                longest = max(longest, duration)
            case _:  # also a subclass that left its value out
                return Failed(error_text(exc))
    return Delayed(min(longest, MAX_WAIT)) if reason is None else TerminalOutcome(clean_text(reason))


def first_outcome(
    result: Result, message: Identified, policy: RetryPolicy, chance: float, history: HistoryKept = "failures"
) -> tuple[ExceptionRow | None, HistoryRow | None]:
    """Return the rows that record a message's first run out of a range; a success leaves no exception row.

    `chance` in [0, 1] is the jitter; `history` is the group's setting: a success is written under "all" only.
    """
    after = next_outcome(result, 0, 0, policy, chance)
    kept = history == "all" or (history == "failures" and after.history != "succeeded")
    line = HistoryRow(message.id, 0, after.history, after.error) if kept else None
    if after.status == "resolved":
        return None, line
    return _row(message, after.status, after.attempts, after.delays, after.wait, after.error), line


def next_outcome(
    result: Result, attempts: int, delays: int, policy: RetryPolicy, chance: float
) -> NextOutcome:
    """Decide what becomes of an exception whose run saw `attempts` and `delays`; `chance` in [0, 1] is the jitter.

    Guarantee: a failure raises attempts, a delay raises both numbers, success and `Terminal` raise neither.
    """
    match result:
        case Success():
            return NextOutcome("resolved", attempts, delays, None, None, "succeeded")
        case TerminalOutcome(reason):
            return NextOutcome("dead", attempts, delays, None, reason, "dead")
        case Delayed(duration):
            return NextOutcome("ready", attempts + 1, delays + 1, duration, None, "delayed")
        case Failed(text):
            verdict = after_failure(attempts + 1, delays, policy, chance)
            if isinstance(verdict, Dead):
                return NextOutcome("dead", attempts + 1, delays, None, text, "dead")
            return NextOutcome("ready", attempts + 1, delays, verdict.wait, text, "failed")
        case _:
            assert_never(result)


def handed_back(message: Identified) -> tuple[ExceptionRow, HistoryRow]:
    """Return the rows of a message that was cut short in its first run: free at once, and nothing is counted."""
    return _row(message, "ready", 0, 0, timedelta(0), None), HistoryRow(message.id, 0, "handed back", None)


def deferred(message: Identified) -> ExceptionRow:
    """Return the row of a message that was held back for its key and never started: nothing is counted."""
    return _row(message, "deferred", 0, 0, timedelta(0), None)


def parked(message: Identified, why: str) -> ExceptionRow:
    """Return the row of a message that this instance cannot read; it waits for one that can."""
    return _row(message, "parked", 0, 0, None, clean_text(why))


def error_text(exc: BaseException) -> str:
    """Return the class and message of an exception as a text that can be stored.

    Guarantee: no U+0000, no lone surrogate, at most MAX_ERROR_BYTES bytes of UTF-8, a cut text ends with "…"; an
    exception whose own `__str__` fails is named all the same. A group is told by its members, since a nursery wraps
    even a single exception into one.
    """
    texts: list[str] = []
    length = 0
    for leaf in _leaves(exc):
        texts.append(_one_text(leaf))
        length += len(texts[-1])
        if length > MAX_ERROR_BYTES:
            break
    return clean_text(f"{type(exc).__name__}: {'; '.join(texts)}" if len(texts) > 1 else texts[0])


def clean_text(text: str) -> str:
    """Return the text as it can be stored: unstorable characters replaced by U+FFFD, cut on a character's border."""
    text = _NOT_STORABLE.sub("\ufffd", text[: MAX_ERROR_BYTES + 1])  # a character has at least one byte
    encoded = text.encode()
    if len(encoded) <= MAX_ERROR_BYTES:
        return text
    return encoded[: MAX_ERROR_BYTES - len(_CUT.encode())].decode(errors="ignore") + _CUT


def _one_text(exc: BaseException) -> str:
    name = type(exc).__name__
    try:
        message = str.__getitem__(
            str(exc), slice(MAX_ERROR_BYTES + 1)
        )  # a plain str, whatever __str__ returned
    except Exception:  # noqa: BLE001 - whatever a foreign __str__ raises, the outcome must be recorded
        return f"{name}: (its message cannot be shown)"
    return f"{name}: {message}" if message else name


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside of groups, in order, without recursion: groups may be nested deeply."""
    stack = [exc]
    while stack:
        top = stack.pop()
        if isinstance(top, BaseExceptionGroup):
            stack.extend(reversed(top.exceptions))
        else:
            yield top


def _row(
    message: Identified,
    status: ExceptionStatus,
    attempts: int,
    delays: int,
    wait: timedelta | None,
    error: str | None,
) -> ExceptionRow:
    return ExceptionRow(
        message.id, status, attempts, delays, wait, error, message.message_key, message.schema_version
    )
