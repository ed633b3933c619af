"""Lag is never negative and adds up."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from sqlstreams.model.lag import Lag, lag_of


def test_l1_five_unread_messages():
    lag = lag_of(
        head=5,
        settled=5,
        committed=0,
        newest_high=0,
        open_ids=0,
        unresolved=0,
        oldest_age=timedelta(seconds=3),
    )
    assert lag == Lag(messages=5, seconds=3.0, head=5, settled=5, committed=0)


def test_l1_caught_up_is_zero_seconds():
    lag = lag_of(
        head=5,
        settled=5,
        committed=5,
        newest_high=5,
        open_ids=0,
        unresolved=0,
        oldest_age=timedelta(seconds=3),
    )
    assert lag == Lag(0, 0.0, 5, 5, 5)


def test_a9_an_emptied_log_has_no_lag():
    lag = lag_of(
        head=1_000,
        settled=1_000,
        committed=1_000,
        newest_high=1_000,
        open_ids=0,
        unresolved=0,
        oldest_age=None,
    )
    assert (lag.messages, lag.head, lag.seconds) == (0, 1_000, 0.0)


def test_lag_is_not_head_minus_committed():
    """1,000,000 ids are done above a delayed message: one message is behind."""
    lag = lag_of(
        head=1_000_000,
        settled=1_000_000,
        committed=4,
        newest_high=1_000_000,
        open_ids=0,
        unresolved=1,
        oldest_age=timedelta(days=1),
    )
    assert (lag.messages, lag.seconds) == (1, 86_400.0)


@given(*[st.integers(-10, 10)] * 6, st.none() | st.timedeltas())
def test_a9_no_number_is_negative(head, settled, committed, newest_high, open_ids, unresolved, oldest_age):
    lag = lag_of(
        head=head,
        settled=settled,
        committed=committed,
        newest_high=newest_high,
        open_ids=open_ids,
        unresolved=unresolved,
        oldest_age=oldest_age,
    )
    assert min(lag.messages, lag.seconds, lag.head, lag.settled, lag.committed) >= 0
    assert lag.settled <= lag.head
    assert lag.messages or not lag.seconds
