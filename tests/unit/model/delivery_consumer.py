"""The delivery model's groups: claims, the messages that run, exceptions.

What a statement does is written out in the plainest way; what a process decides, `sqlstreams.model` decides. A claim and
the reading of its messages are two events.
"""

from datetime import timedelta

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
from sqlstreams.model.progress import RangeProgress, resolved_prefix
from sqlstreams.model.retry import RetryPolicy, Run, overdrawn, takeover
from sqlstreams.model.values import Claim, Fence, ServerRun
from tests.unit.model.delivery_rows import POLICY, ClaimRow, Group, Message, Owned, Process, QueueRow, demand
from tests.unit.model.delivery_server import Server

MAX_RANGE_RECLAIMS = 2


class Consumers(Server):
    """A server with two groups, which the processes consume."""

    def __init__(self, script: bytes) -> None:
        super().__init__(script)
        self.groups = [Group(), Group()]

    # --- what the sabotage replaces

    def settled_of(self, process: Process) -> tuple[int, ServerRun | None]:
        """Return what a process believes is settled, and on which run."""
        return process.observations.settled, process.observations.run

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

    # --- claiming

    def working(self) -> Process | None:
        """Return some process whose guard has not fired."""
        process = self.process()
        return None if process.guard_fired else process

    def group(self) -> int:
        """Return some group."""
        return self.script.choose(2)

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
        high = settled if first is None else min(settled, low + limit if first <= low + limit else first - 1)
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
