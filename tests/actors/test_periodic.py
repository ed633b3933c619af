"""Due and when_due: no mark lost, at most one tick a period, failures stay due, idle costs nothing."""

import logging
import math

import pytest
import trio

from actors import Backoff, Due, TickOverrun, when_due
from tests.actors.histories import nothing_due_is_forgotten, seeded, work_marked_at_any_moment


class Steps(trio.abc.Instrument):
    """Counts how often any task ran."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task) -> None:
        self.count += 1


class Worker:
    """A when_due actor whose ticks follow a script: an exception, seconds to take, or None."""

    def __init__(self, *script: object, period: float = 10.0, deadline: float = 30.0, **settings) -> None:
        self.due = Due()
        self.script = list(script)
        self.began: list[float] = []
        self.failures: list[Exception] = []
        settings.setdefault("on_failure", self.failures.append)
        self.actor = when_due(
            self.due, self.tick, at_most_every=period, deadline=deadline, random=seeded(), **settings
        )

    async def tick(self) -> None:
        self.began.append(trio.current_time())
        step = self.script.pop(0) if self.script else None
        if isinstance(step, BaseException):
            raise step
        if step is not None:
            await trio.sleep(step)

    async def run(self, *marks: float, lasting: float = 1_000.0) -> None:
        with trio.move_on_after(lasting):
            async with trio.open_nursery() as nursery:
                await nursery.start(self.actor)
                for at in marks:
                    await trio.sleep_until(at)
                    self.due.mark()


async def test_nothing_due_runs_nothing(autojump_clock) -> None:
    worker = Worker()
    await worker.run()
    assert worker.began == []


async def test_first_due_tick_runs_at_once(autojump_clock) -> None:
    worker = Worker()
    await worker.run(3)
    assert worker.began == [3]


async def test_marked_before_it_starts_is_done(autojump_clock) -> None:
    worker = Worker()
    worker.due.mark()
    await worker.run()
    assert worker.began == [0]


async def test_many_marks_make_at_most_one_tick_a_period(autojump_clock) -> None:
    worker = Worker()
    await worker.run(0, 1, 2, 3, 12, 50)
    assert worker.began == [0, 10, 20, 50]


async def test_mark_during_a_tick_makes_another(autojump_clock) -> None:
    worker = Worker(4)
    await worker.run(0, 2)
    assert worker.began == [0, 10]


async def test_tick_longer_than_the_period_is_followed_at_once_by_what_is_due(autojump_clock) -> None:
    worker = Worker(25)
    await worker.run(0, 2)
    assert worker.began == [0, 25]


async def test_idle_costs_nothing(autojump_clock) -> None:
    worker = Worker()
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.actor)
        worker.due.mark()
        await trio.sleep(100)
        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        await trio.sleep(1e6)
        trio.lowlevel.remove_instrument(steps)
        nursery.cancel_scope.cancel()
    assert steps.count <= 2  # this test's own


async def test_failed_tick_is_reported_and_retried_after_a_growing_capped_wait(autojump_clock) -> None:
    failures = [ValueError(n) for n in range(4)]
    worker = Worker(
        *failures, period=1.0, failure_backoff=Backoff(5.0, 20.0, factor=2.0, random=seeded(), jitter=0.0)
    )
    await worker.run(0, lasting=200)
    assert worker.began == [0, 5, 15, 35, 55]
    assert worker.failures == failures


async def test_wait_after_a_failure_is_never_below_the_period_and_begins_anew_after_a_success(
    autojump_clock,
) -> None:
    worker = Worker(
        ValueError(),
        ValueError(),
        None,
        ValueError(),
        failure_backoff=Backoff(4, 80, 4, random=seeded(), jitter=0),
    )
    await worker.run(0, 100, lasting=200)
    assert worker.began == [0, 10, 26, 100, 110]


async def test_default_wait_after_failures_is_jittered_and_capped(autojump_clock) -> None:
    worker = Worker(*(ValueError() for _ in range(40)), period=0.1)
    await worker.run(0, lasting=3_600)
    gaps = [b - a for a, b in zip(worker.began, worker.began[1:], strict=False)]
    assert 0.5 <= gaps[0] <= 1
    assert all(30 <= gap <= 60 for gap in gaps[8:])
    assert len(set(gaps)) > 30


async def test_period_longer_than_the_default_cap_is_kept_after_a_failure(autojump_clock) -> None:
    worker = Worker(ValueError(), period=600)
    await worker.run(0, lasting=2_000)
    assert worker.began == [0, 600]


async def test_overrun_is_cut_reported_and_retried(autojump_clock) -> None:
    worker = Worker(1e9, deadline=7)
    await worker.run(0)
    (overrun,) = worker.failures
    assert isinstance(overrun, TickOverrun)
    assert overrun.deadline == 7
    assert overrun.__cause__ is None
    assert len(worker.began) == 2


async def test_tick_that_cannot_be_cut_and_returns_late_has_overrun(autojump_clock) -> None:
    failures: list[Exception] = []

    async def tick() -> None:
        with trio.CancelScope(shield=True):  # bounded: nine virtual seconds
            await trio.sleep(9)

    due = Due()
    due.mark()
    with trio.move_on_after(12):
        await when_due(due, tick, at_most_every=10, deadline=7, random=seeded(), on_failure=failures.append)()
    assert [type(failure) for failure in failures] == [TickOverrun]


async def test_overrun_keeps_what_the_tick_made_of_it_as_its_cause(autojump_clock) -> None:
    failures: list[Exception] = []

    async def tick() -> None:
        try:
            await trio.sleep(100)
        except trio.Cancelled:
            raise ValueError("outcome unknown") from None

    due = Due()
    due.mark()
    with trio.move_on_after(9):
        await when_due(due, tick, at_most_every=10, deadline=7, random=seeded(), on_failure=failures.append)()
    (overrun,) = failures
    assert isinstance(overrun, TickOverrun)
    assert isinstance(overrun.__cause__, ValueError)


async def test_timeout_of_the_ticks_own_is_its_own_failure(autojump_clock) -> None:
    worker = Worker(trio.TooSlowError())
    await worker.run(0)
    assert [type(failure) for failure in worker.failures] == [trio.TooSlowError]


async def test_failure_in_a_group_is_reported_as_it_is(autojump_clock) -> None:
    worker = Worker(ExceptionGroup("several", [ValueError()]))
    await worker.run(0)
    assert isinstance(worker.failures[0], ExceptionGroup)


async def test_cancel_passes_through_and_the_cut_tick_stays_due(autojump_clock) -> None:
    worker = Worker(5)
    await worker.run(0, lasting=2)
    assert worker.began == [0]
    assert worker.failures == []
    assert worker.due.is_due
    await worker.run(lasting=100)
    assert worker.began == [0, 2]
    assert not worker.due.is_due


async def test_report_that_raises_ends_the_actor_and_the_work_stays_due(autojump_clock) -> None:
    def give_up(failure: Exception) -> None:
        raise KeyError("too often") from failure

    worker = Worker(ValueError(), on_failure=give_up)
    worker.due.mark()
    with pytest.raises(KeyError, match="too often"):
        await worker.actor()
    assert worker.due.is_due


async def test_failures_are_logged_when_nobody_asks_for_them(autojump_clock, caplog) -> None:
    worker = Worker(ValueError("lost"), on_failure=None)
    with caplog.at_level(logging.WARNING, "actors"):
        await worker.run(0, lasting=5)
    (record,) = caplog.records
    assert record.getMessage() == "a tick failed and stays due"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "lost"


async def test_future_time_makes_it_due_then_and_the_earliest_wins(autojump_clock) -> None:
    worker = Worker()
    worker.due.mark_at(40)
    worker.due.mark_at(30)
    worker.due.mark_at(35)
    assert not worker.due.is_due
    await worker.run()
    assert worker.began == [30]


async def test_earlier_time_wakes_who_waits_for_a_later_one(autojump_clock) -> None:
    worker = Worker()
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.actor)
        worker.due.mark_at(500)
        await trio.sleep(5)
        worker.due.mark_at(20)
        await trio.sleep(900)
        nursery.cancel_scope.cancel()
    assert worker.began == [20]


async def test_time_to_come_survives_a_tick_before_it(autojump_clock) -> None:
    worker = Worker()
    worker.due.mark_at(100)
    await worker.run(5)
    assert worker.began == [5, 100]


async def test_clear_takes_what_is_due_and_leaves_what_is_to_come(autojump_clock) -> None:
    due = Due()
    due.mark()
    due.mark_at(10)
    due.clear()
    assert not due.is_due
    await due.wait()
    assert trio.current_time() == 10
    due.clear()
    assert not due.is_due


async def test_wait_takes_nothing_also_when_cancelled(autojump_clock) -> None:
    due = Due()
    due.mark()
    with trio.CancelScope() as scope:
        scope.cancel()
        await due.wait()
    assert scope.cancelled_caught
    await due.wait()
    await due.wait()
    assert due.is_due


async def test_mark_wakes_everybody_who_waits(autojump_clock) -> None:
    due = Due()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(due.wait)
        await trio.testing.wait_all_tasks_blocked()
        due.mark()


@pytest.mark.parametrize("seed", range(20))
def test_nothing_due_is_forgotten_whenever_it_is_marked(seed) -> None:
    assert nothing_due_is_forgotten(work_marked_at_any_moment(seed)) == []


@pytest.mark.parametrize("settings", [{"period": 0}, {"deadline": 0}, {"period": math.nan}])
async def test_settings_of_zero_are_refused(settings) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Worker(**settings)
