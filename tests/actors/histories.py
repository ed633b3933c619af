"""Scenarios that record a history, and pure checkers that judge it. The sabotage tests run both on broken variants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import trio

from actors import Backoff, Children, Due, Intensity, Lease, heartbeat, keep, when_due
from actors.testing import FaultPlan, simulate

TINY = 1e-6


def seeded(seed: int = 0) -> Random:
    return Random(seed)


class Silence(Exception):
    """No answer came, or nobody knows what it would have been."""


# ------------------------------------------------------------------------------------------------------------ lease


@dataclass
class LeaseHistory:
    """Trio times: `ends` is when the grantor may give the lease to others, as it stands at the end."""

    margin: float
    ends: float = 0.0
    cuts: list[float] = field(default_factory=list)
    renewals: int = 0


def guards_end_before_the_lease(history: LeaseHistory) -> list[str]:
    """Every guard was cut, at least the margin before the grantor may give the lease to somebody else."""
    if not history.cuts:
        return ["a guard was never cut"]
    latest = history.ends - history.margin
    return [f"cut at {cut:.3f}, allowed {latest:.3f}" for cut in history.cuts if cut > latest + TINY]


def lease_under_faults(seed: int, lease_type: type[Lease] = Lease) -> LeaseHistory:
    """Renew through slow requests, slow and lost answers, then through silence until the guards are cut."""
    ttl, every, margin = 15.0, 5.0, 2.0
    history = LeaseHistory(margin)

    async def main() -> None:
        random = seeded(seed)
        plan = FaultPlan(
            random, failure=Silence, lost=Silence, delay=(0.0, 2.4), fail=0.1, lose=0.1, hang=0.05
        )
        lease = lease_type(trio.current_time(), ttl, margin)
        history.ends = trio.current_time() + ttl

        async def grant() -> bool:
            await trio.lowlevel.checkpoint()
            if trio.current_time() >= history.ends:
                return False
            history.ends = trio.current_time() + ttl
            history.renewals += 1
            return True

        async def work() -> None:
            with lease.guard():
                await trio.sleep_forever()
            history.cuts.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(work)
            nursery.start_soon(
                partial(heartbeat, lease, partial(plan.call, "renew", grant), every, random, outage=Silence)
            )
            await trio.sleep(random.uniform(10, 60))
            with plan.outage("hung"):
                await trio.sleep(60)

    simulate(main, seed)
    return history


# ----------------------------------------------------------------------------------------------------------- keeper


@dataclass
class RunHistory:
    """When each run of a kept actor began."""

    limit: int
    within: float
    runs: list[float] = field(default_factory=list)


def restarts_stay_within_intensity(history: RunHistory) -> list[str]:
    """No window holds more runs than the limit of restarts and the run that began it."""
    complaints = []
    for first in history.runs:
        inside = [run for run in history.runs if first <= run < first + history.within]
        if len(inside) > history.limit + 1:
            complaints.append(f"{len(inside)} runs within {history.within} s of {first:.3f}")
    return complaints


def keeper_of_a_broken_actor(make_intensity: Callable[[int, float], Intensity] = Intensity) -> RunHistory:
    """Keep an actor that starts and fails at once, for ten minutes or until the keeper gives up."""
    history = RunHistory(limit=3, within=60.0)

    async def broken(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        history.runs.append(trio.current_time())
        task_status.started()
        raise ValueError("broken")

    async def main() -> None:
        intensity = make_intensity(history.limit, history.within)
        with trio.move_on_after(600):
            try:
                await keep(broken, intensity, Backoff(1.0, 5.0, random=seeded()))
            except Exception:
                return

    simulate(main, 0)
    return history


# -------------------------------------------------------------------------------------------------------------- due


@dataclass
class WorkHistory:
    """What was marked as due, and what a tick has seen."""

    produced: int = 0
    handled: int = 0


def nothing_due_is_forgotten(history: WorkHistory) -> list[str]:
    """All that was ever marked was seen by a tick that began later."""
    left = history.produced - history.handled
    return [f"{left} of {history.produced} forgotten"] if left else []


def work_marked_at_any_moment(seed: int, due_type: type[Due] = Due) -> WorkHistory:
    """Produce and mark at random moments, before, during and after ticks that take time and sometimes fail."""
    history = WorkHistory()

    async def main() -> None:
        random = seeded(seed)
        due = due_type()

        async def tick() -> None:
            seen = history.produced
            await trio.sleep(random.uniform(0, 2))
            if random.random() < 0.2:
                raise Silence
            history.handled = seen

        async with trio.open_nursery() as nursery:
            run = when_due(
                due, tick, at_most_every=1.0, deadline=1.8, random=random, on_failure=lambda _exc: None
            )
            await nursery.start(run)
            for _ in range(20):
                await trio.sleep(random.choice([0.0, 0.3, 1.0, 5.0]))
                history.produced += 1
                due.mark()
            await trio.sleep(3_600)
            nursery.cancel_scope.cancel()

    simulate(main, seed)
    return history


# --------------------------------------------------------------------------------------------------------- children


@dataclass
class StopHistory:
    """In which order children started and ended."""

    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


def stopped_in_reverse(history: StopHistory) -> list[str]:
    """The last to start was the first to end."""
    wanted = list(reversed(history.started))
    return [] if history.ended == wanted else [f"ended {history.ended}, wanted {wanted}"]


def children_that_take_a_while(children_type: type[Children] = Children) -> StopHistory:
    """Start four children that each need a moment to clean up, then stop all."""
    history = StopHistory()

    def actor(name: str) -> Any:
        async def run(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            history.started.append(name)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):  # bounded: one virtual second
                    await trio.sleep(1)
                history.ended.append(name)

        return run

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            children = children_type(nursery, grace=5.0)
            for name in "abcd":
                await children.start(name, actor(name))
            await children.stop_all()

    simulate(main, 0)
    return history


CHECKERS: Sequence[Callable[[Any], list[str]]] = (
    guards_end_before_the_lease,
    restarts_stay_within_intensity,
    nothing_due_is_forgotten,
    stopped_in_reverse,
)
