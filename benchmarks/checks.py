"""The checker of every case: each produced message was handled exactly once. Pure, and nothing else is imported here."""

from dataclasses import dataclass

__all__ = ["Verdict", "check"]


@dataclass(frozen=True)
class Verdict:
    """What became of the messages numbered 0 to `produced` - 1.

    Attributes:
        produced: how many there were.
        lost: how many were never handled. twice: how many were handled more than once.
        strange: how many were handled that nobody produced.
    """

    produced: int
    lost: int
    twice: int
    strange: int

    @property
    def sound(self) -> bool:
        """Whether there is nothing to complain of, and something was measured at all."""
        return self.produced > 0 and not (self.lost or self.twice or self.strange)

    def text(self) -> str:
        """Return it in words."""
        return (
            f"{self.produced:,} produced, {self.lost:,} lost, {self.twice:,} twice, {self.strange:,} strange"
        )


def check(counts: bytes | bytearray, produced: int) -> Verdict:
    """Judge a run.

    Args:
        counts: at [n] how often message n was handled, counted up to 255.
        produced: messages 0 to produced - 1 were committed.
    """
    known = counts[:produced]
    lost = known.count(0) + max(0, produced - len(counts))
    once = known.count(1)
    return Verdict(produced, lost, len(known) - known.count(0) - once, sum(map(bool, counts[produced:])))
