"""Scenarios B1 to B12: ranges are disjoint and contiguous, whoever claims, dies, hands back or loses an answer."""

import json
import subprocess
import sys
from contextlib import asynccontextmanager
from datetime import timedelta
from random import Random

import pytest
import trio

import sqlstreams
from sqlstreams.config import GroupConfig, LeaseConfig
from sqlstreams.errors import (
    GroupDamaged,
    LeaseLost,
    OutcomeUnknown,
)
from sqlstreams.model.outcome import ExceptionRow, HistoryRow
from sqlstreams.model.progress import forward, marks_of
from sqlstreams.store import RangeRecord
from tests.postgres.opened import (
    Installation,
    eventually,
    eventually_equal,
    finished,
    ids_of,
    new_token,
    open_installation,
    span,
)
from tests.postgres.proxy import open_proxy

CLAIM = "select low, high from sqlstreams.claim_range_1($1, $2, $3, $4, $5, gen_random_uuid())"
INSERT = "insert into sqlstreams.message_log_1 (payload) values ('{}')"
POLL = 1.0
BRIEF = LeaseConfig(ttl=timedelta(seconds=6), heartbeat=timedelta(seconds=2), margin=timedelta(seconds=2))
SLOW_CLAIM = """
create function slow_claim() returns trigger language plpgsql set lock_timeout = 0 as $$
begin
  perform pg_advisory_lock_shared(7);
  perform pg_advisory_unlock_shared(7);
  return new;
end $$;
create trigger slow before insert on sqlstreams.claim_1 for each row execute function slow_claim();
"""


class Inbox:
    """A handler that keeps what it got; `hold` makes it wait at one message."""

    def __init__(self, hold: int | None = None) -> None:
        self.ids: list[int] = []
        self.metas: list[sqlstreams.Meta] = []
        self.hold = hold
        self.holding = trio.Event()
        self.at: dict[int, float] = {}

    async def __call__(self, _message: object, meta: sqlstreams.Meta) -> None:
        self.ids.append(meta.id)
        self.metas.append(meta)
        self.at[meta.id] = trio.current_time()
        if meta.id == self.hold:
            self.holding.set()
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def gate_closed(here: Installation):
    """Within the block, or until the session that it gives is closed, claims wait between their look and their insert."""
    keeper = await here.session()
    await keeper.execute("select pg_advisory_lock(7)")
    yield keeper
    await keeper.close()


# B1

CLAIMERS = """
import json, sys, random, trio
from sqlstreams.store import GroupRow
from tests.postgres.opened import new_token, open_installation
async def main(dsn, seed):
    chance, found = random.Random(seed), []
    async with open_installation(dsn, size=4) as here:
        stream = await here.store.stream_by_name("s")
        group = await here.store.group_by_name(stream.id, "g")
        run = (await here.see(stream)).run
        async def claim():
            node = await here.node()
            while (taken := await here.claim(group, node, 10_000, limit=chance.randint(1, 120), run=run)) is not None:
                found.append([taken.claim.low, taken.claim.high, [row.id for row in taken.rows]])
        print("ready", flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(claim)
    print(json.dumps(found))
trio.run(main, sys.argv[1], int(sys.argv[2]))
"""


async def test_b1_sixteen_claimers_in_four_processes_get_disjoint_and_contiguous_ranges(dsn):
    async with open_installation(dsn) as here:
        stream = await here.stream()
        await here.group(stream)
        await here.produce_many(stream, 10_000)
        processes = [
            subprocess.Popen(  # noqa: ASYNC220 - nothing else runs here
                [sys.executable, "-W", "ignore", "-c", CLAIMERS, dsn, str(seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in range(4)
        ]
        found = []
        try:
            for process in processes:
                assert process.stdout.readline() == "ready\n"
            for process in processes:
                process.stdin.write("go\n")
                process.stdin.flush()
            answers = [process.communicate(timeout=60)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * 4
        per_process = [json.loads(answer) for answer in answers]
        assert sum(bool(each) for each in per_process) >= 2  # they really shared the work
        found = sorted(each for process in per_process for each in process)
        at = 0
        for low, high, ids in found:
            assert (low, ids) == (at, list(range(low + 1, high + 1)))
            at = high
        assert at == 10_000


@pytest.mark.parametrize(("end", "expected"), [("commit", (100, 200)), ("rollback", (0, 100))])
async def test_b1_in_slow_motion_the_second_claimer_waits_for_the_first(any_dsn, end, expected):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, a, b = await here.group(stream), await here.node(), await here.node()
        await here.produce_many(stream, 300)
        run = (await here.see(stream)).run
        first = await here.session()
        await first.execute("begin")
        assert [tuple(row) for row in await first.fetch(CLAIM, group.id, 100, 300, run.run, a.id)] == [
            (0, 100)
        ]
        got = []

        async def claim() -> None:
            got.append(span(await here.claim(group, b, 300, limit=100, run=run)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(claim)
            await here.wait_until_lock_waits()
            assert got == []
            await first.execute(end)
        assert got == [expected]


# B2


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_b2_the_isolation_that_a_role_defaults_to_does_not_matter(any_dsn, level):
    async with open_installation(any_dsn) as before:
        await before.admin.execute(
            f"do $$ begin execute format('alter database %I set default_transaction_isolation = ''{level}''',"
            " current_database()); end $$"
        )
    async with open_installation(any_dsn) as here:
        assert await here.admin.fetchval("show default_transaction_isolation") == level
        stream = await here.stream()
        group = await here.group(stream)
        await here.produce_many(stream, 400)
        run = (await here.see(stream)).run
        spans = []

        async def claim() -> None:
            node = await here.node()
            while (taken := await here.claim(group, node, 400, limit=7, run=run)) is not None:
                spans.append(span(taken))
                await here.finish(group, node, taken)
                await here.advance(group)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(claim)
        assert sorted(spans) == [(low, min(low + 7, 400)) for low in range(0, 400, 7)]
        # whoever calls the function by hand is told
        psql, node = await here.session(), await here.node()
        with pytest.raises(Exception, match=f"needs READ COMMITTED, not {level.upper()}"):
            await psql.fetch(CLAIM, group.id, 7, 400, run.run, node.id)


async def test_b2_a_claimer_whose_snapshot_is_older_than_two_finished_ranges_hands_no_low_out_again(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 30)
        run = (await here.see(stream)).run
        blocker = await here.session()
        lock = "pg_advisory_xact_lock('sqlstreams.claim_1'::regclass::oid::int, $1::int)"
        await blocker.execute("begin")
        await blocker.execute(f"select {lock}", group.id)
        late = []

        async def claim_late() -> None:
            late.append(await here.claim(group, await here.node(), 30, limit=10, run=run))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(claim_late)  # its statement has begun, with a snapshot from now
            await here.wait_until_lock_waits()
            spans = []
            for _ in range(2):
                spans += [
                    tuple(row) for row in await blocker.fetch(CLAIM, group.id, 10, 30, run.run, node.id)
                ]
            await blocker.execute("update sqlstreams.claim_1 set done = true, node_id = null")
            await blocker.execute("update sqlstreams.group_cursor set ranges_done = 20, committed = 20")
            await blocker.execute("delete from sqlstreams.claim_1 where low < 10")
            await blocker.execute("commit")
        assert (spans, span(late[0])) == ([(0, 10), (10, 20)], (20, 30))


async def test_b2_sabotage_a_claim_that_only_steps_back_from_conflicts_hands_a_low_out_again(dsn):
    """What the lock and a snapshot after it are for: the primary key alone does not see a row that was cleaned up."""
    async with open_installation(dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 30)
        run = (await here.see(stream)).run
        text = await here.admin.fetchval("select pg_get_functiondef('sqlstreams.claim_range_1'::regproc)")
        for old, new in (
            ("perform pg_advisory_xact_lock", "perform pg_advisory_xact_lock_shared"),
            ("returning c.low, c.high", "on conflict do nothing returning c.low, c.high"),
        ):
            assert old in text
            text = text.replace(old, new)
        await here.admin.execute(text)
        await here.admin.execute(SLOW_CLAIM.replace("for each row", "for each row when (new.node_id = 1)"))
        sleeper = await here.node()
        assert (node.id, sleeper.id) == (1, 2)
        got = []

        async def sleep_between_look_and_insert() -> None:
            got.append(span(await here.claim(group, node, 30, limit=10, run=run)))

        async with gate_closed(here) as keeper, trio.open_nursery() as nursery:
            nursery.start_soon(sleep_between_look_and_insert)
            await here.wait_until_lock_waits()
            for _ in range(2):
                taken = await here.claim(group, sleeper, 30, limit=10, run=run)
                await here.finish(group, sleeper, taken)
            await here.advance(group)
            assert await here.claims(group) == [(10, 20, True, 0)]
            await keeper.close()
        assert got == [(0, 10)]  # a second time


# B3


async def test_b3_a_dropped_part_reaches_no_handler_and_holds_nothing_up(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream(partition_size=2)
        group, node = await here.group(stream), await here.node()
        await here.store.make_partitions(stream.id, 2, 6)
        await here.produce_many(stream, 6)
        await here.admin.execute("drop table sqlstreams.message_log_1_0, sqlstreams.message_log_1_1")
        got, ranges = [], []
        while (taken := await here.claim(group, node, 6, limit=3)) is not None:
            ranges.append((span(taken), taken.empty))
            got += ids_of(taken)
            assert taken.empty == (not taken.rows)
            if not taken.empty:
                await here.finish(group, node, taken)
        assert got == [4, 5, 6]
        assert ranges == [((0, 3), True), ((3, 6), False)]
        await here.advance(group)
        assert await here.committed(group) == 6


async def test_b3_a_range_of_rollbacks_is_done_at_once_and_owned_by_nobody(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        writer = await here.session()
        await writer.execute("begin")
        for _ in range(3):
            await writer.execute(INSERT)
        await writer.execute("rollback")
        taken = await here.claim(group, node, 3, limit=3)
        assert (span(taken), taken.empty, taken.rows) == ((0, 3), True, [])
        assert await here.claims(group) == [(-1, 0, True, 0), (0, 3, True, 0)]
        assert await here.store.held(stream.id, group.id, node.id, 0) == []
        await here.produce_many(stream, 3)
        taken = await here.claim(group, node, 6, limit=3)
        assert (span(taken), ids_of(taken)) == ((3, 6), [4, 5, 6])


# B4


async def test_b4_ten_million_ids_that_are_gone_cost_one_empty_claim(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        early, node = await here.group(stream, "early"), await here.node()
        await here.admin.execute("select setval('sqlstreams.message_log_1_id', 9999999)")
        await here.store.make_partitions(stream.id, stream.partition_size, 10_000_003)
        await here.admin.execute("drop table sqlstreams.message_log_1_0, sqlstreams.message_log_1_1")
        assert await here.produce_many(stream, 3) == [10_000_000, 10_000_001, 10_000_002]
        new = await here.group(stream, "new")
        with trio.fail_after(2):
            hole = await here.claim(early, node, 10_000_002, limit=100)  # it stands before the hole
            assert (span(hole), hole.empty) == ((0, 9_999_999), True)
            for group in (early, new):  # the other begins at what is retained
                taken = await here.claim(group, node, 10_000_002, limit=100)
                assert ids_of(taken) == [10_000_000, 10_000_001, 10_000_002]


# B5


async def test_b5_a_reclaimed_range_belongs_to_its_new_owner_alone(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, a, b = await here.group(stream), await here.node("a"), await here.node("b")
        await here.produce_many(stream, 4)
        first = await here.claim(group, a, 4)
        assert await here.reclaim(group, b) is None
        await here.expire(a)
        assert await here.reclaim(group, b) is None  # to run out is not to have ended
        assert await here.store.end_expired_nodes() == 1
        assert not await here.store.heartbeat(a.id, a.token, timedelta(seconds=15))
        second = await here.reclaim(group, b)
        assert (span(second), ids_of(second)) == (span(first), [1, 2, 3, 4])
        assert second.claim.reclaims == 1
        assert second.claim.token != first.claim.token
        assert second.claim.fence > first.claim.fence

        failed = ExceptionRow(2, "ready", 1, 0, timedelta(0), "no", None, 1)
        for exceptions in ((), (failed,)):
            record = RangeRecord(
                group.id,
                0,
                first.claim.token,
                0,
                "finish",
                4,
                a.id,
                exceptions,
                (HistoryRow(2, 0, "failed", "no"),),
            )
            with pytest.raises(LeaseLost):
                await here.store.record(stream.id, record)
        for action, through in (("progress", 2), ("hand back", 2)):
            record = RangeRecord(group.id, 0, first.claim.token, 0, action, through, a.id, (failed,))
            with pytest.raises(LeaseLost):
                await here.store.record(stream.id, record)
        assert await here.claims(group) == [(-1, 0, True, 0), (0, 4, False, 1)]
        assert (await here.exceptions(group), await here.history(group)) == ([], [])
        await here.advance(group)
        assert await here.committed(group) == 0
        assert await here.finish(group, b, second)
        await here.advance(group)
        assert await here.committed(group) == 4


async def test_b5_a_node_that_expired_while_it_waited_for_the_claim_lock_claims_nothing(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node, other = await here.group(stream), await here.node(), await here.node()
        await here.produce_many(stream, 4)
        run = (await here.see(stream)).run
        holder = await here.session()
        await holder.execute("begin")
        await holder.fetch(CLAIM, group.id, 1, 4, run.run, other.id)
        refused = []

        async def claim() -> None:
            with pytest.raises(LeaseLost):
                await here.claim(group, node, 4, run=run)
            refused.append(node)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(claim)
            await here.wait_until_lock_waits()
            await here.expire(node)
            await holder.execute("rollback")
        assert refused == [node]
        assert await here.claims(group) == [(-1, 0, True, 0)]


# B6


async def test_b6_a_freed_range_comes_before_fresh_ids(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, dead, node = await here.group(stream), await here.node(), await here.node()
        await here.produce_many(stream, 4)
        await here.claim(group, dead, 4)
        await here.produce_many(stream, 4)
        await here.kill(dead)
        spans = [span(await here.claim(group, node, 8, freed_first=True)) for _ in range(2)]
        assert spans == [(0, 4), (4, 8)]


async def test_b6_an_idle_consumer_notices_an_expired_range_within_a_poll_of_its_expiry(dsn):
    async with (
        sqlstreams.connect(dsn, listen=False) as client,
        open_installation(dsn) as here,
        trio.open_nursery() as nursery,
    ):
        stream = client.stream("s")
        row = await stream.register()
        group = await stream.consumer("g").register()
        dead = await here.node(ttl=timedelta(seconds=1))
        expires = trio.current_time() + 1
        await here.produce_many(row, 4)
        await here.claim(group, dead, 4)
        inbox = Inbox()
        await nursery.start(stream.consumer("g").consume, inbox)
        await eventually(lambda: inbox.ids == [1, 2, 3, 4])
        assert 0 <= inbox.at[1] - expires < POLL + 1
        assert (await here.claims(group))[-1][:2] == (0, 4)
        nursery.cancel_scope.cancel()


# B7


async def test_b7_a_range_that_kills_each_owner_is_quarantined_at_the_third_expiry(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group = await here.group(stream)
        await here.produce_many(stream, 4)
        node = await here.node()
        taken = await here.claim(group, node, 4)
        handed_out = [taken.claim.reclaims]
        while True:
            last = taken
            await here.kill(node)
            node = await here.node()
            taken = await here.reclaim(group, node)
            if taken.quarantined is not None:
                break
            handed_out.append(taken.claim.reclaims)
        assert handed_out == [0, 1, 2]
        assert (taken.quarantined, taken.rows) == (4, [])
        assert await here.exceptions(group) == [(n, "ready", 0, 0) for n in (1, 2, 3, 4)]
        assert await here.claims(group) == [(-1, 0, True, 0), (0, 4, True, 3)]
        assert await here.reclaim(group, node) is None
        await here.advance(group)
        assert await here.committed(group) == 0
        with pytest.raises(LeaseLost):
            await here.finish(group, node, last)


async def test_b7_what_was_recorded_before_is_not_quarantined_again(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group = await here.group(stream, max_range_reclaims=1)
        await here.produce_many(stream, 4)
        node = await here.node()
        taken = await here.claim(group, node, 4)
        failed = ExceptionRow(1, "ready", 1, 0, timedelta(hours=1), "no", None, 1)
        await here.store.record(
            stream.id, RangeRecord(group.id, 0, taken.claim.token, 0, "progress", 2, node.id, (failed,))
        )
        await here.kill(node)
        taken = await here.reclaim(group, await here.node())
        assert taken.quarantined == 2
        assert await here.exceptions(group) == [(1, "ready", 1, 0), (3, "ready", 0, 0), (4, "ready", 0, 0)]


# B8


async def test_b8_five_graceful_restarts_cost_neither_a_reclaim_nor_an_attempt(dsn):
    async with open_installation(dsn) as here:
        stream = await here.stream()
        group = await here.group(stream)
        await here.produce_many(stream, 10)
        for restart in range(
            1, 6
        ):  # each is cut short in the lowest message of the range that is not resolved
            inbox = Inbox(hold=restart)
            async with sqlstreams.connect(dsn) as client, trio.open_nursery() as nursery:
                await nursery.start(client.stream("s").consumer("g").consume, inbox)
                await inbox.holding.wait()
                nursery.cancel_scope.cancel()
            assert all(meta.attempts == 0 for meta in inbox.metas)
            assert {row[3] for row in await here.claims(group)} == {0}
            # what was cut short once may have succeeded in a later round; none of it has been counted
            assert all(row[1:] == ("ready", 0, 0) for row in await here.exceptions(group))
        assert await here.history(group) == []
        inbox = Inbox()
        async with sqlstreams.connect(dsn) as client, trio.open_nursery() as nursery:
            await nursery.start(client.stream("s").consumer("g").consume, inbox)
            await eventually_equal(lambda: here.committed(group), 10)
            nursery.cancel_scope.cancel()
        assert {meta.attempts for meta in inbox.metas} == {0}
        assert await here.exceptions(group) == []


async def test_b8_a_range_that_is_handed_back_again_and_again_is_never_quarantined(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group = await here.group(stream)
        await here.produce_many(stream, 4)
        node = await here.node()
        taken = await here.claim(group, node, 4)
        for _ in range(5):
            record = RangeRecord(group.id, 0, taken.claim.token, 0, "hand back", 0, node.id)
            assert await here.store.record(stream.id, record)
            assert not await here.store.record(
                stream.id, record
            )  # its answer was lost: told so, nothing changed
            assert await here.store.end_own_node(node.id, node.token)
            node = await here.node()
            taken = await here.reclaim(group, node)
            assert (span(taken), taken.claim.reclaims, taken.quarantined) == ((0, 4), 0, None)
        assert await here.exceptions(group) == []


# B9


async def test_b9_a_group_without_claim_rows_is_damaged_and_not_caught_up(any_dsn):
    async with sqlstreams.connect(any_dsn) as client, open_installation(any_dsn) as here:
        stream = client.stream("s")
        await stream.register()
        group = await stream.consumer("g").register()
        await stream.produce({})
        await here.admin.execute("delete from sqlstreams.claim_1")
        with pytest.raises(GroupDamaged):
            await here.claim(group, await here.node(), 1)
        with pytest.raises(GroupDamaged):
            await stream.consumer("g").lag()
        with pytest.raises(GroupDamaged) as caught:
            await stream.consumer("g").snapshot()
        assert caught.value.code == "SQLS-GROUP-DAMAGED"
        with trio.fail_after(5), pytest.raises(GroupDamaged):
            await stream.consumer("g").consume(Inbox())
        # the advancer does not take it for done either
        await here.advance(group)
        assert await here.committed(group) == 0


# B10


async def test_b10_the_claim_is_there_although_its_answer_was_lost(dsn):
    async with open_proxy(dsn) as proxy, open_installation(proxy.dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 4)
        run = (await here.see(stream)).run
        token = new_token()
        proxy.lose_answer(token.bytes.lower(), "cut")
        with pytest.raises(OutcomeUnknown):
            await here.claim(group, node, 4, run=run, token=token)
        (held,) = await here.store.held(stream.id, group.id, node.id, 0)
        assert (held.id, held.token, held.kind) == (0, token, "range")
        assert await here.store.release(stream.id, group.id, held)
        taken = await here.reclaim(group, node)
        assert (span(taken), taken.claim.reclaims) == ((0, 4), 0)


async def test_b10_a_consumer_whose_claim_lost_its_answer_runs_the_range_while_its_node_lives(dsn):
    async with (
        open_proxy(dsn) as proxy,
        open_installation(dsn) as here,
        sqlstreams.connect(proxy.dsn, lease=BRIEF) as client,
        trio.open_nursery() as nursery,
    ):
        stream, inbox = client.stream("s"), Inbox()
        await stream.register()
        group = await stream.consumer("g").register()
        await nursery.start(stream.consumer("g").consume, inbox)
        await stream.produce({})
        await eventually(lambda: inbox.ids == [1])
        store = client._core.store
        real = store.claim
        lost = []

        async def claim(*args, **options):
            if not lost and not options["freed_first"]:
                lost.append(trio.current_time())
                proxy.lose_answer(args[2].bytes.lower(), "cut")
            return await real(*args, **options)

        store.claim = claim
        await here.produce_many(await stream.get(), 4)
        await eventually(lambda: inbox.ids == [1, 2, 3, 4, 5], timeout=15)
        assert proxy.seen.is_set()
        assert inbox.at[2] - lost[0] < 10
        claims = await here.claims(group)
        assert claims[-1][3] == 0
        assert len(await client.nodes(ended=True)) == 1  # it went on with the same node
        nursery.cancel_scope.cancel()


async def test_b10_a_claimed_range_that_could_not_be_read_is_run_while_the_node_lives(dsn):
    async with open_installation(dsn) as here, sqlstreams.connect(dsn, lease=BRIEF) as client:
        stream, inbox = client.stream("s"), Inbox()
        row = await stream.register()
        group = await stream.consumer("g").register()
        await here.admin.execute(SLOW_CLAIM)
        async with trio.open_nursery() as nursery:
            await nursery.start(stream.consumer("g").consume, inbox)
            blocker = await here.session()
            async with gate_closed(here) as keeper, trio.open_nursery() as locking:
                await here.produce_many(row, 4)
                await (
                    here.wait_until_lock_waits()
                )  # the claim has looked the ids up, and stands before its insert
                locking.start_soon(
                    blocker.execute, "begin; lock table sqlstreams.message_log_1_0 in access exclusive mode"
                )
                await here.wait_until_waiting(blocker.pid)
                await keeper.close()
            claimed = trio.current_time()
            (node,) = await client.nodes()
            await here.wait_until_relation_waits()  # the read, behind the lock
            assert [each.id for each in await here.store.held(row.id, group.id, node.id, 0)] == [0]
            await here.wait_until_relation_waits(expected=False)  # it has failed
            assert inbox.ids == []
            await blocker.execute("rollback")
            await eventually(lambda: inbox.ids == [1, 2, 3, 4])
            assert inbox.at[1] - claimed < 10
            assert (await here.claims(group))[-1][3] == 0
            assert [each.id for each in await client.nodes(ended=True)] == [node.id]
            nursery.cancel_scope.cancel()


# B11


async def test_b11_committed_follows_what_is_resolved_and_a_redrive_lowers_nothing(dsn):
    fails = {3}

    async def handle(_message: object, meta: sqlstreams.Meta) -> None:
        if meta.id in fails:
            raise ValueError("not yet")
        if meta.id == 5:
            raise sqlstreams.Terminal("never")
        await trio.lowlevel.checkpoint()

    async with (
        sqlstreams.connect(dsn) as client,
        open_installation(dsn) as here,
        trio.open_nursery() as nursery,
    ):
        stream = client.stream("s")
        row = await stream.register()
        group = await stream.consumer("g").register(GroupConfig(initial_backoff=timedelta(hours=1)))
        await here.produce_many(row, 6)
        await nursery.start(stream.consumer("g").consume, handle)
        await eventually_equal(lambda: here.committed(group), 2)
        assert await here.exceptions(group) == [(3, "ready", 1, 0), (5, "dead", 0, 0)]
        assert (await stream.consumer("g").snapshot()).oldest_unresolved == 3

        fails.clear()
        await here.admin.execute(
            "update sqlstreams.exception_queue_1 set can_run_after = clock_timestamp() where message_id = 3"
        )
        await eventually_equal(lambda: here.committed(group), 6)
        (dead,) = await stream.consumer("g").dead_letters()
        assert (dead.message_id, dead.error, bytes(dead.payload)) == (5, "never", b'{"n":5}')
        # what a redrive does to the row; it waits, so that it stays unresolved
        await here.admin.execute(
            "update sqlstreams.exception_queue_1 set status = 'ready', attempts = 0,"
            " can_run_after = clock_timestamp() + interval '1 hour' where message_id = 5"
        )
        for _ in range(2):
            await here.advance(group)
            assert await here.committed(group) == 6
        assert (await stream.consumer("g").lag()).committed == 6
        await stream.produce({})
        await eventually_equal(
            lambda: here.admin.fetchval("select max(high) from sqlstreams.claim_1 where done"), 7
        )
        await here.advance(group)
        assert await here.committed(group) == 6  # and it does not pass the redriven one's successors
        nursery.cancel_scope.cancel()


# B12


@pytest.mark.parametrize("between", ["read and advance", "advance and delete"])
async def test_b12_a_claim_between_two_steps_of_the_advancer_is_never_passed(any_dsn, between):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 40)
        open_lows: list[int] = []
        chance = Random(12)
        before = 0

        async def interfere() -> None:
            """Claim a range and finish another one."""
            if (taken := await here.claim(group, node, 40, limit=3)) is not None:
                held.append(taken)
            if len(held) > 2:
                await here.finish(group, node, held.pop(chance.randrange(len(held))))

        held: list = []
        for _ in range(20):
            progress = await here.store.read_progress(stream.id, group.id)
            marks = forward(progress, marks_of(progress))
            if between == "read and advance":
                await interfere()
            await here.store.advance(group.id, progress.epoch, marks.ranges_done, marks.committed)
            if between == "advance and delete":
                await interfere()
            await here.store.delete_done_claims(
                stream.id, group.id, progress.epoch, marks.ranges_done, limit=100
            )
            claims = await here.claims(group)
            open_lows = [low for low, _, done, _ in claims if not done]
            committed = await here.committed(group)
            assert before <= committed <= min([*open_lows, claims[-1][1]])
            assert sorted(open_lows) == sorted(taken.claim.low for taken in held)
            before = committed
        for taken in held:
            await here.finish(group, node, taken)
        await here.advance(group)
        assert await here.committed(group) == 40


async def test_b12_an_advancer_that_slept_cannot_move_the_marks_back(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 30)
        first = await here.claim(group, node, 30, limit=10)
        await here.finish(group, node, first)
        old = await here.store.read_progress(stream.id, group.id)
        stale = marks_of(old)
        for _ in range(2):
            await here.finish(group, node, await here.claim(group, node, 30, limit=10))
        await here.advance(group)
        assert (stale.committed, await here.committed(group)) == (10, 30)
        assert not await here.store.advance(group.id, old.epoch, stale.ranges_done, stale.committed)
        assert (
            await here.store.delete_done_claims(stream.id, group.id, old.epoch, stale.ranges_done, limit=100)
            == 0
        )
        assert await here.committed(group) == 30
        # after a seek, which raises the epoch, not even an advancer that would move them forward may write
        await here.admin.execute(
            "update sqlstreams.group_cursor set epoch = epoch + 1, committed = 0, ranges_done = 0"
        )
        assert not await here.store.advance(group.id, old.epoch, 30, 30)
        assert await here.store.delete_done_claims(stream.id, group.id, old.epoch, 30, limit=100) == 0
        assert await here.committed(group) == 0


async def test_b12_the_prefix_of_an_open_range_counts_and_hides_nothing(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 20)
        taken = await here.claim(group, node, 20, limit=10)
        await here.finish(group, node, await here.claim(group, node, 20, limit=10))
        record = RangeRecord(group.id, 0, taken.claim.token, 0, "progress", 4, node.id)
        assert await here.store.record(stream.id, record)
        advanced = await here.advance(group)
        assert (advanced.marks.ranges_done, await here.committed(group)) == (0, 4)
        await here.kill(node)
        other = await here.node()
        taken = await here.reclaim(group, other)  # the scan from ranges_done still finds it
        assert (taken.claim.start_above, ids_of(taken)) == (4, list(range(5, 11)))
        await here.store.record(stream.id, finished(group, other, taken))
        await here.advance(group)
        assert await here.committed(group) == 20


async def test_lag_says_how_far_the_group_is_also_when_nobody_moves_the_stored_mark(dsn):
    """The advancer runs inside consumers: between the last record and its next tick the stored mark is behind."""
    async with open_installation(dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 5)
        taken = await here.claim(group, node, 5, limit=10)
        await here.finish(group, node, taken)
        assert await here.committed(group) == 0
        async with sqlstreams.connect(dsn) as client:
            lag = await client.stream(stream.name).consumer(group.name).lag()
        assert (lag.messages, lag.committed, lag.seconds) == (0, 5, 0.0)
