"""Scenarios H4 to H9 and H16: what a produce promises.

Not here: what needs idempotency keys, compaction, or the SQL function (H1 to H3, H10 to H15).
"""

from collections import Counter
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import sqlstreams
from sqlstreams.errors import (
    OutcomeUnknown,
    PayloadInvalid,
    SQLStreamsError,
    StatementRefused,
    TransactionAborted,
)
from tests.postgres.lossy_proxy import open_lossy_proxy
from tests.postgres.scenario_rig import Seen, assert_nothing_left, consuming, opened, until_done
from tests.servers import sql_async, wait_until_async

REFUSE = (  # as a trigger of the user would
    "create function public.refuse() returns trigger language plpgsql as"
    " $$ begin if new.message_key = 'poison' then raise exception 'refused %', new.payload; end if; return new; end $$;"
    "create trigger refuse before insert on sqlstreams.message_log_1 for each row execute function public.refuse()"
)


async def stored(dsn, stream: int = 1) -> list[tuple[int, bytes]]:
    rows = await sql_async(dsn, f"select id, payload::text from sqlstreams.message_log_{stream} order by id")
    return [(row[0], row[1].encode()) for row in rows]


async def produce_all(stream, items: list[tuple[Any, str | None]]) -> list[object]:
    """Produce each from a task of its own, at once; return what each was told."""
    told: list[object] = [None] * len(items)

    async def one(at: int) -> None:
        payload, key = items[at]
        try:
            told[at] = (await stream.produce(payload, message_key=key)).id
        except SQLStreamsError as exc:
            told[at] = exc

    async with trio.open_nursery() as nursery:
        for at in range(len(items)):
            nursery.start_soon(one, at)
    return told


async def test_h4_a_batch_is_one_transaction_with_ids_in_the_order_of_its_items(any_dsn):
    async with opened(any_dsn) as (_client, stream, _group):
        sent = await stream.produce_batch(
            [sqlstreams.Outgoing({"n": n}, message_key=str(n)) for n in range(1_000)]
        )
        assert [each.id for each in sent] == list(range(1, 1_001))
        rows = await sql_async(
            any_dsn,
            "select id, message_key, payload->>'n' as n, xmin::text from sqlstreams.message_log_1 order by id",
        )
        assert [(row[0], row[1], row[2]) for row in rows] == [(n + 1, str(n), str(n)) for n in range(1_000)]
        assert len({row[3] for row in rows}) == 1
        assert await stream.produce_batch([]) == []


@pytest.mark.parametrize(
    "bad",
    [
        object(),
        {1, object()},
        sqlstreams.Outgoing({}, message_key="x" * 2_000),
        sqlstreams.Outgoing({}, headers={"a": 1}),
    ],  # type: ignore[dict-item]
    ids=["not JSON", "a set", "a long key", "a header that is no text"],
)
async def test_h4_one_bad_item_stores_nothing_and_the_error_names_its_index(dsn, bad):
    async with opened(dsn) as (_client, stream, _group):
        with pytest.raises(PayloadInvalid, match="item 7"):
            await stream.produce_batch([{}] * 7 + [bad] + [{}] * 3)
        assert await stored(dsn) == []


async def test_h4_a_batch_that_the_server_refuses_stores_nothing(dsn):
    async with opened(dsn) as (_client, stream, _group):
        await sql_async(dsn, REFUSE)
        with pytest.raises(StatementRefused):
            await stream.produce_batch([{}, sqlstreams.Outgoing({}, message_key="poison"), {}])
        assert await stored(dsn) == []


async def test_h5_only_the_two_callers_fail_whose_message_does_not_encode_or_is_refused(any_dsn):
    async with opened(any_dsn) as (client, stream, _group):
        await sql_async(any_dsn, REFUSE)
        items: list[tuple[Any, str | None]] = [({"n": n}, None) for n in range(50)]
        items[13] = (object(), None)
        items[37] = ({"n": 37}, "poison")
        told = await produce_all(stream, items)
        failed = {at: type(each) for at, each in enumerate(told) if not isinstance(each, int)}
        assert failed == {13: PayloadInvalid, 37: StatementRefused}
        assert isinstance(told[37], StatementRefused)
        assert told[37].sqlstate == "P0001"
        rows = await stored(any_dsn)
        assert sorted(rows) == sorted(
            (each, b'{"n":%d}' % at) for at, each in enumerate(told) if isinstance(each, int)
        )
        assert len(rows) == 48
        await assert_nothing_left(client, any_dsn)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_h5_when_the_connection_dies_under_a_batch_every_caller_is_told_the_truth(dsn, when):
    async with open_lossy_proxy(dsn) as proxy, opened(proxy.dsn) as (client, stream, _group):
        await stream.produce({"n": -1})
        lost = proxy.lose("-- insert_messages:", when)
        told = await produce_all(stream, [({"n": n}, None) for n in range(100)])
        assert lost.happened == 1
        errors = [each for each in told if not isinstance(each, int)]
        assert {type(each) for each in errors} == {OutcomeUnknown}  # nobody is blamed for the batch
        assert len({id(each) for each in errors}) == len(errors)
        counted = Counter(payload for _, payload in await stored(dsn))
        assert max(counted.values()) == 1
        for at, each in enumerate(told):
            if isinstance(each, int):
                assert counted[b'{"n":%d}' % at] == 1
            else:
                assert counted[b'{"n":%d}' % at] == (when == "after")
        await assert_nothing_left(client, dsn)


async def test_h6_a_thousand_concurrent_produces_share_transactions(any_dsn):
    async with opened(any_dsn) as (_client, stream, _group):
        told = await produce_all(stream, [({"n": n}, None) for n in range(1_000)])
        assert len(set(told)) == 1_000
        rows = await sql_async(
            any_dsn, "select count(distinct xmin::text), count(*) from sqlstreams.message_log_1"
        )
        assert rows[0][1] == 1_000
        assert rows[0][0] < 300


async def test_h6_a_lone_produce_is_sent_as_soon_as_it_comes(dsn):
    async with opened(dsn) as (client, stream, _group):
        batcher, _ = client._core.producer(await stream.get())
        for n in range(1, 4):
            await stream.produce({})
            assert batcher.batches == n


async def test_h7_a_cancelled_caller_disturbs_nobody(any_dsn):
    async with opened(any_dsn) as (client, stream, _group):
        told: dict[str, object] = {}
        scopes = {name: trio.CancelScope() for name in ("first", "second", "third", "fourth")}

        async def produce(name: str) -> None:
            with scopes[name]:
                told[name] = (await stream.produce({"who": name})).id

        async with trio.open_nursery() as nursery, client.transaction() as tx:
            await tx.execute("lock table sqlstreams.message_log_1 in share mode")  # no produce can go on
            for name in ("first", "second"):  # each is a batch that is under way
                nursery.start_soon(produce, name)
                await wait_until_async(
                    any_dsn,
                    "select count(*) from pg_locks where not granted and relation = 'sqlstreams.message_log_1'::regclass",
                    len(told) + 1 if name == "first" else 2,
                )
            nursery.start_soon(produce, "third")
            nursery.start_soon(produce, "fourth")
            await wait_all_tasks_blocked(0.01)
            scopes["third"].cancel()  # had not joined a batch
            scopes["first"].cancel()  # had
            await wait_all_tasks_blocked(0.01)
        counted = Counter(payload for _, payload in await stored(any_dsn))
        assert counted[b'{"who":"third"}'] == 0
        assert counted[b'{"who":"first"}'] <= 1
        assert counted[b'{"who":"second"}'] == counted[b'{"who":"fourth"}'] == 1
        assert sorted(told) == ["fourth", "second"]
        await assert_nothing_left(client, any_dsn)


async def test_h8_a_transaction_over_sql_and_two_streams_is_all_or_nothing(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        other = client.stream("other")
        await other.register()
        await sql_async(any_dsn, "create table invoice (id text primary key)")
        doorbell = client._core.process.doorbell
        seen = Seen()
        async with consuming(group, seen):
            await doorbell.flush()
            rung = doorbell.sent
            with pytest.raises(KeyError):
                async with client.transaction() as tx:
                    await tx.execute("insert into invoice values ($1)", "no")
                    await stream.produce({"n": 1}, tx=tx)
                    await other.produce_batch([{}, {}], tx=tx)
                    raise KeyError
            await doorbell.flush()
            assert doorbell.sent == rung
            async with client.transaction() as tx:
                await tx.execute("insert into invoice values ($1)", "yes")
                sent = await stream.produce({"n": 2}, tx=tx)
                (first, second) = await other.produce_batch([{}, {}], tx=tx)
                assert sent.id == 2  # known before the commit
                assert (first.id, second.id) == (3, 4)
                assert await tx.fetchval("select count(*) from sqlstreams.message_log_1") == 1
                await client._core.process.doorbell.flush()
                await wait_all_tasks_blocked(0.05)
                assert seen.ids == []  # delivery comes after the commit
            await until_done(any_dsn, 2)
            await doorbell.flush()
            assert doorbell.sent > rung
        assert seen.runs == [(2, 0, 0)]
        assert [row[0] for row in await sql_async(any_dsn, "select id from invoice")] == ["yes"]
        assert [id_ for id_, _ in await stored(any_dsn)] == [2]
        assert [id_ for id_, _ in await stored(any_dsn, 2)] == [3, 4]


async def test_h8_a_refused_produce_leaves_the_transaction_as_it_was(dsn):
    async with opened(dsn) as (client, stream, _group):
        await sql_async(dsn, REFUSE + "; create table invoice (id text primary key)")
        async with client.transaction() as tx:
            await tx.execute("insert into invoice values ('a')")
            with pytest.raises(StatementRefused):
                await stream.produce({}, message_key="poison", tx=tx)
            await stream.produce({"n": 1}, tx=tx)
        assert len(await stored(dsn)) == len(await sql_async(dsn, "select from invoice")) == 1
        with pytest.raises(TransactionAborted):
            async with client.transaction() as tx:
                await stream.produce({"n": 2}, tx=tx)
                with pytest.raises(StatementRefused):
                    await tx.execute("insert into invoice values ('a')")
        assert len(await stored(dsn)) == 1


@pytest.mark.parametrize("batch", [1, 25], ids=["one", "a batch over two partitions"])
async def test_h9_a_produce_in_a_transaction_that_finds_no_partition_keeps_the_earlier_work(any_dsn, batch):
    async with (
        opened(any_dsn, stream=sqlstreams.StreamConfig(partition_size=20)) as (client, stream, group),
        sqlstreams.connect(any_dsn) as other,
    ):
        await sql_async(any_dsn, "create table invoice (id text)")
        await sql_async(any_dsn, "select setval('sqlstreams.message_log_1_id', 99)")
        seen = Seen()
        with trio.fail_after(10):
            async with client.transaction() as tx:
                await tx.execute("insert into invoice values ('a')")
                await stream.produce_batch([{}] * batch, tx=tx)
                await tx.execute("insert into invoice values ('b')")
                # nobody else waits for the end of this transaction, here or over there
                await stream.produce({"who": "the same process"})
                await other.stream("s").produce({"who": "another one"})
        assert len(await sql_async(any_dsn, "select from invoice")) == 2
        rows = await stored(any_dsn)
        assert len(rows) == batch + 2
        async with consuming(group, seen):
            await until_done(any_dsn, rows[-1][0])
        assert seen.ids == [id_ for id_, _ in rows]


@pytest.mark.parametrize(
    "text",
    [
        b'{"b":1,"a":2}',
        b'{ "a" : [1 , 2 ] }',
        b' {"a":1}\n',
        b'{"a":1,"a":2}',
        b"1.0",
        b'"\\u0000"',
        b"null",
        b'"\xc3\xa9"',
    ],
)
async def test_h16_payload_bytes_and_headers_come_back_as_sent(dsn, text):
    async with opened(dsn, type_=msgspec.Raw) as (_client, stream, group):
        headers = {"b": "2", "a": "x\ny", "é": ""}
        await stream.produce(msgspec.Raw(text), headers=headers, message_key="k", routing_key="r")
        await stream.produce_batch([sqlstreams.Outgoing(msgspec.Raw(text), "k", "r", headers)] * 2)
        metas = []
        seen = Seen(metas.append)
        async with consuming(group, seen):
            await until_done(dsn, 3)
        assert [bytes(payload) for payload in seen.payloads] == [text] * 3
        assert [list(meta.headers.items()) for meta in metas] == [list(headers.items())] * 3
        assert {(meta.message_key, meta.routing_key) for meta in metas} == {("k", "r")}
        assert [bytes(each.payload) for each in await stream.read()] == [text] * 3
