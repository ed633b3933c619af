"""Marks of a group and the resolved prefix of a range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstreams.model.progress import RangeProgress, forward, marks_of, movable, resolved_prefix
from sqlstreams.model.values import Marks, Progress


def progress(
    newest_high: int, low: int | None = None, through: int | None = None, unresolved: int | None = None
):
    return Progress(0, 0, 0, newest_high, low, through, unresolved)


def test_b11_a_failed_message_holds_committed_until_it_is_resolved():
    assert marks_of(progress(6, unresolved=3)) == Marks(6, 2)
    assert marks_of(progress(6)) == Marks(6, 6)


def test_b11_a_redrive_does_not_lower_committed():
    stored = Marks(6, 6)
    marks = marks_of(progress(6, unresolved=5))
    assert marks == Marks(6, 4)
    assert not movable(stored, marks)
    assert forward(stored, marks) == stored


def test_b14_committed_reaches_into_an_open_range_and_ranges_done_does_not():
    """Range (0,10], done_through 4, exception 4: committed 3, while scans still start at 0."""
    assert marks_of(progress(10, low=0, through=4, unresolved=4)) == Marks(0, 3)
    assert marks_of(progress(10, low=0, through=3)) == Marks(0, 3)


def test_b13_a_delayed_message_holds_committed_and_not_ranges_done():
    assert marks_of(progress(1_000_000, unresolved=5)) == Marks(1_000_000, 4)


def test_b12_marks_move_one_by_one():
    assert movable(Marks(5, 5), Marks(6, 4))
    assert movable(Marks(5, 5), Marks(4, 6))
    assert not movable(Marks(5, 5), Marks(5, 5))
    assert forward(Marks(5, 5), Marks(6, 4)) == Marks(6, 5)
    assert movable(progress(9), Marks(0, 1))
    assert forward(progress(9), Marks(0, 1)) == Marks(0, 1)


# A claim log: contiguous ranges with what is resolved of each; and unresolved exceptions.
ranges = st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 5)), min_size=1, max_size=8)


@given(ranges, st.sets(st.integers(1, 45), max_size=4))
def test_b12_committed_is_the_last_id_before_anything_open(lengths, exceptions):
    open_ranges, blocked, low = [], set(), 0
    for length, done, resolved in lengths:
        through = low + min(resolved, length - 1)
        if not done:
            open_ranges.append((low, through))
            blocked.update(range(through + 1, low + length + 1))
        low += length
    exceptions = {id_ for id_ in exceptions if id_ <= low}
    read = Progress(
        0,
        0,
        0,
        low,
        min((each for each, _ in open_ranges), default=None),
        min((through for _, through in open_ranges), default=None),
        min(exceptions, default=None),
    )
    marks = marks_of(read)
    assert marks.committed == min(blocked | exceptions, default=low + 1) - 1
    assert marks.ranges_done == min((each for each, _ in open_ranges), default=low)


@given(st.lists(st.builds(Marks, st.integers(0, 50), st.integers(0, 50)), min_size=1))
def test_b12_stored_marks_never_move_back(writes):
    stored = Marks(0, 0)
    for marks in writes:
        after = forward(stored, marks)
        assert after.committed >= stored.committed
        assert after.ranges_done >= stored.ranges_done
        assert movable(stored, marks) == (after != stored)
        stored = after


def test_b3_absent_ids_need_nobody():
    assert resolved_prefix(0, 3, {}) == 3
    assert RangeProgress(0, 3, []).through == 3


def test_b14_the_prefix_ends_before_the_first_open_id():
    states = {id_: id_ <= 3 for id_ in range(1, 11)}
    assert resolved_prefix(0, 10, states) == 3
    assert resolved_prefix(4, 10, states) == 4
    assert resolved_prefix(0, 3, states) == 3
    assert resolved_prefix(0, 3, {5: False}) == 3


def test_b15_concurrent_ends_count_up_to_the_first_gap():
    """1, 3 and 5 finished, 2 and 4 running: handed back with rows for both, nothing is skipped."""
    work = RangeProgress(0, 10, range(1, 11))
    for id_ in (1, 3, 5):
        work.finish(id_)
    assert work.through == 1
    work.except_(2)
    assert work.through == 3
    work.except_(4)
    assert work.through == 5
    assert work.open_ids() == [6, 7, 8, 9, 10]
    assert work.excepted_ids() == [2, 4]


def test_b15_what_was_held_back_below_the_highest_started_id_stops_the_prefix():
    """1, 3 and 4 finished, 5 cut short, 2 never started: without a row for 2 only 1 is resolved."""
    work = RangeProgress(0, 10, range(1, 6))
    for id_ in (1, 3, 4):
        work.finish(id_)
    work.except_(5)
    assert work.through == 1
    work.except_(2)
    assert work.through == 10
    assert work.left == 0


def test_an_id_is_resolved_once():
    work = RangeProgress(0, 2, [1, 2])
    work.finish(1)
    work.except_(1)
    work.finish_index(0)
    assert (work.left, work.through, work.excepted_ids()) == (1, 1, [])
    with pytest.raises(KeyError):
        work.finish(3)


@pytest.mark.parametrize("ids", [[2, 1], [1, 1], [0], [11], [5, 11]])
def test_ids_outside_or_out_of_order_are_refused(ids):
    with pytest.raises(ValueError, match="not ascending"):
        RangeProgress(0, 10, ids)


@given(st.data())
def test_b14_b15_range_progress_is_resolved_prefix_kept_up_to_date(data):
    start = data.draw(st.integers(0, 5))
    ids = sorted(data.draw(st.sets(st.integers(start + 1, start + 20), max_size=12)))
    high = data.draw(st.integers(max(ids, default=start), start + 25))
    work = RangeProgress(start, high, ids)
    states = dict.fromkeys(ids, False)
    assert work.through == resolved_prefix(start, high, states)
    order = data.draw(st.lists(st.sampled_from(range(len(ids))), max_size=20)) if ids else []
    for i in order:
        how = data.draw(st.sampled_from(["finish", "except_", "finish_index", "except_index"]))
        getattr(work, how)(i if how.endswith("index") else ids[i])
        states[ids[i]] = True
        assert work.through == resolved_prefix(start, high, states)
        assert work.open_ids() == [id_ for id_, resolved in states.items() if not resolved]
        assert work.left == len(work.open_ids())
        assert start <= work.through <= high
        assert all(resolved for id_, resolved in states.items() if id_ <= work.through)
