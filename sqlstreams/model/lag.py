"""How far a group is behind, in messages and in seconds.

Source: docs/explanation/claim-log.md
"""

from datetime import timedelta

import msgspec

__all__ = ["Lag", "lag_of"]


class Lag(msgspec.Struct, frozen=True):
    """How far a group is behind.

    Attributes:
        messages: ids that are not resolved yet; burnt ids above the newest claim are counted, since nobody has looked.
        seconds: age of the oldest unresolved message; 0.0 when there is none.
        head: newest id that was drawn.
        settled: every id up to it is committed or aborted.
        committed: everything up to it is finally resolved for the group.
    """

    messages: int
    seconds: float
    head: int
    settled: int
    committed: int


def lag_of(
    *,
    head: int,
    settled: int,
    committed: int,
    newest_high: int,
    open_ids: int,
    unresolved: int,
    oldest_age: timedelta | None,
) -> Lag:
    """Compute the lag from what was counted.

    Guarantee: no number is negative, also when the parts were read at different instants, and the seconds are 0 exactly
    when no message is unresolved or none is old.

    Args:
        head: newest drawn id. An observation may be older than the newest claim; then nothing is above that claim.
        settled: the settled head.
        committed: the group's committed.
        newest_high: high of the newest claim.
        open_ids: ids of open ranges above their done_through.
        unresolved: exceptions that are neither dead nor superseded.
        oldest_age: age of the oldest unresolved message, None when none was found.
    """
    head = max(head, 0)
    messages = max(head - newest_high, 0) + max(open_ids, 0) + max(unresolved, 0)
    seconds = 0.0 if oldest_age is None or not messages else max(oldest_age.total_seconds(), 0.0)
    return Lag(messages, seconds, head, min(max(settled, 0), head), max(committed, 0))
