"""The trace: what happened in a run, when, in order; made to be compared and read."""

from collections import deque
from typing import NamedTuple

import trio


class Step(NamedTuple):
    """One line of a trace: seconds since the trace began, what happened, and its facts by name."""

    at: float
    what: str
    facts: tuple[tuple[str, object], ...]

    def line(self) -> str:
        """Return it as text."""
        return " ".join([f"{self.at:.6f}", self.what, *(f"{name}={value!r}" for name, value in self.facts)])


class Trace:
    """Records the newest steps of a run."""

    def __init__(self, limit: int = 100_000) -> None:
        """Keep at most `limit` steps. Create it inside trio: its time counts from now."""
        self._began = trio.current_time()
        self._steps: deque[Step] = deque(maxlen=limit)
        self._count = 0

    def add(self, what: str, /, **facts: object) -> None:
        """Record a step. Facts should have a repr that is the same in every process."""
        self._count += 1
        self._steps.append(Step(trio.current_time() - self._began, what, tuple(sorted(facts.items()))))

    @property
    def steps(self) -> tuple[Step, ...]:
        """What is kept, oldest first."""
        return tuple(self._steps)

    @property
    def dropped(self) -> int:
        """How many steps there were beyond the limit."""
        return self._count - len(self._steps)

    def text(self) -> str:
        """Return a line a step, after one for what was dropped."""
        head = [f"... {self.dropped} earlier"] if self.dropped else []
        return "\n".join([*head, *(step.line() for step in self._steps)])
