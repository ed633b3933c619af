"""The delivery model's server: a log whose ids are drawn and committed out of order, and who observes it.

Committed rows become visible late, locks outlive commits, a crash forgets what was not flushed. An observation is two
events, the sequence and then the locks, so that anything can happen in between.
"""

from collections import Counter
from datetime import UTC, datetime
from uuid import UUID

from sqlstreams.model.values import MessageId, Observation, ServerRun, Token
from tests.unit.model.delivery_rows import Message, Process, Script, Writer, demand

STARTED = datetime(2024, 1, 1, tzinfo=UTC)


class Server:
    """One stream, its server, the writers, and three processes that observe."""

    def __init__(self, script: bytes) -> None:
        self.script = Script(script)
        self.happened: Counter[str] = Counter()
        self.calm = self.script.choose(4) == 0
        self.draining = False
        self.steps = 0
        self.numbers = 0
        self.run = self.new_run()
        self.sequence = 0
        self.durable_sequence = 0
        self.log: dict[int, Message] = {}
        self.unflushed: list[list[int]] = []
        self.writers: dict[str, Writer] = {}
        self.ever_drawn = 0
        self.ended: dict[int, bool] = {}
        self.processes = [Process(self.new_node()) for _ in range(3)]

    # --- what the sabotage replaces

    def observe_head(self, process: Process) -> None:
        """Do the first half of an observation: the sequence."""
        process.half = (self.sequence, self.steps)

    def observe_locks(self, process: Process) -> None:
        """Do the second half: who holds the lock."""
        if process.half is None:
            return
        head, then = process.half
        process.half = None
        if self.steps > then:
            self.note("something between head and locks")
        self.learn(process, Observation(head, frozenset(self.writers), self.run))

    def learn(self, process: Process, observation: Observation) -> None:
        """Take in an observation."""
        stalled = process.observations.unsettled
        process.observations.add(observation)
        if process.observations.unsettled:
            self.note("stalled fence")
            demand(bool(process.observations.writers), "a stall without anybody who blocks")
        elif stalled:
            self.note("stall ended")

    # --- the server

    def new_run(self) -> ServerRun:
        """Return a server run that was never there before."""
        return ServerRun(UUID(int=self.number()), STARTED)

    def new_node(self) -> int:
        """Register a node."""
        node = self.number()
        self.ended[node] = False
        return node

    def number(self) -> int:
        """Return a number that was never used."""
        self.numbers += 1
        return self.numbers

    def token(self) -> Token:
        """Return a new token."""
        return Token(UUID(int=self.number()))

    def note(self, event: str) -> None:
        """Count an event of the script; what happens while coming to rest is no merit of it."""
        if not self.draining:
            self.happened[event] += 1

    def flush(self) -> None:
        """Note that everything written so far survives a crash: a statement of ours was flushed."""
        self.unflushed.clear()
        self.durable_sequence = self.sequence

    def draw(self) -> int:
        """Draw an id."""
        self.sequence += 1
        if self.sequence <= self.ever_drawn:
            self.note("ids drawn again")
        self.ever_drawn = max(self.ever_drawn, self.sequence)
        return self.sequence

    def make_visible(self, ids: list[int]) -> None:
        """Commit ids."""
        if any(id_ < max(self.log, default=0) for id_ in ids):
            self.note("late commit")
        if len(ids) > 1:
            self.note("commit by several ids")
        for id_ in ids:
            self.log[id_] = Message(MessageId(id_), self.number())
        if self.script.choose(2):
            self.unflushed.append(ids)
        else:
            self.flush()

    # --- the writers

    def pick_writer(self, *, committed: bool) -> str | None:
        """Return a writer that has committed, or one that has not."""
        names = [name for name, writer in self.writers.items() if writer.committed == committed]
        return names[self.script.choose(len(names))] if names else None

    def produce(self) -> None:
        """One to three messages in an autocommit statement."""
        self.make_visible([self.draw() for _ in range(1 + self.script.choose(3))])

    def writer_begins(self) -> None:
        """A statement takes the log's lock; its trigger is slow, so it draws its id later."""
        if len(self.writers) < 4:
            self.writers[f"3/{self.number()}"] = Writer(self.sequence)

    def writer_draws(self) -> None:
        """An open transaction draws an id, under the lock."""
        name = self.pick_writer(committed=False)
        if name is None:
            return
        writer = self.writers[name]
        if not writer.ids and self.sequence > writer.locked_at:
            self.note("slow trigger")
        writer.ids.append(self.draw())

    def writer_savepoint(self) -> None:
        """An open transaction makes a savepoint, or rolls back to the one it has: its ids are burnt."""
        name = self.pick_writer(committed=False)
        if name is None:
            return
        writer = self.writers[name]
        if writer.savepoint is None:
            writer.savepoint = len(writer.ids)
            return
        if len(writer.ids) > writer.savepoint:
            self.note("savepoint burnt")
        del writer.ids[writer.savepoint :]
        writer.savepoint = None
        if not writer.ids and self.script.choose(2):
            del self.writers[
                name
            ]  # the lock was taken below the savepoint: it is gone, though the transaction lives

    def writer_commits(self) -> None:
        """A transaction's rows become visible; its lock goes then or a little later."""
        name = self.pick_writer(committed=False)
        if name is None:
            return
        writer = self.writers[name]
        self.make_visible(writer.ids)
        writer.ids, writer.committed = [], True
        if self.script.choose(2):
            del self.writers[name]
        else:
            self.note("lock outlives the commit")

    def writer_rolls_back(self) -> None:
        """A transaction aborts: its ids are burnt."""
        name = self.pick_writer(committed=False)
        if name is not None:
            self.note("rollback")
            del self.writers[name]

    def writer_releases(self) -> None:
        """A committed transaction gives up its lock."""
        name = self.pick_writer(committed=True)
        if name is not None:
            del self.writers[name]

    def server_crash(self) -> None:
        """The server recovers from a crash: open transactions and commits that were not flushed are forgotten."""
        if self.calm or self.script.choose(3):
            return
        self.note("server crash")
        if self.unflushed:
            self.note("commits forgotten")
        for ids in self.unflushed:
            for id_ in ids:
                del self.log[id_]
        self.unflushed.clear()
        self.writers.clear()
        if self.script.choose(4):
            self.sequence = self.durable_sequence
        self.durable_sequence = self.sequence
        self.run = self.new_run()
        for process in self.processes:
            process.half = None

    # --- observing

    def process(self) -> Process:
        """Return some process."""
        return self.processes[self.script.choose(len(self.processes))]

    def observe(self) -> None:
        """Observe in one go."""
        process = self.process()
        self.observe_head(process)
        self.observe_locks(process)

    def half_observe(self) -> None:
        """Do the next half of an observation."""
        process = self.process()
        if process.half is None:
            self.observe_head(process)
        else:
            self.observe_locks(process)
