"""The client where its parts meet: transactions that share a small pool, errors that keep their form, roles with few rights."""

from urllib.parse import urlsplit, urlunsplit

import pytest
import trio

import sqlstreams
from sqlstreams.model.values import GroupId, StreamId
from tests.servers import sql_async


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("batch", [False, True])
async def test_h18_fresh_handles_inside_transactions_take_no_second_connection(dsn, size, batch):
    everybody = trio.Event()
    inside = 0

    async def work(client: sqlstreams.Client, n: int) -> None:
        nonlocal inside
        async with client.transaction() as tx:
            inside += 1
            if inside == size:
                everybody.set()
            await everybody.wait()
            fresh = client.stream("x", int)
            if batch:
                await fresh.produce_batch([n], tx=tx)
            else:
                await fresh.produce(n, tx=tx)

    async with sqlstreams.connect(dsn, pool_size=size) as client:
        stream = client.stream("x", int)
        await stream.register()
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for n in range(size):
                    nursery.start_soon(work, client, n)
        assert sorted(message.payload for message in await stream.read()) == list(range(size))


async def test_a_transaction_with_the_only_connection_heals_a_missing_partition(dsn):
    async with sqlstreams.connect(dsn, pool_size=1) as client:
        stream = client.stream("x", int)
        await stream.register()
        await sql_async(
            dsn,
            "select setval('sqlstreams.message_log_1_id', (select partition_size * 2 from sqlstreams.stream) - 1)",
        )
        with trio.fail_after(5):
            async with client.transaction() as tx:
                sent = await stream.produce(1, tx=tx)
        assert [message.id for message in await stream.read()] == [sent.id]


async def test_a_stream_that_is_not_there_costs_the_transaction_nothing(dsn):
    async with sqlstreams.connect(dsn, pool_size=1) as client:
        stream = client.stream("x", int)
        await stream.register()
        async with client.transaction() as tx:
            with pytest.raises(sqlstreams.NotFound):
                await client.stream("y", int).produce(1, tx=tx)
            await stream.produce(2, tx=tx)
        assert [message.payload for message in await stream.read()] == [2]


async def test_an_error_of_the_block_leaves_drain_on_signals_as_it_is(dsn):
    with pytest.raises(sqlstreams.NotFound):
        async with sqlstreams.connect(dsn) as client, client.drain_on_signals():
            await client.stream("x", int).produce(1)
    with pytest.RaisesGroup(LookupError, match="of the block"):
        async with sqlstreams.connect(dsn) as client, client.drain_on_signals():
            raise ExceptionGroup("of the block", [LookupError()])
    async with sqlstreams.connect(dsn) as client:
        with trio.move_on_after(0.05) as scope:
            async with client.drain_on_signals():
                await trio.sleep_forever()
        assert scope.cancelled_caught


async def test_without_a_right_on_the_sequence_looking_is_refused_and_names_it(any_dsn):
    async with sqlstreams.connect(any_dsn) as client:
        stream = client.stream("x", int)
        await stream.register()
        await stream.consumer("g").register()
        await stream.produce(1)
    role = f"limited_{urlsplit(any_dsn).path[1:]}"
    await sql_async(
        any_dsn,
        f"create role {role} login password 'p'; grant usage on schema sqlstreams to {role};"
        f" grant select, insert, update, delete on all tables in schema sqlstreams to {role};"
        f" grant execute on all functions in schema sqlstreams to {role}",
    )
    try:
        parts = urlsplit(any_dsn)
        limited = urlunsplit(parts._replace(netloc=f"{role}:p@{parts.hostname}:{parts.port}"))
        sequence, id_ = "message_log_1_id", StreamId(1)
        async with sqlstreams.connect(limited, install=False) as client:
            group = client.stream("x", int).consumer("g")
            with pytest.raises(sqlstreams.PermissionDenied, match=sequence):
                await group.lag()
            store = client._core.store
            with pytest.raises(sqlstreams.PermissionDenied, match=sequence):
                await store.log_refs([id_])
            with pytest.raises(sqlstreams.PermissionDenied, match=sequence):
                await store.runway(id_, 1_000_000)
            with pytest.raises(sqlstreams.PermissionDenied, match=sequence):
                await store.snapshot(id_, GroupId(1))
            for right in ("usage", "select"):
                await sql_async(any_dsn, f"grant {right} on sequence sqlstreams.{sequence} to {role}")
                assert (await group.lag()).messages == 1
                assert [seen.head for seen in await store.observe(await store.log_refs([id_]))] == [1]
                await sql_async(any_dsn, f"revoke {right} on sequence sqlstreams.{sequence} from {role}")
    finally:
        await sql_async(any_dsn, f"drop owned by {role}; drop role {role}")
