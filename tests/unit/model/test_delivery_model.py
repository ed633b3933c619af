"""The decisions hold together under random interleavings, and the checker sees when one of them is broken."""

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sqlstreams.model.progress import marks_of
from sqlstreams.model.values import Marks, Observation, Progress, ServerRun
from tests.unit.model.delivery_model import EVENTS, World
from tests.unit.model.delivery_rows import ClaimRow, Group, Owned, Process, Violation

SABOTAGE_SEEDS = 400


def explore(examples: int) -> Counter[str]:
    """Play so many scripts, print how often each event happened, and return it."""
    happened: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=1_200, max_size=1_800))
    def play(script):
        world = World(script)
        try:
            world.play()
        finally:
            happened.update(world.happened)

    play()
    for event in sorted(EVENTS):
        print(f"{happened[event]:8} {event}")
    return happened


def assert_everything_happened(happened: Counter[str]) -> None:
    assert set(happened) <= EVENTS, f"not declared: {sorted(set(happened) - EVENTS)}"
    assert set(happened) == EVENTS, f"never happened: {sorted(EVENTS - set(happened))}"


def test_a1_a7_a10_b1_b5_b8_b12_b15_c5_c6_nothing_is_lost_or_handled_twice():
    """300 random worlds; each of them ends with everything resolved and the marks at the head."""
    assert_everything_happened(explore(300))


@pytest.mark.slow
def test_a1_a7_a10_b1_b5_b8_b12_b15_c5_c6_nothing_is_lost_or_handled_twice_in_many_worlds():
    assert_everything_happened(explore(2_000))


def test_the_guard_against_a_model_that_does_too_little_is_not_blind():
    with pytest.raises(AssertionError, match="never happened"):
        assert_everything_happened(Counter({"claim": 1}))


class LocksBeforeTheSequence(World):
    """Observes who writes first and what was drawn second."""

    def observe_head(self, process: Process) -> None:
        process.half = (0, self.steps)
        process.early_writers = frozenset(self.writers)  # type: ignore[attr-defined]

    def observe_locks(self, process: Process) -> None:
        if process.half is not None:
            process.half = None
            self.learn(process, Observation(self.sequence, process.early_writers, self.run))  # type: ignore[attr-defined]


class ClaimsWithoutWaiting(World):
    """Takes the newest observed head for settled."""

    def settled_of(self, process: Process) -> tuple[int, ServerRun | None]:
        return process.observations.head, process.observations.run


class ForgetsTheServerRun(World):
    """Claims with what was settled on another server run."""

    def settled_of(self, process: Process) -> tuple[int, ServerRun | None]:
        return process.observations.settled, self.run


class HandsBackThroughTheHighestStarted(World):
    """Gives rows to what was cut short and steps over what was held back below it."""

    def resolve_on_hand_back(self, owned: Owned) -> int:
        held, owned.held = owned.held, {}
        through = super().resolve_on_hand_back(owned)
        started = [message.id for i, message in enumerate(owned.messages[: owned.started]) if i not in held]
        return max([through, *started])


class HandsBackWithoutRowsForWhatWasHeldBack(World):
    """Counts what was held back as resolved and writes no row for it."""

    def resolve_on_hand_back(self, owned: Owned) -> int:
        through = super().resolve_on_hand_back(owned)
        for message in owned.held.values():
            del owned.rows[message.id]
        return through


class CommittedFromLowsOnly(World):
    """Ignores what is resolved of an open range."""

    def marks(self, progress: Progress) -> Marks:
        marks = marks_of(progress)
        return Marks(marks.ranges_done, min(marks.ranges_done, marks.committed))


class CommittedPassesExceptions(World):
    """Looks at the ranges only."""

    def marks(self, progress: Progress) -> Marks:
        marks = marks_of(progress)
        through = progress.lowest_open_through
        return Marks(marks.ranges_done, progress.newest_high if through is None else through)


class ScansFromThePrefix(World):
    """Lets ranges_done count done_through, so that scans miss the open range."""

    def marks(self, progress: Progress) -> Marks:
        marks = marks_of(progress)
        return Marks(max(marks.ranges_done, progress.lowest_open_through or 0), marks.committed)


class MarksMoveBack(World):
    """Writes stale marks as they are."""

    def stored_marks(self, stored: Marks, marks: Marks) -> Marks:
        return marks


class DeletesTheNewestClaim(World):
    """Deletes every done claim below ranges_done, the newest included."""

    def deletable(self, group: Group) -> list[int]:
        return [low for low, claim in group.claims.items() if claim.done and low < group.marks.ranges_done]


class DeletesAboveRangesDone(World):
    """Deletes every done claim but the newest."""

    def deletable(self, group: Group) -> list[int]:
        newest = max(group.claims)
        return [low for low, claim in group.claims.items() if claim.done and low < newest]


class TakesOverFromTheLow(World):
    """Ignores the recorded prefix."""

    def start_above(self, row: ClaimRow) -> int:
        return row.low


SABOTAGE = {
    LocksBeforeTheSequence: r"claimed while one of .* may appear",
    ClaimsWithoutWaiting: r"claimed while one of .* may appear",
    ForgetsTheServerRun: r"will be drawn|claimed while one of .* may appear",
    HandsBackThroughTheHighestStarted: r"done_through \d+ passes one of",
    HandsBackWithoutRowsForWhatWasHeldBack: r"group \d lost \d+|committed passed \d+, unseen",
    CommittedFromLowsOnly: r"the marks are .* and should be",
    CommittedPassesExceptions: r"the marks are .* and should be",
    ScansFromThePrefix: r"the marks are .* and should be",
    MarksMoveBack: r"moved back",
    DeletesTheNewestClaim: r"newest claim was deleted",
    DeletesAboveRangesDone: r"deleted above ranges_done",
    TakesOverFromTheLow: r"without a reason|has an exception row already",
}


@pytest.mark.parametrize("broken", SABOTAGE, ids=lambda broken: broken.__name__)
def test_sabotage_is_caught(broken):
    with pytest.raises(Violation, match=SABOTAGE[broken]):
        for seed in range(SABOTAGE_SEEDS):
            broken(Random(seed).randbytes(1_500)).play()


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (CommittedPassesExceptions, r"committed passed an unresolved"),
        (ScansFromThePrefix, r"open range below ranges_done"),
    ],
)
def test_sabotage_of_the_marks_is_caught_without_comparing_them(broken, check):
    """The comparison with the marks as computed from all rows is not the only thing that sees it."""

    class Blind(broken):
        def write_marks(self, process: Process) -> None:
            g, progress, _ = process.read
            process.read = g, progress, self.marks(progress)
            super().write_marks(process)

    with pytest.raises(Violation, match=check):
        for seed in range(SABOTAGE_SEEDS):
            Blind(Random(seed).randbytes(1_500)).play()
