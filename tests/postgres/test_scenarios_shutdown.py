"""Scenarios M: signals and shutdown, with real processes. Not here: M6 and M7."""

import os
import signal
from contextlib import contextmanager

import pytest
import trio

import sqlstreams
from tests.postgres.scenario_rig import (
    BUSY,
    Seen,
    consuming,
    exceptions,
    forever,
    log_lines,
    opened,
    program,
    seconds,
    until_done,
    until_logged,
    until_resolved,
)
from tests.servers import sql_async


@contextmanager
def consumer(dsn, tmp_path, name="runs", **wanted):
    with program("consume", dsn=dsn, stream="s", group="g", log=str(tmp_path / name), **wanted) as running:
        yield running


async def nothing_is_held(dsn):
    """No claim or exception has an owner, no worker instance is left, and every process but ours has ended its node."""
    rows = await sql_async(
        dsn,
        "select (select count(*) from sqlstreams.claim_1 where not done and node_id is not null),"
        " (select count(*) from sqlstreams.exception_queue_1 where status = 'inflight'),"
        " (select count(*) from sqlstreams.worker_instance),"
        f" (select count(*) from sqlstreams.node where ended_at is null and pid <> {os.getpid()})",
    )
    assert tuple(rows[0]) == (0, 0, 0, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_m1_a_signal_while_idle_ends_the_process_with_0_and_everything_released(dsn, tmp_path, number):
    async with opened(dsn):
        with consumer(dsn, tmp_path) as running:
            await running.ready()
            rows = await sql_async(dsn, "select count(*) from sqlstreams.worker_instance")
            assert rows[0][0] == 1
            asked = trio.current_time()
            running.signal(number)
            assert await running.ended(2.0 + BUSY) == 0
            assert trio.current_time() - asked < 2.0 + BUSY
        await nothing_is_held(dsn)
        rows = await sql_async(
            dsn, "select count(*) from pg_stat_activity where application_name like 'consume.py%'"
        )
        assert rows[0][0] == 0


async def test_m2_a_handler_that_has_two_seconds_left_finishes_and_nothing_is_claimed_after_the_signal(
    dsn, tmp_path
):
    async with opened(dsn) as (_client, stream, group):
        await stream.produce_batch([{}] * 10)
        with consumer(dsn, tmp_path, take=2.0, batch=5) as running:
            await until_logged(running.log, 1)
            running.signal(signal.SIGTERM)
            await stream.produce_batch([{}] * 5)
            assert await running.ended(2.0 + 2.0 + BUSY) == 0
            lines = log_lines([running.log])
        assert [line[:2] for line in lines] == [["began", "1"], ["ended", "1"]]
        await nothing_is_held(dsn)
        rows = await sql_async(
            dsn, "select low, high, done, done_through from sqlstreams.claim_1 where low >= 0"
        )
        assert [tuple(row) for row in rows] == [(0, 5, False, 1)]  # recorded, and no other claim was made
        assert await exceptions(dsn) == {}
        seen = Seen()
        async with consuming(group, seen):
            await until_resolved(dsn, 15)
        assert seen.runs == [(id_, 0, 0) for id_ in range(2, 16)]  # nothing comes twice


async def test_m3_a_handler_that_outlasts_the_budget_is_cut_and_its_message_is_free_at_once(dsn, tmp_path):
    async with opened(dsn) as (_client, stream, group):
        await stream.produce_batch([{}] * 3)
        with consumer(dsn, tmp_path, take=60.0, shutdown=0.5) as running:
            await until_logged(running.log, 1)
            asked = trio.current_time()
            running.signal(signal.SIGTERM)
            assert await running.ended(0.5 + 2.0 + BUSY) == 0
            assert trio.current_time() - asked < 0.5 + 2.0 + BUSY
            assert [line[:2] for line in log_lines([running.log])] == [["began", "1"]]
        await nothing_is_held(dsn)
        assert await exceptions(dsn) == {1: ("ready", 0, 0)}
        seen = Seen()
        began = trio.current_time()
        async with consuming(group, seen):
            await seen.until_runs(3)
            assert trio.current_time() - began < 2.0 + BUSY  # without waiting for any lease
            await until_resolved(dsn, 3)
        assert sorted(seen.runs) == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]


async def test_m3_ten_restarts_inside_one_run_cost_neither_an_attempt_nor_a_reclaim(any_dsn):
    async with opened(any_dsn) as (_client, stream, group):
        await stream.produce_batch([{}] * 2)
        runs = []
        for _ in range(10):
            seen = Seen(lambda meta: forever() if meta.id == 1 else None)
            async with sqlstreams.connect(any_dsn) as other, trio.open_nursery() as nursery:
                handle = other.stream("s").consumer("g")
                options = sqlstreams.ConsumeOptions(shutdown=seconds(0))
                await nursery.start(handle.consume, seen, options)
                await seen.until(lambda: 1 in seen.ids)  # noqa: B023 - of this round
                other.drain()
            runs += [run for run in seen.runs if run[0] == 1]
            assert await exceptions(any_dsn) == {1: ("ready", 0, 0)}
        assert runs == [(1, 0, 0)] * 10
        rows = await sql_async(any_dsn, "select max(reclaims) from sqlstreams.claim_1")
        assert rows[0][0] == 0
        async with consuming(group, Seen()):
            await until_resolved(any_dsn, 2)
        assert await exceptions(any_dsn) == {}


@pytest.mark.slow
async def test_m3_real_processes_that_are_restarted_inside_one_run_cost_nothing(dsn, tmp_path):
    async with opened(dsn) as (_client, stream, _group):
        await stream.produce({})
        for turn in range(1, 5):
            with consumer(dsn, tmp_path, take=60.0, shutdown=0.0) as running:
                await until_logged(running.log, turn)
                running.signal(signal.SIGTERM)
                assert await running.ended(2.0 + BUSY) == 0
            assert await exceptions(dsn) == {1: ("ready", 0, 0)}
        with consumer(dsn, tmp_path) as running:
            await until_logged(running.log, 1, word="ended")
            await until_resolved(dsn, 1)
        assert {line[2] for line in log_lines([running.log])} == {"0"}


async def test_m4_a_second_signal_ends_a_process_whose_handler_hangs_at_once_with_143(dsn, tmp_path):
    async with opened(dsn) as (_client, stream, _group):
        await stream.produce({})
        with consumer(dsn, tmp_path, take=60.0, shield=True) as running:
            await until_logged(running.log, 1)
            running.signal(signal.SIGTERM)
            await trio.sleep(0.2)  # because two signals that come at the same moment are one
            running.signal(signal.SIGTERM)
            assert await running.ended(1.0 + BUSY) == 143


async def test_m5_a_producer_that_is_killed_in_a_transaction_leaves_no_message_and_no_lock(dsn, tmp_path):
    async with opened(dsn) as (_client, stream, group):
        with program("produce_in_transaction", dsn=dsn, stream="s", log=str(tmp_path / "none")) as producer:
            await producer.ready()
            rows = await sql_async(
                dsn,
                "select count(*) from pg_locks where mode = 'RowExclusiveLock'"
                " and relation = 'sqlstreams.message_log_1'::regclass",
            )
            assert rows[0][0] == 1
            producer.signal(signal.SIGKILL)
            await producer.ended(5)
        seen = Seen()
        async with consuming(group, seen):
            sent = await stream.produce({})
            await until_done(dsn, sent.id)
        assert sent.id == 2  # the first one is burnt
        assert seen.ids == [2]
