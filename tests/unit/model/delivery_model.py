"""An abstract model of delivery: log, fence, claim log, exceptions and nodes under random interleavings.

A `World` is one stream with two groups, a server and three processes. It is played from a script of bytes, each of which
picks the next event or a choice inside it, so a failing script shrinks and replays. What Postgres and the processes do is
written out here in the plainest way; what they decide is decided by the real functions of `sqlstreams.model`. The checks
know more than any process does (open transactions, what really ran) and raise `Violation`.

Every step that a real system does in two statements is two events here, so that anything can happen in between: the
sequence is read before the locks, progress before the marks are written, a claim before its messages are read.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlstreams.model.fence import Observations
from sqlstreams.model.outcome import (
    Delay,
    ExceptionRow,
    Result,
    Terminal,
    classify,
    deferred,
    first_outcome,
    handed_back,
    next_outcome,
)
from sqlstreams.model.progress import RangeProgress, forward, marks_of, movable, resolved_prefix
from sqlstreams.model.retry import RetryPolicy, Run, overdrawn, takeover
from sqlstreams.model.values import Claim, Fence, Marks, MessageId, Observation, Progress, ServerRun, Token

MAX_RANGE_RECLAIMS = 2
MAX_DRAIN_ROUNDS = 200
STARTED = datetime(2024, 1, 1, tzinfo=UTC)
POLICY = RetryPolicy(2, timedelta(seconds=5), timedelta(seconds=1), timedelta(minutes=5))

EVENTS = frozenset(
    {
        "late commit",
        "commit by several ids",
        "rollback",
        "savepoint burnt",
        "slow trigger",
        "lock outlives the commit",
        "something between head and locks",
        "stalled fence",
        "stall ended",
        "claim",
        "claim of nothing settled",
        "claim over a hole",
        "empty range",
        "claim on another run",
        "answer lost",
        "orphan handed back",
        "start",
        "held back",
        "success",
        "failure",
        "delay",
        "terminal",
        "timed out",
        "range complete",
        "prefix recorded",
        "late completion of a zombie refused",
        "handed back",
        "handed back with cut short",
        "handed back with held back",
        "crash",
        "lease expired",
        "node ended",
        "registered anew",
        "reclaim",
        "reclaim above a prefix",
        "quarantine",
        "exception run",
        "exception resolved",
        "exception retried",
        "exception dead",
        "exception taken over",
        "taken over and dead",
        "overdrawn",
        "exception token refused",
        "marks moved",
        "stale marks ignored",
        "claims deleted",
        "server crash",
        "commits forgotten",
        "ids drawn again",
        "calm world",
    }
)


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


class World:
    """One stream, its server, two groups and three processes."""

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
        self.groups = [Group(), Group()]
        self.ended: dict[int, bool] = {}
        self.processes = [Process(self.new_node()) for _ in range(3)]
        self.actions = self.table()

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

    def settled_of(self, process: Process) -> tuple[int, ServerRun | None]:
        """Return what a process believes is settled, and on which run."""
        return process.observations.settled, process.observations.run

    def marks(self, progress: Progress) -> Marks:
        """Decide the marks."""
        return marks_of(progress)

    def stored_marks(self, stored: Marks, marks: Marks) -> Marks:
        """Decide what is written."""
        return forward(stored, marks)

    def deletable(self, group: Group) -> list[int]:
        """Return the lows of the claim rows that clean-up takes."""
        newest = max(group.claims)
        return [
            low
            for low, c in group.claims.items()
            if c.done and low < group.marks.ranges_done and low < newest
        ]

    def resolve_on_hand_back(self, owned: Owned) -> int:
        """Give rows to what is cut short or held back; return done_through."""
        assert owned.progress is not None
        for i, message in owned.running.items():
            owned.rows[message.id], _ = handed_back(message)
            owned.progress.except_index(i)
        for message in owned.held.values():
            owned.rows[message.id] = deferred(message)
            owned.progress.except_(message.id)
        return owned.progress.through

    def start_above(self, row: ClaimRow) -> int:
        """Return where a takeover starts."""
        return row.through

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

    # --- observing and claiming

    def process(self) -> Process:
        """Return some process."""
        return self.processes[self.script.choose(len(self.processes))]

    def working(self) -> Process | None:
        """Return some process whose guard has not fired."""
        process = self.process()
        return None if process.guard_fired else process

    def group(self) -> int:
        """Return some group."""
        return self.script.choose(2)

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

    def claim(self) -> None:
        """Take a fresh range."""
        process = self.working()
        if process is not None:
            lost = self.script.choose(8) == 7
            self.claim_range(process, self.group(), 1 + self.script.choose(6), lost=lost)

    def claim_range(self, process: Process, g: int, limit: int, *, lost: bool = False) -> bool:
        """Do what the claim function does; `lost`: its answer does not arrive."""
        group = self.groups[g]
        settled, run = self.settled_of(process)
        if run != self.run:
            self.note("claim on another run")
            return False
        if self.ended[process.node]:
            return False
        demand(bool(group.claims), "a group without claim rows")
        low = group.claims[max(group.claims)].high
        if settled <= low:
            self.note("claim of nothing settled")
            return False
        first = min((id_ for id_ in self.log if id_ > low), default=None)
        high = settled if first is None else min(settled, first - 1 + limit)
        if first is not None and first > low + 1:
            self.note("claim over a hole")
        demand(low == group.handed_through, f"({low}, {high}] does not follow {group.handed_through}")
        demand(low < high, f"inverted range ({low}, {high}]")
        demand(high <= self.sequence, f"{high} is claimed, and {self.sequence + 1} will be drawn")
        for writer in self.writers.values():
            demand(
                all(id_ > high for id_ in writer.ids),
                f"{high} is claimed while one of {writer.ids} may appear",
            )
        group.handed_through = high
        token = self.token()
        group.claims[low] = ClaimRow(low, high, token, process.node, low)
        self.flush()
        self.note("claim")
        if lost:
            self.note("answer lost")
        else:
            process.ranges[g, low] = Owned(Claim(low, high, low, token, Fence(self.number()), 0), low)
        return True

    def reconcile(self) -> None:
        """Hand back what the database says a process holds and none of its tasks knows."""
        process = self.process()
        for g, group in enumerate(self.groups):
            for low, row in group.claims.items():
                if row.node == process.node and (g, low) not in process.ranges and not row.done:
                    self.note("orphan handed back")
                    row.node = row.token = None

    def reclaim(self) -> None:
        """Take over the lowest range whose node has ended or that was handed back."""
        process = self.working()
        if process is not None:
            self.reclaim_range(process, self.group())

    def reclaim_range(self, process: Process, g: int) -> bool:
        """Do what the reclaim statement does."""
        group = self.groups[g]
        if self.ended[process.node]:
            return False
        for low in sorted(group.claims):
            row = group.claims[low]
            free = row.node is None or self.ended[row.node]
            if row.done or not free or low < group.marks.ranges_done:
                continue
            row.reclaims += row.node is not None
            row.token, row.node = self.token(), process.node
            start = self.start_above(row)
            self.flush()
            self.note("reclaim")
            if start > low:
                self.note("reclaim above a prefix")
            rest = [message for id_, message in self.log.items() if row.through < id_ <= row.high]
            for message in rest:
                group.allow_again(message.serial)
            if row.reclaims >= MAX_RANGE_RECLAIMS:
                self.note("quarantine")
                row.done, row.node = True, None
                for message in rest:
                    self.write_row(g, handed_back(message)[0])
            else:
                claim = Claim(low, row.high, start, row.token, Fence(self.number()), row.reclaims)
                process.ranges[g, low] = Owned(claim, start)
            return True
        return False

    # --- running a range

    def owned(self, process: Process) -> tuple[int, Owned] | None:
        """Return some range of a process."""
        if not process.ranges:
            return None
        keys = list(process.ranges)
        key = keys[self.script.choose(len(keys))]
        return key[0], process.ranges[key]

    def start(self) -> None:
        """Start the next message of a range, or hold it back for its key."""
        process = self.working()
        found = process and self.owned(process)
        if found:
            self.start_next(*found, hold=self.script.choose(8) == 7)

    def start_next(self, g: int, owned: Owned, *, hold: bool = False) -> bool:
        """Read the range if need be and start its next message."""
        claim = owned.claim
        if owned.messages is None:
            ids = sorted(id_ for id_ in self.log if claim.start_above < id_ <= claim.high)
            owned.messages = [self.log[id_] for id_ in ids]
            owned.progress = RangeProgress(claim.start_above, claim.high, ids)
            if not ids:
                self.note("empty range")
        if owned.started >= len(owned.messages):
            return False
        i, message = owned.started, owned.messages[owned.started]
        owned.started += 1
        if hold and not self.calm:
            self.note("held back")
            owned.held[i] = message
        else:
            self.note("start")
            owned.running[i] = message
            self.deliver(g, message)
        return True

    def deliver(self, g: int, message: Message) -> None:
        """Hand a message to a handler."""
        group = self.groups[g]
        group.runs[message.serial] += 1
        demand(self.log.get(message.id) is message, f"{message.id} is delivered and not in the log")
        demand(
            group.runs[message.serial] <= group.allowed.get(message.serial, 1),
            f"{message.id} of group {g} runs for the {group.runs[message.serial]}th time without a reason",
        )

    def result(self, g: int, message: Message) -> Result:
        """Let a handler end somehow."""
        match 0 if self.calm else self.script.choose(16):
            case 1 | 2 | 3 | 4:
                self.note("failure")
                return classify(
                    ExceptionGroup("nursery", [ValueError("no"), Terminal("not alone")]), timed_out=False
                )
            case 5:
                self.note("delay")
                return classify(ExceptionGroup("nursery", [Delay(timedelta(hours=1))]), timed_out=False)
            case 6:
                self.note("terminal")
                return classify(Terminal("enough"), timed_out=False)
            case 7:
                self.note("timed out")
                return classify(None, timed_out=True)
            case _:
                self.note("success")
                self.groups[g].succeeded.add(message.serial)
                return classify(None, timed_out=False)

    def finish(self) -> None:
        """Let a running handler end."""
        found = self.owned(self.process())
        if found and found[1].running:
            g, owned = found
            indexes = list(owned.running)
            self.finish_index(g, owned, indexes[self.script.choose(len(indexes))])

    def finish_index(self, g: int, owned: Owned, i: int) -> None:
        """Let one running handler of a range end."""
        assert owned.progress is not None
        message = owned.running.pop(i)
        chance = self.script.choose(256) / 256
        row, _ = first_outcome(self.result(g, message), message, self.groups[g].policy, chance)
        if row is None:
            owned.progress.finish_index(i)
        else:
            owned.rows[message.id] = row
            owned.progress.except_index(i)

    def record(self) -> None:
        """Record a range, or the prefix of it that is resolved."""
        process = self.process()
        found = self.owned(process)
        if found and found[1].progress is not None:
            self.record_range(process, *found)

    def record_range(self, process: Process, g: int, owned: Owned) -> None:
        """Write what is resolved, guarded by the token."""
        assert owned.progress is not None
        if not owned.running and owned.messages is not None and owned.started == len(owned.messages):
            for message in owned.held.values():
                owned.rows[message.id] = deferred(message)
                owned.progress.except_(message.id)
            owned.held.clear()
        through = owned.progress.through
        if through <= owned.recorded and through < owned.claim.high:
            return
        row = self.groups[g].claims.get(owned.claim.low)
        if row is None or row.token != owned.claim.token or row.done:
            self.note("late completion of a zombie refused")
            del process.ranges[g, owned.claim.low]
            return
        self.write_through(g, owned, row, through)
        owned.recorded = through
        if row.done:
            self.note("range complete")
            del process.ranges[g, owned.claim.low]
        else:
            self.note("prefix recorded")

    def write_through(self, g: int, owned: Owned, row: ClaimRow, through: int) -> None:
        """Move done_through and write the exception rows up to it, in one transaction."""
        assert owned.progress is not None
        assert owned.messages is not None
        states = dict.fromkeys((message.id for message in owned.messages), True)
        states.update(dict.fromkeys(owned.progress.open_ids(), False))
        demand(
            through <= resolved_prefix(owned.claim.start_above, row.high, states),
            f"done_through {through} passes one of {owned.progress.open_ids()}",
        )
        demand(
            row.through <= through <= row.high,
            f"done_through {through} outside of [{row.through}, {row.high}]",
        )
        row.through = through
        row.done = through == row.high
        if row.done:
            row.node = None
        for id_ in [id_ for id_ in owned.rows if id_ <= through]:
            self.write_row(g, owned.rows.pop(id_))
        self.flush()

    def write_row(self, g: int, row: ExceptionRow) -> None:
        """Insert an exception row."""
        group = self.groups[g]
        demand(
            row.message_id not in group.queue, f"{row.message_id} of group {g} has an exception row already"
        )
        group.queue[row.message_id] = QueueRow(row.status, row.attempts, row.delays)
        if row.status == "ready":
            group.allow_again(self.log[row.message_id].serial)

    def hand_back(self) -> None:
        """End a range early: cancelled or shutting down."""
        process = self.process()
        found = self.owned(process)
        if self.calm or not found or found[1].messages is None or self.script.choose(2):
            return
        g, owned = found
        del process.ranges[g, owned.claim.low]
        row = self.groups[g].claims.get(owned.claim.low)
        if row is None or row.token != owned.claim.token or row.done:
            self.note("late completion of a zombie refused")
            return
        self.note("handed back")
        if owned.running:
            self.note("handed back with cut short")
        if owned.held:
            self.note("handed back with held back")
        through = self.resolve_on_hand_back(owned)
        self.write_through(g, owned, row, through)
        row.node = row.token = None

    # --- exceptions

    def run_exception(self) -> None:
        """Take an exception that is due, or one whose owner's node has ended."""
        process = self.working()
        if process is not None:
            self.take_exception(process, self.group(), skip=self.script.choose(4))

    def take_exception(self, process: Process, g: int, *, skip: int = 0) -> bool:
        """Take over or claim the next exception after `skip` others."""
        group = self.groups[g]
        if self.ended[process.node]:
            return False
        free = [
            id_
            for id_ in sorted(group.queue)
            if (row := group.queue[id_]).status in ("ready", "deferred")
            or (row.status == "inflight" and row.node is not None and self.ended[row.node])
        ]
        if not free:
            return False
        id_ = free[skip % len(free)]
        row, message = group.queue[id_], self.log[id_]
        self.flush()
        if row.status == "inflight":
            verdict = takeover(row.attempts, row.delays, group.policy)
            row.attempts += 1
            if not isinstance(verdict, Run):
                self.note("taken over and dead")
                row.status, row.token, row.node = "dead", None, None
                return True
            self.note("exception taken over")
            demand(verdict.attempts == row.attempts, "a takeover counts once")
            group.allow_again(message.serial)
        elif overdrawn(row.attempts, row.delays, group.policy):
            self.note("overdrawn")
            row.status = "dead"
            return True
        row.status, row.token, row.node = "inflight", self.token(), process.node
        self.note("exception run")
        process.exceptions.append((g, message, row.attempts, row.delays, row.token))
        self.deliver(g, message)
        return True

    def finish_exception(self) -> None:
        """Let the handler of an exception end and record it."""
        process = self.process()
        if not process.exceptions:
            return
        at = self.script.choose(len(process.exceptions))
        g, message, attempts, delays, token = process.exceptions.pop(at)
        group = self.groups[g]
        result = self.result(g, message)
        after = next_outcome(result, attempts, delays, group.policy, self.script.choose(256) / 256)
        row = group.queue.get(message.id)
        if row is None or row.token != token:
            self.note("exception token refused")
            return
        demand(row.status == "inflight", "a token without a run")
        self.flush()
        if after.status == "resolved":
            self.note("exception resolved")
            del group.queue[message.id]
            return
        group.queue[message.id] = QueueRow(after.status, after.attempts, after.delays)
        if after.status == "ready":
            self.note("exception retried")
            group.allow_again(message.serial)
        else:
            self.note("exception dead")

    def lower_budget(self) -> None:
        """An operator lowers max_retries."""
        if not self.calm and self.script.choose(8) == 7:
            self.groups[self.group()].policy = RetryPolicy(0, POLICY.initial_backoff, POLICY.base, POLICY.cap)

    # --- nodes

    def crash(self) -> None:
        """A process dies with all it knows; another one starts."""
        if self.calm or self.script.choose(3):
            return
        self.note("crash")
        self.processes[self.script.choose(len(self.processes))] = Process(self.new_node())

    def expire(self) -> None:
        """A process does not reach the database: its guard fires, then somebody ends its node."""
        process = self.process()
        if self.calm or process.guard_fired or self.script.choose(2):
            return
        self.note("lease expired")
        process.guard_fired = True
        self.ended[process.node] = True

    def end_node(self) -> None:
        """Somebody ends the node of a process that is gone."""
        alive = {process.node for process in self.processes}
        gone = [node for node, ended in self.ended.items() if not ended and node not in alive]
        if gone:
            self.note("node ended")
            self.ended[gone[self.script.choose(len(gone))]] = True

    def register_anew(self) -> None:
        """A process whose lease is over gets a new node; what was cut short is forgotten."""
        at = self.script.choose(len(self.processes))
        if self.processes[at].guard_fired:
            self.note("registered anew")
            anew = Process(self.new_node())
            anew.observations = self.processes[at].observations
            self.processes[at] = anew

    # --- the advancer

    def read_progress(self) -> None:
        """Read what decides the marks, in one statement."""
        self.read_group(self.process(), self.group())

    def read_group(self, process: Process, g: int) -> None:
        """Read a group's progress, and note what the marks must be."""
        group = self.groups[g]
        demand(bool(group.claims), "a group without claim rows")
        rows = group.claims.values()
        seen = [row for row in rows if not row.done and row.low >= group.marks.ranges_done]
        progress = Progress(
            0,
            group.marks.ranges_done,
            group.marks.committed,
            group.claims[max(group.claims)].high,
            min((row.low for row in seen), default=None),
            min((max(row.low, row.through) for row in seen), default=None),
            min(group.unresolved(), default=None),
        )
        blocked = set(group.unresolved())
        for row in rows:
            if not row.done:
                blocked.update(range(row.through + 1, row.high + 1))
        expected = Marks(
            min((row.low for row in rows if not row.done), default=progress.newest_high),
            min(blocked, default=progress.newest_high + 1) - 1,
        )
        process.read = g, progress, expected

    def advance(self) -> None:
        """Write the marks that were read some time ago."""
        process = self.process()
        if process.read is not None:
            self.write_marks(process)

    def write_marks(self, process: Process) -> None:
        """Decide and write the marks."""
        assert process.read is not None
        g, progress, expected = process.read
        process.read = None
        group = self.groups[g]
        marks = self.marks(progress)
        demand(marks == expected, f"the marks are {marks} and should be {expected}")
        stored, group.marks = group.marks, self.stored_marks(group.marks, marks)
        self.note("marks moved" if movable(stored, marks) else "stale marks ignored")
        self.flush()
        demand(group.marks.committed >= stored.committed, "committed moved back")
        demand(group.marks.ranges_done >= stored.ranges_done, "ranges_done moved back")
        self.check_committed(group)

    def check_committed(self, group: Group) -> None:
        """Nothing at or below committed is open, may still appear, or was never handled."""
        committed = group.marks.committed
        demand(all(id_ > committed for id_ in group.unresolved()), "committed passed an unresolved exception")
        for row in group.claims.values():
            demand(row.done or row.low >= group.marks.ranges_done, "an open range below ranges_done")
            demand(row.done or row.through >= committed, "committed passed an open range")
        for writer in self.writers.values():
            demand(all(id_ > committed for id_ in writer.ids), "committed passed an id that may appear")
        for id_, message in self.log.items():
            if id_ <= committed and message.serial not in group.succeeded:
                demand(
                    id_ in group.queue and group.queue[id_].status == "dead",
                    f"committed passed {id_}, unseen",
                )

    def delete_done(self) -> None:
        """Clean up the claim log."""
        self.delete_claims(self.groups[self.group()])

    def delete_claims(self, group: Group) -> None:
        """Delete done claims, and check what goes."""
        newest = max(group.claims, default=None)
        for low in self.deletable(group):
            row = group.claims.pop(low)
            self.note("claims deleted")
            demand(row.done and row.low < group.marks.ranges_done, "a claim was deleted above ranges_done")
        demand(newest in group.claims, "the newest claim was deleted: nobody knows where the group stands")

    # --- playing

    def table(self) -> list[Callable[[], None]]:
        """Return the events, the frequent ones repeatedly."""
        return [
            *[self.produce] * 5,
            *[self.writer_begins] * 3,
            *[self.writer_draws] * 5,
            *[self.writer_savepoint] * 3,
            *[self.writer_commits] * 3,
            self.writer_rolls_back,
            *[self.writer_releases] * 2,
            self.server_crash,
            *[self.observe] * 5,
            *[self.half_observe] * 6,
            *[self.claim] * 9,
            self.reconcile,
            *[self.reclaim] * 6,
            *[self.start] * 18,
            *[self.finish] * 18,
            *[self.record] * 9,
            *[self.hand_back] * 3,
            *[self.run_exception] * 12,
            *[self.finish_exception] * 11,
            self.lower_budget,
            *[self.crash] * 2,
            *[self.expire] * 2,
            *[self.end_node] * 3,
            *[self.register_anew] * 2,
            *[self.read_progress] * 3,
            *[self.advance] * 3,
            *[self.delete_done] * 2,
        ]

    def play(self) -> None:
        """Play the script, then let everything come to rest, and check the end."""
        actions = self.actions
        while not self.script.over:
            actions[self.script.choose(len(actions))]()
            self.steps += 1
        if self.calm:
            self.note("calm world")
        self.draining = True
        self.drain()
        self.check_end()

    def drain(self) -> None:
        """End all writers and dead nodes; let one process do what is left, without further trouble."""
        for name in list(self.writers):
            if not self.writers[name].committed and self.number() % 2:
                self.make_visible(self.writers[name].ids)
            del self.writers[name]
        if self.calm:  # no restarts: what was started ends where it was started
            for process in self.processes:
                for (g, _), owned in list(process.ranges.items()):
                    self.run_to_the_end(process, g, owned)
        for node in self.ended:
            self.ended[node] = True
        last = Process(self.new_node())
        self.processes = [last]
        self.observe_head(last)
        self.observe_locks(last)
        for g, group in enumerate(self.groups):
            for _ in range(MAX_DRAIN_ROUNDS):
                if not self.drain_round(last, g):
                    break
            else:
                raise Violation("it does not come to rest")
            self.read_group(last, g)
            self.write_marks(last)
            self.delete_claims(group)

    def drain_round(self, process: Process, g: int) -> bool:
        """Do one more thing for a group; False when there is none."""
        if self.reclaim_range(process, g) or self.claim_range(process, g, 5):
            owned = next(iter(process.ranges.values()), None)
            if owned is not None:
                self.run_to_the_end(process, g, owned)
            return True
        if self.take_exception(process, g):
            if process.exceptions:
                self.finish_exception()
            return True
        return False

    def run_to_the_end(self, process: Process, g: int, owned: Owned) -> None:
        """Run and record what is left of a range."""
        while self.start_next(g, owned):
            pass
        while owned.running:
            self.finish_index(g, owned, next(iter(owned.running)))
        self.record_range(process, g, owned)

    def check_end(self) -> None:
        """Nothing was lost: all is resolved, and the marks say so."""
        for g, group in enumerate(self.groups):
            for id_, message in self.log.items():
                row = group.queue.get(id_)
                if message.serial not in group.succeeded:
                    demand(row is not None and row.status == "dead", f"group {g} lost {id_}")
                if self.calm:
                    demand(
                        group.runs[message.serial] == 1,
                        f"{id_} of group {g} ran {group.runs[message.serial]} times",
                    )
            demand(not group.unresolved(), f"group {g} has unresolved exceptions")
            demand(group.handed_through == self.sequence, f"group {g} stands at {group.handed_through}")
            demand(group.marks == Marks(self.sequence, self.sequence), f"group {g} ends with {group.marks}")
            demand(len(group.claims) == 1, f"group {g} keeps {len(group.claims)} claim rows")
