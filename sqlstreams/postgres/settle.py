"""settle: let the last statement end though its caller was cancelled, for a bounded time. asyncio-flavoured.

Guarantee   what has to run to its end runs in a task of its own; the caller waits a grace at most after its cancel.
Cancelled   returned means that it ended; OutcomeUnknown means that nobody knows, and the task was told to stop.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from sqlstreams.errors import OutcomeUnknown

__all__ = ["settle"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_left_alone: set[asyncio.Task[Any]] = (
    set()
)  # tasks whose caller did not wait any longer; asyncio itself holds them weakly


async def settle(grace: float, fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
    """Run `fn(*args)` to its end though the caller is cancelled: for at most `grace` seconds more. asyncio-flavoured.

    Cancelled: returns what fn returns, or raises what it raises, if it ends within the grace.
    Raises: OutcomeUnknown after the grace; fn then gets its CancelledError, and nobody waits for it.
    """
    task = asyncio.ensure_future(fn(*args))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=grace)
        if not task.done():
            _leave_alone(task)
            task.cancel()  # fn's own except branch stops the server and gives back
            raise OutcomeUnknown("no answer within the grace after the call was cancelled") from None
    return task.result()


def _leave_alone(task: asyncio.Task[Any]) -> None:
    _left_alone.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _left_alone.discard(task)
    if not task.cancelled():
        task.exception()  # or the loop would report that nobody read it
