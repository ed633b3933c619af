"""What the actors of one running `consume` share."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import trio

from actors import Backoff, Shutdown
from sqlstreams.config import ConsumeOptions
from sqlstreams.errors import OutcomeUnknown
from sqlstreams.model.retry import RetryPolicy
from sqlstreams.model.values import Token
from sqlstreams.runtime.handler import HandlerRunner
from sqlstreams.runtime.holdings import Holdings
from sqlstreams.runtime.node import OUTAGES, Node
from sqlstreams.runtime.observer import StreamWatch
from sqlstreams.runtime.pulse import GroupPulse
from sqlstreams.store import GroupRow, MessageRow, Store

__all__ = ["Context", "Counters", "known_outcome"]

T = TypeVar("T")

HAND_BACK_SECONDS = 5.0  # how long giving back may take when the lease lasts

_log = logging.getLogger("sqlstreams.consumer")


@dataclass
class Counters:
    """What one running `consume` has done so far."""

    handled: int = 0
    failed: int = 0
    ranges: int = 0
    reclaimed: int = 0
    handed_back: int = 0


@dataclass
class Context:
    """The store, the group and everything that ranges and exceptions of one consumer share.

    `slots` bounds handlers that run at once, in ranges and exceptions together.
    """

    store: Store
    group: GroupRow
    stream_name: str
    options: ConsumeOptions
    runner: HandlerRunner[Any]
    reads: tuple[int, ...]
    watch: StreamWatch
    pulse: GroupPulse
    holdings: Holdings
    shutdown: Shutdown
    slots: trio.Semaphore
    make_token: Callable[[], Token]
    random: Random
    grace: float
    freed: Callable[[], None]
    counters: Counters = field(default_factory=Counters)

    @property
    def policy(self) -> RetryPolicy:
        """When a failed message runs again."""
        config = self.group.config
        return RetryPolicy(config.max_retries, config.initial_backoff, config.base, config.cap)

    def hand_back_seconds(self, node: Node) -> float:
        """How long giving back may take after a cancel: long while the lease lasts, a grace when it was lost."""
        return min(max(node.lease.deadline - trio.current_time(), self.grace), HAND_BACK_SECONDS)

    def reads_message(self, row: MessageRow) -> bool:
        """Whether this instance can read the message's version."""
        return row.schema_version in self.reads


async def known_outcome(random: Random, call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call that is safe to repeat until its outcome is known; an outage is waited out, for as long as the guard lasts.

    Raises: whatever does not pass by itself.
    """
    backoff = Backoff(0.05, 1.0, random=random, jitter=0.5)
    while True:
        try:
            return await call()
        except OUTAGES as exc:
            level = logging.INFO if isinstance(exc, OutcomeUnknown) else logging.DEBUG
            _log.log(level, "recording is tried again: %s", exc)
            await trio.sleep(backoff())
