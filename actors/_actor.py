"""The actor: an async callable that says when it is usable."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import trio

from ._restart import Backoff, Intensity, RestartKind


class Actor(Protocol):
    """An async callable that calls `task_status.started()` once it is usable, then works until it is cancelled."""

    async def __call__(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Run. Cancelled: everything it began has ended or was handed back when it returns."""
        ...


@dataclass(frozen=True)
class ActorSpec:
    """An actor and how it is kept alive.

    `intensity` and `backoff` remember the past of this one actor: give each spec its own.
    """

    name: str
    actor: Actor
    _: KW_ONLY
    restart: RestartKind = "permanent"
    intensity: Intensity
    backoff: Backoff
