"""Runs the demo: a Postgres, a producer, three consumers, and one SIGKILL.

Guarantee   when it ends, however it ends, its processes have ended; the stream it made is gone, and so is a private Postgres.
Cancelled   processes get SIGTERM, and SIGKILL after 5 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import trio

import sqlstreams
from sqlstreams.cli._errors import DemoFailed
from sqlstreams.cli._options import Settings
from sqlstreams.cli._running import SCHEMA
from sqlstreams.cli.demo.journal import (
    Dead,
    Journal,
    Killed,
    Planned,
    Ran,
    Record,
    Tail,
    journal_path,
    read_history,
)
from sqlstreams.cli.demo.plan import AUDIT, CHARGE, GROUP, LEASE, STREAM, Orders, Plan, Role
from sqlstreams.cli.demo.report import Report, judge
from sqlstreams.cli.demo.show import Show
from sqlstreams.client import DATABASE_URL
from sqlstreams.config import LeaseConfig
from sqlstreams.errors import AlreadyExists, ConfigurationError

__all__ = ["play"]

READ_SECONDS, LOOK_SECONDS = 0.05, 0.25  # between two looks into the files, and into the database
READY_SECONDS = 20.0  # for the processes to start
DRAIN_SECONDS = 30.0  # after the last payment; then what is missing is found by the report
STALL_SECONDS = 120.0  # for the process that is killed to come to its payment
END_SECONDS = 15.0  # for a process to end after SIGTERM
PAGE = 1_000

VICTIM = f"{CHARGE} 1"
CONSUMERS = {VICTIM: CHARGE, f"{CHARGE} 2": CHARGE, f"{AUDIT} 1": AUDIT}
PRODUCER = "producer"


async def play(settings: Settings, plan: Plan, show: Show, keep: Path | None) -> Report:
    """Run the demo and return what its files say.

    Args:
        settings: the database and schema; without a URL a private Postgres is started.
        plan: what to produce.
        show: is told how it goes.
        keep: where the files stay; None: they are removed.

    Raises: AlreadyExists (the stream is there, and may be somebody's), DemoFailed, what connecting raises.
    """
    with _directory(keep) as directory, show.on():
        async with AsyncExitStack() as stack:
            url = settings.database_url
            if url is None:
                show.tell("starting a private Postgres")
                url = await stack.enter_async_context(sqlstreams.embedded())
            schema = settings.schema or SCHEMA
            client = await stack.enter_async_context(
                sqlstreams.connect(
                    url, schema=schema, listen=False, allow_destroy=True, application_name="sqlstreams demo"
                )
            )
            groups = await stack.enter_async_context(_declared(client))
            stage = _Stage(client, groups, url, schema, plan, show, directory)
            await stage.run()
        return judge(read_history(directory))


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="sqlstreams-demo-") as name:
            yield Path(name)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise ConfigurationError("it is not empty", subject=f"directory {str(keep)!a}")
    yield keep


@asynccontextmanager
async def _declared(
    client: sqlstreams.Client,
) -> AsyncIterator[dict[str, sqlstreams.ConsumerGroup[msgspec.Raw]]]:
    """Make the stream and its groups for the block. Raises: AlreadyExists: what is there is not touched."""
    stream = client.stream(STREAM, msgspec.Raw)
    if await stream.get() is not None:
        raise AlreadyExists(
            "the demo makes this stream itself; give it another --schema, or destroy what an interrupted demo left"
            f" (`sqlstreams stream destroy {STREAM} --force`)",
            subject=f"stream {STREAM!a}",
        )
    await stream.register()
    try:
        groups = {name: stream.consumer(name) for name in (CHARGE, AUDIT)}
        for group in groups.values():
            await group.register(GROUP)
        yield groups
    finally:
        with trio.move_on_after(END_SECONDS, shield=True):  # bounded: END_SECONDS
            await stream.destroy(force=True)


class _Stage:
    """The processes and what they write."""

    def __init__(
        self,
        client: sqlstreams.Client,
        groups: dict[str, sqlstreams.ConsumerGroup[msgspec.Raw]],
        url: str,
        schema: str,
        plan: Plan,
        show: Show,
        directory: Path,
    ) -> None:
        self._client = client
        self._groups = groups
        self._url = url
        self._schema = schema
        self._plan = plan
        self._show = show
        self._directory = directory
        self._journal = Journal(directory / "demo.jsonl")
        self._tails = {name: Tail(journal_path(directory, name)) for name in (PRODUCER, *CONSUMERS)}
        self._processes: dict[str, trio.Process] = {}
        self._stalled = trio.Event()
        self._killed_at: float | None = None
        self._in_hand: set[int] = set()
        self._taken_over = False

    async def run(self) -> None:
        """Play it to the end. Raises: DemoFailed."""
        self._journal.write(Planned(self._plan.messages, tuple(self._groups)))
        async with trio.open_nursery() as nursery:
            for name, group in CONSUMERS.items():
                orders = self._orders(name, "consume", group=group, stalls=name == VICTIM)
                await nursery.start(self._process, orders)
            await self._wait_for_consumers()
            nursery.start_soon(self._follow)
            nursery.start_soon(self._look)
            self._show.tell(
                f"leases last {LEASE.ttl.total_seconds():g} s here, so that a take-over is seen soon"
                f" (by default {LeaseConfig().ttl.total_seconds():g} s)"
            )
            self._show.tell(f"producing {self._plan.messages:,} payments, {self._plan.rate:,} a second")
            await nursery.start(self._process, self._orders(PRODUCER, "produce"))
            await self._kill()
            await self._wait_ended(PRODUCER, None)
            self._show.tell("all payments are produced; waiting for the last retries")
            await self._wait_drained()
            for name in CONSUMERS:
                if name != VICTIM:
                    self._processes[name].terminate()
            for name in CONSUMERS:
                await self._wait_ended(name, END_SECONDS)
            nursery.cancel_scope.cancel(reason="the demo is over")
        await self._write_dead()

    def _orders(self, name: str, role: Role, *, group: str | None = None, stalls: bool = False) -> Orders:
        return Orders(name, role, str(self._directory), self._schema, self._plan, group, stalls)

    async def _process(
        self, orders: Orders, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run a process until it ends. Raises: DemoFailed when it ends badly, unless we killed it."""
        log = journal_path(self._directory, orders.name).with_suffix(".log")
        command = (sys.executable, "-m", "sqlstreams.cli.demo.worker", msgspec.json.encode(orders).decode())
        with log.open("wb") as output:
            async with trio.open_nursery() as nursery:
                process = await nursery.start(
                    partial(
                        trio.run_process,
                        command,
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        check=False,
                        env={**os.environ, DATABASE_URL: self._url},
                        start_new_session=True,  # Ctrl-C is for us alone
                    )
                )
                self._processes[orders.name] = process
                task_status.started()
                code = await process.wait()
        if code != 0 and not (orders.name == VICTIM and self._killed_at is not None):
            *_, last = log.read_text(errors="replace").strip().splitlines() or [""]
            raise DemoFailed(f"it ended with {code}: {last[:500]}", subject=f"process {orders.name!a}")

    async def _wait_for_consumers(self) -> None:
        """Wait until each consumer has its lease."""
        with trio.fail_after(READY_SECONDS):
            while True:
                if CONSUMERS.keys() <= {node.name for node in await self._client.nodes()}:
                    break
                await trio.sleep(READ_SECONDS)
        self._show.tell(f"{len(CONSUMERS)} consumers are running: {', '.join(CONSUMERS)}")

    async def _follow(self) -> None:
        """Follow what the processes write."""
        while True:
            self._read()
            await trio.sleep(READ_SECONDS)

    async def _look(self) -> None:
        """Show where the groups stand and who holds a lease."""
        while True:
            seen = {name: await group.snapshot() for name, group in self._groups.items()}
            self._show.seen(seen, await self._client.nodes(ended=True))
            await trio.sleep(LOOK_SECONDS)

    def _read(self) -> None:
        for name, tail in self._tails.items():
            self._show.wrote(name, self._noted(name, tail.read()))

    def _noted(self, name: str, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            if isinstance(record, Ran):
                self._note(name, record)
            yield record

    def _note(self, name: str, ran: Ran) -> None:
        if name == VICTIM:
            if ran.outcome == "stalls":
                self._stalled.set()
            if ran.outcome in ("started", "stalls"):
                self._in_hand.add(ran.id)
            else:
                self._in_hand.discard(ran.id)
        elif (
            self._killed_at is not None
            and not self._taken_over
            and (ran.group == CHARGE and ran.id in self._in_hand and ran.at > self._killed_at)
        ):
            self._taken_over = True
            self._show.tell(f"{name} took its work over")

    async def _kill(self) -> None:
        """Kill the victim while it hangs in a payment: that message's range is open and cannot be recorded."""
        process = self._processes[VICTIM]
        with trio.move_on_after(STALL_SECONDS) as patience:
            await self._stalled.wait()
        if patience.cancelled_caught:
            raise DemoFailed(
                "it never came to the payment in which it is killed", subject=f"process {VICTIM!a}"
            )
        self._killed_at = time.monotonic()
        process.kill()
        self._journal.write(Killed(VICTIM, CHARGE, self._killed_at))
        await process.wait()
        self._read()
        self._show.tell(
            f"SIGKILL for {VICTIM} (pid {process.pid}); payments it had in hand: {len(self._in_hand)}"
        )

    async def _wait_ended(self, name: str, seconds: float | None) -> None:
        with trio.move_on_after(float("inf") if seconds is None else seconds) as patience:
            await self._processes[name].wait()
        if patience.cancelled_caught:
            raise DemoFailed(f"it did not end within {seconds:g} s", subject=f"process {name!a}")

    async def _wait_drained(self) -> None:
        with trio.move_on_after(DRAIN_SECONDS) as patience:
            while True:
                await trio.sleep(READ_SECONDS)
                if not any([(await group.lag()).messages for group in self._groups.values()]):
                    break
        if patience.cancelled_caught:
            self._show.tell(f"the groups have not drained within {DRAIN_SECONDS:g} s")

    async def _write_dead(self) -> None:
        """Write down which messages the groups gave up."""
        for name, group in self._groups.items():
            after = 0
            while letters := await group.dead_letters(after=after, limit=PAGE):
                self._journal.write(*(Dead(name, letter.message_id) for letter in letters))
                after = letters[-1].message_id
        await trio.lowlevel.checkpoint()
