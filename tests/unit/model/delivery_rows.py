"""What the delivery model is made of: a script of choices, the rows, and what a process remembers.

Everything here is data; what happens to it is in `delivery_server`, `delivery_consumer` and `delivery_model`.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

from sqlstreams.model.fence import Observations
from sqlstreams.model.outcome import ExceptionRow
from sqlstreams.model.progress import RangeProgress
from sqlstreams.model.retry import RetryPolicy
from sqlstreams.model.values import Claim, Marks, MessageId, Progress, Token

POLICY = RetryPolicy(2, timedelta(seconds=5), timedelta(seconds=1), timedelta(minutes=5))


class Violation(AssertionError):
    """An invariant does not hold."""


def demand(holds: bool, message: str) -> None:
    """Raise Violation unless it holds."""
    if not holds:
        raise Violation(message)


class Script:
    """Choices out of bytes; 0 when they have run out."""

    def __init__(self, script: bytes) -> None:
        self._script = script
        self._at = 0

    @property
    def over(self) -> bool:
        """Whether all bytes are used."""
        return self._at >= len(self._script)

    def choose(self, n: int) -> int:
        """Return a number in [0, n)."""
        if self.over:
            return 0
        self._at += 1
        return self._script[self._at - 1] % n


@dataclass(slots=True)
class Writer:
    """A transaction with the log's lock, or one that has committed and still has it."""

    locked_at: int  # the sequence when it took the lock
    ids: list[int] = field(default_factory=list)
    savepoint: int | None = None
    lock_in_savepoint: bool = False
    committed: bool = False


@dataclass(slots=True)
class ClaimRow:
    """A row of the claim log."""

    low: int
    high: int
    token: Token | None
    node: int | None
    through: int
    done: bool = False
    reclaims: int = 0


@dataclass(slots=True)
class QueueRow:
    """A row of the exception queue."""

    status: str
    attempts: int
    delays: int
    token: Token | None = None
    node: int | None = None


@dataclass(slots=True)
class Message:
    """What the rows need of a message."""

    id: MessageId
    serial: int
    message_key: str | None = None
    schema_version: int = 1


class Group:
    """A group's rows, and what only the checks know of it."""

    def __init__(self) -> None:
        self.claims: dict[int, ClaimRow] = {-1: ClaimRow(-1, 0, None, None, 0, done=True)}
        self.queue: dict[int, QueueRow] = {}
        self.marks = Marks(0, 0)
        self.policy = POLICY
        # for the checks
        self.handed_through = 0
        self.succeeded: set[int] = set()
        self.runs: Counter[int] = Counter()
        self.allowed: dict[int, int] = {}

    def unresolved(self) -> list[int]:
        """Return the ids whose exceptions hold committed."""
        return [id_ for id_, row in self.queue.items() if row.status != "dead"]

    def allow_again(self, serial: int) -> None:
        """Note that one more run of the message is legitimate."""
        self.allowed[serial] = self.runs[serial] + 1


@dataclass(slots=True)
class Owned:
    """A range in the hands of a process; read when its messages were read."""

    claim: Claim
    recorded: int
    messages: list[Message] | None = None
    progress: RangeProgress | None = None
    started: int = 0
    running: dict[int, Message] = field(default_factory=dict)  # by index
    held: dict[int, Message] = field(default_factory=dict)
    rows: dict[int, ExceptionRow] = field(default_factory=dict)  # outcomes by id, not written yet


class Process:
    """What one process remembers."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.observations = Observations()
        self.half: tuple[int, int] | None = (
            None  # head of a statement that has not scanned the locks yet, and when
        )
        self.ranges: dict[tuple[int, int], Owned] = {}
        self.exceptions: list[tuple[int, Message, int, int, Token]] = []
        self.read: tuple[int, Progress, Marks] | None = None
        self.guard_fired = False
