"""What the demo shows: a live view on a terminal, a plain line every two seconds elsewhere, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import click
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sqlstreams.cli._output import console, print_styled, say
from sqlstreams.cli.demo.journal import Ran, Record, Sent
from sqlstreams.cli.demo.plan import AUDIT, CHARGE, LEASE, Plan
from sqlstreams.cli.demo.report import Report
from sqlstreams.config import LeaseConfig
from sqlstreams.consumer import GroupSnapshot
from sqlstreams.store import NodeRow

__all__ = ["Show", "print_report"]

LINE_SECONDS = 2.0
RATE_SECONDS = 2.0
EVENTS = 8
LEASE_CELLS = 12


@dataclass
class _Counted:
    """What one process, or the producer, has written down so far."""

    done: int = 0
    failed: int = 0
    rates: list[tuple[float, int]] = field(default_factory=list)

    def rate(self, now: float) -> float:
        """Return how many a second, over the last two seconds."""
        self.rates = [each for each in self.rates if each[0] > now - RATE_SECONDS] or self.rates[-1:]
        since, before = self.rates[0] if self.rates else (now, self.done)
        self.rates.append((now, self.done))
        return (self.done - before) / (now - since) if now > since else 0.0


class Show:
    """Shows how the demo goes.

    Args:
        plan: what is to come.
        stderr: because stdout is for the report alone.
    """

    def __init__(self, plan: Plan, *, stderr: bool) -> None:
        self._plan = plan
        self._console = console(stderr=stderr)
        self._stderr = stderr
        self._live: Live | None = None
        self._began = time.monotonic()
        self._line_at = 0.0
        self._counted: dict[str, _Counted] = {}
        self._groups: dict[str, GroupSnapshot] = {}
        self._nodes: Sequence[NodeRow] = ()
        self._events: list[str] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Show it for the block."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, refresh_per_second=8, transient=True) as self._live:
            yield

    def tell(self, what: str) -> None:
        """Show an event."""
        line = f"{time.monotonic() - self._began:5.1f} s  {what}"
        self._events.append(line)
        if self._live is not None:
            self._draw()
        else:
            self._echo(line)

    def wrote(self, process: str, records: Iterator[Record]) -> None:
        """Count what a process has written down."""
        counted = self._counted.setdefault(process, _Counted())
        for record in records:
            if isinstance(record, Sent) or (isinstance(record, Ran) and record.outcome == "handled"):
                counted.done += 1
            elif isinstance(record, Ran) and record.outcome == "failed":
                counted.failed += 1

    def seen(self, groups: dict[str, GroupSnapshot], nodes: Sequence[NodeRow]) -> None:
        """Show where the groups stand and who holds a lease."""
        self._groups, self._nodes = groups, nodes
        now = time.monotonic()
        if self._live is not None:
            self._draw()
        elif now - self._line_at >= LINE_SECONDS:
            self._line_at = now
            self._echo(self._line())

    def _echo(self, line: str) -> None:
        if self._stderr:
            click.echo(line, err=True)
        else:
            say(line)

    def _of(self, process: str) -> _Counted:
        return self._counted.setdefault(process, _Counted())

    def _line(self) -> str:
        parts = [f"{time.monotonic() - self._began:5.1f} s  produced {self._of('producer').done:,}"]
        for group, seen in self._groups.items():
            done = sum(counted.done for name, counted in self._counted.items() if name.startswith(group))
            parts.append(
                f"{group} {done:,} runs (lag {seen.lag.messages:,}, retrying {seen.by_status.get('ready', 0):,}, "
                f"dead {seen.by_status.get('dead', 0):,})"
            )
        return "  ".join(parts)

    def _draw(self) -> None:
        assert self._live is not None
        events = Text("\n".join(self._events[-EVENTS:]), style="dim")
        self._live.update(Group(self._group_table(), Text(), self._process_table(), Text(), events))

    def _group_table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("group", min_width=16)
        for column in ("lag", "lag seconds", "open ranges", "in flight", "retrying", "dead"):
            table.add_column(column, justify="right")
        for group in (CHARGE, AUDIT):
            if (seen := self._groups.get(group)) is not None:
                table.add_row(
                    group,
                    f"{seen.lag.messages:,}",
                    f"{seen.lag.seconds:.1f}",
                    f"{seen.open_ranges:,}",
                    f"{seen.in_flight:,}",
                    f"{seen.by_status.get('ready', 0):,}",
                    f"{seen.by_status.get('dead', 0):,}",
                )
        return table

    def _process_table(self) -> Table:
        now = time.monotonic()
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("process", min_width=16)
        for column in ("runs", "per second", "failed runs"):
            table.add_column(column, justify="right")
        table.add_column("lease")
        leases = {node.name: _lease_of(node) for node in reversed(self._nodes)}
        for name, counted in self._counted.items():
            lease = leases.get(name, Text("needs none" if name == "producer" else "", style="dim"))
            table.add_row(
                name, f"{counted.done:,}", f"{counted.rate(now):,.0f}", f"{counted.failed:,}", lease
            )
        return table


def _lease_of(node: NodeRow) -> Text:
    if node.ended_at is not None:
        return Text("ended", style="red")
    cells = max(0, min(LEASE_CELLS, round(node.lease_left * LEASE_CELLS / LEASE.ttl.total_seconds())))
    return Text("█" * cells + "░" * (LEASE_CELLS - cells) + f" {node.lease_left:4.1f} s", style="green")


def print_report(report: Report) -> None:
    """Print the table at the end, and why it did not pass."""
    screen = console()
    table = Table(box=box.SIMPLE_HEAD if screen.is_terminal else None, header_style="bold", pad_edge=False)
    table.add_column("group")
    for column in ("produced", "handled", "retried", "dead", "redelivered", "lost"):
        table.add_column(column, justify="right")
    for group in report.groups:
        table.add_row(
            group.group,
            f"{report.produced:,}",
            f"{group.handled:,}",
            f"{group.retried:,}",
            f"{group.dead:,}",
            f"{group.redelivered:,}",
            Text(f"{len(group.lost):,}", style="bold red" if group.lost else "bold green"),
        )
    shown: list[RenderableType] = [table, "", *(Text(line) for line in _dead(report))]
    if report.takeover_seconds is not None:
        begun = "the payment" if report.in_hand == 1 else f"one of the {report.in_hand} payments"
        shown.append(
            f"takeover time {report.takeover_seconds:.1f} s: from SIGKILL until another process ran {begun}"
            f" that the killed one had in hand; leases last {LEASE.ttl.total_seconds():g} s here"
            f" (by default {LeaseConfig().ttl.total_seconds():g} s)"
        )
    shown.append(Text(f"lost {report.lost:,}", style="bold green" if report.passed else "bold red"))
    shown += [Text(f"FINDING: {finding}", style="red") for finding in report.findings]
    print_styled(*shown)


def _dead(report: Report) -> list[str]:
    """Say what the dead letters are, when they are what was planned for every group."""
    undecodable = max((group.undecodable for group in report.groups), default=0)
    failing = [(group.group, group.always_fails) for group in report.groups if group.always_fails]
    planned = all(group.dead == group.undecodable + group.always_fails for group in report.groups)
    if not undecodable or not planned:
        return []
    parts = [
        f"{undecodable:,} cannot be decoded",
        *(f"{count:,} always fail ({name})" for name, count in failing),
    ]
    return [f"dead: {', '.join(parts)}, as planned"]
