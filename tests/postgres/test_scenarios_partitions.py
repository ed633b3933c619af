"""Scenarios I1, I3 to I5: partitions are there before they are needed, and are made on demand when they are not.

Not here: I2 (it takes the maintenance workers) and I6 to I11 (retention).
"""

import random

import pytest
import trio

import sqlstreams
from sqlstreams.errors import PartitionMissing
from sqlstreams.model.values import StreamId
from sqlstreams.runtime.partitions import Runway
from tests.postgres.scenario_rig import (
    BUSY,
    Seen,
    assert_nothing_left,
    consuming,
    opened,
    store_of,
    until,
    until_done,
)
from tests.servers import sql_async, wait_until_async

PARTITIONS = (
    "select array_agg(n order by n) from (select substring(inhrelid::regclass::text from '[0-9]+$')::int as n"
    " from pg_inherits where inhparent = 'sqlstreams.message_log_1'::regclass) t"
)
SIZE_100 = sqlstreams.StreamConfig(partition_size=100)


async def partitions(dsn) -> list[int]:
    rows = await sql_async(dsn, PARTITIONS)
    return list(rows[0][0])


async def move_sequence(dsn, to: int) -> None:
    await sql_async(dsn, "select setval('sqlstreams.message_log_1_id', $1)", to)


async def settled_partitions(client, dsn) -> list[int]:
    """Return the partitions when nobody is making one any more."""
    _, runway = client._core.producer(await client.stream("s").get())
    await until(lambda: not runway._busy, 10)
    return await partitions(dsn)


async def test_i1_partitions_are_made_ahead_without_a_gap_in_the_ids_and_not_too_early(any_dsn):
    async with opened(any_dsn, stream=SIZE_100) as (client, stream, group):
        ids = [(await stream.produce({})).id for _ in range(30)]
        ids += [each.id for each in await stream.produce_batch([{}] * 45)]
        async with client.transaction() as tx:
            ids += [each.id for each in await stream.produce_batch([{}] * 29, tx=tx)]
            ids.append((await stream.produce({}, tx=tx)).id)
        assert ids == list(range(1, 106))
        assert await settled_partitions(client, any_dsn) == [0, 1]
        ids += [each.id for each in await stream.produce_batch([{}] * 74)]
        assert ids[-1] == 179
        assert await settled_partitions(client, any_dsn) == [0, 1]
        ids.append((await stream.produce({})).id)  # 180: four fifths of partition 1
        await wait_until_async(any_dsn, PARTITIONS, [0, 1, 2])
        ids += [each.id for each in await stream.produce_batch([{}] * 20)]
        assert ids == list(range(1, 201))  # the boundary itself left no gap
        assert await settled_partitions(client, any_dsn) == [0, 1, 2]
        seen = Seen()
        async with consuming(group, seen):
            await until_done(any_dsn, 200)
        assert seen.ids == ids


async def test_i1_partitions_are_made_ahead_for_produces_inside_transactions_too(dsn):
    async with opened(dsn, stream=SIZE_100) as (client, stream, _group):
        for n in range(1, 191):
            async with client.transaction() as tx:
                assert (await stream.produce({}, tx=tx)).id == n
        assert await settled_partitions(client, dsn) == [0, 1, 2]


async def test_i3_a_jump_of_the_sequence_makes_the_partition_it_lands_in_and_no_other(any_dsn):
    async with opened(any_dsn, stream=SIZE_100) as (client, stream, group):
        await move_sequence(any_dsn, 399)
        sent = await stream.produce({})
        assert sent.id >= 400
        assert await settled_partitions(client, any_dsn) == [0, 1, 4]
        seen = Seen()
        async with consuming(group, seen):
            await until_done(any_dsn, sent.id)
        assert seen.ids == [sent.id]


async def test_i3_eight_producers_meet_the_missing_partition_at_once_and_all_land(any_dsn):
    async with (
        opened(any_dsn, stream=SIZE_100, pool_size=8) as (client, stream, _group),
        sqlstreams.connect(any_dsn, pool_size=8) as other,
    ):
        await move_sequence(any_dsn, 399)
        sent = []
        async with trio.open_nursery() as nursery:

            async def produce(of) -> None:
                sent.extend(each.id for each in await of.produce_batch([{}] * 2))

            for _ in range(4):
                nursery.start_soon(produce, stream)
                nursery.start_soon(produce, other.stream("s"))
        assert len(set(sent)) == 16
        assert {id_ // 100 for id_ in sent} == {4}
        assert await settled_partitions(client, any_dsn) == [0, 1, 4]
        rows = await sql_async(any_dsn, "select count(*) from sqlstreams.message_log_1")
        assert rows[0][0] == 16
        await assert_nothing_left(client, any_dsn)


async def test_i4_a_producers_transaction_that_stays_open_across_the_mark_delays_nobody(any_dsn):
    async with opened(any_dsn, stream=SIZE_100) as (client, stream, _group):
        await stream.produce_batch([{}] * 170)
        async with client.transaction() as tx:
            await stream.produce({}, tx=tx)
            with trio.fail_after(
                5 + BUSY
            ):  # nothing of this waits for the transaction, nor for a lock timeout
                for _ in range(20):
                    began = trio.current_time()
                    await stream.produce({})
                    assert trio.current_time() - began < 1.0 + BUSY
                await wait_until_async(any_dsn, PARTITIONS, [0, 1, 2])
                await stream.produce_batch([{}] * 50)
            assert await tx.fetchval("select 1") == 1
        head, end = await store_of(client).runway((await stream.get()).id, 100)
        assert (head, end) == (241, 300)


@pytest.mark.slow
async def test_i5_maintenance_that_locks_the_log_is_noticed_at_the_boundary_only_and_passes_by_itself(
    any_dsn,
):
    async with (
        opened(any_dsn, stream=SIZE_100) as (_client, stream, _group),
        sqlstreams.connect(any_dsn) as stranger,
    ):
        await stream.produce_batch([{}] * 150)
        with trio.fail_after(60):
            async with stranger.transaction() as tx:
                await tx.execute("lock table only sqlstreams.message_log_1 in share update exclusive mode")
                began = trio.current_time()
                for _ in range(49):
                    await stream.produce({})  # up to 199; partition 2 cannot be made ahead
                assert trio.current_time() - began < 2.0 + BUSY
                assert await partitions(any_dsn) == [0, 1]
                began = trio.current_time()
                with pytest.raises(PartitionMissing) as caught:
                    await stream.produce({})
                assert caught.value.may_retry
                assert 4.0 < trio.current_time() - began < 30.0  # steps of 2 s, and bounded
            sent = await stream.produce({})
        assert sent.id >= 200
        assert 2 in await partitions(any_dsn)


async def test_i5_a_produce_that_waits_at_the_boundary_goes_on_when_the_lock_is_gone(dsn):
    async with (
        opened(dsn, stream=SIZE_100) as (_client, stream, _group),
        sqlstreams.connect(dsn) as stranger,
    ):
        await stream.produce_batch([{}] * 150)
        sent = []
        async with trio.open_nursery() as nursery:
            async with stranger.transaction() as tx:
                await tx.execute("lock table only sqlstreams.message_log_1 in share update exclusive mode")
                await stream.produce_batch([{}] * 49)

                async def produce() -> None:
                    sent.append((await stream.produce({})).id)

                nursery.start_soon(produce)
                await wait_until_async(
                    dsn,
                    "select count(*) > 0 from pg_locks where not granted and mode = 'ShareUpdateExclusiveLock'",
                )
                assert sent == []
            await until(lambda: sent, 5 + BUSY)
        assert sent[0] >= 200


class SlowLog:
    """A log whose partitions end at 200, and which lets a test say when the first look at them is over."""

    def __init__(self) -> None:
        self.looked_at = trio.Event()
        self.go_on = trio.Event()
        self.made: list[int] = []

    async def runway(self, _stream, _size):
        self.looked_at.set()
        await self.go_on.wait()
        return 170, 200

    async def make_partitions(self, _stream, size, upto):
        await trio.lowlevel.checkpoint()
        self.made.append(upto)
        return (upto // size + 1) * size


async def test_i1_ids_that_are_drawn_while_the_runway_is_looked_up_count_too():
    log = SlowLog()
    async with trio.open_nursery() as nursery:
        runway = Runway(log, StreamId(1), 100, nursery.start_soon, random.Random(1))  # type: ignore[arg-type]
        runway.noticed(170)
        await log.looked_at.wait()
        runway.noticed(191)  # past the mark, and nothing may be produced for a long time after it
        log.go_on.set()
    assert log.made == [200]
