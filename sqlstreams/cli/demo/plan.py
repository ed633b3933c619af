"""What the demo produces: which payments are undecodable, which fail twice, and which always fail. Pure."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Literal

import msgspec

from sqlstreams.config import GroupConfig, LeaseConfig

__all__ = ["AUDIT", "CHARGE", "GROUP", "LEASE", "STREAM", "Kind", "Orders", "Payment", "Plan", "Role"]

STREAM = "payments.requested"
CHARGE, AUDIT = "charge-cards", "audit-payments"

# Short, so that a take-over and the last retry can be waited for; by default a lease has 15 s.
LEASE = LeaseConfig(
    ttl=timedelta(seconds=3),
    heartbeat=timedelta(seconds=1),
    margin=timedelta(seconds=1.2),
    grace=timedelta(seconds=0.5),
)
GROUP = GroupConfig(
    timeout=timedelta(seconds=10),
    max_retries=3,
    initial_backoff=timedelta(seconds=0.5),
    base=timedelta(seconds=0.5),
    cap=timedelta(seconds=2),
)

Role = Literal["produce", "consume"]
Kind = Literal["good", "undecodable", "fails twice", "always fails"]
SHARES: dict[Kind, int] = {"undecodable": 50, "fails twice": 200, "always fails": 20}  # of 20,000
OF = 20_000


class Payment(msgspec.Struct):
    """A payment as `charge-cards` and `audit-payments` read it; `cents` is a text in an undecodable one."""

    number: int
    cents: int
    card: Kind


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the demo.

    Attributes:
        messages: payments in all. rate: payments a second. seed: which ones are bad, and how long each takes.
    """

    messages: int
    rate: int
    seed: int

    def kinds(self) -> list[Kind]:
        """Return the kind of each payment, in the order in which they are produced."""
        counts = {kind: max(1, self.messages * share // OF) for kind, share in SHARES.items()}
        kinds: list[Kind] = [kind for kind, count in counts.items() for _ in range(count)]
        kinds += ["good"] * (self.messages - len(kinds))
        Random(self.seed).shuffle(kinds)  # noqa: S311 - a demo
        return kinds

    @property
    def stalls_after(self) -> int:
        """After how many payments of its own the process that will be killed hangs in one."""
        return self.messages // 8


class Orders(msgspec.Struct, frozen=True):
    """What a process is told.

    Attributes:
        name: of the process. group: None for the producer. stalls: hangs in a payment, to be killed there.
    """

    name: str
    role: Role
    directory: str
    schema: str
    plan: Plan
    group: str | None = None
    stalls: bool = False
