"""Restart decisions: kinds, intensity, backoff."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import Backoff, Intensity, should_restart
from tests.actors.histories import RunHistory, restarts_stay_within_intensity, seeded

gaps = st.lists(st.floats(0, 100), max_size=60)


@pytest.mark.parametrize(
    ("kind", "after_return", "after_failure"),
    [("permanent", True, True), ("transient", False, True), ("temporary", False, False)],
)
def test_restart_kind_decides_by_how_the_actor_ended(kind, after_return, after_failure) -> None:
    assert should_restart(kind, None) is after_return
    assert should_restart(kind, ValueError()) is after_failure


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 5), st.floats(0.1, 200), gaps)
def test_no_window_holds_more_than_the_limit(limit, within, waits) -> None:
    intensity, now, allowed = Intensity(limit, within), 0.0, []
    for wait in waits:
        now += wait
        if intensity.record(now):
            allowed.append(now)
    # the limit of restarts, and no run that began it
    assert restarts_stay_within_intensity(RunHistory(limit - 1, within, allowed)) == []


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.floats(0.1, 200), st.integers(1, 50))
def test_failures_farther_apart_than_the_window_are_always_allowed(limit, within, times) -> None:
    intensity = Intensity(limit, within)
    assert all(intensity.record(n * within * 1.001) for n in range(times))


def test_a_failure_each_30_s_never_reaches_3_in_60() -> None:
    intensity = Intensity(2, 60)
    assert all(intensity.record(n * 30.0) for n in range(100))


def test_refused_restarts_do_not_count() -> None:
    intensity = Intensity(1, 10)
    assert [intensity.record(now) for now in (0, 5, 9, 10, 11)] == [True, False, False, True, False]


def test_limit_0_allows_none() -> None:
    assert not Intensity(0, 10).record(1.0)


@settings(deadline=None, max_examples=100)
@given(st.floats(0, 10), st.floats(0, 1e6), st.floats(1, 1e300), st.floats(0, 1), st.integers())
def test_backoff_never_exceeds_its_cap_and_never_leaves_its_share(
    initial, more, factor, jitter, seed
) -> None:
    cap = initial + more
    backoff = Backoff(initial, cap, factor, random=seeded(seed), jitter=jitter)
    step = initial
    for _ in range(50):
        delay = backoff()
        assert step * (1 - jitter) <= delay <= step <= cap
        step = min(step * factor, cap)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 20), st.integers())
def test_backoff_begins_anew_after_a_reset(failures, seed) -> None:
    backoff = Backoff(1.0, 60.0, random=seeded(seed))
    for _ in range(failures):
        backoff()
    backoff.reset()
    assert backoff() <= 1.0


def test_backoff_without_jitter_doubles_up_to_the_cap() -> None:
    backoff = Backoff(1.0, 5.0, random=seeded(), jitter=0.0)
    assert [backoff() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Intensity(-1, 60),
        lambda: Intensity(1, 0),
        lambda: Intensity(1, float("nan")),
        lambda: Backoff(2.0, 1.0, random=seeded()),
        lambda: Backoff(-1.0, 1.0, random=seeded()),
        lambda: Backoff(1.0, 2.0, 0.5, random=seeded()),
        lambda: Backoff(1.0, 2.0, random=seeded(), jitter=1.5),
    ],
)
def test_wrong_settings_are_refused(make) -> None:
    with pytest.raises(ValueError, match="must"):
        make()
