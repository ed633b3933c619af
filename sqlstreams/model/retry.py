"""When a failed message runs again, and when it is dead.

The budget is counted in failures: `attempts` counts runs that failed, were delayed or whose owner died, `delays` those
that the handler delayed itself, so a delay never costs anything. Claiming, deferring and handing back count as nothing.

Source: docs/explanation/delivery.md
"""

from datetime import timedelta

import msgspec

from sqlstreams.errors import ConfigurationError

__all__ = ["MAX_WAIT", "Dead", "RetryIn", "RetryPolicy", "Run", "after_failure", "overdrawn", "takeover"]

MAX_WAIT = timedelta(days=36_500)  # a longer wait is cut to it: the database's instants must not overflow
_MICROSECOND = timedelta(microseconds=1)
_MAX_DOUBLINGS = 64  # 2**64 µs is past MAX_WAIT


class RetryPolicy(msgspec.Struct, frozen=True):
    """How often and how soon a message is tried again.

    `max_retries` runs follow the first one. The first failure waits `initial_backoff`, failure f >= 2 at most
    base * 2**(f-2), never more than `cap`. Raises ConfigurationError naming the field for a negative value.
    """

    max_retries: int
    initial_backoff: timedelta
    base: timedelta
    cap: timedelta

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ConfigurationError(
                f"max_retries is {self.max_retries}, it must be 0 or more", subject="max_retries"
            )
        for field in ("initial_backoff", "base", "cap"):
            value: timedelta = getattr(self, field)
            if value < timedelta(0):
                raise ConfigurationError(f"{field} is {value}, it must not be negative", subject=field)


class RetryIn(msgspec.Struct, frozen=True):
    """It becomes due after `wait`, between 0 and MAX_WAIT."""

    wait: timedelta


class Run(msgspec.Struct, frozen=True):
    """It runs now; the run sees `attempts`."""

    attempts: int


class Dead(msgspec.Struct, frozen=True):
    """It never runs again unless it is redriven."""

    reason: str


def after_failure(attempts: int, delays: int, policy: RetryPolicy, chance: float) -> RetryIn | Dead:
    """Decide after a failure that `attempts` already counts; `chance` in [0, 1] is the jitter.

    Guarantee: never a negative wait, never an overflow; delays touch neither the budget nor the wait.
    """
    if overdrawn(attempts, delays, policy):
        return Dead("retries used up")
    failures = attempts - delays
    if failures <= 1:
        return RetryIn(min(policy.initial_backoff, MAX_WAIT))
    # In whole microseconds: integers do not overflow, a timedelta does.
    longest = min(
        (policy.base // _MICROSECOND) << min(failures - 2, _MAX_DOUBLINGS),
        min(policy.cap, MAX_WAIT) // _MICROSECOND,
    )
    return RetryIn(min(max(int(longest * chance), 0), longest) * _MICROSECOND)


def takeover(attempts: int, delays: int, policy: RetryPolicy) -> Run | Dead:
    """Decide about an exception whose owner died in flight; `attempts` is what that run saw.

    The death is a failure: the row's attempts become attempts + 1 either way.
    """
    attempts += 1
    if overdrawn(attempts, delays, policy):
        return Dead("its owner died and retries are used up")
    return Run(attempts)


def overdrawn(attempts: int, delays: int, policy: RetryPolicy) -> bool:
    """Say whether a row has used more than its budget, as after `max_retries` was lowered; it is dead at its next turn."""
    return attempts - delays > policy.max_retries
