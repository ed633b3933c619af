"""Supervision: a keeper that restarts one actor, and the children under one roof.

Guarantee   children start in order and stop in reverse; one that ignores its cancel delays the others by a bound.
Relies on   actors that call started() when they are usable and end when they are cancelled.
Cancelled   all children are cancelled at once, in no order, and have ended when the block is left.
Outage      an actor that waits for a database is no failure; only what it raises, or its return, counts as one.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from traceback import format_exception_only
from typing import Any, Literal, NoReturn

import trio

from ._actor import Actor, ActorSpec
from ._errors import ChildrenClosed, NameTaken, NeverStarted, RestartLimitReached
from ._events import ActorEnded, ActorRestarted, ActorStarted, Events
from ._restart import Backoff, Intensity, RestartKind, should_restart

ChildState = Literal["starting", "running", "waiting", "stopping"]
"""starting: not usable yet. running: usable. waiting: its keeper starts it again soon. stopping: cancelled."""


class FirstUp:
    """A task status that forwards the first `started()` only, since a restarted actor calls it again."""

    def __init__(self, task_status: trio.TaskStatus[Any]) -> None:
        """Forward to `task_status`."""
        self._task_status = task_status
        self.up = False

    def started(self, value: object = None) -> None:
        """Forward the first call."""
        if not self.up:
            self.up = True
            self._task_status.started(value)


async def keep(
    actor: Actor,
    intensity: Intensity,
    backoff: Backoff,
    *,
    restart: RestartKind = "permanent",
    on_restart: Callable[[Exception | None, float], None] | None = None,
    name: str | None = None,
    task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `actor` and start it again when it ends, after a backoff, as often as `intensity` allows.

    The backoff begins anew after a run as long as the intensity's window. Whoever starts this gets what the actor
    passed to its first `started()`.

    Args:
        actor: What to keep alive.
        intensity: How often is too often; belongs to this actor.
        backoff: How long to wait; belongs to this actor.
        restart: permanent: whenever it ends; transient: after failures; temporary: never.
        on_restart: Called before each wait with the failure, None after a return, and the seconds to wait.
        name: What errors call the actor; its function's name by default.
        task_status: Gets the first `started()`.

    Returns: when the actor returned and `restart` does not start it again.
    Cancelled: the actor has ended. A Cancelled, also inside a group, is never taken for a failure.
    Raises: the first failure as itself when it came before `started()`; NeverStarted when the actor returned before
        that; a failure as itself that `restart` does not restart; RestartLimitReached, from the last failure.
    """
    called = name if name is not None else _name_of(actor)
    status = FirstUp(task_status)
    while True:
        began = trio.current_time()
        failure: Exception | None = None
        try:
            await actor(task_status=status)
        except Exception as exc:
            if not status.up or not should_restart(restart, exc):
                raise
            failure = exc
        else:
            if not status.up:
                raise NeverStarted(called)
            if not should_restart(restart, None):
                return
        ended = trio.current_time()
        if not intensity.record(ended):
            raise RestartLimitReached(called, intensity.limit, intensity.within) from failure
        if ended - began >= intensity.within:
            backoff.reset()
        delay = backoff()
        if on_restart is not None:
            on_restart(failure, delay)
        await trio.sleep(delay)


@dataclass(frozen=True)
class ChildSnapshot:
    """What is known of a child that has not ended: `since` is the trio time at which it came into its state."""

    name: str
    state: ChildState
    since: float
    restarts: int
    last_error: str | None


class Children:
    """The actors under one roof: started in order, stopped in reverse, each under a scope of its own."""

    def __init__(self, nursery: trio.Nursery, *, grace: float, events: Events | None = None) -> None:
        """Run children in `nursery`; see `open_children`, which is how to get one."""
        if not grace >= 0:
            raise ValueError(f"grace is {grace} s, must be 0 or more")
        self._nursery = nursery
        self._grace = grace
        self._events = events if events is not None else Events()
        self._running: dict[str, _Child] = {}
        self._closed = False

    async def start(self, name: str, actor: Actor) -> object:
        """Start an actor and return what it passed to `started()`.

        Cancelled: it has ended too, unless it had started.
        Raises: its first failure before `started()`, as itself, and the other children live on; NeverStarted when
            it returned, or was stopped, before that; NameTaken, ChildrenClosed: nothing was started.
        A failure after `started()` cancels all children and leaves `open_children` as itself.
        """
        child = self._new(name)
        return await self._nursery.start(self._run, child, child.told(actor))

    async def start_kept(self, spec: ActorSpec) -> object:
        """Start an actor under a keeper: like `start`, and it is started again as its spec says."""
        child = self._new(spec.name)
        keeper = partial(
            keep,
            child.told(spec.actor),
            spec.intensity,
            spec.backoff,
            restart=spec.restart,
            on_restart=child.waits,
            name=spec.name,
        )
        return await self._nursery.start(self._run, child, keeper)

    async def stop(self, name: str, reason: str = "stopped") -> bool:
        """Cancel a child and wait until it has ended, for at most the grace.

        Cancelled: the child has been cancelled all the same.
        Returns: whether it has ended; True also when there is none of this name. One that has not ended goes on
            under its cancelled scope and keeps its name until it ends.
        """
        child = self._running.get(name)
        if child is None:
            await trio.lowlevel.checkpoint()
            return True
        child.stops(reason)
        with trio.move_on_after(self._grace):
            await child.ended.wait()
        return child.ended.is_set()

    async def stop_all(self, reason: str = "all are stopped") -> None:
        """Stop the children in reverse order, waiting for each, for at most the grace.

        Cancelled: those not yet reached are not cancelled by this; a cancelled `open_children` cancels them.
        """
        await trio.lowlevel.checkpoint()
        for name in reversed(tuple(self._running)):
            await self.stop(name, reason)

    async def close(self, reason: str = "the block has ended") -> None:
        """Refuse further children, then stop all."""
        self._closed = True
        await self.stop_all(reason)

    def snapshot(self) -> tuple[ChildSnapshot, ...]:
        """Return the children that have not ended, in the order in which they were started."""
        return tuple(child.snapshot() for child in self._running.values())

    def _new(self, name: str) -> "_Child":
        if self._closed:
            raise ChildrenClosed(name)
        if name in self._running:
            raise NameTaken(name)
        child = self._running[name] = _Child(name, self._events)
        return child

    async def _run(self, child: "_Child", actor: Actor, *, task_status: trio.TaskStatus[Any]) -> None:
        try:
            await _live(child, actor, task_status)
        except BaseException as exc:
            self._ended(child, exc)
            raise
        self._ended(child, None)

    def _ended(self, child: "_Child", failure: BaseException | None) -> None:
        del self._running[child.name]
        child.ended.set()
        self._events.emit(
            ActorEnded(name=child.name, failure=failure if isinstance(failure, Exception) else None)
        )


@asynccontextmanager
async def open_children(*, grace: float, events: Events | None = None) -> AsyncIterator[Children]:
    """Open a block whose children all have ended when it is left.

    At the end of the block, however it ends, no more children are taken and all are stopped in reverse order: each
    gets `grace` seconds after its cancel before the next is cancelled too. A child that ignores its cancel is still
    waited for after that; to end it is up to the bounds of its own shields.

    Args:
        grace: Seconds, see above; with 0 all are cancelled at once, in no order.
        events: Where starts, restarts and ends of children are told.

    Cancelled, or when a child fails: all children are cancelled at once and have ended.
    Raises: the failure of the block or of a child, as itself; a group when there were several.
    """
    try:
        async with trio.open_nursery(strict_exception_groups=True) as nursery:
            children = Children(nursery, grace=grace, events=events)
            try:
                yield children
            finally:
                # A cancel that comes now reaches the children all the same; this only keeps the block's own error.
                bound = grace * (len(children.snapshot()) + 1)
                with trio.move_on_after(bound, shield=True):  # bounded: a grace a child, and one more
                    await children.close()
                nursery.cancel_scope.cancel(reason="the block has ended")
    except BaseExceptionGroup as group:
        _raise_alone(group)


class _Child:
    """One child: its scope, its end, and what a snapshot says of it."""

    def __init__(self, name: str, events: Events) -> None:
        self.name = name
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.up = False
        self._events = events
        self._state: ChildState = "starting"
        self._since = trio.current_time()
        self._restarts = 0
        self._last_error: str | None = None

    def told(self, actor: Actor) -> Actor:
        """Wrap an actor so that the child learns of every `started()`."""

        async def run(*, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
            await actor(task_status=_Told(self, task_status))

        return run

    def is_up(self) -> None:
        self.up = True
        self._enter("running")
        self._events.emit(ActorStarted(name=self.name))

    def waits(self, failure: Exception | None, delay: float) -> None:
        self._restarts += 1
        if failure is not None:
            self._last_error = "".join(format_exception_only(failure)).strip()
        self._enter("waiting")
        self._events.emit(ActorRestarted(name=self.name, failure=failure, delay=delay))

    def stops(self, reason: str) -> None:
        self._enter("stopping")
        self.scope.cancel(reason=reason)

    def snapshot(self) -> ChildSnapshot:
        return ChildSnapshot(self.name, self._state, self._since, self._restarts, self._last_error)

    def _enter(self, state: ChildState) -> None:
        if self._state not in (state, "stopping"):
            self._state = state
            self._since = trio.current_time()


class _Told:
    """A task status that tells the child of every `started()` before it forwards it."""

    def __init__(self, child: _Child, task_status: trio.TaskStatus[Any]) -> None:
        self._child = child
        self._task_status = task_status

    def started(self, value: object = None) -> None:
        self._child.is_up()
        self._task_status.started(value)


async def _live(child: _Child, actor: Actor, task_status: trio.TaskStatus[Any]) -> None:
    with child.scope:
        await actor(task_status=task_status)
    if not child.up:
        raise NeverStarted(child.name)


def _name_of(actor: object) -> str:
    while isinstance(actor, partial):
        actor = actor.func
    return str(getattr(actor, "__qualname__", actor))


def _raise_alone(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise what a group of one holds, its own context untouched; a group of several as it is."""
    if len(group.exceptions) > 1:
        raise group
    alone = group.exceptions[0]
    context = alone.__context__
    try:
        raise alone
    finally:
        alone.__context__ = context
        del alone, context, group  # no cycle through this frame
