"""Scenarios D: which exceptions run, when, and what becomes of a message that kills its process.

D5 is in test_scenarios_operations.py. Not here, because this release has no keys, no retention and no versions beside parking: D4
(beyond the cut of a range), D6, D7, D9. D8 and D10 are here as far as they go.
"""

import signal

import pytest
import trio
import trio.testing

import sqlstreams
from sqlstreams.errors import LeaseLost, PermissionDenied
from sqlstreams.model.values import Token
from tests.postgres.scenario_rig import (
    BUSY,
    HOUR,
    SHORT,
    Seen,
    consuming,
    exceptions,
    history,
    log_lines,
    move_clock,
    opened,
    other_node,
    own_clock,
    program,
    seconds,
    store_of,
    take_range,
    until_done,
    until_resolved,
    until_status,
)
from tests.servers import sql_async, wait_until_async

INSERT = (
    "insert into sqlstreams.exception_queue_1 (group_id, message_id, status, can_run_after, node_id, token, attempts)"
    " values (1, $1, $2, sqlstreams.clock() + $3, $4, $5, $6)"
)


async def test_d1_exactly_the_due_the_orphaned_and_the_deferred_run(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        await stream.produce_batch([{}] * 7)
        async with consuming(group, Seen()):
            await until_done(any_dsn, 7)
        dead, dead_token = await other_node(client)
        live, _ = await other_node(client)
        for message, status, wait, node in (
            (1, "ready", 0.0, None),
            (2, "ready", HOUR, None),
            (3, "inflight", 0.0, dead),
            (4, "inflight", 0.0, live),
            (5, "deferred", 0.0, None),
            (6, "dead", 0.0, None),
            (7, "superseded", 0.0, None),
        ):
            token = None if node is None else client._core.process.make_token()
            await sql_async(any_dsn, INSERT, message, status, seconds(wait), node, token, 0)
        await store_of(client).end_own_node(dead, dead_token)
        seen = Seen()
        async with consuming(group, seen):
            await wait_until_async(
                any_dsn,
                "select array_agg(message_id order by message_id) from sqlstreams.exception_queue_1",
                [2, 4, 6, 7],
            )
            client._core.process.pulse.look()  # once more: nothing else may run
            await stream.produce({})
            await until_done(any_dsn, 8)
        assert sorted(seen.runs) == [(1, 0, 0), (3, 1, 0), (5, 0, 0), (8, 0, 0)]
        assert await history(any_dsn) == [(3, 0, "expired")]


@pytest.mark.parametrize("listen", [True, False], ids=["with a listener", "without"])
@pytest.mark.parametrize("whose", ["its own failure", "somebody else's"])
async def test_d2_a_retry_runs_within_a_second_of_its_instant_without_other_traffic(dsn, listen, whose):
    def act(meta):
        if meta.attempts == 0:
            raise ValueError("broken")

    config = sqlstreams.GroupConfig(initial_backoff=seconds(2))
    async with opened(dsn, config, listen=listen) as (_client, stream, group):
        await stream.produce({})
        seen = Seen(act)
        async with consuming(group, seen):
            await until_done(dsn, 1)
            if whose == "somebody else's":
                await sql_async(dsn, "delete from sqlstreams.exception_queue_1")
                await sql_async(dsn, INSERT, 1, "ready", seconds(1.5), None, None, 1)
            due = await sql_async(
                dsn,
                "select extract(epoch from can_run_after - clock_timestamp())::float8 from sqlstreams.exception_queue_1",
            )
            at = trio.current_time() + due[0][0]
            await seen.until_runs(2)
        assert seen.runs[1] == (1, 1, 0)
        assert -0.2 < seen.at[1] - at < 1.0 + BUSY


async def test_d4_a_range_that_lost_three_owners_is_cut_into_single_messages_with_their_own_budget(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        await stream.produce_batch([{}] * 4)
        row = await group.get()
        store = store_of(client)
        for reclaims in range(3):
            node, token = await other_node(client)
            taken = await take_range(client, row, node, client._core.process.make_token(), 4)
            assert taken.claim.reclaims == reclaims
            assert (taken.claim.low, taken.claim.high) == (0, 4)
            await store.end_own_node(node, token)
        node, token = await other_node(client)
        taken = await take_range(client, row, node, client._core.process.make_token(), 4)
        assert taken.quarantined == 4
        assert await exceptions(any_dsn) == dict.fromkeys((1, 2, 3, 4), ("ready", 0, 0))

        def act(meta):
            if meta.id == 2:
                raise ValueError("broken")

        seen = Seen(act)
        async with consuming(group, seen):
            await until_status(any_dsn, 2, "ready", 1, 0)
            await wait_until_async(any_dsn, "select count(*) from sqlstreams.exception_queue_1", 1)
            assert sorted(seen.runs) == [(each, 0, 0) for each in (1, 2, 3, 4)]
            wait = await sql_async(
                any_dsn,
                "select extract(epoch from can_run_after - updated_at)::float8 from sqlstreams.exception_queue_1",
            )
            assert wait[0][0] > 4.9  # a first failure, with the initial backoff
            await wait_until_async(any_dsn, "select committed from sqlstreams.group_cursor", 1)


@pytest.mark.slow
async def test_d3_a_message_that_kills_its_process_at_every_run_costs_seven_deaths(dsn, tmp_path):
    log = tmp_path / "runs"
    async with opened(dsn) as (_client, stream, group):
        await own_clock(dsn)
        await stream.produce_batch([{}] * 4)
        for death in range(1, 8):
            with program("consume", dsn=dsn, stream="s", group="g", log=str(log), deadly=2) as victim:
                assert await victim.ended(20) == -signal.SIGKILL
            deadly = [line for line in log_lines([log]) if line[:2] == ["began", "2"]]
            assert len(deadly) == death
            await move_clock(dsn, HOUR)  # its lease is over
        with program("consume", dsn=dsn, stream="s", group="g", log=str(log), deadly=2) as last:
            await last.ready()
            await until_resolved(dsn, 4)
        deadly = [line for line in log_lines([log]) if line[:2] == ["began", "2"]]
        assert [line[2] for line in deadly] == [
            "0",
            "0",
            "0",
            "0",
            "1",
            "2",
            "3",
        ]  # 3 of the range, 4 single ones
        assert [line for line in log_lines([log]) if line[:2] == ["ended", "2"]] == []
        assert {line[1] for line in log_lines([log]) if line[0] == "ended"} == {"1", "3", "4"}
        letters = await group.dead_letters()
        assert [(letter.message_id, letter.attempts) for letter in letters] == [(2, 4)]
        assert [line[2] for line in await history(dsn)] == ["expired", "expired", "expired", "dead"]


async def test_d3_the_same_in_one_process_with_nodes_that_end(dsn):
    """What the slow test does with real processes."""
    async with opened(dsn) as (client, stream, group):
        await stream.produce({})
        row = await group.get()
        store = store_of(client)
        runs: list[int] = []
        for _ in range(12):
            node, token = await other_node(client)
            claimed = client._core.process.make_token()
            taken = await take_range(client, row, node, claimed, 1)
            if taken is not None and taken.quarantined is None:
                runs.append(0)
            handed_out = await store.claim_exceptions(row, node, claimed, reads=(1,), limit=10)
            runs += [each.attempts for each in handed_out if not each.dead]
            await store.end_own_node(node, token)
        assert runs == [0, 0, 0, 0, 1, 2, 3]
        assert await exceptions(dsn) == {1: ("dead", 4, 0)}


async def test_d8_a_row_beyond_a_lowered_budget_is_dead_at_its_next_turn_without_a_run(dsn):
    async with opened(dsn) as (_client, stream, group):
        await stream.produce({})
        async with consuming(group, Seen()):
            await until_done(dsn, 1)
        await sql_async(dsn, INSERT, 1, "ready", seconds(0), None, None, 3)
        await group.register(sqlstreams.GroupConfig(max_retries=1))
        seen = Seen()
        async with consuming(group, seen):
            await until_status(dsn, 1, "dead", 3, 0)
        assert seen.runs == []


async def test_d10_consume_ends_with_the_cause_when_recording_is_not_allowed_any_more(dsn):
    def act(meta):
        raise ValueError("broken")

    await sql_async(dsn, "create role limited login password 'secret'")
    try:
        async with opened(dsn) as (_client, stream, _group):
            await stream.produce({})
            await sql_async(
                dsn,
                "grant usage on schema sqlstreams to limited;"
                "grant all on all tables in schema sqlstreams to limited;"
                "grant all on all sequences in schema sqlstreams to limited;"
                "revoke insert on sqlstreams.exception_queue_1 from limited",
            )
            other = dsn.replace(dsn.split("//")[1].split("@")[0], "limited:secret")
            seen = Seen(act)
            with trio.fail_after(20):
                async with sqlstreams.connect(other, lease=SHORT, install=False) as limited:
                    with pytest.raises(PermissionDenied):
                        await limited.stream("s").consumer("g").consume(seen)
                    # its node lives on, and holds nothing that it does not run
                    held = "select count(*) from sqlstreams.claim_1 where not done and node_id is not null"
                    assert await sql_async(dsn, held) == [(0,)]
            assert len(seen.runs) == 1
            assert await exceptions(dsn) == {}
    finally:
        await sql_async(dsn, "drop owned by limited; drop role limited")


async def test_c6_a_frozen_owner_records_nothing_after_its_exception_was_taken_over(dsn):
    """A real consumer that was away for longer than its lease: what it did then counts for nothing."""
    hold = trio.Event()

    async def wait(_meta):
        with trio.CancelScope(shield=True):  # bounded: the test sets the event
            await hold.wait()

    async with opened(dsn) as (client, stream, group):
        await stream.produce({})
        async with consuming(group, Seen()):
            await until_done(dsn, 1)
        await sql_async(dsn, INSERT, 1, "ready", seconds(0), None, None, 0)
        row = await group.get()
        slow = Seen(wait)
        async with consuming(group, slow):
            await slow.until_runs(1)
            await sql_async(dsn, "update sqlstreams.node set ended_at = sqlstreams.clock()")
            other, _ = await other_node(client)
            token = client._core.process.make_token()
            with trio.fail_after(10):
                while not await store_of(client).claim_exceptions(row, other, token, reads=(1,), limit=1):
                    await trio.sleep(0.01)  # because it is the database that ends the wait
            hold.set()  # the first owner finishes now
            await trio.testing.wait_all_tasks_blocked(0.1)
        assert await exceptions(dsn) == {1: ("inflight", 1, 0)}
        rows = await sql_async(dsn, "select node_id, token from sqlstreams.exception_queue_1")
        assert (rows[0][0], Token(rows[0][1])) == (other, token)
        assert [line[2] for line in await history(dsn)] == ["expired"]
        with pytest.raises(LeaseLost):
            await store_of(client).claim_exceptions(row, row.id, token, reads=(1,), limit=1)
