"""Scenarios J: the lease of a process. Not here: what needs the managers (J1, J5, J7 to J13) and the simulation's (J14, J16)."""

import random
from contextlib import ExitStack
from itertools import pairwise
from typing import Self

import pytest
import trio

import sqlstreams
from actors import Lease, heartbeat
from sqlstreams.errors import LeaseLost
from tests.postgres.scenario_rig import (
    BUSY,
    HOUR,
    SHORT,
    Seen,
    consuming,
    forever,
    move_clock,
    opened,
    other_node,
    own_clock,
    seconds,
    store_of,
    take_range,
    until,
    until_done,
    until_resolved,
)
from tests.servers import backends, frozen, sql_async, wait_until_async

BEAT = (
    "update sqlstreams.node set beats = beats + 1, expires_at = (select sqlstreams.clock()) + interval '600 s'"
    " where id = $1 and token = $2 and ended_at is null and expires_at > (select sqlstreams.clock()) returning beats"
)


# J2: one row decides between the heartbeat and whoever ends the node.


async def test_j2_a_heartbeat_that_becomes_visible_late_is_seen_by_the_taker_who_takes_nothing(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        await own_clock(any_dsn)
        await stream.produce({})
        row, store = await group.get(), store_of(client)
        node, token = await other_node(client, ttl=15)
        assert await take_range(client, row, node, client._core.process.make_token(), 1) is not None
        taker, _ = await other_node(client, ttl=2 * HOUR)
        async with client.transaction() as tx:
            assert await tx.fetchval(BEAT, node, token) == 1  # executed before the expiry
            await move_clock(any_dsn, 16)
            with trio.fail_after(1 + BUSY):  # it is skipped, not waited for
                assert await store.end_expired_nodes() == 0
                assert await take_range(client, row, taker, client._core.process.make_token(), 1) is None
        # visible now, and the lease it wrote still holds
        assert await store.end_expired_nodes() == 0
        assert await take_range(client, row, taker, client._core.process.make_token(), 1) is None
        assert await store.heartbeat(node, token, seconds(15))


async def test_j2_a_heartbeat_that_comes_after_the_node_was_ended_is_refused_for_ever(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        await own_clock(any_dsn)
        await stream.produce({})
        row, store = await group.get(), store_of(client)
        node, token = await other_node(client, ttl=15)
        claim_token = client._core.process.make_token()
        assert await take_range(client, row, node, claim_token, 1) is not None
        await move_clock(any_dsn, 16)
        taker, taker_token = await other_node(client)
        late: list[object] = []

        async def beat() -> None:
            late.append(await store.heartbeat(node, token, seconds(15)))

        async with trio.open_nursery() as nursery:  # noqa: SIM117 - the nursery waits, the transaction must not
            async with client.transaction() as tx:  # the end is executed and not yet visible
                await tx.execute(
                    "update sqlstreams.node set ended_at = sqlstreams.clock() where id = $1", node
                )
                nursery.start_soon(beat)
                await wait_until_async(
                    any_dsn,
                    "select count(*) from pg_stat_activity where application_name = 'sqlstreams node'"
                    " and wait_event_type = 'Lock'",
                    lambda waiting: waiting == 1 or bool(late),
                )
        assert late == [False]
        taken = await take_range(client, row, taker, client._core.process.make_token(), 1)
        assert (taken.claim.low, taken.claim.high, taken.claim.reclaims) == (0, 1, 1)
        await move_clock(any_dsn, -16)  # also when the clock falls back
        assert not await store.heartbeat(node, token, seconds(15))
        with pytest.raises(LeaseLost):
            await take_range(client, row, node, claim_token, 1)
        assert await store.heartbeat(taker, taker_token, seconds(15))


async def test_j2_racing_heartbeats_and_enders_never_leave_both_winners(dsn):
    async with opened(dsn) as (client, _stream, _group):
        await own_clock(dsn)
        store = store_of(client)
        chance = random.Random(2)
        wins = {"beat": 0, "end": 0}
        for _ in range(60):
            node, token = await other_node(client, ttl=0.02)
            told: dict[str, object] = {}

            async def beat() -> None:
                await trio.sleep(chance.uniform(0.005, 0.025))  # because they race
                told["beat"] = await store.heartbeat(node, token, seconds(0.03))  # noqa: B023

            async def end() -> None:
                await trio.sleep(chance.uniform(0.015, 0.03))  # because they race
                told["end"] = await store.end_expired_nodes()  # noqa: B023

            async with trio.open_nursery() as nursery:
                nursery.start_soon(beat)
                nursery.start_soon(end)
            rows = await sql_async(
                dsn, "select ended_at is not null, beats from sqlstreams.node where id = $1", node
            )
            ended, beats = rows[0]
            assert beats == bool(told["beat"])
            wins["beat"] += not ended
            wins["end"] += ended
            if ended:
                assert not await store.heartbeat(node, token, seconds(15))
        print(wins)
        assert wins["beat"] + wins["end"] == 60


# J3, J4: the guard.


class Frozen:
    """The whole server stops: its postmaster, and every backend of the database."""

    def __init__(self, server) -> None:
        self._server = server
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        pids = backends(self._server.dsn)
        self._stack.enter_context(frozen(self._server.pid))
        for pid in pids:
            self._stack.enter_context(frozen(pid))
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()


@pytest.mark.slow
async def test_j3_and_j4_a_silent_database_cuts_the_work_in_time_and_a_new_node_takes_it_back_at_once(
    durable_server,
):
    server = durable_server()
    async with opened(server.dsn, lease=SHORT) as (client, stream, group):
        await stream.produce_batch([{}] * 2)
        hold = [True]
        seen = Seen(lambda _meta: forever() if hold[0] else None)
        nodes = client._core.process.nodes
        async with consuming(group, seen):
            await seen.until_runs(1)
            node = await nodes.current()
            acknowledged = node.lease.deadline
            # a heartbeat that was just acknowledged
            await until(lambda: node.lease.deadline != acknowledged, 10)
            deadline = node.lease.deadline
            with Frozen(server):
                asked = trio.current_time()
                assert deadline <= asked + SHORT.ttl.total_seconds() - SHORT.margin.total_seconds()
                await seen.until(lambda: seen.cut, 10)
                cut = trio.current_time()
                # not before the deadline, and before the lease can end in Postgres
                assert deadline - 0.01 <= cut <= deadline + BUSY
                hold[0] = False
                await trio.sleep(2.0)  # because an answer that comes after this stretches nothing
                assert node.lease.lost
            thawed = trio.current_time()
            await seen.until_runs(3, 20)
            assert seen.at[1] - thawed < 2.0 + BUSY
            await until_resolved(server.dsn, 2)
        assert node.lease.lost
        again = await nodes.current()
        assert again.id != node.id
        rows = await sql_async(
            server.dsn, "select ended_at is not null from sqlstreams.node where id = $1", node.id
        )
        assert rows[0][0]
        assert set(seen.ids) == {1, 2}
        assert (await sql_async(server.dsn, "select max(reclaims) from sqlstreams.claim_1"))[0][0] <= 1


async def test_j4_registering_anew_ends_the_old_node_in_the_same_step_and_its_work_is_free(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        await stream.produce({})
        row, store = await group.get(), store_of(client)
        make = client._core.process.make_token
        node, token = await other_node(client)  # its lease would last for ten minutes more
        assert await take_range(client, row, node, make(), 1) is not None
        own = make()
        again = await store.register_node("other", "elsewhere", 1, "0", seconds(600), own, (node, token))
        taken = await take_range(client, row, again, make(), 1)
        assert (taken.claim.low, taken.claim.high, taken.claim.reclaims) == (0, 1, 1)
        assert not await store.heartbeat(node, token, seconds(600))
        # a token that is not the old node's ends nothing
        await store.register_node("other", "elsewhere", 1, "0", seconds(600), make(), (again, make()))
        assert await store.heartbeat(again, own, seconds(600))


async def test_j4_a_consumer_whose_node_was_ended_goes_on_as_the_next_node(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        seen = Seen()
        async with consuming(group, seen):
            for n in range(1, 4):
                node = await client._core.process.nodes.current()
                await sql_async(
                    any_dsn, "update sqlstreams.node set ended_at = sqlstreams.clock() where id = $1", node.id
                )
                await stream.produce({})
                await seen.until_runs(n)
                await until_done(any_dsn, n)
                assert (await client._core.process.nodes.current()).id != node.id
        assert seen.ids == [1, 2, 3]
        assert [each.ended_at is None for each in await client.nodes(ended=True)] == [
            True,
            False,
            False,
            False,
        ]


# J6.


@pytest.mark.parametrize("things", [1, 10_000])
async def test_j6_a_heartbeat_updates_one_row_whatever_the_node_holds(any_dsn, things):
    async with opened(any_dsn) as (client, _stream, _group):
        node, token = await other_node(client)
        await sql_async(
            any_dsn,
            "create table public.written (what text);"
            "create function public.note() returns trigger language plpgsql as"
            " $$ begin insert into public.written values (tg_table_name || ' ' || tg_op); return null; end $$",
        )
        rows = await sql_async(
            any_dsn,
            "select relname from pg_class where relnamespace = 'sqlstreams'::regnamespace and relkind = 'r'"
            " and relispartition = false",
        )
        for (table,) in rows:
            await sql_async(
                any_dsn,
                f"create trigger note after insert or update or delete on sqlstreams.{table} for each row"
                " execute function public.note()",
            )
        await sql_async(
            any_dsn,
            "insert into sqlstreams.claim_1 (group_id, low, high, node_id, token)"
            " select 1, n, n + 1, $1, gen_random_uuid() from generate_series(1, $2::int) n",
            node,
            things,
        )
        await sql_async(any_dsn, "delete from public.written")
        for _ in range(3):
            assert await store_of(client).heartbeat(node, token, seconds(600))
        rows = await sql_async(any_dsn, "select what, count(*) from public.written group by what")
        assert [tuple(row) for row in rows] == [("node UPDATE", 3)]


async def test_j6_a_hundred_processes_that_start_together_spread_their_heartbeats(autojump_clock):
    sent: list[list[float]] = [[] for _ in range(100)]

    async def process(at: int) -> None:
        async def renew() -> bool:
            sent[at].append(trio.current_time())
            return True

        lease = Lease(trio.current_time(), 15.0, 2.0)
        await heartbeat(lease, renew, 5.0, random.Random(at), outage=OSError)

    with trio.move_on_after(120):
        async with trio.open_nursery() as nursery:
            for at in range(100):
                nursery.start_soon(process, at)
    first = [times[0] for times in sent]
    assert max(first) - min(first) > 0.9  # 10 % either way
    later = sorted(times[15] % 5.0 for times in sent)
    busiest = max(sum(start <= each < start + 0.5 for each in later) for start in later)
    assert busiest < 50  # of 100, in a tenth of the period
    gaps = [after - before for times in sent for before, after in pairwise(times)]
    assert 4.5 - 0.01 <= min(gaps) <= max(gaps) <= 5.5 + 0.01


async def test_j6_a_process_that_only_produces_has_no_node(dsn):
    async with sqlstreams.connect(dsn) as client:
        stream = client.stream("s")
        await stream.register()
        await stream.produce({})
        assert await client.nodes(ended=True) == []
