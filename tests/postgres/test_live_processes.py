"""What a hostile tester found between live processes and live tasks, each as it was shown, and now as it must be."""

import logging
from datetime import timedelta

import pytest
import trio

import sqlstreams
from sqlstreams.runtime import holdings
from tests.servers import sql_async, wait_until_async

SHORT = sqlstreams.LeaseConfig(
    ttl=timedelta(seconds=1.5),
    heartbeat=timedelta(seconds=0.5),
    margin=timedelta(seconds=0.6),
    grace=timedelta(seconds=0.25),
)


class Overlaps:
    """A handler that notes who runs what, and whether two run one message at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.running: dict[int, int] = {}
        self.runs: list[int] = []
        self.overlapping: list[int] = []

    async def __call__(self, _message, meta):
        """Run for a while."""
        self.runs.append(meta.id)
        if self.running.get(meta.id):
            self.overlapping.append(meta.id)
        self.running[meta.id] = self.running.get(meta.id, 0) + 1
        try:
            await trio.sleep(self.seconds)  # because the handler has to outlast heartbeats
        finally:
            self.running[meta.id] -= 1


async def test_b19_two_consumers_of_one_group_in_one_process_leave_each_other_their_ranges(dsn, monkeypatch):
    """The comparison of holdings sees all that the node holds, so it must know the tokens of all its tasks."""
    monkeypatch.setattr(holdings, "SOON", 0.05)
    handler = Overlaps(2.0)
    async with sqlstreams.connect(dsn, lease=SHORT) as client:
        stream = client.stream("s")
        await stream.register()
        await stream.consumer("g").register()
        await stream.produce_batch(range(4))
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                await nursery.start(stream.consumer("g").consume, handler, sqlstreams.ConsumeOptions(batch=1))
            with trio.fail_after(15):
                await wait_until_async(dsn, "select bool_and(done) and max(high) = 4 from sqlstreams.claim_1")
            nursery.cancel_scope.cancel()
    assert sorted(handler.runs) == [1, 2, 3, 4]
    assert handler.overlapping == []


async def test_j17_a_process_with_a_short_lease_does_not_end_a_silent_one_with_a_long_lease(dsn):
    """Each node is judged by its own ttl."""
    long = sqlstreams.LeaseConfig(ttl=timedelta(seconds=60), heartbeat=timedelta(seconds=20))
    tiny = sqlstreams.LeaseConfig(
        ttl=timedelta(seconds=0.6),
        heartbeat=timedelta(seconds=0.2),
        margin=timedelta(seconds=0.25),
        grace=timedelta(seconds=0.1),
    )
    handler = Overlaps(4.2)
    async with sqlstreams.connect(dsn, lease=long) as slow, sqlstreams.connect(dsn, lease=tiny) as quick:
        stream = slow.stream("s")
        await stream.register()
        await stream.consumer("g").register()
        await stream.produce(1)
        async with trio.open_nursery() as nursery:
            await nursery.start(stream.consumer("g").consume, handler)
            with trio.fail_after(5):
                await wait_until_async(dsn, "select count(*) from sqlstreams.claim_1 where not done", 1)
            await nursery.start(quick.stream("s").consumer("g").consume, handler)
            with trio.fail_after(15):
                await wait_until_async(dsn, "select bool_and(done) from sqlstreams.claim_1", True)
            nursery.cancel_scope.cancel()
    assert handler.runs == [1]
    assert await sql_async(dsn, "select sum(reclaims) from sqlstreams.claim_1") == [(0,)]


async def test_h17_what_was_committed_while_the_client_closed_is_reported_as_sent(dsn):
    """Looking at the runway is no reason to deny a commit, nor to forget about it later."""
    async with sqlstreams.connect(dsn) as client:
        stream = client.stream("s")
        await stream.register(sqlstreams.StreamConfig(partition_size=4))
        background = client._core.background
        nursery, background._nursery = background._nursery, None  # as while the block ends
        try:
            sent = await stream.produce_batch([1, 2, 3, 4, 5, 6, 7])
            async with client.transaction() as tx:
                await stream.produce_batch([8], tx=tx)
        finally:
            background._nursery = nursery
        assert len(sent) == 7
        assert await sql_async(dsn, "select count(*) from sqlstreams.message_log_1") == [(8,)]


async def test_j18_a_node_that_was_ended_before_its_consumer_joined_goes_on_as_the_next_one(dsn):
    handler = Overlaps(0.0)
    async with sqlstreams.connect(dsn) as client:
        stream = client.stream("s")
        await stream.register()
        await stream.consumer("g").register()
        await stream.produce(1)
        await client._core.process.nodes.current()
        await sql_async(dsn, "update sqlstreams.node set ended_at = sqlstreams.clock()")
        async with trio.open_nursery() as nursery:
            with trio.fail_after(10):
                await nursery.start(stream.consumer("g").consume, handler)
                await wait_until_async(dsn, "select bool_and(done) and max(high) = 1 from sqlstreams.claim_1")
            nursery.cancel_scope.cancel()
    assert handler.runs == [1]


async def test_c16_a_handler_whose_clean_up_fails_when_the_lease_is_lost_does_not_end_consume(dsn):
    runs = []

    async def broken_on_its_way_out():
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("clean-up")

    async def handle(_message):
        runs.append(1)
        if len(runs) == 1:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(broken_on_its_way_out)
                await trio.sleep_forever()

    async with sqlstreams.connect(dsn, lease=SHORT) as client:
        stream = client.stream("s")
        await stream.register()
        await stream.consumer("g").register()
        await stream.produce(1)
        async with trio.open_nursery() as nursery:
            await nursery.start(stream.consumer("g").consume, handle)
            with trio.fail_after(15):
                while not runs:
                    await trio.sleep(0.01)  # because the handler is another task's
                await sql_async(dsn, "update sqlstreams.node set ended_at = sqlstreams.clock()")
                await wait_until_async(
                    dsn,
                    "select (select bool_and(done) from sqlstreams.claim_1)"
                    " and not exists (select from sqlstreams.exception_queue_1)",
                )
            nursery.cancel_scope.cancel()
    assert len(runs) == 2


class Odd(BaseException):
    """Neither an Exception nor one of those that end programs."""


@pytest.mark.parametrize(
    "odd", [Odd("x"), GeneratorExit(), BaseExceptionGroup("g", [Odd("y"), ValueError("z")])]
)
async def test_c16_whatever_a_handler_raises_is_a_failure_of_its_message(dsn, odd):
    async def handle(message):
        if message == 1:
            raise odd

    async with sqlstreams.connect(dsn) as client:
        stream = client.stream("s")
        await stream.register()
        group = stream.consumer("g")
        await group.register(sqlstreams.GroupConfig(max_retries=0))
        await stream.produce_batch([1, 2])
        async with trio.open_nursery() as nursery:
            await nursery.start(group.consume, handle)
            with trio.fail_after(10):
                while len(await group.dead_letters()) != 1:
                    await trio.sleep(0.01)  # because the consumer is another task
            nursery.cancel_scope.cancel()
        assert (await group.lag()).messages == 0


async def test_i3_producers_that_use_up_each_others_partitions_all_land(dsn):
    """Partitions of two ids, ten batches of thirty at once: nobody holds the log, so nobody may be turned away."""
    async with sqlstreams.connect(dsn) as client:
        stream = client.stream("s")
        await stream.register(sqlstreams.StreamConfig(partition_size=2))
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(stream.produce_batch, list(range(30)))
        assert await sql_async(dsn, "select count(*) from sqlstreams.message_log_1") == [(300,)]


async def test_a_failing_handler_is_told_in_the_log_without_its_text(dsn, caplog):
    async def handle(_message):
        raise ValueError("canary of the payload")

    async with sqlstreams.connect(dsn) as client:
        stream = client.stream("s")
        await stream.register()
        group = stream.consumer("g")
        await group.register(sqlstreams.GroupConfig(max_retries=0))
        await stream.produce_batch(range(3))
        with caplog.at_level(logging.WARNING, logger="sqlstreams.consumer"):
            async with trio.open_nursery() as nursery:
                await nursery.start(group.consume, handle)
                with trio.fail_after(10):
                    while len(await group.dead_letters()) != 3:
                        await trio.sleep(0.01)  # because the consumer is another task
                nursery.cancel_scope.cancel()
    (line,) = [record.getMessage() for record in caplog.records]  # one a second, however many fail
    assert "message 1 of stream s, group g failed at run 1: ValueError at " in line
    assert __file__ in line
    assert "canary" not in caplog.text


async def test_o5_a_consumer_that_joins_while_another_one_does_is_listed_as_well(dsn):
    """The row of the worker is locked for a moment: whoever finds it locked has to ask again."""
    async with sqlstreams.connect(dsn) as client, sqlstreams.connect(dsn) as other:
        stream = client.stream("s")
        await stream.register()
        await stream.consumer("g").register()
        handler = Overlaps(0.0)
        async with trio.open_nursery() as nursery:
            async with other.transaction() as tx:
                await tx.execute("select from sqlstreams.worker for update")
                nursery.start_soon(stream.consumer("g").consume, handler)
                with trio.fail_after(5):
                    await wait_until_async(
                        dsn,
                        "select count(*) > 0 from pg_stat_activity where query like '%claim_worker%' and pid <> pg_backend_pid()",
                    )
                assert await sql_async(dsn, "select count(*) from sqlstreams.worker_instance") == [(0,)]
            with trio.fail_after(5):
                await wait_until_async(dsn, "select count(*) from sqlstreams.worker_instance", 1)
            nursery.cancel_scope.cancel()
