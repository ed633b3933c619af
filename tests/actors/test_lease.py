"""The lease and its heartbeat: ttl 15, every 5, margin 2, as in production, on a virtual clock."""

import math
from functools import partial

import pytest
import trio

from actors import Lease, heartbeat
from actors.testing import FaultPlan
from tests.actors.histories import TINY, Silence, guards_end_before_the_lease, lease_under_faults, seeded

TTL, EVERY, MARGIN = 15.0, 5.0, 2.0
GOOD_FOR = TTL - MARGIN


class Node:
    """A lease, guards that say when they were cut, and the times at which renewals were sent."""

    def __init__(self, guards: int = 3) -> None:
        self.lease = Lease(trio.current_time(), TTL, MARGIN)
        self.guards = guards
        self.sent: list[float] = []
        self.cuts: list[tuple[float, str | None]] = []
        self.heartbeat_ended = math.nan

    async def work(self) -> None:
        with self.lease.guard():
            try:
                await trio.sleep_forever()
            except trio.Cancelled as cut:
                self.cuts.append((trio.current_time(), cut.reason))
                raise

    async def run(self, answer, *, lasting: float = math.inf) -> None:
        """Work and renew until the lease is lost; `answer` gets the number of the request, from 1."""

        async def renew() -> bool:
            self.sent.append(trio.current_time())
            return await answer(len(self.sent))

        with trio.move_on_after(lasting):
            async with trio.open_nursery() as nursery:
                for _ in range(self.guards):
                    nursery.start_soon(self.work)
                await heartbeat(self.lease, renew, EVERY, seeded(1), outage=Silence)
                self.heartbeat_ended = trio.current_time()

    @property
    def cut_times(self) -> list[float]:
        return [at for at, _ in self.cuts]


async def yes(_number: int) -> bool:
    await trio.lowlevel.checkpoint()
    return True


async def test_guard_is_never_cut_in_ten_hours_of_yes(autojump_clock) -> None:
    node = Node()
    await node.run(yes, lasting=36_000)
    assert trio.current_time() == 36_000
    assert node.cut_times == [36_000] * 3  # by the test, not by the lease
    assert math.isnan(node.heartbeat_ended)
    gaps = [b - a for a, b in zip(node.sent, node.sent[1:], strict=False)]
    assert 4.5 - TINY <= min(gaps) <= max(gaps) <= 5.5 + TINY


async def test_hanging_renewals_cut_every_guard_at_sent_plus_ttl_minus_margin(autojump_clock) -> None:
    async def answer(number: int) -> bool:
        if number >= 3:
            await trio.sleep_forever()
        return await yes(number)

    node = Node()
    await node.run(answer)
    assert node.cut_times == [pytest.approx(node.sent[1] + GOOD_FOR)] * 3
    assert node.heartbeat_ended == pytest.approx(node.sent[1] + GOOD_FOR)
    assert node.lease.lost
    assert node.lease.reason is None


async def test_renewal_that_hangs_is_cut_and_asked_again_soon(autojump_clock) -> None:
    async def answer(number: int) -> bool:
        if number == 1:
            await trio.sleep_forever()
        return await yes(number)

    node = Node()
    await node.run(answer, lasting=20)
    assert EVERY + 0.9 <= node.sent[1] - node.sent[0] <= EVERY + 1.1
    assert 4.5 <= node.sent[2] - node.sent[1] <= 5.5


async def test_slow_answers_stretch_nothing_and_keep_the_lease(autojump_clock) -> None:
    node = Node()

    async def answer(number: int) -> bool:
        before = node.lease.deadline
        await trio.sleep(4)
        if number > 100:
            await trio.sleep_forever()
        assert node.lease.deadline == before
        return True

    await node.run(answer)
    assert len(node.sent) > 100
    assert node.cut_times == [pytest.approx(node.sent[99] + GOOD_FOR)] * 3


async def test_a_no_cuts_all_guards_at_once_with_its_reason(autojump_clock) -> None:
    async def answer(number: int) -> bool:
        await trio.sleep(0.5)
        return number < 3

    node = Node()
    await node.run(answer)
    assert node.cuts == [(pytest.approx(node.sent[2] + 0.5), "the renewal was refused")] * 3
    assert node.lease.reason == "the renewal was refused"
    assert node.lease.deadline == -math.inf


async def test_short_outage_is_survived_by_asking_again_soon(autojump_clock) -> None:
    async def answer(_number: int) -> bool:
        await trio.lowlevel.checkpoint()
        if 12 <= trio.current_time() <= 22:
            raise Silence
        return True

    node = Node()
    await node.run(answer, lasting=600)
    assert node.cut_times == [600] * 3
    asked = [at for at in node.sent if 12 <= at <= 22]
    assert len(asked) > 5


async def test_long_outage_cuts_at_the_deadline_of_the_last_yes(autojump_clock) -> None:
    async def answer(number: int) -> bool:
        await trio.lowlevel.checkpoint()
        if number > 2:
            raise Silence
        return True

    node = Node()
    await node.run(answer)
    assert node.cut_times == [pytest.approx(node.sent[1] + GOOD_FOR)] * 3


async def test_yes_that_cannot_be_cut_and_comes_after_the_deadline_revives_nothing(autojump_clock) -> None:
    async def answer(_number: int) -> bool:
        with trio.CancelScope(shield=True):  # bounded: a minute of virtual time
            await trio.sleep(60)
        return True

    node = Node()
    await node.run(answer)
    assert node.cut_times == [pytest.approx(GOOD_FOR)] * 3
    assert len(node.sent) == 1
    assert node.lease.lost


async def test_other_errors_of_a_renewal_leave_as_themselves_and_the_guards_stay(autojump_clock) -> None:
    lease = Lease(trio.current_time(), TTL, MARGIN)

    async def renew() -> bool:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        await heartbeat(lease, renew, EVERY, seeded(), outage=(Silence, OSError))
    assert not lease.lost
    assert lease.deadline == pytest.approx(GOOD_FOR)


async def test_heartbeat_ends_at_once_when_somebody_else_loses_the_lease(autojump_clock) -> None:
    lease = Lease(trio.current_time(), TTL, MARGIN)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(heartbeat, lease, partial(yes, 0), EVERY, seeded(), outage=Silence))
        await trio.sleep(1)
        lease.lose("taken")
    assert trio.current_time() == 1


async def test_heartbeat_that_is_cancelled_leaves_the_guards_their_deadline(autojump_clock) -> None:
    lease = Lease(trio.current_time(), TTL, MARGIN)
    with trio.move_on_after(7):
        await heartbeat(lease, partial(yes, 0), EVERY, seeded(), outage=Silence)
    with lease.guard() as scope:
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert GOOD_FOR + 4.5 <= trio.current_time() <= GOOD_FOR + 5.5


async def test_guard_that_is_left_in_time_was_not_cut(autojump_clock) -> None:
    lease = Lease(trio.current_time(), TTL, MARGIN)
    with lease.guard() as scope:
        await trio.sleep(1)
    assert not scope.cancelled_caught
    await trio.sleep(60)
    assert not scope.cancelled_caught


async def test_guard_entered_after_the_loss_is_cut_at_its_first_checkpoint_with_the_reason(
    autojump_clock,
) -> None:
    lease = Lease(trio.current_time(), TTL, MARGIN)
    lease.lose("first")
    lease.lose("second")
    with lease.guard() as scope:
        with pytest.raises(trio.Cancelled) as cut:
            await trio.lowlevel.checkpoint()
        raise cut.value
    assert scope.cancelled_caught
    assert cut.value.reason == "first"
    assert lease.reason == "first"


async def test_guard_entered_after_the_deadline_is_cut_at_its_first_checkpoint(autojump_clock) -> None:
    lease = Lease(trio.current_time(), TTL, MARGIN)
    await trio.sleep(GOOD_FOR)
    assert lease.lost
    with lease.guard() as scope:
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert not lease.renewed(trio.current_time())


async def test_renewals_move_every_guard_and_an_older_one_moves_none_back(autojump_clock) -> None:
    lease = Lease(trio.current_time(), TTL, MARGIN)
    with lease.guard() as outer, lease.guard() as inner:
        await trio.sleep(3)
        assert lease.renewed(2)
        assert lease.renewed(1)
        assert outer.deadline == inner.deadline == lease.deadline == 2 + GOOD_FOR


@pytest.mark.parametrize("seed", range(20))
def test_no_guard_outlives_its_lease_under_slow_lost_and_hanging_answers(seed) -> None:
    history = lease_under_faults(seed)
    assert guards_end_before_the_lease(history) == []
    assert history.renewals > 0


async def test_faulty_renewals_are_all_taken_for_no_answer(autojump_clock) -> None:
    random = seeded(4)
    plan = FaultPlan(random, failure=Silence, lost=Silence)
    lease = Lease(trio.current_time(), TTL, MARGIN)
    plan.next("renew", "failed", "lost", "hung", "none")
    with trio.move_on_after(13):
        await heartbeat(lease, partial(plan.call, "renew", partial(yes, 0)), EVERY, random, outage=Silence)
    assert lease.deadline > 20


@pytest.mark.parametrize("margin", [0, 15, -1, math.nan])
async def test_margin_outside_the_ttl_is_refused(margin) -> None:
    with pytest.raises(ValueError, match="margin"):
        Lease(trio.current_time(), TTL, margin)


async def test_period_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="every"):
        await heartbeat(Lease(trio.current_time(), 1, 0.5), partial(yes, 0), 0, seeded(), outage=Silence)
