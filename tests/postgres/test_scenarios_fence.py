"""Scenarios A1 to A11: no id is passed that may still appear, whoever writes, and strangers stop nobody."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
import trio

import sqlstreams
from sqlstreams.config import ConsumeOptions, LeaseConfig, StreamConfig
from sqlstreams.errors import LogDamaged, ServerRunChanged
from sqlstreams.model.fence import Observations
from sqlstreams.model.lag import Lag
from tests.postgres.opened import (
    Installation,
    Session,
    eventually,
    eventually_equal,
    ids_of,
    open_installation,
    span,
)
from tests.servers import frozen, sql_async, wait_for, wait_until_async

POLL = 1.0  # seconds between two looks of an idle observer
SLOW_TRIGGER = """
create function slow() returns trigger language plpgsql as $$
begin
  if new.payload->>'gate' is not null then
    perform pg_advisory_lock_shared((new.payload->>'gate')::bigint);
    perform pg_advisory_unlock_shared((new.payload->>'gate')::bigint);
  end if;
  return new;
end $$;
create trigger slow before insert on sqlstreams.message_log_1 for each row execute function slow();
"""
INSERT = "insert into sqlstreams.message_log_1 (payload) values ($1)"
QUIET = LeaseConfig(ttl=timedelta(seconds=90), heartbeat=timedelta(seconds=30))  # no heartbeat during a test


class Inbox:
    """A handler that keeps what it got, and when."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.at: dict[int, float] = {}
        self.payloads: list[object] = []

    async def __call__(self, message: object, meta: sqlstreams.Meta) -> None:
        self.ids.append(meta.id)
        self.payloads.append(message)
        self.at[meta.id] = trio.current_time()
        await trio.lowlevel.checkpoint()


async def consumed(nursery: trio.Nursery, client: sqlstreams.Client, name: str = "g", **options) -> Inbox:
    """Register stream and group, and start to consume."""
    inbox = Inbox()
    stream = client.stream("s")
    await stream.register()
    group = stream.consumer(name)
    await group.register()
    await nursery.start(group.consume, inbox, ConsumeOptions(**options))
    return inbox


def watch_of(client: sqlstreams.Client):
    """What the process knows of its only stream."""
    (watch,) = client._core.process.observer._watches.values()
    return watch


# A1


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a1_nothing_above_an_open_transaction_is_handed_out(any_dsn, end):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 7)
        late, other = await here.session(), await here.session()
        await late.execute("begin")
        await late.execute(INSERT, '"late"')  # id 8
        await other.execute(INSERT, '"other"')  # id 9
        observations = Observations()
        for _ in range(3):
            await here.look(stream, observations)
            assert (observations.settled, observations.head) in {(0, 9), (7, 9)}
        # seen for the first time with the writer there, nothing below it is known to be settled
        assert observations.settled == 0
        assert await here.claim(group, node, observations.settled) is None

        await late.execute(end)
        await here.look(stream, observations)
        assert observations.settled == 9
        taken = await here.claim(group, node, observations.settled)
        assert ids_of(taken) == [*range(1, 8), *([8] if end == "commit" else []), 9]


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a1_a_consumer_waits_for_the_open_transaction_and_goes_on_within_a_poll(dsn, end):
    async with (
        sqlstreams.connect(dsn) as client,
        trio.open_nursery() as nursery,
        open_installation(dsn) as here,
    ):
        inbox = await consumed(nursery, client)
        stream = client.stream("s")
        await stream.produce_batch([{}] * 7)
        await eventually(lambda: inbox.ids == list(range(1, 8)))
        late = await here.session()
        await late.execute("begin")
        await late.execute(INSERT, '"late"')
        assert (await stream.produce({})).id == 9
        await eventually(lambda: watch_of(client).head == 9)
        assert watch_of(client).settled == 7
        group = await stream.consumer("g").get()
        assert (await here.claims(group))[-1][1] == 7
        assert inbox.ids == list(range(1, 8))
        snapshot = await stream.consumer("g").snapshot()
        assert snapshot.held_by == "a writer's transaction is open"
        await late.execute(end)
        ended = trio.current_time()
        await eventually(lambda: inbox.ids[7:] == ([8, 9] if end == "commit" else [9]))
        assert inbox.at[9] - ended < POLL + 0.5
        nursery.cancel_scope.cancel()


# A2


async def test_a2_fence_race_the_xid_fence_loses_the_sleeper_and_ours_does_not(any_dsn):
    """A draws id 2 and sleeps in a trigger without an xid, B commits id 3: one deterministic interleaving."""
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.admin.execute(SLOW_TRIGGER)
        await here.produce(stream, "first")
        observations = await here.look(stream)
        assert observations.settled == 1
        gate, a, b = await here.session(), await here.session(), await here.session()
        await gate.execute("select pg_advisory_lock(7)")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.execute, INSERT, '{"gate": 7}')
            await here.wait_until_waiting(a.pid)
            assert (
                await gate.fetchval("select backend_xid from pg_stat_activity where pid = $1", a.pid) is None
            )
            await b.execute(INSERT, '"B"')

            # what a reader believes that waits for all transactions older than its own xid
            head, own = (
                await gate.fetch(
                    "select (select max(id) from sqlstreams.message_log_1), pg_current_xact_id()::text::bigint"
                )
            )[0]
            xmin = await gate.fetchval("select pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
            assert (head, xmin >= own) == (3, True)
            believed = await gate.column("select id from sqlstreams.message_log_1 where id <= 3 order by id")

            for _ in range(3):
                await here.look(stream, observations)
                assert (observations.settled, observations.head) == (1, 3)
            taken = await here.claim(group, node, observations.settled)
            assert (span(taken), ids_of(taken)) == ((0, 1), [1])
            assert await here.claim(group, node, observations.settled) is None
            await gate.execute("select pg_advisory_unlock(7)")
        there = await gate.column("select id from sqlstreams.message_log_1 where id <= 3 order by id")
        assert (believed, there) == ([1, 3], [1, 2, 3])  # the xid fence has lost id 2
        await here.look(stream, observations)
        assert ids_of(await here.claim(group, node, observations.settled)) == [2, 3]


# A3


async def test_a3_a_sequence_with_a_cache_stops_consumption_with_a_code(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 3)
        await here.admin.execute("alter sequence sqlstreams.message_log_1_id cache 10")
        with pytest.raises(LogDamaged, match="CACHE"):
            await here.claim(group, node, 3)
        await here.admin.execute("alter sequence sqlstreams.message_log_1_id cache 1")
        assert ids_of(await here.claim(group, node, 3)) == [1, 2, 3]


# A4


async def test_a4_strangers_with_open_transactions_hold_nothing_up(dsn, server):
    other_database = f"other_{os.getpid()}"
    await sql_async(server.dsn, f"create database {other_database}")
    async with (
        sqlstreams.connect(dsn) as client,
        trio.open_nursery() as nursery,
        open_installation(dsn) as here,
    ):
        inbox = await consumed(nursery, client)
        stream = client.stream("s")
        await stream.produce({})
        writer, reader, vacuum = await here.session(), await here.session(), await here.session()
        await writer.execute(
            "create table foreign_table (n bigint); begin; insert into foreign_table values (1)"
        )
        await reader.execute("begin isolation level repeatable read")
        assert await reader.fetchval("select count(*) from sqlstreams.message_log_1") == 1
        await here.admin.execute(
            "create table slow_to_vacuum as select repeat('x', 1000) from generate_series(1, 20000)"
        )
        await vacuum.execute("set vacuum_cost_delay = 100; set vacuum_cost_limit = 1")
        async with (
            open_installation(server.dsn_for(other_database), size=1) as there,
            trio.open_nursery() as slow,
        ):
            stranger = await there.session()
            await stranger.execute("create table t (n bigint); begin; insert into t values (1)")
            slow.start_soon(_until_cut, vacuum, "vacuum (freeze) slow_to_vacuum")
            await eventually_equal(
                lambda: here.admin.fetchval(
                    "select count(*) from pg_stat_progress_vacuum where pid = $1", vacuum.pid
                ),
                1,
            )
            for _ in range(10):
                await stream.produce_batch([{}] * 100)
                seen = await here.see(await stream.get())
                assert seen.writers == frozenset()  # nobody's transaction counts but a producer's
            await eventually(lambda: len(inbox.ids) == 1001)
            assert inbox.ids == list(range(1, 1002))
            busy = await here.admin.fetchval(
                "select count(*) from pg_stat_activity where xact_start is not null and pid = any($1)",
                [writer.pid, reader.pid, vacuum.pid, stranger.pid],
            )
            assert busy == 4  # all of them were there until now
            await vacuum.close()
        nursery.cancel_scope.cancel()
    await sql_async(server.dsn, f"drop database {other_database} with (force)")


async def _until_cut(session: Session, text: str) -> None:
    with suppress(Exception):  # the connection is cut under it
        await session.execute(text)


# A5


async def test_a5_idle_polls_take_no_xid_and_write_no_wal(durable_server):
    server = durable_server(autovacuum="off", fsync="off")  # the server itself writes nothing either
    async with sqlstreams.connect(server.dsn, lease=QUIET) as client, trio.open_nursery() as nursery:
        inbox = await consumed(nursery, client)
        await client.stream("s").produce_batch([{}] * 10)
        await eventually(lambda: len(inbox.ids) == 10)
        at_rest = "select committed = 10 and ranges_done = 10 from sqlstreams.group_cursor"
        await wait_until_async(server.dsn, at_rest)
        await wait_until_async(server.dsn, "select count(*) from sqlstreams.claim_1", 1)
        polls = _count_polls(client)
        # the server notes running transactions every 15 s at most, if there was something: a window without that counts
        for _ in range(3):
            xid, wal = await _xid(server.dsn), await _wal(server.dsn)
            seen = dict(polls)
            await eventually(
                lambda seen=seen: all(polls[name] >= seen[name] + 3 for name in polls), timeout=20
            )
            written, xids = await _wal(server.dsn) - wal, await _xid(server.dsn) - xid
            if not written:
                break
        assert (written, xids) == (0, 1)
        nursery.cancel_scope.cancel()


def _count_polls(client: sqlstreams.Client) -> dict[str, int]:
    """Count the statements that the observer and the pulse send."""
    store = client._core.store
    polls = {"observe": 0, "due": 0}

    def counted(name: str) -> Callable[..., Awaitable[object]]:
        real = getattr(store, name)

        async def call(*args: object) -> object:
            answer = await real(*args)
            polls[name] += 1
            return answer

        return call

    for name in polls:
        setattr(store, name, counted(name))
    return polls


async def _xid(dsn: str) -> int:
    """Take a transaction id and return it."""
    return int((await sql_async(dsn, "select pg_current_xact_id()::text::bigint"))[0][0])


async def _wal(dsn: str) -> int:
    """Return how much WAL was ever written."""
    return int((await sql_async(dsn, "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint"))[0][0])


# A6


async def test_a6_a_head_without_any_moment_of_rest_still_settles_step_by_step(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        writers = [await here.session() for _ in range(3)]
        observations = Observations()
        await writers[0].execute("begin")
        await writers[0].execute(INSERT, "0")
        for turn in range(1, 12):  # before one ends the next has begun
            nxt, before = writers[turn % 3], writers[(turn - 1) % 3]
            await nxt.execute("begin")
            await nxt.execute(INSERT, str(turn))
            await here.look(stream, observations)
            assert observations.unsettled
            await before.execute("commit")
            await here.look(stream, observations)
            assert observations.head == turn + 1
            assert observations.settled >= turn - 1


async def test_a6_eight_producers_that_overlap_all_the_time_starve_nobody(dsn):
    open_for, seconds = 0.05, 2.0
    async with (
        sqlstreams.connect(dsn) as client,
        trio.open_nursery() as nursery,
        open_installation(dsn) as here,
    ):
        inbox = await consumed(nursery, client)
        committed: dict[int, float] = {}
        longest = 0.0
        end = trio.current_time() + seconds

        async def produce(session: Session, offset: float) -> None:
            nonlocal longest
            await trio.sleep(offset)  # because eight that begin together would also end together
            while (began := trio.current_time()) < end:
                await session.execute("begin")
                number = await session.fetchval(f"{INSERT} returning id", "{}")
                await trio.sleep(open_for)  # because that is the scenario
                await session.execute("commit")
                committed[number] = trio.current_time()
                longest = max(longest, committed[number] - began)

        async with trio.open_nursery() as producers:
            for n in range(8):
                producers.start_soon(produce, await here.session(), n * open_for / 8)
        await eventually(lambda: len(inbox.ids) == len(committed))
        assert inbox.ids == sorted(committed)
        waits = [inbox.at[number] - committed[number] for number in committed]
        assert max(waits) < longest + 2 * POLL
        # the stream was never at rest, and still most had been handed out while it went on
        assert sum(at < end for at in inbox.at.values()) > len(committed) / 2
        nursery.cancel_scope.cancel()


# A7


LOSE_61 = "insert into sqlstreams.message_log_1 (payload) select '\"lost\"' from generate_series(1, 61)"


async def _forgetful(durable_server, version: int):
    """Start a server that flushes an asynchronous commit as late as it can."""
    return durable_server(
        version,
        synchronous_commit="on",
        wal_writer_delay="10000ms",
        wal_writer_flush_after="1GB",
        bgwriter_lru_maxpages="0",
        checkpoint_timeout="1h",
        autovacuum="off",
    )


@asynccontextmanager
async def _nothing_is_flushed(here: Installation) -> AsyncIterator[None]:
    """Within the block asynchronous commits stay in memory; at its end the server crashes, forgets them, and comes back."""
    walwriter = await here.admin.fetchval("select pid from pg_stat_activity where backend_type = 'walwriter'")
    before = await here.admin.fetchval("select id from sqlstreams.server_run")
    victim = await here.session()
    with frozen(walwriter):
        yield
        os.kill(victim.pid, signal.SIGKILL)
        await trio.to_thread.run_sync(wait_for, lambda: _told_to_quit(walwriter))
    # crash recovery empties the unlogged table
    forgotten = f"select not exists (select from sqlstreams.server_run where id = '{before}')"
    await wait_until_async(here.dsn, forgotten, timeout=30)
    here.admin = await here.session()


def _told_to_quit(pid: int) -> bool:
    """Whether a stopped process will quit as soon as it goes on."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True
    pending = {name: int(mask, 16) for name, mask in (line.split(":", 1) for line in lines if "Pnd:" in line)}
    return bool((pending["SigPnd"] | pending["ShdPnd"]) & (1 << (signal.SIGQUIT - 1)))


@pytest.mark.parametrize("version", [18, 15])
async def test_a7_a_settled_head_ends_with_the_server_run_that_it_was_seen_on(durable_server, version):
    server = await _forgetful(durable_server, version)
    async with open_installation(server.dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        first = await here.produce(stream, *["kept"] * 40)
        observations = await here.look(stream)
        taken = await here.claim(group, node, 40)
        assert ids_of(taken) == first
        await here.finish(group, node, taken)
        await here.admin.execute("checkpoint")
        careless = await here.session(synchronous_commit="off")
        started = await here.admin.fetchval("select pg_postmaster_start_time()")
        async with _nothing_is_flushed(here):
            await careless.execute(LOSE_61)
            await here.look(stream, observations)
            assert observations.settled == 101
            before = observations.run
        assert (
            await here.admin.fetchval("select pg_postmaster_start_time()") == started
        )  # it alone shows nothing
        assert await here.admin.fetchval("select max(id) from sqlstreams.message_log_1") == 40
        with pytest.raises(ServerRunChanged):
            await here.claim(group, node, 101, run=before)
        again = await here.produce(stream, *["new"] * 5)
        assert again == [41, 42, 43, 44, 45]
        with pytest.raises(ServerRunChanged):  # though the table has a run again, it is another one
            await here.see(stream)
            await here.claim(group, node, 101, run=before)
        await here.look(stream, observations)
        assert (observations.settled, observations.run == before) == (45, False)
        assert ids_of(await here.claim(group, node, observations.settled, run=observations.run)) == again


async def test_a7_a_running_consumer_delivers_the_ids_that_are_drawn_again(durable_server):
    server = await _forgetful(durable_server, 18)
    payloads: dict[int, object] = {}
    go_on = trio.Event()

    async def handle(message: object, meta: sqlstreams.Meta) -> None:
        await go_on.wait()
        payloads[meta.id] = message

    async with open_installation(server.dsn) as here, sqlstreams.connect(server.dsn, lease=QUIET) as client:
        stream = client.stream("s")
        await stream.register()
        await stream.consumer("g").register()
        await stream.produce_batch(["kept"] * 40)
        async with trio.open_nursery() as nursery:
            await nursery.start(stream.consumer("g").consume, handle)
            group = await stream.consumer("g").get()
            await eventually_equal(lambda: here.claims(group), [(-1, 0, True, 0), (0, 40, False, 0)])
            await here.admin.execute("checkpoint")
            careless = await here.session(synchronous_commit="off")
            async with _nothing_is_flushed(here):
                await careless.execute(LOSE_61)
                await eventually(lambda: watch_of(client).settled == 101)  # its range consumer is busy
            assert [sent.id for sent in await stream.produce_batch(["new"] * 5)] == [41, 42, 43, 44, 45]
            go_on.set()
            await eventually(lambda: len(payloads) == 45, timeout=30)
            assert payloads == dict.fromkeys(range(1, 41), "kept") | dict.fromkeys(range(41, 46), "new")
            nursery.cancel_scope.cancel()


async def test_a7_an_emptied_run_table_as_after_a_promotion_makes_a_new_run(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 3)
        observations = await here.look(stream)
        old = observations.run
        await here.admin.execute("truncate sqlstreams.server_run")
        with pytest.raises(ServerRunChanged):
            await here.claim(group, node, 3, run=old)
        late = await here.session()
        await late.execute("begin")
        await late.execute(INSERT, '"late"')
        await here.look(stream, observations)
        assert (observations.settled, observations.run == old) == (0, False)  # all of it is learned anew
        await late.execute("commit")
        await here.look(stream, observations)
        assert ids_of(await here.claim(group, node, observations.settled)) == [1, 2, 3, 4]
        # four that find it empty at once agree on one
        await here.admin.execute("truncate sqlstreams.server_run")
        runs = set()

        async def observe() -> None:
            runs.add((await here.see(stream)).run)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(observe)
        assert len(runs) == 1


# A8


async def test_a8_an_observer_that_lags_gets_nothing(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 500)
        assert span(await here.claim(group, node, 500, limit=500)) == (0, 500)
        for settled in (450, 500, 0):
            assert await here.claim(group, node, settled) is None
        assert await here.claims(group) == [(-1, 0, True, 0), (0, 500, False, 0)]


# A9


async def test_a9_an_emptied_log_keeps_head_and_lag(any_dsn):
    async with sqlstreams.connect(any_dsn, listen=False) as client, open_installation(any_dsn) as here:
        stream = client.stream("s")
        row = await stream.register(StreamConfig(partition_size=100))
        await here.store.make_partitions(row.id, 100, 1001)
        group = await stream.consumer("g").register()
        await stream.produce_batch([{}] * 1000)
        async with trio.open_nursery() as nursery:
            await nursery.start(stream.consumer("g").consume, Inbox(), ConsumeOptions(batch=1000))
            await eventually_equal(lambda: here.committed(group), 1000)
            nursery.cancel_scope.cancel()
        # what retention leaves of an old log: its newest partition, empty
        for number in range(10):
            await here.admin.execute(f"drop table sqlstreams.message_log_1_{number}")
        await here.admin.execute("delete from sqlstreams.message_log_1_10")
        assert await here.admin.fetchval("select count(*) from sqlstreams.message_log_1") == 0

        at_rest = Lag(0, 0.0, 1000, 1000, 1000)
        assert await stream.consumer("g").lag() == at_rest
        assert (await stream.consumer("g").snapshot()).held_by is None
        await stream.consumer("at head").register(start="head")
        assert await stream.consumer("at head").lag() == at_rest
        await stream.consumer("at the beginning").register()
        assert (await stream.consumer("at the beginning").lag()).messages in {
            0,
            1,
        }  # the hole below partition 10
        assert (await stream.produce({})).id == 1001
        lag = await stream.consumer("g").lag()
        assert (lag.messages, lag.head, lag.committed) == (1, 1001, 1000)
        for name in ("g", "at head", "at the beginning"):
            got = Inbox()
            async with trio.open_nursery() as nursery:
                await nursery.start(stream.consumer(name).consume, got)
                await eventually(lambda got=got: got.ids == [1001])
                nursery.cancel_scope.cancel()


# A10: tests/postgres/test_protocol_property.py, and here with a whole process


async def test_a10_groups_get_every_committed_id_once_and_in_order_beside_random_writers(dsn):
    chance = Random(10)
    async with (
        sqlstreams.connect(dsn) as client,
        trio.open_nursery() as nursery,
        open_installation(dsn) as here,
    ):
        inboxes = [await consumed(nursery, client, name, batch=7) for name in ("one", "two", "three")]
        committed: list[int] = []

        async def write(session: Session) -> None:
            for _ in range(40):
                await session.execute("begin")
                rows = await session.column(
                    "insert into sqlstreams.message_log_1 (payload) select '{}' from generate_series(1, $1::int)"
                    " returning id",
                    chance.randint(1, 5),
                )
                end = chance.choice(["commit", "commit", "rollback", "error"])
                if end == "error":
                    with suppress(Exception):
                        await session.execute("select 1/0")
                await session.execute("commit" if end == "commit" else "rollback")
                if end == "commit":
                    committed.extend(rows)

        async with trio.open_nursery() as writers:
            for _ in range(4):
                writers.start_soon(write, await here.session())
        for inbox in inboxes:
            await eventually(lambda inbox=inbox: len(inbox.ids) >= len(committed))
            assert inbox.ids == sorted(committed)
        nursery.cancel_scope.cancel()


# A11


async def test_a11_what_psql_inserts_and_copies_is_delivered_like_anything_else(any_dsn):
    async with sqlstreams.connect(any_dsn) as client, trio.open_nursery() as nursery:
        inbox = await consumed(nursery, client, batch=1000)
        async with open_installation(any_dsn) as here:
            psql = await here.session()
            await psql.execute(
                "insert into sqlstreams.message_log_1 (payload) select json_build_object('n', n) from generate_series(1, 5000) n"
            )
            await psql.copy(
                "sqlstreams", "message_log_1", "payload", [f'{{"n": {n}}}' for n in range(5001, 10001)]
            )
            await eventually(lambda: len(inbox.ids) == 10_000, timeout=20)
            assert inbox.ids == list(range(1, 10_001))
            assert inbox.payloads == [{"n": n} for n in range(1, 10_001)]

            with pytest.raises(Exception, match='null value in column "id"'):
                await psql.execute("insert into sqlstreams.message_log_1_0 (payload) values ('{}')")
        nursery.cancel_scope.cancel()


async def test_a11_no_partition_has_a_default_for_the_id_whoever_made_it(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream(partition_size=10)
        await here.store.make_partitions(stream.id, 10, 45)
        rows = await here.admin.fetch(
            "select c.relname, a.atthasdef from pg_inherits i join pg_class c on c.oid = i.inhrelid"
            " join pg_attribute a on a.attrelid = c.oid and a.attname = 'id'"
            " where i.inhparent = 'sqlstreams.message_log_1'::regclass order by 1"
        )
        assert [tuple(row) for row in rows] == [(f"message_log_1_{n}", False) for n in range(5)]
