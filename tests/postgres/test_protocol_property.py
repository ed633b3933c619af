"""The protocols on a real server, under random interleavings of sessions that really overlap: nothing is lost or handed out twice.

A `World` is one stream with two groups, three processes that hold nodes, and four sessions that write. A seed picks event
after event; a statement that waits (in a slow trigger, for a group's lock, between the two halves of an observation) stays
there while others go on. What the processes decide is decided by the real functions of `sqlstreams.model`, what they ask the
database is the real store. The world keeps a record of its own of what was handed out and what was recorded, which is what
everything is checked against; `Violation` says what does not fit.

The pure part, with server crashes, is in tests/unit/model/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import asyncpg
import pytest
import trio
import trio.lowlevel

from sqlstreams.errors import Contended, LeaseLost, PartitionMissing, SQLStreamsError
from sqlstreams.model.fence import Observations
from sqlstreams.model.outcome import (
    Delay,
    ExceptionRow,
    HistoryRow,
    Result,
    Terminal,
    classify,
    first_outcome,
    handed_back,
    next_outcome,
)
from sqlstreams.model.progress import RangeProgress, forward, marks_of
from sqlstreams.model.retry import RetryPolicy
from sqlstreams.model.values import Claim, Marks, MessageId, ServerRun, Token
from sqlstreams.store import GroupRow, LogRef, MessageRow, RangeRecord, Seen, StreamRow, Taken
from tests.postgres.opened import WHOLE, Installation, Node, Session, new_token, open_installation, outgoing

STEPS = 260
PARTITION = 24  # ids: a world attaches some while others write
TTL = timedelta(seconds=15)
TICK = timedelta(seconds=6)
POLICY: dict[str, Any] = {
    "max_retries": 1,
    "initial_backoff": timedelta(seconds=5),
    "base": timedelta(seconds=1),
    "max_range_reclaims": 2,
}
MOST_ROUNDS = 300
SABOTAGE_SEEDS = 400

EVENTS = frozenset(
    {
        *(
            "late commit",
            "rollback",
            "savepoint burnt",
            "abort by error",
            "slow trigger",
            "slow copy",
            "copy",
        ),
        *("batch", "partition made", "partition missing", "stalled fence", "stall ended"),
        *("something between head and locks", "claim", "claim of nothing settled", "claim over a hole"),
        *("empty range", "claim in slow motion", "claim waited for another", "claims at once", "answer lost"),
        *(
            "orphan handed back",
            "success",
            "failure",
            "delay",
            "terminal",
            "range complete",
            "prefix recorded",
        ),
        *("record repeated", "late completion of a zombie refused", "late completion of a zombie accepted"),
        *(
            "handed back",
            "handed back with cut short",
            "crash",
            "lease expired",
            "node ended",
            "registered anew",
        ),
        *(
            "claim by an ended node refused",
            "reclaim",
            "reclaim above a prefix",
            "reclaim of what was handed back",
        ),
        *("quarantine", "exception run", "exception resolved", "exception retried", "exception dead"),
        *("exception taken over", "exception token refused", "marks moved", "stale marks ignored"),
        *("claim between the advancer's steps", "claims deleted", "two groups differ"),
    }
)


class Violation(AssertionError):
    """An invariant does not hold."""


def demand(holds: bool, message: str) -> None:
    """Raise Violation unless it holds."""
    if not holds:
        raise Violation(message)


class Pending:
    """A call that goes on while other things happen."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.value: Any = None
        self.error: Exception | None = None

    async def run(self, call: Callable[[], Awaitable[Any]]) -> None:
        """Run the call and keep what comes of it."""
        try:
            self.value = await call()
        except Exception as exc:
            self.error = exc
        finally:
            self.done.set()

    async def result(self) -> Any:
        """Wait for it; return or raise what the call did."""
        await self.done.wait()
        if self.error is not None:
            raise self.error
        return self.value


@dataclass
class Writer:
    """A session that writes to the log, and what it has in hand."""

    session: Session
    ids: list[int] = field(default_factory=list)
    open: bool = False
    savepoint: int | None = None
    pending: Pending | None = None
    gate: int | None = None
    copy: str | None = None  # what the rows of a COPY are marked with


@dataclass
class Owned:
    """A range in the hands of a process."""

    claim: Claim
    rows: list[MessageRow]
    progress: RangeProgress
    recorded: int
    started: int = 0
    running: dict[int, MessageRow] = field(default_factory=dict)  # by index
    finished: set[int] = field(default_factory=set)
    exceptions: dict[int, tuple[ExceptionRow, HistoryRow | None]] = field(default_factory=dict)


@dataclass
class RunningException:
    """An exception in the hands of a process."""

    group: int
    row: MessageRow
    attempts: int
    delays: int
    token: Token


class Process:
    """What one process remembers."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.observations = Observations()
        self.half: tuple[Pending, Session] | None = None
        self.ranges: dict[tuple[int, int], Owned] = {}
        self.exceptions: list[RunningException] = []
        self.fired = False

    def tokens(self) -> set[Token]:
        """Return the tokens that its tasks know."""
        return {owned.claim.token for owned in self.ranges.values()} | {
            each.token for each in self.exceptions
        }


@dataclass
class RangeTruth:
    """What was handed out, and what was recorded of it."""

    high: int
    token: Token | None
    owner: Process | None
    fence: int
    through: int
    done: bool = False


@dataclass
class ExceptionTruth:
    """Where an exception stands."""

    status: str
    token: Token | None = None
    owner: Process | None = None


@dataclass
class Group:
    """A group, and all that is known of it."""

    row: GroupRow
    ranges: dict[int, RangeTruth] = field(default_factory=dict)
    queue: dict[int, ExceptionTruth] = field(default_factory=dict)
    resolved: set[int] = field(default_factory=set)  # succeeded and recorded, or dead
    runs: Counter[int] = field(default_factory=Counter)
    allowed: dict[int, int] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)
    marks: Marks = field(default_factory=lambda: Marks(0, 0))
    slow: list[tuple[Process, Pending, int, bool]] = field(default_factory=list)  # claims under way
    gate: int | None = None
    read: Any = None
    claimed_since_read: bool = False

    @property
    def through(self) -> int:
        """Up to which id ranges were handed out."""
        return max((truth.high for truth in self.ranges.values()), default=0)

    def allow_again(self, id_: int) -> None:
        """Note that one more run of a message is legitimate."""
        self.allowed[id_] = self.runs[id_] + 1


SET_UP = """
create table {schema}.armed (token uuid primary key, gate bigint not null);

create function {schema}.pass(gate bigint) returns void language plpgsql set lock_timeout = 0 as $$
begin
  perform pg_advisory_lock_shared(gate);
  perform pg_advisory_unlock_shared(gate);
end $$;

create function {schema}.slow_message() returns trigger language plpgsql as $$
begin
  if new.payload->>'gate' is not null then
    perform {schema}.pass((new.payload->>'gate')::bigint);
  end if;
  return new;
end $$;

create function {schema}.slow_claim() returns trigger language plpgsql as $$
declare
  gate bigint;
begin
  select a.gate into gate from {schema}.armed a where a.token = new.token;
  if gate is not null then
    perform {schema}.pass(gate);
  end if;
  return new;
end $$;

create function {schema}.gap(heads bigint[], gate bigint) returns bigint[] language plpgsql as $$
begin
  perform {schema}.pass(gate);
  return heads;
end $$;
"""
TRIGGERS = """
create trigger slow before insert on {schema}.message_log_{stream} for each row execute function {schema}.slow_message();
create trigger slow before insert on {schema}.claim_{stream} for each row execute function {schema}.slow_claim();
"""


class Crew:
    """What the worlds of one installation share: its sessions, and the gates at which statements wait."""

    def __init__(self, here: Installation) -> None:
        self.here = here
        self.gates = 1_000
        self.keeper: Session
        self.writers: list[Session]
        self.observers: list[Session]

    async def open(self) -> None:
        """Set the installation up."""
        await self.here.script_clock()
        await self.here.admin.execute(self.here.sql.fill(SET_UP, 0))
        self.keeper = await self.here.session()
        self.writers = [await self.here.session() for _ in range(3)]
        self.observers = [await self.here.session() for _ in range(2)]

    async def close_gate(self) -> int:
        """Return a gate at which whoever comes there waits."""
        self.gates += 1
        await self.keeper.execute("select pg_advisory_lock($1)", self.gates)
        return self.gates

    async def open_gate(self, gate: int) -> None:
        """Let through whoever waits there."""
        await self.keeper.execute("select pg_advisory_unlock($1)", gate)

    async def waits(self, gate: int, pending: Pending) -> bool:
        """Wait until a call stands at a gate, or has ended; say whether it stands there."""
        with trio.fail_after(20):
            while not pending.done.is_set():
                if await self.keeper.fetchval(
                    "select exists (select from pg_locks where locktype = 'advisory' and not granted"
                    " and classid = 0 and objid = $1)",
                    gate,
                ):
                    return True
                await trio.lowlevel.checkpoint()
        return False


class World:
    """One stream under a seed."""

    def __init__(self, crew: Crew, seed: int, happened: Counter[str], nursery: trio.Nursery) -> None:
        self.crew = crew
        self.here = crew.here
        self.seed = seed
        self.chance = Random(seed)
        self.happened = happened
        self.nursery = nursery
        self.calm = seed % 4 == 0  # no crash, no hand-back, no failure: then everything runs once
        self.stormy = seed % 4 == 1
        self.most_writers = 1 + seed % 3  # at once
        self.draining = False
        self.stream: StreamRow
        self.ref: LogRef
        self.groups: list[Group] = []
        self.processes: list[Process] = []
        self.zombies: list[Process] = []
        self.ended: set[int] = set()
        self.writers = [Writer(session) for session in crew.writers]
        self.committed: set[int] = set()
        self.policy = RetryPolicy(1, timedelta(seconds=5), timedelta(seconds=1), timedelta(minutes=5))
        self.copies = 0

    # --- what the sabotage replaces

    async def break_it(self) -> None:
        """Break a protocol."""

    def settled_of(self, process: Process) -> int:
        """Return what a process believes is settled."""
        return process.observations.settled

    def observe_text(self, gap: str) -> str:
        """Return the observation, with something between its halves."""
        text = self.here.sql("observe")
        halves = "from h cross join lateral ("
        assert halves in text
        return text.replace(
            halves,
            f"from (select g.streams, {gap.format('g.heads')} as heads from h g offset 0) h cross join lateral (",
        )

    async def patch(self, function: str, *changes: tuple[str, str]) -> None:
        """Replace parts of a function in the database."""
        name = f"{self.here.schema}.{function}_{self.stream.id}"
        text = await self.here.admin.fetchval("select pg_get_functiondef($1::text::regproc)", name)
        for old, new in changes:
            assert old in text, (function, old)
            text = text.replace(old, new)
        await self.here.admin.execute(text)

    def patch_statement(self, name: str, old: str, new: str) -> None:
        """Replace a part of a named statement, for this stream."""
        text = self.here.sql(name, self.stream.id)
        assert old in text, (name, old)
        self.here.sql._ready[name, self.stream.id] = text.replace(old, new)

    # --- playing

    async def set_up(self) -> None:
        """Declare stream, groups and processes."""
        here = self.here
        self.stream = await here.stream(f"s{self.crew.gates}-{self.seed}", PARTITION)
        self.crew.gates += 1
        (self.ref,) = await here.store.log_refs([self.stream.id])
        await here.store.observe([self.ref])  # the server run has a name from here on
        for name in ("one", "two"):
            self.groups.append(Group(await here.group(self.stream, name, **POLICY)))
        await here.admin.execute(here.sql.fill(TRIGGERS, self.stream.id))
        await self.break_it()
        self.processes = [Process(await self.new_node()) for _ in range(3)]

    async def play(self) -> None:
        """Play, come to rest, and check the end."""
        try:
            await self.set_up()
            actions = self.table()
            for _ in range(STEPS):
                await self.chance.choice(actions)()
            if self.groups[0].through != self.groups[1].through:
                self.note("two groups differ")
            self.draining = True
            await self.drain()
            await self.check_end()
        except SQLStreamsError as exc:
            raise Violation(f"an error that nobody may see: {exc}") from exc
        finally:
            await self.tidy()

    async def tidy(self) -> None:
        """Leave the sessions as they were found."""
        await self.crew.keeper.execute("select pg_advisory_unlock_all()")
        for writer in self.writers:
            if writer.pending is not None:
                await writer.pending.done.wait()
            with suppress(asyncpg.PostgresError):
                await writer.session.execute("rollback")
        for process in self.processes + self.zombies:
            if process.half is not None:
                await process.half[0].done.wait()
        for group in self.groups:
            for _, pending, _, _ in group.slow:
                await pending.done.wait()

    def table(self) -> list[Callable[[], Awaitable[None]]]:
        """Return the events, the frequent ones repeatedly."""
        rough: list[Callable[[], Awaitable[None]]] = [
            *[self.hand_back] * 3,
            self.crash,
            self.suspend,
            *[self.die_holding] * (6 if self.stormy else 2),
            *[self.tick] * 4,
            *[self.end_nodes] * 2,
            *[self.end_zombie] * 5,
            *[self.register_anew] * 4,
            *[self.zombie_records] * 4,
            *[self.reconcile] * 4,
        ]
        return [
            *[self.produce] * 3,
            *[self.write] * 12,
            self.make_partition,
            *[self.observe] * 10,
            *[self.half_observe] * 4,
            *[self.claim] * 9,
            *[self.slow_claim] * 2,
            *[self.end_slow_claims] * 3,
            self.claims_at_once,
            self.burn,
            *[self.reclaim] * 8,
            *[self.work] * 24,
            *[self.record] * 10,
            *[self.run_exceptions] * 9,
            *[self.finish_exception] * 8,
            *[self.read_progress] * 3,
            *[self.write_progress] * 3,
            *([] if self.calm else rough),
        ]

    def note(self, event: str) -> None:
        """Count an event; what happens while coming to rest is no merit of the seed."""
        if not self.draining:
            self.happened[event] += 1

    def spawn(self, call: Callable[[], Awaitable[Any]]) -> Pending:
        """Start a call that may wait."""
        pending = Pending()
        self.nursery.start_soon(pending.run, call)
        return pending

    # --- writing

    def fence_now(self) -> int:
        """Return the highest id that anybody takes for settled, or that was handed out."""
        return max(
            *(self.settled_of(process) for process in self.processes),
            *(group.through for group in self.groups),
        )

    def note_committed(self, ids: list[int], fence: int) -> None:
        """Take in ids that are visible now; `fence` is from before the commit was sent."""
        for id_ in ids:
            demand(id_ > fence, f"id {id_} appeared although everything up to {fence} was settled")
        if ids and self.committed and min(ids) < max(self.committed):
            self.note("late commit")
        self.committed.update(ids)

    async def produce(self) -> None:
        """Append through the store, as producers do."""
        fence, rows = self.fence_now(), self.chance.randint(1, 4)
        try:
            ids = await self.here.store.append(self.stream.id, outgoing(*range(rows)))
        except PartitionMissing:
            self.note("partition missing")
            await self.make_partition()
            return
        if rows > 1:
            self.note("batch")
        self.note_committed([int(id_) for id_ in ids], fence)

    async def make_partition(self) -> None:
        """Make what is missing, and the next one."""
        head, end = await self.here.store.runway(self.stream.id, PARTITION)
        if head + PARTITION >= end:
            await self.here.store.make_partitions(self.stream.id, PARTITION, head + 8)
            self.note("partition made")

    async def write(self) -> None:
        """Let a session do its next step."""
        busy = [writer for writer in self.writers if writer.open or writer.pending is not None]
        writer = self.chance.choice(self.writers if len(busy) < self.most_writers else busy)
        if writer.pending is not None:
            await self.let_go_on(writer)
        elif writer.open:
            await self.go_on(writer)
        else:
            await self.begin(writer)

    async def begin(self, writer: Writer) -> None:
        """Begin a transaction, or run one statement that commits by itself."""
        what = self.chance.randrange(8)
        if what < 4:
            await writer.session.execute("begin")
            writer.open = True
            await self.insert(writer)
        elif what < 6:
            await self.insert_slowly(writer)
        else:
            await self.copy(writer, slow=what == 7)

    async def go_on(self, writer: Writer) -> None:
        """Do one more thing in a transaction."""
        session = writer.session
        match self.chance.randrange(9):
            case 0:
                await self.insert(writer)
            case 1:
                await self.insert_slowly(writer)
            case 2 | 3:
                if writer.savepoint is None:
                    await session.execute("savepoint here")
                    writer.savepoint = len(writer.ids)
                    await self.insert(writer)
                else:
                    await session.execute("rollback to savepoint here; release savepoint here")
                    if len(writer.ids) > writer.savepoint:
                        self.note("savepoint burnt")
                    del writer.ids[writer.savepoint :]
                    writer.savepoint = None
            case 4:
                await self.end(writer, commit=False)
                self.note("rollback")
            case 5:
                with suppress(asyncpg.PostgresError):
                    await session.execute("select 1/0")
                await self.end(writer, commit=True)  # a commit of an aborted transaction rolls back
                self.note("abort by error")
            case _:
                await self.end(writer, commit=True)

    async def insert(self, writer: Writer) -> None:
        """Insert in a transaction; a missing partition aborts it."""
        try:
            writer.ids += await writer.session.column(self.insert_text(), self.chance.randint(1, 3), None)
        except asyncpg.CheckViolationError:
            self.note("partition missing")
            await self.end(writer, commit=False)
            await self.make_partition()

    def insert_text(self) -> str:
        """Return an insert as somebody types it in psql."""
        return (
            f"insert into {self.here.schema}.message_log_{self.stream.id} (payload)"
            " select json_build_object('n', n, 'gate', $2::bigint) from generate_series(1, $1::int) n returning id"
        )

    async def insert_slowly(self, writer: Writer) -> None:
        """Insert with a trigger that keeps it there, its id drawn."""
        writer.gate = await self.crew.close_gate()
        writer.pending = self.spawn(
            partial(writer.session.column, self.insert_text(), self.chance.randint(1, 2), writer.gate)
        )
        if not await self.crew.waits(writer.gate, writer.pending):
            await self.let_go_on(writer)

    async def copy(self, writer: Writer, *, slow: bool) -> None:
        """COPY some rows; `slow`: the trigger keeps it there."""
        self.copies += 1
        writer.copy = f"copy {self.copies}"
        gate = writer.gate = await self.crew.close_gate() if slow else None
        rows = [
            f'{{"copy": "{writer.copy}", "gate": {gate or "null"}}}' for _ in range(self.chance.randint(1, 3))
        ]
        log = f"message_log_{self.stream.id}"
        writer.pending = self.spawn(partial(writer.session.copy, self.here.schema, log, "payload", rows))
        if gate is None or not await self.crew.waits(gate, writer.pending):
            await self.let_go_on(writer)

    async def let_go_on(self, writer: Writer) -> None:
        """Let a statement that waits in its trigger end."""
        assert writer.pending is not None
        fence, pending = self.fence_now(), writer.pending
        if writer.gate is not None:
            await self.crew.open_gate(writer.gate)
            self.note("slow trigger" if writer.copy is None else "slow copy")
        try:
            ids = await pending.result()
        except asyncpg.CheckViolationError:
            self.note("partition missing")
            await self.end(writer, commit=False)
            await self.make_partition()
            ids = []
        else:
            if writer.copy is not None:
                self.note("copy")
                ids = await writer.session.column(
                    f"select id from {self.here.schema}.message_log_{self.stream.id} where payload->>'copy' = $1",
                    writer.copy,
                )
            if writer.open:
                writer.ids += ids
            else:
                self.note_committed(ids, fence)
        finally:
            writer.pending = writer.gate = writer.copy = None

    async def end(self, writer: Writer, *, commit: bool) -> None:
        """End a transaction."""
        fence, ids = self.fence_now(), writer.ids
        writer.ids, writer.savepoint = [], None
        if not writer.open:
            return
        writer.open = False
        if await writer.session.execute("commit" if commit else "rollback") == "COMMIT":
            self.note_committed(ids, fence)

    # --- observing

    def process(self) -> Process:
        """Return some process."""
        return self.chance.choice(self.processes)

    async def observe(self) -> None:
        """Observe in one go."""
        process = self.process()
        if process.half is None:
            (seen,) = await self.here.store.observe([self.ref])
            self.learn(process, seen)

    async def half_observe(self) -> None:
        """Begin an observation, or let one that has begun end."""
        process = self.process()
        if process.half is not None:
            await self.end_half(process)
            return
        busy = {other.half[1] for other in self.processes + self.zombies if other.half is not None}
        free = [session for session in self.crew.observers if session not in busy]
        if not free:
            return
        gate, session = await self.crew.close_gate(), free[0]
        text = self.observe_text(f"{self.here.schema}.gap({{}}, {gate})")
        ref = self.ref
        pending = self.spawn(partial(session.fetch, text, [ref.stream], [ref.sequence], [ref.log]))
        assert await self.crew.waits(gate, pending), pending.error
        process.half = pending, session
        process.gate = gate  # type: ignore[attr-defined]

    async def end_half(self, process: Process) -> None:
        """Do the second half of an observation."""
        assert process.half is not None
        await self.crew.open_gate(process.gate)  # type: ignore[attr-defined]
        (row,) = await process.half[0].result()
        process.half = None
        self.note("something between head and locks")
        writers = frozenset(row["writers"] or ())
        self.learn(
            process,
            Seen(self.ref.stream, row["heads"][0], writers, (), ServerRun(row["run"], row["started"])),
        )

    def learn(self, process: Process, seen: Seen) -> None:
        """Take in an observation."""
        stalled = process.observations.unsettled
        process.observations.add(seen)  # type: ignore[arg-type] # it has what an Observation has
        if process.observations.unsettled:
            self.note("stalled fence")
        elif stalled:
            self.note("stall ended")

    # --- claiming

    def working(self) -> Process | None:
        """Return some process whose guard has not fired."""
        process = self.process()
        return None if process.fired else process

    async def ask(
        self, process: Process, group: Group, token: Token, *, settled: int, freed: bool
    ) -> Taken | None:
        """Ask the store for a range."""
        assert process.observations.run is not None
        return await self.here.store.claim(
            group.row,
            process.node.id,
            token,
            settled=settled,
            run=process.observations.run,
            limit=1_000 if self.draining else self.chance.randint(1, 6),
            mark=group.marks.ranges_done,
            freed_first=freed,
            reads=(1,),
            rows=1_000,
            size=WHOLE,
        )

    async def claim(self) -> None:
        """Take a fresh range; behind a claim in slow motion it waits."""
        process, group = self.working(), self.chance.choice(self.groups)
        if process is None or process.observations.run is None or len(group.slow) > 2:
            return
        settled = self.settled_of(process)
        lost = not self.calm and self.chance.random() < 0.2
        call: Callable[[], Awaitable[Taken | None]] = partial(
            self.ask, process, group, new_token(), settled=settled, freed=False
        )
        if group.slow:
            pending = self.spawn(call)
            if await self.waits_for_the_lock(group, pending):
                group.slow.append((process, pending, settled, lost))
                self.note("claim waited for another")
                return
            call = pending.result
        await self.fresh(process, group, call, settled, lost=lost)

    async def waits_for_the_lock(self, group: Group, pending: Pending) -> bool:
        """Wait until a claim stands behind those that are under way, or has ended; say whether it stands there."""
        with trio.fail_after(20):
            while not pending.done.is_set():
                waiting = await self.here.admin.fetchval(
                    "select count(*) from pg_locks where locktype = 'advisory' and not granted and objid = $2"
                    " and classid = $1::regclass::oid",
                    f"{self.here.schema}.claim_{self.stream.id}",
                    group.row.id,
                )
                if waiting >= len(group.slow):  # all but the one at the gate, and this one
                    return True
                await trio.lowlevel.checkpoint()
        return False

    async def fresh(
        self,
        process: Process,
        group: Group,
        call: Callable[[], Awaitable[Taken | None]],
        settled: int,
        *,
        lost: bool = False,
    ) -> bool:
        """Take in the answer to a claim of a fresh range; say whether there was one."""
        taken = await self.answer(process, call)
        if taken is None:
            if settled <= group.through:
                self.note("claim of nothing settled")
            return False
        claim = taken.claim
        self.note("claim")
        if group.read is not None:
            group.claimed_since_read = True
        low, high = claim.low, claim.high
        demand(low < high <= settled, f"({low}, {high}] with {settled} settled")
        demand(low not in group.ranges, f"the range above {low} was handed out twice")
        for other, truth in group.ranges.items():
            demand(high <= other or truth.high <= low, f"({low}, {high}] overlaps ({other}, {truth.high}]")
        for writer in self.writers:
            demand(
                not [id_ for id_ in writer.ids if id_ <= high],
                f"{high} is claimed while {writer.ids} are open",
            )
        owner = None if taken.empty else process
        group.ranges[low] = RangeTruth(high, claim.token, owner, claim.fence, low, done=taken.empty)
        if taken.rows and taken.rows[0].id > low + 1:
            self.note("claim over a hole")
        if taken.empty:
            self.note("empty range")
            demand(not self.known(low, high), f"({low}, {high}] is called empty")
        elif lost:
            self.note("answer lost")
        else:
            self.own(process, group, taken)
        return True

    async def answer(self, process: Process, call: Callable[[], Awaitable[Any]]) -> Any:
        """Wait for an answer; a lock that was not free in time is one, and so is a lease that is over."""
        try:
            return await call()
        except Contended:
            return None
        except LeaseLost:
            over = await self.here.admin.fetchval(
                f"select ended_at is not null or expires_at <= {self.here.schema}.clock()"
                f" from {self.here.schema}.node where id = $1",
                process.node.id,
            )
            demand(over, "the lease of a live node was refused")
            self.note("claim by an ended node refused")
            process.fired = True
            return None

    def known(self, low: int, high: int) -> list[int]:
        """Return the ids of (low, high] that are known to be committed."""
        return sorted(id_ for id_ in self.committed if low < id_ <= high)

    def own(self, process: Process, group: Group, taken: Taken) -> None:
        """Give a range to a process."""
        claim, ids = taken.claim, [row.id for row in taken.rows]
        missing = set(self.known(claim.start_above, claim.high)) - set(ids)
        demand(not missing, f"({claim.start_above}, {claim.high}] came without {sorted(missing)}")
        progress = RangeProgress(claim.start_above, claim.high, ids)
        process.ranges[group.row.id, claim.low] = Owned(claim, taken.rows, progress, claim.start_above)

    async def slow_claim(self) -> None:
        """Begin a claim that stays between its look at the newest range and its insert."""
        process, group = self.working(), self.chance.choice(self.groups)
        if process is None or process.observations.run is None or group.slow:
            return
        token, settled = new_token(), self.settled_of(process)
        gate = await self.crew.close_gate()
        await self.crew.keeper.execute(f"insert into {self.here.schema}.armed values ($1, $2)", token, gate)
        pending = self.spawn(partial(self.ask, process, group, token, settled=settled, freed=False))
        if await self.crew.waits(gate, pending):
            self.note("claim in slow motion")
            group.gate = gate
            group.slow.append((process, pending, settled, False))
        else:
            await self.crew.open_gate(gate)
            await self.fresh(process, group, pending.result, settled)

    async def end_slow_claims(self) -> None:
        """Let claims in slow motion, and those that wait behind them, end."""
        for group in self.groups:
            if group.gate is not None:
                await self.crew.open_gate(group.gate)
            slow, group.slow, group.gate = group.slow, [], None
            for process, pending, settled, lost in slow:
                await self.fresh(process, group, pending.result, settled, lost=lost)
            self.check_contiguous(group)

    async def burn(self) -> None:
        """The newest ids are burnt, and a group claims as far as it can."""
        writer, process, group = self.writers[0], self.working(), self.chance.choice(self.groups)
        if (
            writer.open
            or writer.pending is not None
            or process is None
            or process.half is not None
            or group.slow
        ):
            return
        await writer.session.execute("begin")
        writer.open = True
        await self.insert(writer)
        await self.end(writer, commit=False)
        (seen,) = await self.here.store.observe([self.ref])
        self.learn(process, seen)
        settled = self.settled_of(process)
        call = partial(self.ask, process, group, new_token(), settled=settled, freed=False)
        while await self.fresh(process, group, call, settled):
            call = partial(self.ask, process, group, new_token(), settled=settled, freed=False)

    async def claims_at_once(self) -> None:
        """All processes claim for one group while somebody produces."""
        group = self.chance.choice(self.groups)
        if group.slow:
            return
        under_way = []
        (seen,) = await self.here.store.observe([self.ref])
        for process in self.processes:
            if process.half is None:
                self.learn(process, seen)
            if not process.fired and process.observations.run is not None:
                settled = self.settled_of(process)
                call = partial(self.ask, process, group, new_token(), settled=settled, freed=False)
                under_way.append((process, self.spawn(call), settled))
        await self.produce()
        for process, pending, settled in under_way:
            await self.fresh(process, group, pending.result, settled)
        self.note("claims at once")
        self.check_contiguous(group)

    def check_contiguous(self, group: Group) -> None:
        """No id was left out between two ranges."""
        if group.slow:
            return
        at = 0
        for low in sorted(group.ranges):
            demand(low == at, f"no range has the ids of ({at}, {low}]")
            at = group.ranges[low].high

    async def reclaim(self) -> None:
        """Take over a range that was freed."""
        process, group = self.working(), self.chance.choice(self.groups)
        # behind a claim in slow motion the look for a fresh range that follows would wait
        if process is not None and process.observations.run is not None and not group.slow:
            await self.take_over(process, group)

    async def take_over(self, process: Process, group: Group) -> bool:
        """Take over a range; say whether there was one."""
        call = partial(self.ask, process, group, new_token(), settled=0, freed=True)
        taken = await self.answer(process, call)
        if taken is None:
            return False
        claim, truth = taken.claim, group.ranges[taken.claim.low]
        low, high = claim.low, claim.high
        demand(not truth.done, f"the range above {low} was taken over though it is done")
        demand(high == truth.high, f"the range above {low} has changed its end")
        demand(
            truth.owner is None or truth.owner.node.id in self.ended,
            f"the range above {low} was stolen from a live node",
        )
        demand(claim.fence > truth.fence, f"the fence of the range above {low} fell to {claim.fence}")
        demand(
            claim.start_above == truth.through,
            f"the takeover of ({low}, {high}] starts above {claim.start_above}, recorded is {truth.through}",
        )
        self.note("reclaim")
        if truth.through > low:
            self.note("reclaim above a prefix")
        if truth.owner is None:
            self.note("reclaim of what was handed back")
        truth.token, truth.owner, truth.fence = claim.token, process, claim.fence
        rest = self.known(truth.through, high)
        for id_ in rest:
            group.allow_again(id_)
        if taken.quarantined is None:
            self.own(process, group, taken)
            return True
        self.note("quarantine")
        demand(taken.quarantined == len(rest), f"{taken.quarantined} were cut out of {rest}")
        truth.done, truth.owner, truth.through = True, None, high
        for id_ in rest:
            group.queue[id_] = ExceptionTruth("ready")
        return True

    # --- running ranges

    def some_range(self, processes: list[Process]) -> tuple[Process, Group, Owned] | None:
        """Return some range in somebody's hands."""
        held = [(process, key) for process in processes for key in process.ranges]
        if not held:
            return None
        process, key = self.chance.choice(held)
        return process, self.group_of(key[0]), process.ranges[key]

    def group_of(self, number: int) -> Group:
        """Return a group by its number."""
        return next(group for group in self.groups if group.row.id == number)

    async def work(self) -> None:
        """Start the next messages of a range, and let handlers end."""
        found = self.some_range([process for process in self.processes if not process.fired])
        if found is not None:
            _, group, owned = found
            for _ in range(self.chance.randint(1, 5)):
                if owned.running and self.chance.random() < 0.6:
                    self.finish(group, owned, self.chance.choice(list(owned.running)))
                elif owned.started < len(owned.rows):
                    self.start(group, owned)
        await trio.lowlevel.checkpoint()

    def start(self, group: Group, owned: Owned) -> None:
        """Hand the next message of a range to a handler."""
        at = owned.started
        owned.started += 1
        owned.running[at] = owned.rows[at]
        self.deliver(group, owned.rows[at], owned.claim.fence)

    def deliver(self, group: Group, row: MessageRow, fence: int) -> None:
        """Check that a message may run now."""
        id_ = int(row.id)
        group.runs[id_] += 1
        demand(
            group.runs[id_] <= group.allowed.get(id_, 1),
            f"{id_} of group {group.row.name} runs for the {group.runs[id_]}th time without a reason",
        )
        before = group.fences.get(id_, 0)
        demand(fence > before, f"the fence of {id_} went from {before} to {fence}")
        group.fences[id_] = fence

    def result(self, often: int = 8) -> Result:
        """Let a handler end somehow; in five of `often` cases not well."""
        match 0 if self.calm or self.draining else self.chance.randrange(often):
            case 1 | 2 | 5:
                self.note("failure")
                return classify(ValueError("no"), timed_out=False)
            case 3:
                self.note("delay")
                return classify(Delay(timedelta(seconds=3)), timed_out=False)
            case 4:
                self.note("terminal")
                return classify(Terminal("enough"), timed_out=False)
            case _:
                self.note("success")
                return classify(None, timed_out=False)

    def finish(self, group: Group, owned: Owned, at: int) -> None:
        """Let a handler of a range end."""
        row = owned.running.pop(at)
        exception, line = first_outcome(self.result(), row, self.policy, self.chance.random())
        if exception is None:
            owned.finished.add(int(row.id))
            owned.progress.finish_index(at)
        else:
            owned.exceptions[int(row.id)] = exception, line
            owned.progress.except_index(at)

    async def record(self) -> None:
        """Record a range, or what is resolved of it."""
        found = self.some_range([process for process in self.processes if not process.fired])
        if found is not None:
            await self.record_range(*found)

    async def record_range(self, process: Process, group: Group, owned: Owned) -> None:
        """Write what is resolved."""
        complete = owned.started == len(owned.rows) and not owned.running
        through = owned.claim.high if complete else owned.progress.through
        if complete or through > owned.recorded:
            await self.write_record(process, group, owned, "finish" if complete else "progress", through)

    async def write_record(
        self, process: Process, group: Group, owned: Owned, action: Any, through: int
    ) -> None:
        """Send a record, sometimes twice, and check that its token decides."""
        claim, truth = owned.claim, group.ranges[owned.claim.low]
        ours = truth.token == claim.token and not truth.done
        rows = [owned.exceptions[id_] for id_ in sorted(owned.exceptions) if id_ <= through]
        record = RangeRecord(
            group=group.row.id,
            low=claim.low,
            token=claim.token,
            epoch=group.row.epoch,
            action=action,
            through=through,
            node=process.node.id,
            exceptions=tuple(row for row, _ in rows),
            history=tuple(line for _, line in rows if line is not None),
        )
        zombie = process not in self.processes or process.fired
        try:
            recorded = await self.here.store.record(self.stream.id, record)
        except LeaseLost:
            demand(not ours, f"the range above {claim.low} was refused to its owner")
            self.note("late completion of a zombie refused")
            del process.ranges[group.row.id, claim.low]
            return
        if not recorded and not ours:
            # its heir has finished the range and the clean-up has deleted it: nobody can tell the two apart any more
            gone = claim.low not in {low for low, *_ in await self.here.claims(group.row)}
            demand(
                action == "finish" and truth.done and gone, f"{action} above {claim.low} was recorded before"
            )
            del process.ranges[group.row.id, claim.low]
            return
        demand(ours, f"a stale token has written to the range above {claim.low}")
        demand(recorded, "a first record was called a second one")
        if zombie:
            self.note("late completion of a zombie accepted")
        owned.recorded = truth.through = through
        for id_ in [id_ for id_ in owned.finished if id_ <= through]:
            owned.finished.discard(id_)
            group.resolved.add(id_)
        for row, _ in rows:
            del owned.exceptions[row.message_id]
            self.enqueue(group, row)
        if action == "progress":
            self.note("prefix recorded")
        else:
            del process.ranges[group.row.id, claim.low]
            truth.owner, truth.done = None, action == "finish"
            if action == "finish":
                self.note("range complete")
            else:
                truth.token = None
        if self.chance.random() < 0.2:
            self.note("record repeated")
            demand(not await self.here.store.record(self.stream.id, record), "a record was written twice")

    def enqueue(self, group: Group, row: ExceptionRow) -> None:
        """Note a new exception."""
        demand(row.message_id not in group.queue, f"{row.message_id} has an exception already")
        group.queue[row.message_id] = ExceptionTruth(row.status)
        if row.status == "dead":
            group.resolved.add(row.message_id)
        else:
            group.allow_again(row.message_id)

    async def hand_back(self) -> None:
        """End a range early: cancelled, or shutting down."""
        found = self.some_range([process for process in self.processes if not process.fired])
        if found is None:
            return
        process, group, owned = found
        if owned.started == len(owned.rows) and not owned.running:
            return
        if owned.running:
            self.note("handed back with cut short")
        for at, row in owned.running.items():
            exception, _ = handed_back(row)
            owned.exceptions[int(row.id)] = exception, None
            owned.progress.except_index(at)
        owned.running.clear()
        through = owned.progress.through
        action = "finish" if through >= owned.claim.high else "hand back"
        if action == "hand back":
            self.note("handed back")
        await self.write_record(process, group, owned, action, through)

    async def zombie_records(self) -> None:
        """A process that was away comes back and records what it had finished."""
        found = self.some_range(self.zombies)
        if found is not None:
            process, group, owned = found
            while owned.running:
                self.finish(group, owned, next(iter(owned.running)))
            await self.record_range(process, group, owned)
        for zombie in self.zombies:
            if zombie.exceptions:
                await self.end_exception(zombie, zombie.exceptions.pop())
                return

    # --- nodes

    async def new_node(self) -> Node:
        """Register a node."""
        return await self.here.node(ttl=TTL)

    def bury(self, process: Process, successor: Process) -> None:
        """Put a process aside; what it had in hand stays with it."""
        self.zombies.append(process)
        self.processes[self.processes.index(process)] = successor

    async def crash(self) -> None:
        """A process falls silent with all it holds; another one starts."""
        process = self.process()
        self.note("crash")
        self.bury(process, Process(await self.new_node()))

    async def tick(self) -> None:
        """Time passes; most processes beat in it."""
        await self.here.move_clock(TICK)
        for process in self.processes:
            if not process.fired and self.chance.random() < 0.75:
                process.fired = not await self.here.store.heartbeat(process.node.id, process.node.token, TTL)
                if process.fired:
                    self.note("lease expired")

    async def die_holding(self) -> None:
        """A process dies with what it holds, and another one takes it over."""
        holding = [
            process
            for process in self.processes
            if (process.ranges or process.exceptions) and process.node.id not in self.ended
        ]
        if not holding:
            return
        process = self.chance.choice(holding)
        self.note("crash")
        self.bury(process, Process(await self.new_node()))
        await self.here.kill(process.node)
        self.note("node ended")
        await self.refresh_ended()
        heir = self.working()
        if heir is None or heir.observations.run is None:
            return
        for group in self.groups:
            if not group.slow:
                await self.take_over(heir, group)
            await self.take_exceptions(heir, group, 3)
        if self.chance.random() < 0.5:  # it had not died, it was only away
            while process.exceptions:
                await self.end_exception(process, process.exceptions.pop())

    async def suspend(self) -> None:
        """A process does not get through to the database for too long: its guard has fired, and its node is ended."""
        process = self.working()
        if process is not None and process.node.id not in self.ended:
            self.note("lease expired")
            await self.here.kill(process.node)
            await self.refresh_ended()
            group = self.groups[0]
            if process.observations.run is not None and not group.slow:  # one more claim was under way
                settled = self.settled_of(process)
                call = partial(self.ask, process, group, new_token(), settled=settled, freed=False)
                demand(
                    not await self.fresh(process, group, call, settled), "a node that has ended has claimed"
                )
            process.fired = True

    async def end_zombie(self) -> None:
        """The node of a process that died runs out, and somebody ends it."""
        living = [zombie for zombie in self.zombies if zombie.node.id not in self.ended]
        if living:
            await self.here.kill(self.chance.choice(living).node)
            self.note("node ended")
            await self.refresh_ended()

    async def end_nodes(self) -> None:
        """Somebody ends the nodes that have run out."""
        if await self.here.store.end_expired_nodes():
            self.note("node ended")
        await self.refresh_ended()

    async def refresh_ended(self) -> None:
        """Learn which nodes have ended."""
        self.ended.update(
            await self.here.admin.column(f"select id from {self.here.schema}.node where ended_at is not null")
        )

    async def register_anew(self) -> None:
        """A process whose lease is over registers again, which ends its old node."""
        process = self.process()
        if process.fired:
            token = new_token()
            former = process.node.id, process.node.token
            number = await self.here.store.register_node("anew", "host", 1, "0", TTL, token, former)
            anew = Process(Node(number, token))
            if process.half is None:
                anew.observations = process.observations
            self.bury(process, anew)
            self.note("registered anew")
            await self.refresh_ended()

    async def reconcile(self) -> None:
        """Give back what the database says a process holds and none of its tasks knows."""
        process = self.working()
        if process is None or any(each[0] is process for group in self.groups for each in group.slow):
            return
        for group in self.groups:
            for held in await self.here.store.held(self.stream.id, group.row.id, process.node.id, 0):
                if held.token in process.tokens():
                    continue
                demand(
                    await self.here.store.release(self.stream.id, group.row.id, held),
                    f"{held} was not given back",
                )
                self.note("orphan handed back")
                if held.kind == "range":
                    truth = group.ranges[held.id]
                    truth.owner = truth.token = None
                else:
                    group.queue[held.id] = ExceptionTruth("ready")
                    group.allow_again(held.id)

    # --- exceptions

    async def run_exceptions(self) -> None:
        """Take exceptions that are due, or whose owner has ended."""
        process, group = self.working(), self.chance.choice(self.groups)
        if process is not None:
            lost = not self.calm and self.chance.random() < 0.2
            await self.take_exceptions(process, group, self.chance.randint(1, 3), lost=lost)
            if process.exceptions and self.chance.random() < 0.5:
                await self.end_exception(process, process.exceptions.pop())

    async def take_exceptions(self, process: Process, group: Group, limit: int, *, lost: bool = False) -> int:
        """Take exceptions; return how many there were."""
        token = new_token()
        call = partial(
            self.here.store.claim_exceptions, group.row, process.node.id, token, reads=(1,), limit=limit
        )
        claimed = await self.answer(process, call) or []
        for each in claimed:
            id_, truth = int(each.message_id), group.queue[int(each.message_id)]
            demand(truth.status not in ("dead", "done"), f"{id_} is {truth.status} and runs again")
            if truth.status == "inflight":
                demand(
                    truth.owner is not None and truth.owner.node.id in self.ended,
                    f"exception {id_} was stolen from a live node",
                )
                self.note("exception taken over")
                group.allow_again(id_)
            if each.dead:
                group.queue[id_] = ExceptionTruth("dead")
                group.resolved.add(id_)
                self.note("exception dead")
                continue
            demand(each.row is not None, f"exception {id_} came without its message")
            group.queue[id_] = ExceptionTruth("inflight", token, process)
            if lost:
                self.note("answer lost")
                continue
            self.note("exception run")
            self.deliver(group, each.row, each.fence)
            process.exceptions.append(
                RunningException(group.row.id, each.row, each.attempts, each.delays, token)
            )
        return len(claimed)

    async def finish_exception(self) -> None:
        """Let the handler of an exception end."""
        process = self.process()
        if process.exceptions and not process.fired:
            await self.end_exception(
                process, process.exceptions.pop(self.chance.randrange(len(process.exceptions)))
            )

    async def end_exception(self, process: Process, running: RunningException) -> None:
        """Record what became of an exception, and check that its token decides."""
        group, id_ = self.group_of(running.group), int(running.row.id)
        truth = group.queue[id_]
        ours = truth.token == running.token and truth.status == "inflight"
        after = next_outcome(
            self.result(), running.attempts, running.delays, self.policy, self.chance.random()
        )
        try:
            await self.here.store.record_exception(
                group.row,
                MessageId(id_),
                running.token,
                after,
                process.node.id,
                seen_attempts=running.attempts,
                history=after.history,
            )
        except LeaseLost:
            demand(not ours, f"exception {id_} was refused to its owner")
            self.note("exception token refused")
            return
        demand(ours, f"a stale token has written to exception {id_}")
        match after.status:
            case "resolved":
                self.note("exception resolved")
                group.queue[id_] = ExceptionTruth("done")
                group.resolved.add(id_)
            case "dead":
                self.note("exception dead")
                group.queue[id_] = ExceptionTruth("dead")
                group.resolved.add(id_)
            case "ready":
                self.note("exception retried")
                group.queue[id_] = ExceptionTruth("ready")
                group.allow_again(id_)

    # --- the advancer

    async def read_progress(self) -> None:
        """Read what decides a group's marks; it is written some time later."""
        group = self.chance.choice(self.groups)
        group.read = await self.here.store.read_progress(self.stream.id, group.row.id)
        group.claimed_since_read = False

    async def write_progress(self) -> None:
        """Write marks that were read some time ago, and clean up."""
        group = self.chance.choice(self.groups)
        if group.read is not None:
            await self.write_marks(group)

    async def write_marks(self, group: Group) -> None:
        """Do the second and third step of the advancer; check all that the marks say."""
        progress, group.read = group.read, None
        marks = forward(progress, marks_of(progress))
        store = self.here.store
        moved = await store.advance(group.row.id, progress.epoch, marks.ranges_done, marks.committed)
        self.note("marks moved" if moved else "stale marks ignored")
        if group.claimed_since_read:
            self.note("claim between the advancer's steps")
        if await store.delete_done_claims(
            self.stream.id, group.row.id, progress.epoch, marks.ranges_done, limit=1_000
        ):
            self.note("claims deleted")
        await self.check_marks(group)

    async def check_marks(self, group: Group) -> None:
        """Nothing at or below committed is open, may still appear, or was never resolved; the newest claim is there."""
        schema, number = self.here.schema, group.row.id
        row = (
            await self.here.admin.fetch(
                "select g.ranges_done, g.committed, (select c.high from"
                f" {schema}.claim_{self.stream.id} c where c.group_id = $1 order by c.low desc limit 1),"
                f" (select array_agg(c.low) from {schema}.claim_{self.stream.id} c where c.group_id = $1)"
                f" from {schema}.group_cursor g where g.group_id = $1",
                number,
            )
        )[0]
        before, group.marks = group.marks, Marks(row[0], row[1])
        committed = group.marks.committed
        demand(committed >= before.committed, "committed moved back")
        demand(group.marks.ranges_done >= before.ranges_done, "ranges_done moved back")
        demand(row[2] is not None, "the group has no claim rows")
        if not group.slow:
            demand(
                row[2] == group.through, f"the newest claim ends at {row[2]}, handed out is {group.through}"
            )
        lows = set(row[3])
        for low, truth in group.ranges.items():
            if not truth.done:
                demand(low in lows, f"the open range above {low} was deleted")
                demand(low >= group.marks.ranges_done, f"the open range above {low} is below ranges_done")
                demand(truth.through >= committed, f"committed {committed} passed ({low}, {truth.high}]")
        for id_ in self.known(0, committed):
            demand(id_ in group.resolved, f"committed {committed} passed {id_}, which is not resolved")
        for writer in self.writers:
            demand(
                all(id_ > committed for id_ in writer.ids),
                f"committed {committed} passed an id that may appear",
            )

    # --- the end

    async def drain(self) -> None:
        """End all that is open, let all nodes end, and let one process do what is left."""
        await self.end_what_is_open()
        if self.calm:  # what was begun ends where it was begun
            for process in self.processes:
                for key in list(process.ranges):
                    await self.run_to_the_end(process, self.group_of(key[0]), process.ranges[key])
        await self.here.move_clock(TTL * 2)
        await self.here.store.end_expired_nodes()
        await self.refresh_ended()
        last = Process(await self.new_node())
        self.zombies += self.processes
        self.processes = [last]
        await self.observe()
        head = last.observations.head
        demand(last.observations.settled == head, f"nobody writes, and {last.observations.settled} < {head}")
        for group in self.groups:
            for _ in range(MOST_ROUNDS):
                if not await self.drain_round(last, group):
                    break
            else:
                raise Violation("it does not come to rest")
            group.read = await self.here.store.read_progress(self.stream.id, group.row.id)
            await self.write_marks(group)

    async def end_what_is_open(self) -> None:
        """End all sessions' transactions and all calls that wait."""
        for writer in self.writers:
            if writer.pending is not None:
                await self.let_go_on(writer)
            await self.end(writer, commit=self.chance.random() < 0.7)
        await self.end_slow_claims()
        for process in self.processes + self.zombies:
            if process.half is not None:
                await self.end_half(process)

    async def drain_round(self, process: Process, group: Group) -> bool:
        """Do one more thing; False when there is none."""
        settled = self.settled_of(process)
        call = partial(self.ask, process, group, new_token(), settled=settled, freed=False)
        if await self.take_over(process, group) or await self.fresh(process, group, call, settled):
            for key in list(process.ranges):
                await self.run_to_the_end(process, group, process.ranges[key])
            return True
        if not await self.take_exceptions(process, group, 10):
            if all(truth.status in ("dead", "done") for truth in group.queue.values()):
                return False
            await self.here.move_clock(TICK)
            await self.here.store.heartbeat(process.node.id, process.node.token, TTL)
        while process.exceptions:
            await self.end_exception(process, process.exceptions.pop())
        return True

    async def run_to_the_end(self, process: Process, group: Group, owned: Owned) -> None:
        """Run and record what is left of a range."""
        while owned.started < len(owned.rows):
            self.start(group, owned)
        while owned.running:
            self.finish(group, owned, next(iter(owned.running)))
        await self.record_range(process, group, owned)

    async def check_end(self) -> None:
        """Nothing was lost, nothing was made up, and the tables say so."""
        here, stream = self.here, self.stream.id
        there = set(await here.admin.column(f"select id from {here.schema}.message_log_{stream}"))
        demand(there == self.committed, f"the log and the world differ: {sorted(there ^ self.committed)}")
        (process,) = self.processes
        for group in self.groups:
            name, head = group.row.name, process.observations.head
            self.check_contiguous(group)
            demand(group.through == head, f"group {name} stands at {group.through} of {head}")
            lost = self.committed - group.resolved
            demand(not lost, f"group {name} has lost {sorted(lost)}")
            ran = set(group.runs)
            demand(ran <= self.committed, f"group {name} got {sorted(ran - self.committed)}, which never was")
            if self.calm:
                often = [id_ for id_, runs in group.runs.items() if runs != 1]
                demand(not often, f"group {name} got {often} more than once in a calm world")
            demand(group.marks == Marks(head, head), f"group {name} ends with {group.marks} of {head}")
            rows = await here.admin.fetchval(
                f"select count(*) from {here.schema}.claim_{stream} where group_id = $1", group.row.id
            )
            demand(rows == 1, f"group {name} keeps {rows} claim rows")
            left = await here.admin.column(
                f"select message_id from {here.schema}.exception_queue_{stream}"
                " where group_id = $1 and status <> 'dead'",
                group.row.id,
            )
            demand(not left, f"group {name} keeps exceptions {left}")


# Playing many.


@asynccontextmanager
async def open_crew(dsn: str) -> AsyncIterator[Crew]:
    """Open an installation for many worlds."""
    async with open_installation(dsn, size=8) as here:
        crew = Crew(here)
        await crew.open()
        yield crew


async def play(crew: Crew, seed: int, happened: Counter[str], world: type[World] = World) -> None:
    """Play one world. Raises: Violation, with the seed."""
    failure: Violation | None = None
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            try:
                await world(crew, seed, happened, nursery).play()
            except Violation as exc:
                exc.add_note(f"{world.__name__}, seed {seed}")
                failure = exc
    if failure is not None:
        raise failure


async def explore(dsn: str, seeds: range, least: int) -> Counter[str]:
    """Play many worlds; print how often each event happened.

    Args:
        dsn: an empty database.
        seeds: one for each world.
        least: play so many, and of the rest as many as it takes until every event has happened.
    """
    happened: Counter[str] = Counter()
    async with open_crew(dsn) as crew:
        for played, seed in enumerate(seeds):
            if played >= least and set(happened) == EVENTS:
                break
            await play(crew, seed, happened)
    for event in sorted(EVENTS):
        print(f"{happened[event]:8} {event}")
    return happened


def assert_everything_happened(happened: Counter[str]) -> None:
    assert set(happened) <= EVENTS, f"not declared: {sorted(set(happened) - EVENTS)}"
    assert set(happened) == EVENTS, f"never happened: {sorted(EVENTS - set(happened))}"


async def test_a1_a2_a6_a10_b1_b2_b5_b12_nothing_is_lost_or_handed_out_twice(dsn):
    assert_everything_happened(await explore(dsn, range(200, 280), 20))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1_000, 1_200, 50))
async def test_a1_a2_a6_a10_b1_b2_b5_b12_nothing_is_lost_or_handed_out_twice_in_many_worlds(any_dsn, first):
    assert_everything_happened(await explore(any_dsn, range(first, first + 50), 50))


# Sabotage: each breaks one protocol, and the world must see it.


class ClaimsWithoutTheLock(World):
    """Claims of a group are not serialised; the primary key alone stands in the way."""

    async def break_it(self) -> None:
        await self.patch(
            "claim_range", ("perform pg_advisory_xact_lock", "perform pg_advisory_xact_lock_shared")
        )


class LocksBeforeTheSequence(World):
    """Observes who writes first and what was drawn second."""

    async def break_it(self) -> None:
        self.here.sql._ready["observe", 0] = self.observe_text("{}")

    def observe_text(self, gap: str) -> str:
        return f"""
            with l as materialized (
              select array_agg(k.relation) as logs, array_agg(k.virtualtransaction) as writers, array_agg(k.pid) as pids
              from pg_locks k
              where k.locktype = 'relation' and k.mode = 'RowExclusiveLock' and k.granted and k.relation = any($3::oid[])
                and k.database = (select d.oid from pg_database d where d.datname = current_database())
            ),
            g as materialized (select l.logs, l.writers, l.pids, {gap.format("array[0::bigint]")} as passed from l)
            select h.streams, h.heads, (select r.id from {self.here.schema}.server_run r) as run,
              pg_postmaster_start_time() as started, g.logs, g.writers, g.pids
            from g cross join lateral (
              select array_agg(w.stream_id order by w.at) as streams,
                array_agg(coalesce(pg_sequence_last_value(w.seq), 0) order by w.at) as heads
              from unnest($1::bigint[], $2::oid[]) with ordinality as w (stream_id, seq, at)
              where g.passed is not null
            ) h"""


class ClaimsUpToTheHead(World):
    """Takes the newest observed head for settled."""

    def settled_of(self, process: Process) -> int:
        return process.observations.head


class RecordsWithoutTheToken(World):
    """Whoever had a range once may record it."""

    async def break_it(self) -> None:
        await self.patch(
            "record_range", ("c.low = lo and c.token = tok and not c.done", "c.low = lo and not c.done")
        )
        self.patch_statement("finish_range", "and token = $3", "and $3::uuid is not null")


class RecordsExceptionsWithoutTheToken(World):
    """Whoever had an exception once may record it."""

    async def break_it(self) -> None:
        await self.patch("record_exception", ("e.message_id = mid and e.token = tok", "e.message_id = mid"))


class ReclaimsFromTheLiving(World):
    """Takes every range that is open."""

    async def break_it(self) -> None:
        await self.patch("reclaim_range", ("n.ended_at is not null", "n.id is not null"))


class TakesOverFromTheLow(World):
    """Ignores the recorded prefix of a range."""

    async def break_it(self) -> None:
        await self.patch("reclaim_range", ("greatest(c.low, c.done_through)", "c.low"))


class KeepsTheFence(World):
    """Takes over without drawing a new fence."""

    async def break_it(self) -> None:
        await self.patch(
            "reclaim_range", (f"fence = nextval('{self.here.sql.schema}.fence')", "fence = c.fence")
        )


class DeletesTheNewestClaim(World):
    """Deletes every done claim below ranges_done, the newest included."""

    async def break_it(self) -> None:
        newest = f"and c.low < (select max(k.low) from {self.here.sql.schema}.claim_{self.stream.id} k where k.group_id = $1)"
        self.patch_statement("delete_done_claims", newest, "")


class DeletesAboveRangesDone(World):
    """Deletes claims that are not done."""

    async def break_it(self) -> None:
        self.patch_statement(
            "delete_done_claims", "where k.group_id = $1 and k.done and", "where k.group_id = $1 and"
        )
        self.patch_statement("delete_done_claims", "and c.done and c.low <", "and c.low <")
        self.patch_statement("delete_done_claims", "k.low < $3", "k.low < $3 + 1000")


class CommittedPassesExceptions(World):
    """Looks at the ranges only."""

    async def break_it(self) -> None:
        self.patch_statement(
            "read_progress", "e.status in ('ready', 'inflight', 'deferred', 'parked')", "false"
        )


SABOTAGE = {
    ClaimsWithoutTheLock: r"an error that nobody may see|handed out twice",
    LocksBeforeTheSequence: r"appeared although|while .* are open|came without",
    ClaimsUpToTheHead: r"appeared although|while .* are open",
    RecordsWithoutTheToken: r"a stale token has written to the range|a record was written twice",  # whichever comes first
    RecordsExceptionsWithoutTheToken: r"a stale token has written to exception",
    ReclaimsFromTheLiving: r"stolen from a live node",
    TakesOverFromTheLow: r"the takeover of .* starts above",
    KeepsTheFence: r"the fence of",
    DeletesTheNewestClaim: r"no claim rows|the newest claim ends at|has no claim rows",
    DeletesAboveRangesDone: r"the open range above \d+ was deleted",
    CommittedPassesExceptions: r"committed \d+ passed \d+, which is not resolved",
}


@pytest.mark.parametrize("broken", SABOTAGE, ids=lambda broken: broken.__name__)
async def test_sabotage_is_caught(dsn, broken):
    async with open_crew(dsn) as crew:
        with pytest.raises(Violation, match=SABOTAGE[broken]):
            for seed in range(1, SABOTAGE_SEEDS, 4):  # where most dies
                await play(crew, seed, Counter(), broken)


def test_the_guard_against_worlds_that_do_too_little_is_not_blind():
    with pytest.raises(AssertionError, match="never happened"):
        assert_everything_happened(Counter({"claim": 1}))
