"""Probes: waiting for inner moments, holding actors, and doing nothing in production."""

import pytest
import trio

from actors.testing import NoProbes, Probe, Probes


async def work(probes: Probe, rounds: int = 1) -> None:
    for number in range(rounds):
        await probes.hit("claimed", number=number)
        probes.hit("noted", number=number)


async def test_moment_is_waited_for_with_its_facts(autojump_clock) -> None:
    probes = Probes()
    async with trio.open_nursery() as nursery:

        async def later() -> None:
            await trio.sleep(5)
            await work(probes)

        nursery.start_soon(later)
        assert await probes.reached("claimed") == {"number": 0}
        assert trio.current_time() == 5


async def test_moment_that_came_before_anybody_waited_is_not_missed(autojump_clock) -> None:
    probes = Probes()
    await work(probes, rounds=2)
    assert [await probes.reached("noted") for _ in range(2)] == [{"number": 0}, {"number": 1}]
    assert probes.count("noted") == 2
    with trio.move_on_after(1) as scope:
        await probes.reached("noted")
    assert scope.cancelled_caught


async def test_each_moment_wakes_one_of_those_who_wait(autojump_clock) -> None:
    probes, got = Probes(), []

    async def wait() -> None:
        got.append(await probes.reached("claimed"))

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await work(probes, rounds=2)
    assert sorted(fact["number"] for fact in got) == [0, 1]


async def test_held_actor_pauses_there_until_the_block_ends(autojump_clock) -> None:
    probes, done = Probes(), trio.Event()

    async def actor() -> None:
        await work(probes)
        done.set()

    async with trio.open_nursery() as nursery:
        with probes.hold("claimed"):
            with pytest.raises(ValueError, match="held already"), probes.hold("claimed"):
                pass
            nursery.start_soon(actor)
            await probes.reached("claimed")
            await trio.testing.wait_all_tasks_blocked()
            assert not done.is_set()
        await done.wait()
    with trio.fail_after(1):
        await work(probes)


async def test_held_actor_can_be_cancelled(autojump_clock) -> None:
    probes = Probes()
    with probes.hold("claimed"), trio.move_on_after(1) as scope:
        await work(probes)
    assert scope.cancelled_caught


@pytest.mark.parametrize("make", [NoProbes, Probes])
async def test_hit_that_nobody_holds_is_no_checkpoint(make) -> None:
    probes = make()
    with trio.testing.assert_no_checkpoints():
        await work(probes, rounds=3)
