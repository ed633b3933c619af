"""How far a range and a group are: the resolved prefix of a range, and the two marks of a group.

An id counts as resolved in its range when its run has finished or when it has an exception row, which then stands for it.
Ids that are not in the log (rolled back, dropped, filtered out) need nobody and count as resolved.

Source: docs/explanation/claim-log.md
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from operator import lt

from sqlstreams.model.values import Marks, Progress

__all__ = ["RangeProgress", "forward", "marks_of", "movable", "resolved_prefix"]

_OPEN, _FINISHED, _EXCEPTED = 0, 1, 2


def marks_of(progress: Progress) -> Marks:
    """Return the marks that the facts allow; they may lie below the stored ones, which never move back (see `forward`).

    Guarantee: `committed` passes no unresolved exception and nothing of an open range that is above its resolved
    prefix. `ranges_done` is the lowest *low* of an open range, never its resolved prefix: scans for open ranges start
    there and would miss it.
    """
    newest = progress.newest_high
    ranges_done = newest if progress.lowest_open_low is None else progress.lowest_open_low
    committed = newest if progress.lowest_open_through is None else progress.lowest_open_through
    if progress.lowest_unresolved is not None:
        committed = min(committed, progress.lowest_unresolved - 1)
    return Marks(ranges_done, committed)


def forward(stored: Marks | Progress, marks: Marks) -> Marks:
    """Return what is stored next: each mark moves forward or stays."""
    return Marks(max(stored.ranges_done, marks.ranges_done), max(stored.committed, marks.committed))


def movable(stored: Marks | Progress, marks: Marks) -> bool:
    """Say whether writing `marks` would move one of the stored ones; if not, nothing is written."""
    return marks.ranges_done > stored.ranges_done or marks.committed > stored.committed


def resolved_prefix(start_above: int, high: int, states: Mapping[int, bool]) -> int:
    """Return the highest `done_through` of a range: every id up to it is finished, has an exception row, or is absent.

    `states` says of every id that was read from (start_above, high] whether it is finished or has an exception row.
    """
    unresolved = (id_ for id_, resolved in states.items() if start_above < id_ <= high and not resolved)
    return min(unresolved, default=high + 1) - 1


class RangeProgress:
    """What of a range is resolved, kept while it runs: the same answer as `resolved_prefix`, in O(1) a message.

    Whoever records writes the exception rows of ids up to `through` only: a successor starts above it and reads the
    rest anew, so a row up there would stand for a message that is delivered all the same.

    Args: the range is (start_above, high], `ids` are the ids that were read from it, ascending. Telling it twice
    about one id changes nothing; the first state stays.
    """

    __slots__ = ("_first_open", "_high", "_ids", "_index", "_left", "_states")

    def __init__(self, start_above: int, high: int, ids: Sequence[int]) -> None:
        if ids and not (start_above < ids[0] and ids[-1] <= high and all(map(lt, ids, islice(ids, 1, None)))):
            raise ValueError(f"the ids of the range ({start_above}, {high}] are not ascending in it")
        self._ids = ids
        self._high = high
        self._states = bytearray(len(ids))
        self._first_open = 0
        self._left = len(ids)
        self._index: dict[int, int] | None = None  # made when somebody asks by id

    @property
    def through(self) -> int:
        """The highest possible `done_through`: every id read up to it is resolved; `high` when all are."""
        return self._ids[self._first_open] - 1 if self._left else self._high

    @property
    def left(self) -> int:
        """How many of the ids are not resolved."""
        return self._left

    def finish(self, id_: int) -> None:
        """Note that the id's run has finished. Raises KeyError when it is not of this range."""
        self._resolve(self._at(id_), _FINISHED)

    def except_(self, id_: int) -> None:
        """Note that the id gets an exception row in the transaction that records. Raises KeyError as `finish`."""
        self._resolve(self._at(id_), _EXCEPTED)

    def finish_index(self, i: int) -> None:
        """Note that the run of ids[i] has finished."""
        self._resolve(i, _FINISHED)

    def except_index(self, i: int) -> None:
        """Note that ids[i] gets an exception row in the transaction that records."""
        self._resolve(i, _EXCEPTED)

    def open_ids(self) -> list[int]:
        """Return the ids that are not resolved, ascending."""
        return [id_ for id_, state in zip(self._ids, self._states, strict=True) if state == _OPEN]

    def excepted_ids(self) -> list[int]:
        """Return the ids that were noted with `except_`, ascending."""
        return [id_ for id_, state in zip(self._ids, self._states, strict=True) if state == _EXCEPTED]

    def _at(self, id_: int) -> int:
        if self._index is None:
            self._index = {each: i for i, each in enumerate(self._ids)}
        return self._index[id_]

    def _resolve(self, i: int, state: int) -> None:
        states = self._states
        if states[i] != _OPEN:
            return
        states[i] = state
        self._left -= 1
        if i == self._first_open and self._left:
            self._first_open = states.find(_OPEN, i)
