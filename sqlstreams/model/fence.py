"""The fence: up to which id a log is settled, so that no id can be passed that may still appear.

An id is drawn before its transaction commits, so a smaller id can become visible after a larger one. A writer takes the
log's lock before it draws an id and keeps it until its commit is visible. An observation reads the sequence first and the
holders of that lock second. Therefore an id up to an observation's head belongs to one of its writers or to a transaction
that has ended, and once each of these writers was missing from a later observation, the head is settled.

The straightforward record is a queue of (head, writers) whose members are crossed off as they go missing. One number for
each present writer holds the same knowledge: the head of the last observation that did not see it. Of two pending
observations the writers left of the older one are a subset of those left of the younger one, so the entries that have
drained are always the oldest ones, and they end where the writer that has been here longest came in.

Source: docs/explanation/fence.md
"""

from sqlstreams.model.values import Observation, ServerRun

__all__ = ["Observations"]


class Observations:
    """What one process knows of one log's settled head, on one server run.

    Guarantee: every id up to `settled` is committed and visible, or will never be, on the server run named by `run`.
    Nothing stays known when the run changes, nor when the head falls (somebody set the sequence back).

    Bounded: one number for each writer of the newest observation; nothing grows while a writer stays.
    Observations must be added in the order in which they were made.

    Source: docs/explanation/fence.md
    """

    __slots__ = ("_head", "_run", "_settled", "_unseen_at")

    def __init__(self) -> None:
        self._run: ServerRun | None = None
        self._head = 0
        self._settled = 0
        self._unseen_at: dict[str, int] = {}  # writer -> newest head observed without it

    def add(self, observation: Observation) -> int:
        """Take in the next observation and return the settled head.

        An observation without writers settles its own head at once. Takes time proportional to the number of writers.
        """
        head = observation.head
        if observation.run != self._run or head < self._head:
            self._run = observation.run
            self._head = self._settled = 0
            self._unseen_at = {}
        unseen_at, before = self._unseen_at, self._head
        # A writer that was away for one observation and is back starts anew: what it had drawn before is settled.
        self._unseen_at = {writer: unseen_at.get(writer, before) for writer in observation.writers}
        self._head = head
        self._settled = min(self._unseen_at.values(), default=head)
        return self._settled

    @property
    def settled(self) -> int:
        """Every id up to it is committed or aborted; 0 before anything was settled on this run."""
        return self._settled

    @property
    def head(self) -> int:
        """The newest id that was drawn before the newest observation; 0 before the first one."""
        return self._head

    @property
    def run(self) -> ServerRun | None:
        """The server run that `settled` holds on; None before the first observation. Every claim must name it."""
        return self._run

    @property
    def unsettled(self) -> bool:
        """Whether ids up to the head may still appear."""
        return self._settled < self._head

    @property
    def writers(self) -> frozenset[str]:
        """The transactions that keep `settled` where it is: it moves when all of them have ended. Empty if settled."""
        if not self.unsettled:
            return frozenset()
        return frozenset(writer for writer, head in self._unseen_at.items() if head == self._settled)
