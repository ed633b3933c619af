"""What the scenario tests share: a client over an empty database, a consumer beside the test, time that a test moves, tables."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import trio

import sqlstreams
from sqlstreams.model.values import NodeId, ServerRun, Token
from sqlstreams.store import GroupRow, Store, Taken
from tests.servers import sql, sql_async, wait_until_async

PROGRAMS = Path(__file__).parent.parent / "programs"
ROOT = PROGRAMS.parent.parent
BUSY = 2.0  # seconds that a busy machine may take beyond what is asserted
HOUR = 3600.0
# Leases that outlive every move of the clock, so that only what a test ends is ended.
PATIENT = sqlstreams.LeaseConfig(ttl=timedelta(days=1), heartbeat=timedelta(seconds=1))
# Leases that run out while a test waits.
SHORT = sqlstreams.LeaseConfig(
    ttl=timedelta(seconds=3),
    heartbeat=timedelta(seconds=1),
    margin=timedelta(seconds=1.2),
    grace=timedelta(seconds=0.5),
)
UNRESOLVED = "('ready', 'inflight', 'deferred', 'parked')"


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


# The client and its consumers.


@asynccontextmanager
async def opened(
    dsn: str,
    group: sqlstreams.GroupConfig | None = None,
    stream: sqlstreams.StreamConfig | None = None,
    type_: Any = Any,
    **settings: Any,
) -> AsyncIterator[tuple[sqlstreams.Client, sqlstreams.Stream[Any], sqlstreams.ConsumerGroup[Any]]]:
    """Connect, and declare the stream `s` and its group `g`, with the ids 1 and 1 in an empty database."""
    wanted: dict[str, Any] = {"lease": PATIENT, "allow_destroy": True} | settings
    async with sqlstreams.connect(dsn, **wanted) as client:
        handle = client.stream("s", type_)
        await handle.register(stream)
        consumer = handle.consumer("g")
        await consumer.register(group)
        yield client, handle, consumer


@asynccontextmanager
async def consuming(
    group: sqlstreams.ConsumerGroup[Any], handler: Callable[..., Any], **options: Any
) -> AsyncIterator[trio.CancelScope]:
    """Consume beside the block, and cancel it at its end."""
    async with trio.open_nursery() as nursery:
        await nursery.start(group.consume, handler, sqlstreams.ConsumeOptions(**options))
        yield nursery.cancel_scope
        nursery.cancel_scope.cancel(reason="the test's block has ended")


async def forever() -> None:
    """What a handler does that never ends by itself."""
    await trio.sleep_forever()


class Seen:
    """A handler that remembers its runs, and does what it is told for each message.

    Args:
        act: called with the meta; may raise, or return something to await. Payloads are in `payloads`.
    """

    def __init__(self, act: Callable[[sqlstreams.Meta], Any] | None = None) -> None:
        self._act = act
        self._changed = trio.Event()
        self.runs: list[tuple[int, int, int]] = []  # id, attempts, delays
        self.fences: list[int] = []
        self.payloads: list[Any] = []
        self.cut: list[int] = []
        self.at: list[float] = []

    async def __call__(self, payload: Any, meta: sqlstreams.Meta) -> None:
        self.runs.append((meta.id, meta.attempts, meta.delays))
        self.fences.append(meta.fence)
        self.payloads.append(payload)
        self.at.append(trio.current_time())
        self._tell()
        if self._act is not None:
            try:
                found = self._act(meta)
                if found is not None:
                    await found
            except trio.Cancelled:
                self.cut.append(meta.id)
                self._tell()
                raise

    @property
    def ids(self) -> list[int]:
        """The ids, in the order of their runs."""
        return [run[0] for run in self.runs]

    async def until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        """Wait until a condition on the runs holds."""
        with trio.fail_after(seconds):
            while not condition():
                await self._changed.wait()

    async def until_runs(self, count: int, seconds: float = 10.0) -> None:
        """Wait until there were so many runs."""
        await self.until(lambda: len(self.runs) >= count, seconds)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


# Time.


async def own_clock(dsn: str) -> None:
    """Let `move_clock` decide what time the installation has."""
    await sql_async(
        dsn,
        "create table public.clock_shift (by interval not null);"
        "insert into public.clock_shift values ('0');"
        "create or replace function sqlstreams.clock() returns timestamptz language sql volatile as"
        " 'select clock_timestamp() + (select by from public.clock_shift)'",
    )


async def move_clock(dsn: str, by: float, *clients: sqlstreams.Client) -> None:
    """Move the installation's time forward by seconds, and let clients look at it now."""
    await sql_async(dsn, "update public.clock_shift set by = by + $1", timedelta(seconds=by))
    for client in clients:
        client._core.process.pulse.look()


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until a condition holds that nothing tells about."""
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.01)  # because there is no event for it


# Tables.


async def exceptions(dsn: str) -> dict[int, tuple[str, int, int]]:
    """Return status, attempts and delays of each exception of group 1."""
    rows = await sql_async(
        dsn,
        "select message_id, status, attempts, delays from sqlstreams.exception_queue_1 where group_id = 1",
    )
    return {row[0]: (row[1], row[2], row[3]) for row in rows}


async def wait_of(dsn: str, message: int) -> float:
    """Return how many seconds a message has to wait from when its outcome was recorded."""
    rows = await sql_async(
        dsn,
        "select extract(epoch from can_run_after - updated_at)::float8 from sqlstreams.exception_queue_1"
        " where group_id = 1 and message_id = $1",
        message,
    )
    return float(rows[0][0])


async def history(dsn: str) -> list[tuple[int, int, str]]:
    """Return message, attempt and status of each line of the history, in order."""
    rows = await sql_async(
        dsn, "select message_id, attempt, status from sqlstreams.delivery_log_1 order by message_id, at"
    )
    return [(row[0], row[1], row[2]) for row in rows]


async def until_status(dsn: str, message: int, status: str, attempts: int, delays: int) -> None:
    """Wait until an exception stands so."""
    await wait_until_async(
        dsn,
        "select status || ' ' || attempts || ' ' || delays from sqlstreams.exception_queue_1"
        f" where group_id = 1 and message_id = {message}",
        f"{status} {attempts} {delays}",
    )


async def until_resolved(dsn: str, upto: int, seconds: float = 20.0) -> None:
    """Wait until every id up to `upto` is in a done range and no exception of it is unresolved."""
    await wait_until_async(
        dsn,
        "select (select max(high) from sqlstreams.claim_1 where group_id = 1) >= "
        f"{upto} and not exists (select from sqlstreams.claim_1 where group_id = 1 and not done)"
        f" and not exists (select from sqlstreams.exception_queue_1 where group_id = 1 and status in {UNRESOLVED})",
        timeout=seconds,
    )


async def until_done(dsn: str, upto: int) -> None:
    """Wait until every id up to `upto` is in a done range."""
    await wait_until_async(
        dsn,
        f"select (select max(high) from sqlstreams.claim_1 where group_id = 1) >= {upto}"
        " and not exists (select from sqlstreams.claim_1 where group_id = 1 and not done)",
    )


async def assert_nothing_left(client: sqlstreams.Client, dsn: str) -> None:
    """The pool has all its places, and no session works or is in a transaction."""
    await until(lambda: not (client._pool.statistics().in_use or client._pool.statistics().waiting), 10)
    await wait_until_async(
        dsn,
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        " and backend_type = 'client backend' and state <> 'idle' and application_name like 'sqlstreams%'",
        0,
    )


# The store, as another process would use it.


def store_of(client: sqlstreams.Client) -> Store:
    return client._core.store


async def other_node(client: sqlstreams.Client, ttl: float = 600.0) -> tuple[NodeId, Token]:
    """Register a node that stands for another process; end it to let that process die."""
    token = client._core.process.make_token()
    node = await store_of(client).register_node("other", "elsewhere", 1, "0", seconds(ttl), token, None)
    return node, token


async def server_run(client: sqlstreams.Client, group: GroupRow) -> ServerRun:
    """Return the server run as an observation names it."""
    store = store_of(client)
    return (await store.observe(await store.log_refs([group.stream_id])))[0].run


async def take_range(
    client: sqlstreams.Client, group: GroupRow, node: NodeId, token: Token, settled: int, **others: Any
) -> Taken | None:
    """Claim a range for a node as its process would."""
    arguments: dict[str, Any] = {
        "limit": 100,
        "mark": 0,
        "freed_first": True,
        "reads": (1,),
        "rows": 1_000,
        "size": 1_000_000,
    } | others
    run = await server_run(client, group)
    return await store_of(client).claim(group, node, token, settled=settled, run=run, **arguments)


# Programs.


class Program:
    """A program of tests/programs in a process of its own; its lines of output and its log file."""

    def __init__(self, name: str, /, **wanted: Any) -> None:
        self.log = Path(wanted["log"])
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / f"{name}.py"), json.dumps(wanted | {"log": str(self.log)})],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ready(self, seconds: float = 20.0) -> None:
        """Wait until it says that it works."""
        assert self.process.stdout is not None
        with trio.fail_after(seconds):
            line = await trio.to_thread.run_sync(self.process.stdout.readline, abandon_on_cancel=True)
        if line != b"ready\n":
            self.process.kill()
            raise AssertionError(f"said {line!r}: {self.process.communicate()[1].decode()}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def ended(self, seconds: float) -> int:
        """Wait for its end; return its exit code."""
        with trio.fail_after(seconds):
            return await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)

    def lines(self) -> list[list[str]]:
        """Return its log; a last line that was cut off by a kill is left out."""
        return log_lines([self.log])


@contextmanager
def program(name: str, /, **wanted: Any) -> Iterator[Program]:
    """Run a program for the block; it is killed if it still runs."""
    running = Program(name, **wanted)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGKILL)
        running.process.communicate()


def log_lines(paths: Sequence[Path]) -> list[list[str]]:
    """Return the words of all complete lines of log files."""
    found: list[list[str]] = []
    for path in paths:
        if path.exists():
            found += [line.split() for line in path.read_text().rpartition("\n")[0].splitlines()]
    return found


async def until_logged(path: Path, count: int, seconds: float = 20.0, word: str = "began") -> list[list[str]]:
    """Wait until a log has so many lines that begin with a word; return them."""

    def found() -> list[list[str]]:
        return [line for line in log_lines([path]) if line[0] == word]

    await until(lambda: len(found()) >= count, seconds)
    return found()


def sql_now(dsn: str, query: str) -> Any:
    """Return the first value of a query."""
    return sql(dsn, query)[0][0]
