"""An abstract model of delivery: log, fence, claim log, exceptions and nodes under random interleavings.

A `World` is one stream with two groups, a server and three processes. It is played from a script of bytes, each of which
picks the next event or a choice inside it, so a failing script shrinks and replays. What Postgres and the processes do is
written out here in the plainest way; what they decide is decided by the real functions of `sqlstreams.model`. The checks
know more than any process does (open transactions, what really ran) and raise `Violation`.

Every step that a real system does in two statements is two events here, so that anything can happen in between: the
sequence is read before the locks, progress before the marks are written, a claim before its messages are read.

The rows are in `delivery_rows`, the server and its writers in `delivery_server`, claims and runs in `delivery_consumer`;
here are the nodes, the marks, and the playing.
"""

from collections.abc import Callable

from sqlstreams.model.progress import forward, marks_of, movable
from sqlstreams.model.values import Marks, Progress
from tests.unit.model.delivery_consumer import Consumers
from tests.unit.model.delivery_rows import Group, Owned, Process, Violation, demand

MAX_DRAIN_ROUNDS = 200

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


class World(Consumers):
    """One stream, its server, two groups and three processes."""

    def __init__(self, script: bytes) -> None:
        super().__init__(script)
        self.actions = self.table()

    # --- what the sabotage replaces

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
