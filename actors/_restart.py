"""Restarts: whether, how often, how soon.

Pure: no clock, no I/O. Time and chance come in as arguments.
"""

from collections import deque
from random import Random
from typing import Literal, assert_never

RestartKind = Literal["permanent", "transient", "temporary"]
"""permanent: restart whenever it ends. transient: only after a failure. temporary: never."""


def should_restart(kind: RestartKind, failure: BaseException | None) -> bool:
    """Decide whether an actor that has ended starts again; `failure` is None when it simply returned."""
    match kind:
        case "permanent":
            return True
        case "transient":
            return failure is not None
        case "temporary":
            return False
        case _:
            assert_never(kind)


class Intensity:
    """How often is too often: more than `limit` restarts within a sliding window of `within` seconds.

    It remembers at most `limit` times. One object belongs to one actor.
    """

    def __init__(self, limit: int, within: float) -> None:
        """Allow `limit` restarts (0 or more) in any `within` seconds (above 0)."""
        if limit < 0:
            raise ValueError(f"limit is {limit}, must be 0 or more")
        if not within > 0:
            raise ValueError(f"within is {within} s, must be above 0")
        self.limit = limit
        self.within = within
        self._times: deque[float] = deque()

    def record(self, now: float) -> bool:
        """Record a restart wanted at `now`, in seconds of a clock that never goes back.

        Guarantee: no window (t - within, t] holds more than `limit` allowed restarts.
        Returns: False when this one exceeds the limit; it is then not counted.
        """
        while self._times and self._times[0] <= now - self.within:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return False
        self._times.append(now)
        return True


class Backoff:
    """How long to wait before the next try: growing, jittered, capped. Call it for the seconds.

    One object belongs to one actor: each call is one more failure in a row, until `reset()`.
    """

    def __init__(
        self, initial: float, cap: float, factor: float = 2.0, *, random: Random, jitter: float = 1.0
    ) -> None:
        """Begin at `initial` seconds, multiply by `factor` a call, stop growing at `cap` seconds.

        Args:
            initial: Seconds before the first retry, 0 or more.
            cap: The most that is ever waited, in seconds; not below `initial`.
            factor: Growth a call, 1 or more.
            random: Where the jitter comes from.
            jitter: The share of the wait that is left to chance: 1.0 is full jitter, 0.0 is none.
        """
        if not 0 <= initial <= cap:
            raise ValueError(f"initial is {initial} s, must lie between 0 and the cap of {cap} s")
        if not factor >= 1:
            raise ValueError(f"factor is {factor}, must be 1 or more")
        if not 0 <= jitter <= 1:
            raise ValueError(f"jitter is {jitter}, must lie between 0 and 1")
        self._initial = initial
        self._cap = cap
        self._factor = factor
        self._random = random
        self._jitter = jitter
        self._next = initial

    def __call__(self) -> float:
        """Return the seconds to wait now: at most the cap, at least the share that is not jitter."""
        step = self._next
        self._next = min(step * self._factor, self._cap)
        return step * (1 - self._jitter * self._random.random())

    def reset(self) -> None:
        """Begin again at `initial`: the next failure is a first one."""
        self._next = self._initial
