"""Statistics: medians, percentiles, ratios of rounds, backlogs, and the search for the highest rate that lasts. No I/O."""

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Ratio", "backlog_seconds", "done_at", "highest_rate", "percentile", "ratio_of", "sustained"]

LEFT_SECONDS = 0.5  # of backlog that may be left
PACE = 0.98  # share of the wanted rate that the producer must have reached
REACH = 1.25  # factor by which a search moves while it has no bound yet


@dataclass(frozen=True)
class Ratio:
    """Product over baseline, one of each per round: the median and the range."""

    median: float
    low: float
    high: float

    def text(self) -> str:
        """Return it in words."""
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_of(product: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Return the ratios round by round. Raises: ValueError when there are not as many of each, or none."""
    ratios = [ours / theirs for ours, theirs in zip(product, baseline, strict=True)]
    if not ratios:
        raise ValueError("a ratio needs at least one round")
    return Ratio(median(ratios), min(ratios), max(ratios))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    if not values:
        raise ValueError("no values, no percentile")
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}, allowed is above 0 up to 1")
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def done_at(samples: Sequence[tuple[float, int]], when: float) -> float:
    """Return how many were handled at a time, between two samples as if they came evenly.

    Args:
        samples: (time, handled so far), ascending.
        when: the time; before the first sample nothing was handled.
    """
    at = bisect_right(samples, when, key=lambda sample: sample[0])
    if at == 0:
        return 0.0
    if at == len(samples):
        return float(samples[-1][1])
    (t0, n0), (t1, n1) = samples[at - 1], samples[at]
    return n0 + (n1 - n0) * (when - t0) / (t1 - t0)


def backlog_seconds(sent: int, handled: float, rate: float) -> float:
    """Return how many seconds of production at this rate have not been handled yet."""
    return max(0.0, sent - handled) / rate


def sustained(*, rate: float, sent: int, seconds: float, backlog: float) -> bool:
    """Say whether a paced run lasted: the producer kept the pace, and nearly nothing was left at its end."""
    return sent >= PACE * rate * seconds and backlog < LEFT_SECONDS


async def highest_rate(lasts: Callable[[float], Awaitable[bool]], first: float, precision: float) -> float:
    """Return the highest rate that lasts, by bisection from a first guess; at most `precision` (a share) below the limit.

    Without a bound the guess moves by a quarter, so a guess of any quality does. Raises: ValueError when nothing down to a
    thousandth of the guess lasts.
    """
    low, high, rate = 0.0, float("inf"), first
    while True:
        if await lasts(rate):
            low = rate
        else:
            high = rate
        if low and high / low <= 1 + precision:
            return low
        if high == float("inf"):
            rate = low * REACH
        elif not low:
            rate = high / REACH
            if rate < first / 1_000:
                raise ValueError(f"no rate down to {rate:.0f} a second lasts")
        else:
            rate = (low + high) / 2
