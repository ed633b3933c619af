"""Each checker is shown to catch the bug it is there for, on a variant that is broken on purpose."""

from collections.abc import Callable
from typing import Any

import pytest
import trio

from actors import Children, Due, Intensity, Lease
from tests.actors.histories import (
    CHECKERS,
    LeaseHistory,
    children_that_take_a_while,
    guards_end_before_the_lease,
    keeper_of_a_broken_actor,
    lease_under_faults,
    nothing_due_is_forgotten,
    restarts_stay_within_intensity,
    stopped_in_reverse,
    work_marked_at_any_moment,
)


class CountsFromTheAnswer(Lease):
    def renewed(self, asked: float) -> bool:
        return super().renewed(max(asked, trio.current_time()))


class RevivedByALateYes(Lease):
    @property
    def lost(self) -> bool:
        return False

    def renewed(self, asked: float) -> bool:
        return super().renewed(asked + 15)


class Forgetful(Intensity):
    def record(self, now: float) -> bool:
        super().record(now)
        return True


class HeardOnlyWhileWaitedFor(Due):
    """As with an event that wakes who waits and stays clear for who comes later."""

    waiting = False

    def mark(self) -> None:
        if self.waiting:
            super().mark()

    async def wait(self) -> None:
        self.waiting = True
        try:
            await super().wait()
        finally:
            self.waiting = False


class ForwardChildren(Children):
    async def stop_all(self, reason: str = "") -> None:
        for child in self.snapshot():
            await self.stop(child.name, reason)


class AllAtOnceChildren(Children):
    async def stop_all(self, reason: str = "") -> None:
        async with trio.open_nursery() as nursery:
            for child in self.snapshot():
                nursery.start_soon(self.stop, child.name, reason)


def any_complaint(checker: Callable[[Any], list[str]], run: Callable[[int], object]) -> bool:
    return any(checker(run(seed)) for seed in range(30))


SABOTAGE: dict[Callable[..., list[str]], dict[str, Callable[[], bool]]] = {
    guards_end_before_the_lease: {
        "deadline from the answer": lambda: any_complaint(
            guards_end_before_the_lease, lambda seed: lease_under_faults(seed, CountsFromTheAnswer)
        ),
        "late yes": lambda: any_complaint(
            guards_end_before_the_lease, lambda seed: lease_under_faults(seed, RevivedByALateYes)
        ),
        "guard that never fires": lambda: bool(guards_end_before_the_lease(LeaseHistory(margin=2.0))),
    },
    restarts_stay_within_intensity: {
        "intensity forgotten": lambda: bool(
            restarts_stay_within_intensity(keeper_of_a_broken_actor(Forgetful))
        ),
    },
    nothing_due_is_forgotten: {
        "mark during a tick lost": lambda: any_complaint(
            nothing_due_is_forgotten, lambda seed: work_marked_at_any_moment(seed, HeardOnlyWhileWaitedFor)
        ),
    },
    stopped_in_reverse: {
        "forward": lambda: bool(stopped_in_reverse(children_that_take_a_while(ForwardChildren))),
        "all at once": lambda: bool(stopped_in_reverse(children_that_take_a_while(AllAtOnceChildren))),
    },
}


@pytest.mark.parametrize(
    "caught",
    [pytest.param(caught, id=name) for variants in SABOTAGE.values() for name, caught in variants.items()],
)
def test_checker_catches_the_broken_variant(caught: Callable[[], bool]) -> None:
    assert caught()


def test_every_checker_has_its_sabotage() -> None:
    assert set(SABOTAGE) == set(CHECKERS)
