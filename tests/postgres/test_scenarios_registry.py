"""Scenarios O: declaring, renaming and destroying streams and groups, also from many processes at once.

O5 and O6 are here as far as they go without retention; O7's I/O-free part is in the tests of the settings.
"""

import json
import logging
import re
from functools import partial

import pytest
import trio

import sqlstreams
from sqlstreams.errors import AlreadyExists, ConfigurationError, DestroyRefused, NotFound
from tests.postgres.scenario_rig import (
    BUSY,
    Seen,
    consuming,
    opened,
    seconds,
    until,
    until_done,
    until_status,
)
from tests.servers import sql_async, wait_until_async


async def test_o1_ten_first_registrations_at_once_make_one_of_each(any_dsn):
    ids: list[tuple[int, int]] = []

    async def first() -> None:
        async with sqlstreams.connect(any_dsn, pool_size=2) as client:
            stream = client.stream("orders")
            row = await stream.register()
            group = await stream.consumer("billing").register()
            ids.append((row.id, group.id))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(first)
    assert len(ids) == 10
    assert len(set(ids)) == 1
    rows = await sql_async(
        any_dsn,
        "select (select count(*) from sqlstreams.migration), (select count(*) from sqlstreams.stream),"
        " (select count(*) from sqlstreams.consumer_group), (select count(*) from sqlstreams.group_cursor),"
        " (select count(*) from sqlstreams.claim_1), (select count(*) from sqlstreams.config_event),"
        " (select count(*) from pg_class where relname like 'message_log_%' and relkind = 'p')",
    )
    assert tuple(rows[0]) == (1, 1, 1, 1, 1, 2, 1)


async def test_o2_the_same_declaration_again_writes_nothing(any_dsn):
    everything = (
        "select json_agg(t)::text from (select s.xmin::text, s.* from sqlstreams.stream s) t"
        " union all select json_agg(t)::text from (select g.xmin::text, g.* from sqlstreams.consumer_group g) t"
        " union all select json_agg(t)::text from (select e.xmin::text, e.* from sqlstreams.config_event e) t"
    )
    config = sqlstreams.StreamConfig(retention=seconds(3600))
    async with opened(any_dsn, sqlstreams.GroupConfig(max_retries=7), config) as (client, stream, group):
        before = await sql_async(any_dsn, everything)
        xid = await sql_async(any_dsn, "select pg_current_xact_id()::text::bigint")
        for _ in range(3):
            await stream.register(config)
            await group.register(sqlstreams.GroupConfig(max_retries=7))
            await client.stream("s").register(config)
            await (
                client.stream("s").consumer("g").register(sqlstreams.GroupConfig(max_retries=7), start="head")
            )
        after = await sql_async(any_dsn, "select pg_current_xact_id()::text::bigint")
        assert await sql_async(any_dsn, everything) == before
        rings = client._core.process.doorbell.sent
        assert after[0][0] - xid[0][0] <= 1 + rings  # no transaction of ours wrote anything


async def test_o2_a_changed_declaration_replaces_the_whole_and_says_who_changed_what(any_dsn):
    async with opened(any_dsn, sqlstreams.GroupConfig(max_retries=7)) as (_client, stream, group):
        await group.register(sqlstreams.GroupConfig(timeout=seconds(5)))
        row = await group.get()
        assert row.config == sqlstreams.GroupConfig(timeout=seconds(5))  # max_retries is the default again
        await stream.register(sqlstreams.StreamConfig(retention=seconds(60)))
        rows = await sql_async(
            any_dsn,
            "select subject, old::text, new::text, changed_by, at from sqlstreams.config_event order by id",
        )
        changes = [(row[0], row[1] and json.loads(row[1]), json.loads(row[2])) for row in rows]
        assert [change[0] for change in changes] == [
            "stream s",
            "group g of stream s",
            "group g of stream s",
            "stream s",
        ]
        assert [change[1] is None for change in changes] == [True, True, False, False]
        assert changes[2][1]["max_retries"] == 7
        assert changes[2][2]["max_retries"] == 3
        assert all("sqlstreams" in row[3] for row in rows)


@pytest.mark.parametrize("listen", [True, False], ids=["with a listener", "without"])
async def test_o2_a_changed_declaration_reaches_running_consumers(dsn, listen):
    def act(meta):
        raise ValueError("broken")

    async with (
        opened(dsn, sqlstreams.GroupConfig(max_retries=5), listen=listen) as (_client, stream, group),
        sqlstreams.connect(dsn) as operator,
    ):
        async with consuming(group, Seen(act)):
            await stream.produce({})
            await until_status(dsn, 1, "ready", 1, 0)
            changed = trio.current_time()
            await operator.stream("s").consumer("g").register(sqlstreams.GroupConfig(max_retries=0))
            # a message that fails now is dead at once, as soon as the declaration has arrived
            sent = 1
            with trio.fail_after(30):
                while not await group.dead_letters():
                    sent = (await stream.produce({})).id
                    await until_done(dsn, sent)
            assert trio.current_time() - changed < 30
        assert sent >= 2


async def test_o3_get_of_the_absent_is_none_and_every_other_verb_says_not_found(any_dsn):
    async with sqlstreams.connect(any_dsn, allow_destroy=True) as client:
        for exists in (False, True):
            stream = client.stream("s")
            if exists:
                await client.stream("s").register()
                assert await stream.get() is not None
            else:
                assert await stream.get() is None
                for verb in (
                    partial(stream.rename, "t"),
                    stream.destroy,
                    partial(stream.produce, {}),
                    partial(stream.produce_batch, [{}]),
                    stream.read,
                    stream.consumers,
                    stream.consumer("g").register,
                ):
                    with pytest.raises(NotFound) as caught:
                        await verb()
                    assert "'s'" in str(caught.value)
                async with client.transaction() as tx:
                    with pytest.raises(NotFound):
                        await stream.produce({}, tx=tx)
            group = stream.consumer("g")
            assert await group.get() is None
            for verb in (
                group.destroy,
                partial(group.consume, Seen()),
                group.lag,
                group.snapshot,
                group.dead_letters,
            ):
                with pytest.raises(NotFound):
                    await verb()
        rows = await sql_async(
            any_dsn,
            "select (select count(*) from sqlstreams.stream), (select count(*) from sqlstreams.consumer_group)",
        )
        assert tuple(rows[0]) == (1, 0)


async def test_o3_reserved_names_and_another_partition_size_are_refused(any_dsn):
    async with opened(any_dsn, stream=sqlstreams.StreamConfig(partition_size=500)) as (
        client,
        stream,
        _group,
    ):
        with pytest.raises(ConfigurationError):
            await client.stream("__system.metrics").register()
        with pytest.raises(ConfigurationError):
            await stream.rename("__system.s")
        with pytest.raises(ConfigurationError):
            stream.consumer("__system.g")
        with pytest.raises(ConfigurationError, match="500"):
            await stream.register(sqlstreams.StreamConfig(partition_size=501))
        row = await stream.get()
        assert (row.name, row.partition_size, row.config.partition_size) == ("s", 500, 500)


@pytest.mark.parametrize(
    "name", ['"; drop table x; --', "o'rders", "größe", "注文", "a" * 200, "{schema} %s $1 \\"]
)
async def test_o3_odd_names_are_data(dsn, name):
    async with sqlstreams.connect(dsn, allow_destroy=True) as client:
        stream = client.stream(name)
        await stream.register()
        group = stream.consumer(name)
        await group.register()
        await stream.produce({})
        seen = Seen()
        async with consuming(group, seen):
            await seen.until_runs(1)
        assert [row.name for row in await client.streams()] == [name]
        assert [row.name for row in await stream.consumers()] == [name]
        await stream.destroy(force=True)
        assert await client.streams() == []


async def test_o4_a_stream_is_renamed_under_its_consumers_who_go_on(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        other = client.stream("other")
        await other.register()
        by_old_name = client.stream("s")  # used before: it belongs to the stream, whatever that is called
        await by_old_name.produce({})
        seen = Seen()
        async with consuming(group, seen):
            await until_done(any_dsn, 1)
            with pytest.raises(AlreadyExists):
                await stream.rename("other")
            await stream.rename("t")
            assert stream.name == "t"
            await stream.produce({})
            await by_old_name.produce({})
            await client.stream("t").produce({})
            await until_done(any_dsn, 4)
            with pytest.raises(NotFound):
                await client.stream("s").produce({})
            fresh = client.stream("s")  # the old name is free
            await fresh.register()
            assert (await fresh.produce({})).id == 1
        assert seen.ids == [1, 2, 3, 4]
        assert sorted(row.name for row in await client.streams()) == ["other", "s", "t"]


async def test_o4_after_destroy_and_register_under_one_name_old_handles_and_consumers_say_so(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        await stream.produce({})
        seen = Seen()
        told: list[BaseException] = []

        async def consume(task_status) -> None:
            try:
                await group.consume(seen, task_status=task_status)
            except NotFound as exc:
                told.append(exc)

        async def start(task_status=trio.TASK_STATUS_IGNORED) -> None:
            await consume(task_status)

        async with trio.open_nursery() as nursery:
            await nursery.start(start)
            await until_done(any_dsn, 1)
            operator = client.stream("s")
            await operator.destroy(force=True)
            again = client.stream("s")
            await again.register()
            await again.consumer("g").register()
            await again.produce({"new": True})
            await until(lambda: told, 10)
        assert seen.ids == [1]  # the new stream's messages did not come here
        for verb in (
            lambda: stream.produce({}),
            lambda: stream.produce_batch([{}]),
            stream.read,
            lambda: operator.produce({}),
            lambda: group.consume(seen),
            group.lag,
            group.register,
        ):
            with pytest.raises(NotFound):
                await verb()
        with pytest.raises(NotFound):
            async with client.transaction() as tx:
                await stream.produce({}, tx=tx)
        assert await stream.get() is None
        assert len(await again.read()) == 1
        assert (await again.consumer("g").lag()).messages == 1


async def test_o4_a_group_that_is_destroyed_and_registered_again_is_another_one(dsn):
    async with opened(dsn) as (client, stream, group):
        await stream.produce({})
        async with consuming(group, Seen()):
            await until_done(dsn, 1)
        await client.stream("s").consumer("g").destroy()
        again = client.stream("s").consumer("g")
        await again.register()
        for verb in (group.lag, group.snapshot, group.dead_letters, lambda: group.consume(Seen())):
            with pytest.raises(NotFound):
                await verb()
        assert await group.get() is None
        seen = Seen()
        async with consuming(again, seen):
            await seen.until_runs(1)
        assert seen.ids == [1]


async def test_o5_destroy_is_refused_without_permission_with_messages_and_with_live_groups(any_dsn):
    async with opened(any_dsn, allow_destroy=False) as (_client, stream, group):
        for verb in (stream.destroy, group.destroy):
            with pytest.raises(DestroyRefused):
                await verb(force=True)
    async with opened(any_dsn) as (_client, stream, group):
        with pytest.raises(DestroyRefused, match="it has 1 group"):
            await stream.destroy()
        await stream.produce({})
        with pytest.raises(DestroyRefused, match="messages"):
            await stream.destroy()
        async with consuming(group, Seen()):
            with pytest.raises(DestroyRefused, match="run"):
                await group.destroy()
        await group.destroy()
        await stream.destroy(force=True)
        rows = await sql_async(
            any_dsn,
            "select relname from pg_class where relnamespace = 'sqlstreams'::regnamespace and relname ~ '_1(_|$)'"
            " union all select proname from pg_proc where pronamespace = 'sqlstreams'::regnamespace and proname ~ '_1$'",
        )
        assert [row[0] for row in rows] == []  # nothing of it is left


async def test_o5_a_destroyed_groups_rows_go_and_its_siblings_stay(dsn):
    def act(meta):
        raise sqlstreams.Terminal("given up") if meta.id == 1 else ValueError("broken")

    async with opened(dsn) as (_client, stream, group):
        sibling = stream.consumer("sibling")
        await sibling.register()
        await stream.produce_batch([{}] * 2)
        count = (
            "select count(*) from (select group_id from sqlstreams.claim_1 union all"
            " select group_id from sqlstreams.exception_queue_1 union all select group_id from sqlstreams.delivery_log_1)"
            " t where group_id = {}"
        )
        async with consuming(group, Seen(act)), consuming(sibling, Seen(act)):
            for of in (1, 2):
                await wait_until_async(dsn, count.format(of), lambda rows: rows >= 5)
        await group.destroy()
        assert (await sql_async(dsn, count.format(1)))[0][0] == 0
        assert (await sql_async(dsn, count.format(2)))[0][0] >= 5
        assert [letter.message_id for letter in await sibling.dead_letters()] == [1]


async def test_o5_destroy_with_a_producer_that_still_writes_ends_in_bounded_time(dsn):
    async with opened(dsn) as (client, stream, _group), sqlstreams.connect(dsn) as producer:
        with trio.fail_after(30):
            async with producer.transaction() as tx:
                await producer.stream("s").produce({}, tx=tx)
                began = trio.current_time()
                with pytest.raises(sqlstreams.Contended) as caught:
                    await stream.destroy(force=True)
                assert caught.value.may_retry
                assert trio.current_time() - began < 10 + BUSY
            await client.stream(
                "s"
            ).register()  # it counted as gone, and what was left of it is dropped first
        assert [row.id for row in await client.streams()] == [2]


async def test_o6_two_installations_and_a_hostile_search_path_do_not_meet(dsn, caplog):
    caplog.set_level(logging.WARNING, "sqlstreams")
    database = re.sub(r".*/", "", dsn.split("?")[0])
    for table in ("node", "stream", "message_log_1", "claim_1"):
        await sql_async(dsn, f"create table public.{table} (wrong text)")
    await sql_async(dsn, f"alter database {database} set search_path = public, sqlstreams, two")
    async with opened(dsn) as (_one, stream, group), sqlstreams.connect(dsn, schema="two") as two:
        other = two.stream("s")
        assert (await other.register()).id == (await stream.get()).id
        await other.consumer("g").register()
        mine, theirs = Seen(), Seen()
        async with consuming(group, mine), consuming(other.consumer("g"), theirs):
            await stream.produce_batch([{"of": 1}] * 2)
            await other.produce({"of": 2})
            await mine.until_runs(2)
            await theirs.until_runs(1)
        assert [payload["of"] for payload in mine.payloads] == [1, 1]
        assert [payload["of"] for payload in theirs.payloads] == [2]
        rows = await sql_async(
            dsn, "select (select count(*) from public.message_log_1), (select count(*) from public.node)"
        )
        assert tuple(rows[0]) == (0, 0)
