"""Scenarios C: what a run comes to, and what is recorded of it.

Not here: C8 and the parts of C1 and C5 that need message keys (deferral), and C13, which needs transactional consume.
"""

import logging
from datetime import timedelta

import msgspec
import pytest
import trio

import sqlstreams
from sqlstreams.config import ERROR_TEXT_LIMIT_BYTES
from sqlstreams.errors import LeaseLost
from sqlstreams.model.outcome import NextOutcome
from sqlstreams.model.values import MessageId
from tests.postgres.lossy_proxy import open_lossy_proxy
from tests.postgres.scenario_rig import (
    BUSY,
    HOUR,
    SHORT,
    Seen,
    consuming,
    exceptions,
    forever,
    history,
    move_clock,
    opened,
    other_node,
    own_clock,
    seconds,
    store_of,
    until_done,
    until_resolved,
    until_status,
    wait_of,
)
from tests.servers import sql_async, wait_until_async

CANARY = "canary-7f3a"


class Order(msgspec.Struct):
    order: str
    cents: int


async def test_c1_a_range_records_each_kind_of_outcome_once(any_dsn):
    def act(meta):
        match meta.id:
            case 1:
                raise ValueError("broken")
            case 2:
                raise sqlstreams.Terminal("never")
            case 3:
                raise sqlstreams.Delay(timedelta(hours=1))

    async with opened(any_dsn) as (_client, stream, group):
        await stream.produce_batch([{}] * 4)
        seen = Seen(act)
        async with consuming(group, seen):
            await until_done(any_dsn, 4)
            assert await exceptions(any_dsn) == {1: ("ready", 1, 0), 2: ("dead", 0, 0), 3: ("ready", 1, 1)}
            assert seen.ids == [1, 2, 3, 4]
            assert abs(await wait_of(any_dsn, 1) - 5) < 0.1
            assert abs(await wait_of(any_dsn, 3) - HOUR) < 0.1
            assert await history(any_dsn) == [(1, 0, "failed"), (2, 0, "dead"), (3, 0, "delayed")]
            letters = await group.dead_letters()
            assert [(letter.message_id, letter.error) for letter in letters] == [(2, "never")]


async def test_c1_success_is_kept_as_history_only_where_the_group_asks_for_it(dsn):
    async with opened(dsn, sqlstreams.GroupConfig(history="all")) as (_client, stream, group):
        await stream.produce_batch([{}] * 2)
        async with consuming(group, Seen()):
            await until_done(dsn, 2)
        assert await history(dsn) == [(1, 0, "succeeded"), (2, 0, "succeeded")]


async def test_c2_three_retries_are_four_runs_and_then_a_dead_letter(any_dsn):
    def act(meta):
        raise ValueError("always")

    async with opened(any_dsn) as (client, stream, group):
        await own_clock(any_dsn)
        await stream.produce({})
        seen = Seen(act)
        async with consuming(group, seen):
            for attempts, longest in ((1, 5.0), (2, 1.0), (3, 2.0)):
                await until_status(any_dsn, 1, "ready", attempts, 0)
                wait = await wait_of(any_dsn, 1)
                assert -0.01 <= wait <= longest + 0.05
                if attempts == 1:
                    assert wait > 4.9
                await move_clock(any_dsn, longest, client)
            await until_status(any_dsn, 1, "dead", 4, 0)
        assert seen.runs == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 3, 0)]
        assert await history(any_dsn) == [
            (1, 0, "failed"),
            (1, 1, "failed"),
            (1, 2, "failed"),
            (1, 3, "dead"),
        ]


async def test_c3_delays_cost_neither_attempts_nor_the_budget(dsn):
    plan = iter(["fail", "delay", "delay", "delay", "fail"])

    def act(meta):
        raise sqlstreams.Delay(timedelta(hours=1)) if next(plan) == "delay" else ValueError("broken")

    async with opened(dsn, sqlstreams.GroupConfig(max_retries=1)) as (client, stream, group):
        await own_clock(dsn)
        await stream.produce({})
        seen = Seen(act)
        async with consuming(group, seen):
            for numbers in ((1, 0), (2, 1), (3, 2), (4, 3)):
                await until_status(dsn, 1, "ready", *numbers)
                await move_clock(dsn, HOUR, client)
            await until_status(dsn, 1, "dead", 5, 3)
        assert seen.runs == [(1, 0, 0), (1, 1, 0), (1, 2, 1), (1, 3, 2), (1, 4, 3)]


@pytest.mark.parametrize("end", ["failure", "death"])
async def test_c3_without_retries_the_first_failure_or_death_is_the_end_but_delays_go_on(dsn, end):
    plan = iter(["delay", "delay", "fail"])

    def act(meta):
        raise sqlstreams.Delay(timedelta(hours=1)) if next(plan) == "delay" else ValueError("broken")

    async with opened(dsn, sqlstreams.GroupConfig(max_retries=0)) as (client, stream, group):
        await own_clock(dsn)
        await stream.produce({})
        seen = Seen(act)
        async with consuming(group, seen):
            await until_status(dsn, 1, "ready", 1, 1)
            await move_clock(dsn, HOUR, client)
            await until_status(dsn, 1, "ready", 2, 2)
            if end == "failure":
                await move_clock(dsn, HOUR, client)
                await until_status(dsn, 1, "dead", 3, 2)
                assert seen.runs == [(1, 0, 0), (1, 1, 1), (1, 2, 2)]
        if end == "death":
            await move_clock(dsn, HOUR)
            await die_while_it_runs(client, await group.get())
            async with consuming(group, seen):
                await until_status(dsn, 1, "dead", 3, 2)
            assert len(seen.runs) == 2


async def test_c4_deaths_of_the_owner_count_as_failures_and_delays_do_not(dsn):
    plan = iter(["delay", "fail", "fail"])

    def act(meta):
        raise sqlstreams.Delay(timedelta(hours=1)) if next(plan) == "delay" else ValueError("broken")

    async with opened(dsn, sqlstreams.GroupConfig(initial_backoff=timedelta(hours=1))) as (
        client,
        stream,
        group,
    ):
        await own_clock(dsn)
        await stream.produce({})
        seen = Seen(act)
        async with consuming(group, seen):
            await until_status(dsn, 1, "ready", 1, 1)
            await move_clock(dsn, HOUR, client)
            await until_status(dsn, 1, "ready", 2, 1)
            assert abs(await wait_of(dsn, 1) - HOUR) < 0.1  # it is the first failure
            await move_clock(dsn, HOUR, client)
            await until_status(dsn, 1, "ready", 3, 1)
            assert -0.01 <= await wait_of(dsn, 1) <= 1.05
        await move_clock(dsn, 1.0)
        row = await group.get()
        await die_while_it_runs(client, row, sees=3)
        await die_while_it_runs(client, row, sees=4)
        async with consuming(group, seen):
            await until_status(dsn, 1, "dead", 5, 1)
        assert seen.runs == [(1, 0, 0), (1, 1, 1), (1, 2, 1)]
        assert await history(dsn) == [
            (1, 0, "delayed"),
            (1, 1, "failed"),
            (1, 2, "failed"),
            (1, 3, "expired"),
            (1, 4, "dead"),
        ]


async def test_c5_delays_and_deferrals_touch_neither_the_backoff_nor_the_budget(dsn):
    async with opened(
        dsn,
        sqlstreams.GroupConfig(max_retries=6, initial_backoff=seconds(60), base=seconds(1), cap=seconds(3)),
    ) as (client, stream, group):
        turns = iter(["delay", "fail"] * 5)

        def act(meta):
            raise sqlstreams.Delay(timedelta(hours=1)) if next(turns) == "delay" else ValueError("broken")

        await own_clock(dsn)
        await stream.produce({})
        seen = Seen(act)
        async with consuming(group, seen):
            for failure, longest in enumerate((60.0, 1.0, 2.0, 3.0, 3.0), start=1):
                await until_status(dsn, 1, "ready", 2 * failure - 1, failure)
                # a deferral, as the order of keys will make it: nothing is counted
                await sql_async(dsn, "update sqlstreams.exception_queue_1 set status = 'deferred'")
                await move_clock(dsn, HOUR, client)
                await until_status(dsn, 1, "ready", 2 * failure, failure)
                wait = await wait_of(dsn, 1)
                assert -0.01 <= wait <= longest + 0.05
                assert failure > 1 or wait > 59.9
                await move_clock(dsn, longest, client)
            await seen.until_runs(10)


async def test_c6_nothing_is_written_under_a_token_that_was_taken_over_or_used(any_dsn):
    async with opened(any_dsn) as (client, _stream, group):
        row = await group.get()
        await sql_async(
            any_dsn,
            "insert into sqlstreams.exception_queue_1 (group_id, message_id, status) values (1, 1, 'ready')",
        )
        store = store_of(client)
        first, first_token = await other_node(client)
        token = client._core.process.make_token()
        assert len(await store.claim_exceptions(row, first, token, reads=(1,), limit=10)) == 1
        await store.end_own_node(first, first_token)
        second, _ = await other_node(client)
        own = client._core.process.make_token()
        (taken,) = await store.claim_exceptions(row, second, own, reads=(1,), limit=10)
        assert (taken.attempts, taken.delays, taken.dead) == (1, 0, False)
        before = await state(any_dsn)

        outcomes = {
            "success": NextOutcome("resolved", 0, 0, None, None, "succeeded"),
            "failure": NextOutcome("ready", 1, 0, seconds(5), "x", "failed"),
            "delay": NextOutcome("ready", 1, 1, seconds(5), None, "delayed"),
            "dead": NextOutcome("dead", 1, 0, None, "x", "dead"),
        }
        for outcome in outcomes.values():
            with pytest.raises(LeaseLost):
                await store.record_exception(
                    row, MessageId(1), token, outcome, first, seen_attempts=0, history=outcome.history
                )
        held = (await store.held(row.stream_id, row.id, second, 0))[0]
        assert not await store.release(row.stream_id, row.id, held._replace(token=token))
        assert await state(any_dsn) == before

        await store.record_exception(
            row, MessageId(1), own, outcomes["failure"], second, seen_attempts=1, history="failed"
        )
        before = await state(any_dsn)
        for outcome in outcomes.values():  # its own token serves once
            with pytest.raises(LeaseLost):
                await store.record_exception(
                    row, MessageId(1), own, outcome, second, seen_attempts=1, history=outcome.history
                )
        assert await state(any_dsn) == before


async def test_c7_a_handler_is_cancelled_at_its_timeout_and_the_next_message_starts(dsn):
    def act(meta):
        return forever() if meta.id == 1 else None

    async with opened(dsn, sqlstreams.GroupConfig(timeout=seconds(1))) as (_client, stream, group):
        await stream.produce_batch([{}] * 2)
        seen = Seen(act)
        async with consuming(group, seen):
            await until_done(dsn, 2)
        assert seen.cut == [1]
        assert seen.ids[:2] == [1, 2]
        assert 1.0 <= seen.at[1] - seen.at[0] < 1.0 + BUSY
        rows = await sql_async(dsn, "select status, attempts, last_error from sqlstreams.exception_queue_1")
        assert [(row[0], row[1]) for row in rows] == [("ready", 1)]
        assert "Timed out" in rows[0][2]


async def test_c9_delay_and_terminal_count_as_such_out_of_a_nursery(dsn):
    async def raise_in_nursery(*errors):
        async def fail(error):
            with trio.CancelScope(shield=True):  # bounded: one step; the first failure cancels the others
                await trio.lowlevel.checkpoint()
            raise error

        async with trio.open_nursery() as nursery:
            for error in errors:
                nursery.start_soon(fail, error)

    def act(meta):
        match meta.id:
            case 1:
                return raise_in_nursery(sqlstreams.Delay(timedelta(hours=1)))
            case 2:
                return raise_in_nursery(sqlstreams.Terminal("given up"))
            case 3:
                return raise_in_nursery(sqlstreams.Delay(timedelta(hours=1)), ValueError("broken"))

    async with opened(dsn) as (_client, stream, group):
        await stream.produce_batch([{}] * 3)
        async with consuming(group, Seen(act)):
            await until_done(dsn, 3)
            assert await exceptions(dsn) == {1: ("ready", 1, 1), 2: ("dead", 0, 0), 3: ("ready", 1, 0)}
            assert (await group.dead_letters())[0].error == "given up"


async def test_c10_an_undecodable_payload_is_dead_at_once_and_its_error_names_the_field_only(any_dsn):
    async with opened(any_dsn, type_=Order) as (client, _stream, group):
        raw = client.stream("s", msgspec.Raw)
        await raw.produce_batch(
            [
                msgspec.Raw(b'{"order":"o-1","cents":1}'),
                msgspec.Raw(b'{"order":"o-2","cents":"' + CANARY.encode() + b'"}'),
                msgspec.Raw(b'{"order":"' + CANARY.encode() + b'"}'),
                msgspec.Raw(b'"' + CANARY.encode() + b'"'),
                msgspec.Raw(b'{"order":"o-5","cents":5}'),
            ]
        )
        seen = Seen()
        async with consuming(group, seen):
            await until_resolved(any_dsn, 5)
        assert seen.ids == [1, 5]
        assert seen.payloads == [Order("o-1", 1), Order("o-5", 5)]
        letters = await group.dead_letters()
        assert [(letter.message_id, letter.attempts) for letter in letters] == [(2, 0), (3, 0), (4, 0)]
        errors = [letter.error or "" for letter in letters]
        assert "cents" in errors[0]
        assert "cents" in errors[1]
        assert CANARY not in "".join(errors)
        assert bytes(letters[2].payload or b"") == b'"' + CANARY.encode() + b'"'  # asked for on purpose


@pytest.mark.parametrize(
    "text",
    ["null \0 inside", "x" * 1_000_000, "\u00e9" * 1_000_000, "lone \ud800 surrogate", "\0" * 20_000],
    ids=["U+0000", "1 MB", "1 MB of two bytes each", "a lone surrogate", "many U+0000"],
)
@pytest.mark.parametrize("kind", [ValueError, sqlstreams.Terminal])
async def test_c11_every_error_text_is_stored_clean_and_cut(dsn, text, kind):
    def act(meta):
        raise kind(text)

    async with opened(dsn) as (_client, stream, group):
        await stream.produce({})
        async with consuming(group, Seen(act)):
            await until_done(dsn, 1)
        for table, column in (("exception_queue_1", "last_error"), ("delivery_log_1", "error")):
            rows = await sql_async(dsn, f"select {column} from sqlstreams.{table}")
            assert len(rows) == 1
            assert 0 < len(rows[0][0].encode()) <= ERROR_TEXT_LIMIT_BYTES


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("outcome", ["all succeeded", "one failed"])
async def test_c12_a_lost_answer_to_recording_a_range_writes_nothing_twice(dsn, caplog, when, outcome):
    caplog.set_level(logging.INFO, "sqlstreams")

    def act(meta):
        if outcome == "one failed" and meta.id == 2:
            raise sqlstreams.Terminal("given up")

    async with open_lossy_proxy(dsn) as proxy, opened(proxy.dsn) as (_client, stream, group):
        seen = Seen(act)
        statement = "-- finish_range:" if outcome == "all succeeded" else "-- record_range:"
        lost = proxy.lose(statement, when)
        await stream.produce_batch([{}] * 3)
        async with consuming(group, seen):
            await until_done(dsn, 3)
            assert lost.happened == 1
            await stream.produce({})
            await until_done(dsn, 4)  # it goes on
        assert seen.ids == [1, 2, 3, 4]
        failed = [2] if outcome == "one failed" else []
        assert [line[:2] for line in await history(dsn)] == [(id_, 0) for id_ in failed]
        assert list(await exceptions(dsn)) == failed
        assert (await sql_async(dsn, "select max(reclaims) from sqlstreams.claim_1"))[0][0] == 0
        nodes = await sql_async(dsn, "select count(*) from sqlstreams.node")
        assert nodes[0][0] == 1
        assert [
            text for text in caplog.messages if "somebody else's" in text
        ] == []  # no takeover is reported


async def test_c12_rows_and_done_appear_together_or_not_at_all(dsn):
    def act(meta):
        raise sqlstreams.Terminal("given up")

    async with opened(dsn) as (_client, stream, group):
        # what cannot be stored takes the completion with it
        await sql_async(
            dsn,
            "alter table sqlstreams.exception_queue_1 add constraint refused check (message_id <> 2) not valid",
        )
        await stream.produce_batch([{}] * 3)
        with pytest.raises(sqlstreams.StatementRefused):
            await group.consume(Seen(act))
        assert await exceptions(dsn) == {}
        assert await history(dsn) == []
        assert not (await sql_async(dsn, "select done from sqlstreams.claim_1 where low = 0"))[0][0]
        await sql_async(dsn, "alter table sqlstreams.exception_queue_1 drop constraint refused")
        async with consuming(group, Seen(act)):
            await until_done(dsn, 3)
        assert sorted(await exceptions(dsn)) == [1, 2, 3]


@pytest.mark.slow
async def test_c14_an_outage_costs_at_most_one_attempt_or_reclaim(durable_server):
    server = durable_server()
    go_on = trio.Event()
    handled: list[int] = []

    def fail_first(meta):
        if meta.id <= 5:
            raise ValueError("broken")

    async def hold(_payload, meta):
        await go_on.wait()
        handled.append(meta.id)

    config = sqlstreams.GroupConfig(initial_backoff=seconds(0), timeout=seconds(120))
    with trio.fail_after(90):
        async with opened(server.dsn, config, lease=SHORT) as (_client, stream, group):
            await stream.produce_batch([{}] * 5)
            async with consuming(group, Seen(fail_first)) as scope:
                await wait_until_async(
                    server.dsn, "select count(*) from sqlstreams.exception_queue_1 where attempts > 0", 5
                )
                scope.cancel()
            before = await exceptions(server.dsn)
            async with trio.open_nursery() as nursery:
                options = sqlstreams.ConsumeOptions(batch=2, concurrency=7)
                nursery.start_soon(run_client, server.dsn, hold, options)
                await wait_until_async(
                    server.dsn,
                    "select count(*) from sqlstreams.exception_queue_1 where status = 'inflight'",
                    5,
                )
                for _ in range(2):
                    nursery.start_soon(run_client, server.dsn, hold, sqlstreams.ConsumeOptions(batch=2))
                await stream.produce_batch([{}] * 6)
                await wait_until_async(
                    server.dsn,
                    "select count(*) from sqlstreams.claim_1 where not done and node_id is not null",
                    3,
                )
                await trio.to_thread.run_sync(server.stop)
                await trio.sleep(2 * SHORT.ttl.total_seconds())  # because so long lasts the outage
                await trio.to_thread.run_sync(server.start)
                await wait_until_async(
                    server.dsn,
                    "select count(*) = 0 from sqlstreams.claim_1 c left join sqlstreams.node n on n.id = c.node_id"
                    " where not c.done and n.id is null or n.ended_at is not null",
                    timeout=30,
                )
                after = await exceptions(server.dsn)
                for message, (status, attempts, delays) in before.items():
                    assert after[message][0] != "dead"
                    assert after[message][1] <= attempts + 1, (status, after[message])
                    assert after[message][2] == delays
                go_on.set()
                await until_resolved(server.dsn, 11, 30)
                nursery.cancel_scope.cancel()
            rows = await sql_async(server.dsn, "select max(reclaims) from sqlstreams.claim_1")
            assert rows[0][0] <= 1
            assert set(handled) == set(range(1, 12))
            assert not [row for row in (await exceptions(server.dsn)).values() if row[0] == "dead"]


async def run_client(dsn, handler, options):
    """Consume as another process would."""
    async with sqlstreams.connect(dsn, lease=SHORT) as client:
        await client.stream("s").consumer("g").consume(handler, options)


async def die_while_it_runs(client, row, sees=None):
    """Let another process take the one exception that is due, and die."""
    store = store_of(client)
    node, token = await other_node(client)
    taken = await store.claim_exceptions(row, node, client._core.process.make_token(), reads=(1,), limit=10)
    assert len(taken) == 1
    assert sees is None or taken[0].attempts == sees
    assert await store.end_own_node(node, token)


async def state(dsn):
    """Return all that recording could change."""
    rows = await sql_async(dsn, "select e::text from sqlstreams.exception_queue_1 e")
    return [row[0] for row in rows], await history(dsn)
