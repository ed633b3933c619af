"""Settings of connections, streams, groups and consumers: frozen structs that refuse nonsense before any I/O.

Every default and every limit of the package stands here and nowhere else. Durations are `timedelta`, sizes are bytes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import msgspec

from sqlstreams.errors import ConfigurationError

__all__ = [
    "BATCH_LIMIT_BYTES",
    "BATCH_LIMIT_MESSAGES",
    "ERROR_TEXT_LIMIT_BYTES",
    "HEADERS_LIMIT_BYTES",
    "KEY_LIMIT_BYTES",
    "LONGEST",
    "PAYLOAD_LIMIT_BYTES",
    "READ_AHEAD_LIMIT_BYTES",
    "ConsumeOptions",
    "GroupConfig",
    "LeaseConfig",
    "StreamConfig",
]

PAYLOAD_LIMIT_BYTES = 16 * 1024 * 1024
BATCH_LIMIT_MESSAGES = 10_000
BATCH_LIMIT_BYTES = 64 * 1024 * 1024
HEADERS_LIMIT_BYTES = 16 * 1024
KEY_LIMIT_BYTES = 1_024  # message keys and routing keys: below the 2,700 bytes a btree row may have
ERROR_TEXT_LIMIT_BYTES = 8_192
READ_AHEAD_LIMIT_BYTES = (
    32 * 1024 * 1024
)  # of payloads one consumer holds at once; a larger message still passes alone
LONGEST = timedelta(days=36_500)  # durations end at 100 years: far from the overflow of Postgres' timestamps


class LeaseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a process keeps what it holds when it falls silent.

    Args:
        ttl: after this long without a heartbeat others may take over.
        heartbeat: pause between two heartbeats (±10 %); at most a third of `ttl`.
        margin: this long before the lease ends in Postgres everything that runs under it is cancelled.
        grace: how long a database call may still run after it was cancelled; twice it stays below `margin`.
    """

    ttl: timedelta = timedelta(seconds=15)
    heartbeat: timedelta = timedelta(seconds=5)
    margin: timedelta = timedelta(seconds=2)
    grace: timedelta = timedelta(seconds=0.5)

    def __post_init__(self) -> None:
        """Refuse settings under which a lease could end before its work has stopped."""
        for name in ("ttl", "heartbeat", "margin", "grace"):
            positive("LeaseConfig", name, getattr(self, name))
        if self.ttl > timedelta(days=1):
            raise ConfigurationError(
                f"ttl is {self.ttl}, allowed is at most one day", subject="LeaseConfig.ttl"
            )
        if self.heartbeat * 3 > self.ttl:
            raise ConfigurationError(
                f"heartbeat is {self.heartbeat}, allowed is at most a third of ttl ({self.ttl})",
                subject="LeaseConfig.heartbeat",
            )
        if self.margin * 2 >= self.ttl or self.grace * 2 >= self.margin:
            raise ConfigurationError(
                f"margin is {self.margin}, it must lie between 2 x grace ({self.grace * 2}) and ttl / 2 ({self.ttl / 2})",
                subject="LeaseConfig.margin",
            )


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream keeps, and how its log is cut into partitions.

    Args:
        retention: messages older than this may be removed once every group is past them; None keeps them for ever.
        partition_size: ids per partition; fixed when the stream is created.
        idempotency_retention: how long an idempotency key is remembered.
        history_retention: how long the history of outcomes is kept.
        allow_drop_past_committed: let retention remove messages that a group has not read; each loss is recorded.
    """

    retention: timedelta | None = None
    partition_size: int = 1_000_000
    idempotency_retention: timedelta = timedelta(hours=24)
    history_retention: timedelta = timedelta(days=7)
    allow_drop_past_committed: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.retention is not None:
            positive("StreamConfig", "retention", self.retention)
        positive("StreamConfig", "idempotency_retention", self.idempotency_retention)
        positive("StreamConfig", "history_retention", self.history_retention)
        whole("StreamConfig", "partition_size", self.partition_size, 2, 1_000_000_000)
        flag("StreamConfig", "allow_drop_past_committed", self.allow_drop_past_committed)


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a consumer group treats its messages.

    Args:
        timeout: a handler that runs longer is cancelled, and that is a failure.
        max_retries: failures allowed after the first before a message is dead; delays do not count.
        initial_backoff: wait after the first failure.
        base: the wait after the second failure is up to this, then it doubles.
        cap: no wait is longer.
        max_range_reclaims: a range whose owner died this often is cut into single messages.
        unknown_version: a message of another payload version waits for an instance that reads it ("park"), or is
            stepped over ("skip").
        history: which outcomes are kept as history: "failures" (all but successes), "all" or "none".
    """

    timeout: timedelta = timedelta(seconds=30)
    max_retries: int = 3
    initial_backoff: timedelta = timedelta(seconds=5)
    base: timedelta = timedelta(seconds=1)
    cap: timedelta = timedelta(minutes=5)
    max_range_reclaims: int = 3
    unknown_version: Literal["park", "skip"] = "park"
    history: Literal["failures", "all", "none"] = "failures"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        positive("GroupConfig", "timeout", self.timeout)
        for name in ("initial_backoff", "base", "cap"):
            not_negative("GroupConfig", name, getattr(self, name))
        whole("GroupConfig", "max_retries", self.max_retries, 0, 1_000_000)
        whole("GroupConfig", "max_range_reclaims", self.max_range_reclaims, 1, 1_000_000)
        one_of("GroupConfig", "unknown_version", self.unknown_version, ("park", "skip"))
        one_of("GroupConfig", "history", self.history, ("failures", "all", "none"))


class ConsumeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one consumer instance runs.

    Args:
        batch: ids taken at once.
        concurrency: handlers that run at the same time in this instance.
        transactional: the handler's SQL and the message's outcome commit together.
        shutdown: how long handlers may finish after a drain was asked for; None is the group's timeout + 2 s.
    """

    batch: int = 100
    concurrency: int = 1
    transactional: bool = False
    shutdown: timedelta | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        whole("ConsumeOptions", "batch", self.batch, 1, 100_000)
        whole("ConsumeOptions", "concurrency", self.concurrency, 1, 10_000)
        flag("ConsumeOptions", "transactional", self.transactional)
        if self.shutdown is not None:
            not_negative("ConsumeOptions", "shutdown", self.shutdown)


def positive(owner: str, name: str, value: object) -> None:
    """Refuse what is not a duration above zero and at most `LONGEST`."""
    duration = _duration(owner, name, value)
    if duration <= timedelta(0):
        raise ConfigurationError(
            f"{name} is {seconds(duration)}, allowed is above zero", subject=f"{owner}.{name}"
        )


def not_negative(owner: str, name: str, value: object) -> None:
    """Refuse what is not a duration from zero to `LONGEST`."""
    duration = _duration(owner, name, value)
    if duration < timedelta(0):
        raise ConfigurationError(
            f"{name} is {seconds(duration)}, allowed is zero or more", subject=f"{owner}.{name}"
        )


def whole(owner: str, name: str, value: object, low: int, high: int) -> None:
    """Refuse what is not a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigurationError(
            f"{name} is {value!r}, allowed is a whole number from {low:,} to {high:,}",
            subject=f"{owner}.{name}",
        )


def flag(owner: str, name: str, value: object) -> None:
    """Refuse what is not a bool."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} is {value!r}, allowed is True or False", subject=f"{owner}.{name}")


def one_of(owner: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is not in the list."""
    if value not in allowed:
        raise ConfigurationError(
            f"{name} is {value!r}, allowed is one of {', '.join(map(repr, allowed))}",
            subject=f"{owner}.{name}",
        )


def seconds(value: timedelta) -> str:
    """Write a duration in seconds: Python writes -1 s as "-1 day, 23:59:59"."""
    return f"{value.total_seconds():g} s"


def _duration(owner: str, name: str, value: object) -> timedelta:
    if not isinstance(value, timedelta):
        raise ConfigurationError(f"{name} is {value!r}, allowed is a timedelta", subject=f"{owner}.{name}")
    if value > LONGEST:
        raise ConfigurationError(
            f"{name} is longer than {LONGEST.days:,} days, the longest allowed", subject=f"{owner}.{name}"
        )
    return value
