"""Children: start order, stop order, grace, failures, cancellation, what a snapshot says."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio

from actors import (
    ActorEnded,
    ActorRestarted,
    ActorSpec,
    ActorStarted,
    Backoff,
    Children,
    ChildrenClosed,
    Events,
    Intensity,
    MemorySink,
    NameTaken,
    NeverStarted,
    RestartLimitReached,
    open_children,
)
from tests.actors.histories import children_that_take_a_while, seeded, stopped_in_reverse


class Recorder:
    """Makes actors and notes when they start and end."""

    def __init__(self) -> None:
        self.log: list[tuple[str, float]] = []

    def actor(
        self,
        name: str,
        *,
        cleanup: float = 0.0,
        fails_after: float | None = None,
        fails_when_stopped: bool = False,
        starts_after: float = 0.0,
    ) -> Callable[..., Any]:
        async def run(*, task_status=trio.TASK_STATUS_IGNORED) -> None:
            try:
                await trio.sleep(starts_after)
                task_status.started(f"{name} is up")
                self.log.append((f"+{name}", trio.current_time()))
                if fails_after is not None:
                    await trio.sleep(fails_after)
                    raise ValueError(name)
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):  # bounded: seconds of virtual time
                    await trio.sleep(cleanup)
                self.log.append((f"-{name}", trio.current_time()))
                if fails_when_stopped:
                    raise KeyError(name)

        return run

    @property
    def order(self) -> str:
        return " ".join(what for what, _ in self.log)


def spec(name: str, actor: Callable[..., Any], limit: int = 3) -> ActorSpec:
    return ActorSpec(
        name, actor, intensity=Intensity(limit, 60), backoff=Backoff(1, 1, random=seeded(), jitter=0)
    )


async def test_children_start_in_order_and_stop_in_reverse_each_waited_for(autojump_clock) -> None:
    made = Recorder()
    async with open_children(grace=5) as children:
        for name in "abc":
            assert await children.start(name, made.actor(name, cleanup=1)) == f"{name} is up"
    assert made.log == [("+a", 0), ("+b", 0), ("+c", 0), ("-c", 1), ("-b", 2), ("-a", 3)]


def test_stop_all_is_in_reverse() -> None:
    assert stopped_in_reverse(children_that_take_a_while()) == []


async def test_child_that_ignores_its_cancel_delays_the_others_by_the_grace(autojump_clock) -> None:
    made = Recorder()
    async with open_children(grace=5) as children:
        await children.start("a", made.actor("a"))
        await children.start("hung", made.actor("hung", cleanup=100))
        await children.start("c", made.actor("c"))
    assert made.log[3:] == [("-c", 0), ("-a", 5), ("-hung", 100)]


async def test_grace_of_zero_cancels_all_at_once(autojump_clock) -> None:
    made = Recorder()
    async with open_children(grace=0) as children:
        for name in "abc":
            await children.start(name, made.actor(name, cleanup=1))
    assert {at for _, at in made.log[3:]} == {1}


async def test_stop_waits_for_one_child_and_frees_its_name(autojump_clock) -> None:
    made = Recorder()
    async with open_children(grace=5) as children:
        await children.start("a", made.actor("a", cleanup=1))
        with pytest.raises(NameTaken, match="a child named a"):
            await children.start("a", made.actor("a"))
        assert await children.stop("a")
        assert trio.current_time() == 1
        await children.start("a", made.actor("a"))
    assert made.order == "+a -a +a -a"


async def test_stop_gives_up_waiting_after_the_grace_and_says_so(autojump_clock) -> None:
    made = Recorder()
    async with open_children(grace=5) as children:
        await children.start("a", made.actor("a", cleanup=8))
        assert not await children.stop("a")
        assert trio.current_time() == 5
        with trio.move_on_after(1):
            await children.stop("a")
        assert [(child.state, child.since) for child in children.snapshot()] == [("stopping", 0)]
        assert await children.stop("a")
        assert trio.current_time() == 8


async def test_stop_of_nobody_is_done_already(autojump_clock) -> None:
    async with open_children(grace=5) as children:
        assert await children.stop("nobody")


async def test_stop_reaches_the_child_with_its_reason(autojump_clock) -> None:
    reasons = []

    async def actor(*, task_status=trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cut:
            reasons.append(cut.reason)
            raise

    async with open_children(grace=5) as children:
        await children.start("a", actor)
        await children.stop("a", "over target")
        await children.start("b", actor)
        await children.stop_all("suspended")
        await children.start("c", actor)
    assert reasons == ["over target", "suspended", "the block has ended"]


async def test_failure_of_a_child_leaves_as_itself_and_cancels_the_others(autojump_clock) -> None:
    made = Recorder()
    with pytest.raises(ValueError, match="b") as caught:
        async with open_children(grace=5) as children:
            await children.start("a", made.actor("a"))
            await children.start("b", made.actor("b", fails_after=3))
            await trio.sleep_forever()
    assert caught.value.__context__ is None
    assert made.log[-1] == ("-a", 3)


async def test_failure_of_the_block_leaves_as_itself_after_all_stopped_in_reverse(autojump_clock) -> None:
    made = Recorder()
    with pytest.raises(KeyError, match="mine"):
        async with open_children(grace=5) as children:
            for name in "abc":
                await children.start(name, made.actor(name, cleanup=1))
            raise KeyError("mine")
    assert made.order == "+a +b +c -c -b -a"


async def test_failure_of_the_block_survives_a_cancel_while_the_children_stop(autojump_clock) -> None:
    made = Recorder()
    with pytest.RaisesGroup(KeyError):  # outside, trio takes the Cancelled out of the group
        with trio.move_on_after(1):
            async with open_children(grace=5) as children:
                for name in "abc":
                    await children.start(name, made.actor(name, cleanup=2))
                raise KeyError("mine")
    assert trio.current_time() == 3


async def test_group_that_the_block_raises_stays_a_group(autojump_clock) -> None:
    with pytest.RaisesGroup(ValueError) as caught:
        async with open_children(grace=5):
            raise ExceptionGroup("mine", [ValueError()])
    assert caught.value.message == "mine"


async def test_several_failures_leave_as_a_group(autojump_clock) -> None:
    made = Recorder()
    with pytest.RaisesGroup(KeyError, ValueError):
        async with open_children(grace=5) as children:
            await children.start("a", made.actor("a", fails_when_stopped=True))
            raise ValueError


async def test_failure_beside_a_cancel_from_outside_leaves_alone(autojump_clock) -> None:
    made = Recorder()
    with pytest.RaisesGroup(KeyError):  # outside, trio takes the Cancelled out of the group
        with trio.move_on_after(1):
            async with open_children(grace=5) as children:
                await children.start("a", made.actor("a"))
                await children.start("b", made.actor("b", fails_when_stopped=True))
                await trio.sleep_forever()
    assert trio.current_time() == 1


async def test_cancel_from_outside_reaches_all_at_once_and_waits_for_all(autojump_clock) -> None:
    made = Recorder()
    with trio.move_on_after(10) as scope:
        async with open_children(grace=5) as children:
            for name in "abc":
                await children.start(name, made.actor(name, cleanup=2))
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert {at for _, at in made.log[3:]} == {12}


async def test_failure_before_started_leaves_start_and_the_others_live_on(autojump_clock) -> None:
    made = Recorder()

    async def broken(*, task_status=trio.TASK_STATUS_IGNORED) -> None:
        raise ValueError("broken")

    async with open_children(grace=5) as children:
        await children.start("a", made.actor("a"))
        with pytest.raises(ValueError, match="broken"):
            await children.start("b", broken)
        assert [child.name for child in children.snapshot()] == ["a"]


async def test_child_that_returns_or_is_stopped_before_started_says_so(autojump_clock) -> None:
    made = Recorder()

    async def silent(*, task_status=trio.TASK_STATUS_IGNORED) -> None:
        await trio.lowlevel.checkpoint()

    async with open_children(grace=5) as children:
        with pytest.raises(NeverStarted, match="silent"):
            await children.start("silent", silent)
        async with trio.open_nursery() as nursery:

            async def start_slow() -> None:
                with pytest.raises(NeverStarted, match="slow"):
                    await children.start("slow", made.actor("slow", starts_after=9))

            nursery.start_soon(start_slow)
            await trio.testing.wait_all_tasks_blocked()
            assert [child.state for child in children.snapshot()] == ["starting"]
            assert await children.stop("slow")
    assert trio.current_time() == 0


async def test_cancelled_start_has_ended_the_child(autojump_clock) -> None:
    made = Recorder()
    async with open_children(grace=5) as children:
        with trio.move_on_after(1):
            await children.start("a", made.actor("a", starts_after=9, cleanup=1))
        assert children.snapshot() == ()
        assert trio.current_time() == 2


async def test_no_child_starts_while_the_block_ends(autojump_clock) -> None:
    refused = []
    made = Recorder()

    async def starts_another(children: Children, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            try:
                await children.start("late", made.actor("late"))
            except ChildrenClosed as exc:
                refused.append(exc.name)

    async with open_children(grace=5) as children:
        await children.start("a", partial(starts_another, children))
    assert refused == ["late"]
    assert made.log == []


async def test_child_that_returns_is_gone_and_the_others_live_on(autojump_clock) -> None:
    async def short(*, task_status=trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep(1)

    async with open_children(grace=5) as children:
        await children.start("a", short)
        await trio.sleep(2)
        assert children.snapshot() == ()


async def test_kept_child_is_restarted_and_the_snapshot_tells(autojump_clock) -> None:
    made = Recorder()
    sink = MemorySink()
    async with open_children(grace=5, events=Events(sink)) as children:
        up = await children.start_kept(spec("a", made.actor("a", fails_after=10)))
        assert up == "a is up"
        (first,) = children.snapshot()
        assert (first.name, first.state, first.since, first.restarts, first.last_error) == (
            "a",
            "running",
            0,
            0,
            None,
        )
        await trio.sleep(10.5)
        (waiting,) = children.snapshot()
        assert (waiting.state, waiting.since, waiting.restarts) == ("waiting", 10, 1)
        assert waiting.last_error == "ValueError: a"
        await trio.sleep(1)
        (again,) = children.snapshot()
        assert (again.state, again.since, again.restarts) == ("running", 11, 1)
    assert [type(event) for event in sink.events] == [ActorStarted, ActorRestarted, ActorStarted, ActorEnded]
    (restarted,) = sink.of(ActorRestarted)
    assert (restarted.name, str(restarted.failure), restarted.delay) == ("a", "a", 1)
    assert sink.of(ActorEnded) == (ActorEnded(name="a", failure=None),)


async def test_kept_child_that_returns_is_restarted_without_an_error(autojump_clock) -> None:
    async def short(*, task_status=trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep(10)

    async with open_children(grace=5) as children:
        await children.start_kept(spec("a", short))
        await trio.sleep(15)
        (child,) = children.snapshot()
        assert (child.restarts, child.last_error) == (1, None)


async def test_kept_child_over_its_limit_ends_the_block(autojump_clock) -> None:
    made = Recorder()
    sink = MemorySink()
    with pytest.raises(RestartLimitReached, match="a needed more than 1") as caught:
        async with open_children(grace=5, events=Events(sink)) as children:
            await children.start_kept(spec("a", made.actor("a", fails_after=1), limit=1))
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, ValueError)
    assert sink.of(ActorEnded)[0].failure is caught.value


async def test_negative_grace_is_refused() -> None:
    with pytest.raises(ValueError, match="grace"):
        async with open_children(grace=-1):
            pass
