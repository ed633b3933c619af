"""Retry arithmetic: budget, waits, takeovers."""

from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sqlstreams.errors import ConfigurationError
from sqlstreams.model.retry import (
    MAX_WAIT,
    Dead,
    RetryIn,
    RetryPolicy,
    Run,
    after_failure,
    overdrawn,
    takeover,
)

SECOND = timedelta(seconds=1)
DEFAULT = RetryPolicy(3, 5 * SECOND, SECOND, timedelta(minutes=5))

durations = st.timedeltas(timedelta(0), timedelta.max)
policies = st.builds(RetryPolicy, st.integers(0, 20_000), durations, durations, durations)
chances = st.floats(0, 1)


def test_c2_three_retries_wait_5_1_2_seconds_at_most():
    waits = [after_failure(n, 0, DEFAULT, 1.0) for n in (1, 2, 3)]
    assert waits == [RetryIn(5 * SECOND), RetryIn(SECOND), RetryIn(2 * SECOND)]
    assert after_failure(4, 0, DEFAULT, 1.0) == Dead("retries used up")


def test_c2_jitter_is_full_except_for_the_first_failure():
    assert after_failure(1, 0, DEFAULT, 0.0) == RetryIn(5 * SECOND)
    assert after_failure(3, 0, DEFAULT, 0.0) == RetryIn(timedelta(0))
    assert after_failure(3, 0, DEFAULT, 0.25) == RetryIn(SECOND / 2)


def test_c3_without_retries_the_first_failure_is_dead_and_so_is_a_death_in_flight():
    policy = RetryPolicy(0, SECOND, SECOND, SECOND)
    assert isinstance(after_failure(3, 2, policy, 0.5), Dead)
    assert isinstance(takeover(2, 2, policy), Dead)


def test_c4_a_takeover_counts_one_attempt_and_the_budget_decides():
    assert takeover(3, 1, DEFAULT) == Run(4)
    assert isinstance(takeover(4, 1, DEFAULT), Dead)


def test_c5_waits_grow_to_the_cap():
    policy = RetryPolicy(6, 60 * SECOND, SECOND, 3 * SECOND)
    waits = [after_failure(2 * n, n, policy, 1.0) for n in range(1, 7)]
    assert waits == [RetryIn(n * SECOND) for n in (60, 1, 2, 3, 3, 3)]
    assert isinstance(after_failure(14, 7, policy, 1.0), Dead)


def test_d8_a_lowered_budget_makes_a_row_overdrawn():
    assert not overdrawn(3, 0, DEFAULT)
    assert overdrawn(3, 0, RetryPolicy(2, SECOND, SECOND, SECOND))
    assert not overdrawn(3, 1, RetryPolicy(2, SECOND, SECOND, SECOND))


@given(st.integers(0, 20_000), st.integers(0, 100), policies, chances)
@example(1, 0, RetryPolicy(3, timedelta.max, timedelta.max, timedelta.max), 0.5)
@example(10_000, 0, RetryPolicy(20_000, timedelta.max, timedelta.max, timedelta.max), 1.0)
@example(2, 0, RetryPolicy(3, timedelta.max, timedelta.resolution, timedelta.max), 1.0)
def test_c5_q5_no_wait_is_negative_or_too_long(attempts, delays, policy, chance):
    verdict = after_failure(attempts + delays, delays, policy, chance)
    if attempts > policy.max_retries:
        assert isinstance(verdict, Dead)
    else:
        assert isinstance(verdict, RetryIn)
        assert timedelta(0) <= verdict.wait <= MAX_WAIT
        if attempts > 1:
            assert verdict.wait <= policy.cap


@given(st.integers(1, 10_000), st.integers(0, 100), policies, chances)
def test_c5_delays_touch_neither_budget_nor_backoff(attempts, delays, policy, chance):
    """A delayed message is judged as if the delays had never been."""
    assert after_failure(attempts, 0, policy, chance) == after_failure(
        attempts + delays, delays, policy, chance
    )
    assert isinstance(takeover(attempts, 0, policy), Dead) == isinstance(
        takeover(attempts + delays, delays, policy), Dead
    )


@given(st.integers(2, 100), policies, chances, chances)
def test_c5_more_chance_is_no_shorter_wait_and_more_failures_no_shorter_bound(failures, policy, one, other):
    low, high = sorted((one, other))
    first, second = (after_failure(failures, 0, policy, chance) for chance in (low, high))
    later = after_failure(failures + 1, 0, policy, 1.0)
    if isinstance(first, RetryIn) and isinstance(second, RetryIn):
        assert first.wait <= second.wait
        if isinstance(later, RetryIn):
            assert second.wait <= later.wait


@given(st.integers(0, 100), st.integers(0, 100), policies, chances)
def test_d3_a_takeover_decides_as_a_failure_does(attempts, delays, policy, chance):
    died = takeover(attempts + delays, delays, policy)
    failed = after_failure(attempts + delays + 1, delays, policy, chance)
    assert isinstance(died, Dead) == isinstance(failed, Dead)
    assert isinstance(died, Dead) or died.attempts == attempts + delays + 1


@given(st.integers(0, 1_000))
def test_d3_a_message_that_always_kills_runs_max_retries_plus_one_times_alone(max_retries):
    policy = RetryPolicy(max_retries, SECOND, SECOND, SECOND)
    attempts, runs = 0, 1
    while isinstance(verdict := takeover(attempts, 0, policy), Run):
        attempts, runs = verdict.attempts, runs + 1
    assert runs == max_retries + 1


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ((-1, SECOND, SECOND, SECOND), "max_retries"),
        ((0, -SECOND, SECOND, SECOND), "initial_backoff"),
        ((0, SECOND, -SECOND, SECOND), "base"),
        ((0, SECOND, SECOND, -SECOND), "cap"),
    ],
)
def test_o7_a_negative_setting_is_refused_by_its_name(values, field):
    with pytest.raises(ConfigurationError, match=field):
        RetryPolicy(*values)
