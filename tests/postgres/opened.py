"""An installation for one test: the real store on a real database, nodes of no process, sessions of strangers, a scripted clock.

A `Node` here is a row whose heartbeat only the test sends, so that a test says when an owner dies. A `Session` is a plain
connection, as psql or an application has one. Everything is opened and closed with the block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from random import Random
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import msgspec
import trio

from sqlstreams.config import GroupConfig, StreamConfig
from sqlstreams.model.fence import Observations
from sqlstreams.model.values import MessageId, NodeId, ServerRun, Token
from sqlstreams.postgres.bridge import Bridge
from sqlstreams.postgres.part import Database
from sqlstreams.postgres.pinned import Pinned
from sqlstreams.postgres.pool import Pool
from sqlstreams.postgres.schema import install
from sqlstreams.postgres.statements import Statements
from sqlstreams.postgres.store import PostgresStore
from sqlstreams.store import GroupRow, OutgoingRow, RangeRecord, Seen, StreamRow, Taken
from sqlstreams.workers import cursor_advancer
from tests.postgres.rig import opened, settings_for

T = TypeVar("T")

TTL = timedelta(seconds=15)
WHOLE = 1 << 30  # bytes: more than any range of a test
_tokens = Random()


def new_token() -> Token:
    """Return a token that nobody has, in any process."""
    return Token(UUID(int=_tokens.getrandbits(128)))


def outgoing(*payloads: object) -> list[OutgoingRow]:
    """Return rows to append."""
    return [OutgoingRow(1, None, None, None, msgspec.json.encode(payload)) for payload in payloads]


class Node(msgspec.Struct, frozen=True):
    """A node that a test holds by hand."""

    id: NodeId
    token: Token


class Session:
    """A plain connection: what psql, or an application with any driver, does beside the library."""

    def __init__(self, bridge: Bridge, conn: asyncpg.Connection[asyncpg.Record]) -> None:
        self._bridge = bridge
        self.conn = conn
        self.pid = int(conn.get_server_pid())

    async def execute(self, text: str, *args: Any) -> str:
        """Run a statement, or a script without arguments; return its tag."""
        return await self._bridge.call(self.conn.execute, text, *args)

    async def fetch(self, text: str, *args: Any) -> list[Any]:
        """Run a statement; return its rows."""
        return await self._bridge.call(self.conn.fetch, text, *args)

    async def fetchval(self, text: str, *args: Any) -> Any:
        """Run a statement; return the first value of its first row."""
        return await self._bridge.call(self.conn.fetchval, text, *args)

    async def column(self, text: str, *args: Any) -> list[Any]:
        """Run a statement; return its first column."""
        return [row[0] for row in await self.fetch(text, *args)]

    async def copy(self, schema: str, table: str, column: str, values: Sequence[Any]) -> str:
        """COPY values into one column."""
        return await self._bridge.call(
            self.conn.copy_records_to_table,
            table,
            schema_name=schema,
            columns=[column],
            records=[(value,) for value in values],
        )

    async def close(self) -> None:
        """Hang up at once: what is open is rolled back."""
        self.conn.terminate()
        await trio.lowlevel.checkpoint()


class Installation:
    """The store and what tests do around it.

    Attributes:
        store: the real one. schema: its schema. dsn: its database. sql: its statements.
        admin: a session for looking at tables and for changing what only an owner changes.
    """

    def __init__(self, dsn: str, bridge: Bridge, pool: Pool, sql: Statements, store: PostgresStore) -> None:
        self.dsn = dsn
        self.bridge = bridge
        self.pool = pool
        self.sql = sql
        self.store = store
        self.schema = sql.schema.strip('"')
        self.admin: Session
        self._sessions: list[Session] = []

    async def session(self, **settings: str) -> Session:
        """Open a session; it is closed with the installation."""

        async def connect() -> asyncpg.Connection[asyncpg.Record]:
            return await asyncpg.connect(self.dsn, server_settings=settings)

        session = Session(self.bridge, await self.bridge.call(connect))
        self._sessions.append(session)
        return session

    async def close(self) -> None:
        """Hang up all sessions."""
        for session in self._sessions:
            await session.close()

    # Declaring.

    async def stream(self, name: str = "s", partition_size: int = 1_000_000) -> StreamRow:
        """Declare a stream."""
        return await self.store.register_stream(name, StreamConfig(partition_size=partition_size))

    async def group(
        self, stream: StreamRow, name: str = "g", start: int | None = None, **config: Any
    ) -> GroupRow:
        """Declare a group, at the beginning unless `start` says otherwise."""
        return await self.store.register_group(stream, name, GroupConfig(**config), start=start, run=None)

    async def node(self, name: str = "fake", ttl: timedelta = TTL) -> Node:
        """Register a node that only the test keeps alive."""
        token = new_token()
        return Node(await self.store.register_node(name, "host", 1, "0", ttl, token, None), token)

    # Time.

    async def expire(self, node: Node) -> None:
        """Let a node's lease run out; nobody has ended it yet."""
        await self.admin.execute(
            f"update {self.schema}.node set expires_at = {self.schema}.clock() - interval '1 ms' where id = $1",
            node.id,
        )

    async def kill(self, node: Node) -> None:
        """Let a node's lease run out and have somebody end it."""
        await self.expire(node)
        assert await self.store.end_expired_nodes() >= 1

    async def script_clock(self) -> None:
        """Put the installation on a clock that the test moves."""
        await self.admin.execute(
            f"create table {self.schema}.scripted_clock (ahead interval not null);"
            f"insert into {self.schema}.scripted_clock values (interval '0');"
            f"create or replace function {self.schema}.clock() returns timestamptz language sql volatile as"
            f" 'select clock_timestamp() + (select c.ahead from {self.schema}.scripted_clock c)'"
        )

    async def move_clock(self, by: timedelta) -> None:
        """Move the scripted clock."""
        await self.admin.execute(f"update {self.schema}.scripted_clock set ahead = ahead + $1", by)

    # Writing and looking.

    async def produce(self, stream: StreamRow, *payloads: object) -> list[MessageId]:
        """Append messages in one transaction."""
        return await self.store.append(stream.id, outgoing(*payloads))

    async def produce_many(self, stream: StreamRow, count: int) -> list[MessageId]:
        """Append that many messages, numbered from 1."""
        return await self.produce(stream, *({"n": n} for n in range(1, count + 1)))

    async def see(self, stream: StreamRow) -> Seen:
        """Make one observation."""
        (seen,) = await self.store.observe(await self.store.log_refs([stream.id]))
        return seen

    async def look(self, stream: StreamRow, observations: Observations | None = None) -> Observations:
        """Make one observation and take it in; by default with nothing remembered."""
        observations = Observations() if observations is None else observations
        observations.add(await self.see(stream))  # type: ignore[arg-type] # it has what an Observation has
        return observations

    async def run(self) -> ServerRun:
        """Return the server run."""
        row = (
            await self.admin.fetch(
                f"select (select id from {self.schema}.server_run), pg_postmaster_start_time()"
            )
        )[0]
        assert row[0] is not None, "nobody has observed yet"
        return ServerRun(row[0], row[1])

    # Claiming and recording.

    async def claim(
        self,
        group: GroupRow,
        node: Node,
        settled: int,
        *,
        limit: int = 100,
        token: Token | None = None,
        run: ServerRun | None = None,
        freed_first: bool = False,
    ) -> Taken | None:
        """Claim as a consumer does."""
        if run is None:
            run = (await self.see(await self._stream_of(group))).run
        return await self.store.claim(
            group,
            node.id,
            token or new_token(),
            settled=settled,
            run=run,
            limit=limit,
            mark=0,
            freed_first=freed_first,
            reads=(1,),
            rows=limit,
            size=WHOLE,
        )

    async def reclaim(self, group: GroupRow, node: Node) -> Taken | None:
        """Take a freed range if there is one; never a fresh one."""
        return await self.claim(group, node, 0, freed_first=True)

    async def finish(self, group: GroupRow, node: Node, taken: Taken) -> bool:
        """Record that all of a range has succeeded."""
        return await self.store.record(group.stream_id, finished(group, node, taken))

    async def advance(self, group: GroupRow) -> cursor_advancer.Advanced:
        """Do one tick of the advancer."""
        return await cursor_advancer.run_once(
            self.store, group.stream_id, group.id, cursor_advancer.CursorAdvancerConfig()
        )

    async def committed(self, group: GroupRow) -> int:
        """Return the group's committed as people see it."""
        return int(
            await self.admin.fetchval(
                f"select committed from {self.schema}.group_cursor where group_id = $1", group.id
            )
        )

    async def claims(self, group: GroupRow) -> list[tuple[int, int, bool, int]]:
        """Return (low, high, done, reclaims) of every claim row, by low."""
        return [
            tuple(row)
            for row in await self.admin.fetch(
                f"select low, high, done, reclaims from {self.schema}.claim_{group.stream_id}"
                " where group_id = $1 order by low",
                group.id,
            )
        ]

    async def exceptions(self, group: GroupRow) -> list[tuple[int, str, int, int]]:
        """Return (message id, status, attempts, delays) of every exception, by id."""
        return [
            tuple(row)
            for row in await self.admin.fetch(
                f"select message_id, status, attempts, delays from {self.schema}.exception_queue_{group.stream_id}"
                " where group_id = $1 order by message_id",
                group.id,
            )
        ]

    async def history(self, group: GroupRow) -> list[tuple[int, int, str]]:
        """Return (message id, attempt, status) of the group's history, as it was written."""
        return [
            tuple(row)
            for row in await self.admin.fetch(
                f"select message_id, attempt, status from {self.schema}.delivery_log_{group.stream_id}"
                " where group_id = $1 order by at, message_id",
                group.id,
            )
        ]

    async def _stream_of(self, group: GroupRow) -> StreamRow:
        stream = await self.store.stream_by_id(group.stream_id)
        assert stream is not None
        return stream

    # Waiting.

    async def wait_until_waiting(self, *pids: int, timeout: float = 10) -> None:  # noqa: ASYNC109 - seconds
        """Wait until each of these backends waits for a lock."""
        with trio.fail_after(timeout):
            while set(pids) - set(
                await self.admin.column("select pid from pg_locks where not granted and pid = any($1)", pids)
            ):
                await trio.sleep(0.002)  # because pg_locks has no event

    async def wait_until_lock_waits(self, count: int = 1, *, timeout: float = 10) -> None:  # noqa: ASYNC109
        """Wait until that many backends of this database wait for an advisory lock."""
        with trio.fail_after(timeout):
            while (
                await self.admin.fetchval(
                    "select count(*) from pg_locks where locktype = 'advisory' and not granted"
                    " and database = (select oid from pg_database where datname = current_database())"
                )
                < count
            ):
                await trio.sleep(0.002)  # because pg_locks has no event

    async def wait_until_relation_waits(self, *, expected: bool = True, timeout: float = 10) -> None:  # noqa: ASYNC109
        """Wait until some backend of this database waits for a lock on a table, or none does."""
        text = (
            "select exists (select from pg_locks where locktype = 'relation' and not granted"
            " and database = (select oid from pg_database where datname = current_database()))"
        )
        with trio.fail_after(timeout):
            while await self.admin.fetchval(text) != expected:
                await trio.sleep(0.002)  # because pg_locks has no event


def finished(group: GroupRow, node: Node, taken: Taken) -> RangeRecord:
    """Return the record of a range of which every message has succeeded."""
    claim = taken.claim
    return RangeRecord(group.id, claim.low, claim.token, group.epoch, "finish", claim.high, node.id)


def ids_of(taken: Taken | None) -> list[int]:
    """Return the ids that a claim brought."""
    assert taken is not None
    return [row.id for row in taken.rows]


def span(taken: Taken | None) -> tuple[int, int]:
    """Return (low, high] of a claim."""
    assert taken is not None
    return taken.claim.low, taken.claim.high


async def eventually(condition: Callable[[], T], timeout: float = 10) -> T:  # noqa: ASYNC109 - seconds
    """Wait until something that tasks of this process do has come true."""
    with trio.fail_after(timeout):
        while not (value := condition()):
            await trio.sleep(0.002)  # because a handler's list has no event
        return value


async def eventually_equal(
    look: Callable[[], Awaitable[object]],
    expected: object,
    timeout: float = 10,  # noqa: ASYNC109
) -> None:
    """Wait until a look at the database gives what is expected."""
    seen: object = None
    with trio.move_on_after(timeout):
        while (seen := await look()) != expected:
            await trio.sleep(0.01)  # because tables have no event
    assert seen == expected


@asynccontextmanager
async def open_installation(
    dsn: str, *, schema: str = "sqlstreams", size: int = 6
) -> AsyncIterator[Installation]:
    """Install into a database and open the store for the block."""
    sql = Statements(schema)
    async with opened(dsn, size=size) as (bridge, pool):
        settings = settings_for(dsn)
        node, watch, ddl = (Pinned(bridge, settings, name=name) for name in ("node", "watch", "ddl"))
        await install(pool, sql, schema, allowed=True)
        store = PostgresStore(Database(pool, node, watch, ddl, sql, new_token), f"sqlstreams_{schema}")
        installation = Installation(dsn, bridge, pool, sql, store)
        try:
            installation.admin = await installation.session()
            yield installation
        finally:
            with trio.CancelScope(shield=True):  # bounded: hanging up waits for nobody
                await installation.close()
                for conn in (node, watch, ddl):
                    await conn.close()
