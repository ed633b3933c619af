"""The fault plan: what a caller gets fits what was done, and a seed repeats it."""

import pytest
import trio

from actors.testing import FaultPlan, simulate
from tests.actors.histories import seeded


class Unavailable(Exception):
    pass


class Unknown(Exception):
    pass


class Store:
    def __init__(self, seed: int = 0, **settings) -> None:
        self.plan = FaultPlan(seeded(seed), failure=Unavailable, lost=Unknown, **settings)
        self.done = 0

    async def add(self, number: int) -> int:
        await trio.lowlevel.checkpoint()
        self.done += number
        return self.done

    async def call(self, number: int = 1, name: str = "add") -> object:
        return await self.plan.call(name, self.add, number)


async def test_no_faults_means_the_answer_comes(autojump_clock) -> None:
    store = Store()
    assert [await store.call() for _ in range(3)] == [1, 2, 3]
    assert trio.current_time() == 0


async def test_failed_call_did_nothing_and_lost_answer_did_everything(autojump_clock) -> None:
    store = Store()
    store.plan.next("add", "failed", "lost", "none")
    with pytest.raises(Unavailable, match="add"):
        await store.call(1)
    assert store.done == 0
    with pytest.raises(Unknown, match="add"):
        await store.call(1)
    assert store.done == 1
    assert await store.call(1) == 2


async def test_hung_call_ends_with_its_caller_and_did_nothing(autojump_clock) -> None:
    store = Store()
    store.plan.next("add", "hung")
    with trio.move_on_after(50) as scope:
        await store.call()
    assert scope.cancelled_caught
    assert store.done == 0


async def test_request_and_answer_each_take_their_time(autojump_clock) -> None:
    store = Store(delay=(2.0, 2.0))
    assert await store.call() == 1
    assert trio.current_time() == 4


async def test_cancel_before_the_request_arrives_did_nothing(autojump_clock) -> None:
    store = Store(delay=(2.0, 2.0))
    with trio.move_on_after(1) as scope:
        await store.call()
    assert scope.cancelled_caught
    assert store.done == 0


async def test_cancel_after_it_was_done_still_gets_the_answer(autojump_clock) -> None:
    store = Store(delay=(2.0, 2.0))
    with trio.move_on_after(3):
        assert await store.call() == 1
    assert trio.current_time() == 4


async def test_outage_meets_every_call_but_planned_ones(autojump_clock) -> None:
    store = Store()
    store.plan.next("add", "none")
    with store.plan.outage():
        assert await store.call() == 1
        with pytest.raises(Unavailable):
            await store.call()
        with store.plan.outage("lost"), pytest.raises(Unknown, match="other"):
            await store.call(name="other")
        with pytest.raises(Unavailable):
            await store.call()
    assert await store.call() == 3


def outcomes(seed: int) -> list[str]:
    async def main() -> list[str]:
        store, seen = Store(seed, delay=(0, 1), fail=0.2, lose=0.2, hang=0.1), []
        for _ in range(200):
            before = store.done
            with trio.move_on_after(10) as scope:
                try:
                    await store.call()
                    seen.append("none")
                except Unavailable:
                    seen.append("failed")
                except Unknown:
                    seen.append("lost")
            if scope.cancelled_caught:
                seen.append("hung")
            assert store.done - before == (seen[-1] in ("none", "lost"))
        return seen

    return simulate(main, seed)


def test_chances_come_true_and_a_seed_repeats_them() -> None:
    seen = outcomes(1)
    assert seen == outcomes(1) != outcomes(2)
    for fault, at_least, at_most in (
        ("failed", 20, 60),
        ("lost", 20, 60),
        ("hung", 8, 35),
        ("none", 70, 130),
    ):
        assert at_least <= seen.count(fault) <= at_most


@pytest.mark.parametrize(
    "settings", [{"fail": 0.6, "lose": 0.6}, {"hang": -0.1}, {"delay": (2.0, 1.0)}, {"delay": (-1.0, 1.0)}]
)
def test_wrong_settings_are_refused(settings) -> None:
    with pytest.raises(ValueError, match="must be"):
        Store(**settings)
