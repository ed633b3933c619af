"""The keeper: what it restarts, how often, how soon, and what leaves it."""

from functools import partial

import pytest
import trio

from actors import Backoff, Intensity, NeverStarted, RestartLimitReached, keep
from tests.actors.histories import keeper_of_a_broken_actor, restarts_stay_within_intensity, seeded


class Scripted:
    """An actor that does one thing after the other, a run each: an exception to raise, seconds to live, or None."""

    def __init__(self, *runs: object, up: bool = True) -> None:
        self.runs = list(runs)
        self.up = up
        self.began: list[float] = []

    async def __call__(self, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
        self.began.append(trio.current_time())
        if self.up:
            task_status.started(len(self.began))
        await trio.lowlevel.checkpoint()
        run = self.runs.pop(0) if self.runs else 1e9
        if isinstance(run, BaseException):
            raise run
        if run is not None:
            await trio.sleep(run)


def steady(seconds: float = 1.0) -> Backoff:
    return Backoff(seconds, seconds, random=seeded(), jitter=0.0)


async def test_first_failure_before_started_leaves_start_as_itself(autojump_clock) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(KeyError, match="no config"):
            await nursery.start(
                partial(keep, Scripted(KeyError("no config"), up=False), Intensity(3, 60), steady())
            )


async def test_return_before_started_is_an_error_that_names_the_actor(autojump_clock) -> None:
    async def forgot(*, task_status=trio.TASK_STATUS_IGNORED) -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(NeverStarted, match="forgot"):
        await keep(partial(partial(forgot)), Intensity(3, 60), steady())


async def test_start_gets_what_the_first_started_says_and_later_ones_go_nowhere(autojump_clock) -> None:
    actor = Scripted(ValueError(), ValueError())
    async with trio.open_nursery() as nursery:
        assert await nursery.start(partial(keep, actor, Intensity(3, 60), steady())) == 1
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert actor.began == [0, 1, 2]


async def test_limit_3_ends_after_4_runs_from_the_last_failure(autojump_clock) -> None:
    actor = Scripted(*(ValueError(n) for n in range(10)))
    with pytest.raises(RestartLimitReached) as caught:
        await keep(actor, Intensity(3, 60), steady(), name="reader")
    assert len(actor.began) == 4
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.args == (3,)
    assert (caught.value.name, caught.value.limit, caught.value.within) == ("reader", 3, 60)
    assert "reader needed more than 3 restarts within 60 s" in str(caught.value)


async def test_returns_count_as_restarts_and_leave_no_cause(autojump_clock) -> None:
    with pytest.raises(RestartLimitReached, match="Scripted") as caught:
        await keep(Scripted(*[None] * 10), Intensity(2, 60), steady())
    assert caught.value.__cause__ is None


async def test_failure_each_30_s_is_restarted_for_ever_at_3_in_60(autojump_clock) -> None:
    async def fails_each_30_s(*, task_status=trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep(29)
        raise ValueError

    with trio.move_on_after(36_000) as scope:
        await keep(fails_each_30_s, Intensity(3, 60), steady())
    assert scope.cancelled_caught


async def test_backoff_grows_over_failures_and_begins_anew_after_a_quiet_window(autojump_clock) -> None:
    told = []
    actor = Scripted(ValueError("a"), ValueError("b"), ValueError("c"), 100, ValueError("d"))
    backoff = Backoff(1.0, 60.0, random=seeded(), jitter=0.0)
    with trio.move_on_after(500):
        await keep(
            actor, Intensity(10, 60), backoff, on_restart=lambda failure, delay: told.append((failure, delay))
        )
    assert [delay for _, delay in told] == [1, 2, 4, 1, 2]
    assert [str(failure) for failure, _ in told] == ["a", "b", "c", "None", "d"]
    assert actor.began == [0, 1, 3, 7, 108, 110]


async def test_transient_is_restarted_after_a_failure_and_ends_with_a_return(autojump_clock) -> None:
    actor = Scripted(ValueError(), None, None)
    await keep(actor, Intensity(3, 60), steady(), restart="transient")
    assert len(actor.began) == 2


async def test_temporary_is_never_restarted_and_its_failure_leaves_as_itself(autojump_clock) -> None:
    with pytest.raises(ValueError, match="once"):
        await keep(Scripted(ValueError("once")), Intensity(3, 60), steady(), restart="temporary")
    actor = Scripted(None)
    await keep(actor, Intensity(3, 60), steady(), restart="temporary")
    assert len(actor.began) == 1


async def test_cancel_passes_through_while_it_runs_and_while_it_waits(autojump_clock) -> None:
    for runs in ([], [ValueError()]):
        actor = Scripted(*runs)
        with trio.move_on_after(5) as scope:
            await keep(actor, Intensity(3, 60), steady(100))
        assert scope.cancelled_caught
        assert len(actor.began) == 1


async def test_failure_in_a_group_with_a_cancel_passes_through(autojump_clock) -> None:
    async def fails_while_cancelled(*, task_status=trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("clean-up")

    with pytest.RaisesGroup(ValueError):  # the scope has taken its Cancelled out of the group
        with trio.move_on_after(1):
            await keep(fails_while_cancelled, Intensity(3, 60), steady())


async def test_failure_in_a_group_of_its_own_is_a_failure(autojump_clock) -> None:
    actor = Scripted(ExceptionGroup("several", [ValueError(), KeyError()]))
    with trio.move_on_after(10):
        await keep(actor, Intensity(3, 60), steady())
    assert len(actor.began) == 2


def test_restarts_of_a_broken_actor_stay_within_the_intensity() -> None:
    history = keeper_of_a_broken_actor()
    assert restarts_stay_within_intensity(history) == []
    assert len(history.runs) == 4
