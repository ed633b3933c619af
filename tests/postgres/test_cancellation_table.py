"""What a cancel, a frozen or killed backend and a lost answer leave behind, for each way to run statements.

The rule: cancelled means that nothing was done, returned means committed, OutcomeUnknown means that nobody knows.
"""

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio

from sqlstreams.errors import OutcomeUnknown, StoreUnavailable, TransactionAborted
from sqlstreams.postgres.bridge import Bridge
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.pool import Pool
from tests.postgres.proxy import open_proxy
from tests.postgres.rig import GRACE, SLACK, Freezer, assert_whole, insert, make_table, numbers, opened
from tests.servers import sql, sql_async, wait_until_async

SEED = 1
WAITS_FOR_LOCK = "select count(*) from pg_locks where locktype = 'advisory' and not granted"

Write = Callable[[Bridge, Pool, int], Awaitable[object]]


async def unit_of_work(_bridge: Bridge, pool: Pool, n: int) -> None:
    await pool.unit_of_work(insert, n)


async def transaction(_bridge: Bridge, pool: Pool, n: int) -> None:
    async with pool.transaction() as tx:
        await tx.fetchval("select 1")
        await tx.execute("insert into t values ($1)", n)


async def autocommit(_bridge: Bridge, pool: Pool, n: int) -> None:
    await pool.autocommit(insert, n)


async def then(_bridge: Bridge, pool: Pool, n: int) -> None:
    assert await pool.autocommit(insert, n, then=insert_seen) == (n, n)


async def naive(bridge: Bridge, pool: Pool, n: int) -> None:
    """Sabotage: one autocommit statement in a plain crossing."""
    await bridge.call(insert_plainly, pool, n)


async def insert_seen(conn: Connection, n: int) -> int:
    return int(await conn.fetchval("select n from t where n = $1", n))


async def insert_plainly(pool: Pool, n: int) -> None:
    conn = await pool._places.acquire()
    try:
        await insert(conn, n)
    finally:
        await pool._places.give_back(conn)


async def random_deadlines(dsn: str, write: Write, times: int) -> tuple[set[int], set[int], set[int]]:
    """Run `write` under random deadlines; return what was cancelled, what returned, and what is in the table."""
    chance = random.Random(SEED)
    await make_table(dsn)
    cancelled: set[int] = set()
    returned: set[int] = set()
    async with opened(dsn) as (bridge, pool):
        took = []
        for n in range(-20, 0):  # how long does it take here?
            began = trio.current_time()
            await write(bridge, pool, n)
            took.append(trio.current_time() - began)
        longest = 2 * sorted(took)[10]
        for n in range(times):
            with trio.move_on_after(chance.uniform(0, longest) if n % 10 else 0):
                await write(bridge, pool, n)
                returned.add(n)
            if n not in returned:
                cancelled.add(n)
        await assert_whole(pool, dsn)
    stored = await numbers(dsn)
    assert len(stored) == len(set(stored))
    return cancelled, returned, {n for n in stored if n >= 0}


ALL = pytest.mark.parametrize(
    "write",
    [unit_of_work, transaction, autocommit, then],
    ids=["unit_of_work", "transaction", "autocommit", "autocommit, then a read"],
)


@ALL
async def test_cancelled_means_nothing_was_done_and_returned_means_committed(dsn, write):
    cancelled, returned, stored = await random_deadlines(dsn, write, times=250)
    assert cancelled
    assert returned
    assert stored == returned


@pytest.mark.slow
@ALL
async def test_cancelled_means_nothing_was_done_many_times(dsn, write):
    cancelled, returned, stored = await random_deadlines(dsn, write, times=6_000)
    assert (
        min(len(cancelled), len(returned)) > 10
    )  # a settled statement can be cancelled only before it starts
    assert stored == returned


async def test_sabotage_a_plain_autocommit_statement_commits_though_it_was_cancelled(dsn):
    cancelled, _returned, stored = await random_deadlines(dsn, naive, times=250)
    assert cancelled & stored


async def test_a_scope_that_is_cancelled_already_starts_nothing(dsn):
    await make_table(dsn)
    async with opened(dsn) as (_bridge, pool):
        for call in (pool.unit_of_work, pool.autocommit):
            with trio.CancelScope() as scope:
                scope.cancel()
                await call(insert, 1)
            assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            async with pool.transaction() as tx:
                await tx.run(insert, 1)
                scope.cancel()
        assert scope.cancelled_caught
        await assert_whole(pool, dsn)
    assert await numbers(dsn) == []


# Frozen backends.


async def insert_and_hang(conn: Connection, n: int, freezer: Freezer) -> None:
    await insert(conn, n)
    freezer.freeze(conn)
    await conn.execute("select 1")


async def insert_then_freeze(conn: Connection, n: int, freezer: Freezer) -> None:
    await insert(conn, n)
    freezer.freeze(conn)


async def freeze_then_insert(conn: Connection, n: int, freezer: Freezer) -> None:
    freezer.freeze(conn)
    await conn.execute(f"insert into t values ({n})")  # one message: nothing to be prepared first


async def test_frozen_inside_a_unit_it_is_cancelled_within_two_graces(dsn):
    await make_table(dsn)
    async with opened(dsn) as (_bridge, pool):
        with Freezer() as freezer:
            began = trio.current_time()
            with trio.move_on_after(0.3) as scope:
                await pool.unit_of_work(insert_and_hang, 1, freezer)
            assert scope.cancelled_caught
            assert trio.current_time() - began < 0.3 + 2 * GRACE + SLACK
            await use_all_places(pool)
        await assert_whole(pool, dsn)
        assert await numbers(dsn) == []


async def use_all_places(pool: Pool) -> None:
    """Somebody else's frozen backend takes no place of the pool."""
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in range(pool.settings.size):
                nursery.start_soon(pool.read, fetch_one)


async def fetch_one(conn: Connection) -> object:
    return await conn.fetchval("select 1")


async def frozen_commit(pool: Pool, freezer: Freezer) -> None:
    await pool.unit_of_work(insert_then_freeze, 1, freezer)


async def frozen_autocommit(pool: Pool, freezer: Freezer) -> None:
    await pool.autocommit(freeze_then_insert, 1, freezer)


async def frozen_transaction(pool: Pool, freezer: Freezer) -> None:
    async with pool.transaction() as tx:
        await tx.run(insert_then_freeze, 1, freezer)


FROZEN = pytest.mark.parametrize(
    "write",
    [frozen_commit, frozen_autocommit, frozen_transaction],
    ids=["unit_of_work", "autocommit", "transaction"],
)


@FROZEN
async def test_frozen_under_the_last_statement_the_outcome_is_unknown_and_may_come_true_later(dsn, write):
    await make_table(dsn)
    async with opened(dsn) as (_bridge, pool):
        with Freezer() as freezer:
            began = trio.current_time()
            with trio.CancelScope(deadline=began + 0.3), pytest.raises(OutcomeUnknown):
                await write(pool, freezer)
            assert 0.3 <= trio.current_time() - began < 0.3 + 2 * GRACE + SLACK
            await use_all_places(pool)
        await wait_until_async(dsn, "select count(*) from t", 1)  # long after we hung up
        await assert_whole(pool, dsn)


@FROZEN
async def test_frozen_without_a_cancel_the_command_timeout_ends_it(dsn, write):
    await make_table(dsn)
    async with opened(dsn, command_timeout=0.4) as (_bridge, pool):
        with Freezer() as freezer:
            began = trio.current_time()
            with pytest.raises(OutcomeUnknown):
                await write(pool, freezer)
            assert 0.4 <= trio.current_time() - began < 0.4 + 2 * GRACE + SLACK
        await assert_whole(pool, dsn)


async def test_frozen_while_it_closes_the_pool_is_cut(dsn):
    with Freezer() as freezer:
        with trio.fail_after(2 * GRACE + SLACK + 1):
            async with opened(dsn) as (_bridge, pool):
                await pool.read(freeze, freezer)


async def freeze(conn: Connection, freezer: Freezer) -> None:
    freezer.freeze(conn)


# Killed backends, lost answers, swallowed errors.


async def kill_before_commit(conn: Connection, dsn: str) -> None:
    await insert(conn, 1)
    pid = conn.get_server_pid()
    sql(
        dsn, "select pg_terminate_backend($1, 5000)", pid
    )  # blocks, so that the loop does not read of it before


async def test_killed_before_the_commit_nothing_was_done_and_the_error_does_not_claim_more(dsn):
    await make_table(dsn)
    async with opened(dsn) as (_bridge, pool):
        with trio.fail_after(5), pytest.raises((OutcomeUnknown, StoreUnavailable)):
            await pool.unit_of_work(kill_before_commit, dsn)
        await assert_whole(pool, dsn)
    assert await numbers(dsn) == []


async def kill_and_go_on(conn: Connection, dsn: str) -> None:
    await kill_before_commit(conn, dsn)
    await conn.execute("select 1")


async def test_killed_inside_a_unit_the_store_is_unavailable(dsn):
    await make_table(dsn)
    async with opened(dsn) as (_bridge, pool):
        with trio.fail_after(5), pytest.raises(StoreUnavailable):
            await pool.unit_of_work(kill_and_go_on, dsn)
        await assert_whole(pool, dsn)
    assert await numbers(dsn) == []


COMMIT = b"commit\0"
SECOND_BIND = (8).to_bytes(4, "big") + (2).to_bytes(8, "big")  # the argument of the second insert, a bigint
LOST = pytest.mark.parametrize(
    ("write", "last"),
    [(unit_of_work, COMMIT), (transaction, COMMIT), (autocommit, SECOND_BIND), (then, SECOND_BIND)],
    ids=["unit_of_work", "transaction", "autocommit", "autocommit, then a read"],
)


@LOST
@pytest.mark.parametrize("fault", ["cut", "mute"])
async def test_a_lost_answer_to_the_last_statement_is_an_unknown_outcome(dsn, write, last, fault):
    await make_table(dsn)
    async with open_proxy(dsn) as proxy, opened(proxy.dsn, command_timeout=0.4) as (bridge, pool):
        await write(bridge, pool, 1)  # the statement is prepared: from now on it is one message
        proxy.lose_answer(last, fault)
        began = trio.current_time()
        with pytest.raises(OutcomeUnknown):
            await write(bridge, pool, 2)
        assert proxy.seen.is_set()
        assert trio.current_time() - began < 0.4 + 2 * GRACE + SLACK
        await wait_until_async(dsn, "select count(*) from t where n = 2", 1)
        await assert_whole(pool, dsn)


async def test_a_lost_answer_before_the_commit_means_that_nothing_was_done(dsn):
    await make_table(dsn)
    async with open_proxy(dsn) as proxy, opened(proxy.dsn) as (_bridge, pool):
        proxy.lose_answer(b"insert into t", "cut")
        with pytest.raises(StoreUnavailable):
            await pool.unit_of_work(insert, 1)
        await assert_whole(pool, dsn)
    assert await numbers(dsn) == []


async def swallow(conn: Connection) -> None:
    await insert(conn, 1)
    with suppress(Exception):
        await conn.execute("select 1 / 0")


async def test_a_swallowed_error_of_a_statement_does_not_pass_for_a_commit(dsn):
    await make_table(dsn)
    async with opened(dsn) as (_bridge, pool):
        with pytest.raises(TransactionAborted):
            await pool.unit_of_work(swallow)
        with pytest.raises(TransactionAborted):
            async with pool.transaction() as tx:
                await tx.run(swallow)
        await assert_whole(pool, dsn)
    assert await numbers(dsn) == []


# Locks: what the server does after the cancel.


async def hold_lock(conn: Connection) -> None:
    await conn.fetchval("select pg_advisory_xact_lock(7)")
    await conn.execute("select pg_sleep(3)")


async def insert_behind_lock(conn: Connection, n: int) -> None:
    await conn.execute("with lock as (select pg_advisory_xact_lock(7)) insert into t select $1 from lock", n)


LOCK_HELD = "select count(*) from pg_locks where locktype = 'advisory' and granted"


@pytest.mark.parametrize("how", ["unit_of_work", "read"])
async def test_a_cancelled_statement_stops_in_the_server_and_its_locks_are_free(dsn, how):
    async with opened(dsn) as (_bridge, pool):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(getattr(pool, how), hold_lock)
            await wait_until_async(
                dsn, "select count(*) from pg_stat_activity where wait_event = 'PgSleep'", 1
            )
            nursery.cancel_scope.cancel()
        assert (await sql_async(dsn, LOCK_HELD))[0][0] == 0
        await assert_whole(pool, dsn)


async def test_sabotage_a_connection_that_is_cut_at_once_keeps_its_locks(dsn):
    async with opened(dsn) as (bridge, pool):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bridge.call, cut_at_once, pool, hold_lock_in_transaction)
            await wait_until_async(
                dsn, "select count(*) from pg_stat_activity where wait_event = 'PgSleep'", 1
            )
            nursery.cancel_scope.cancel()
        assert (await sql_async(dsn, LOCK_HELD))[0][0] == 1
        await wait_until_async(dsn, LOCK_HELD, 0)


async def hold_lock_in_transaction(conn: Connection) -> None:
    await conn.execute("begin")
    await hold_lock(conn)


async def cut_at_once(pool: Pool, fn: Callable[[Connection], Awaitable[None]]) -> None:
    conn = await pool._places.acquire()
    try:
        await fn(conn)
    finally:
        conn.terminate()
        pool._places._in_use -= 1


async def test_an_autocommit_statement_that_waits_for_a_lock_is_stopped_by_its_cancel(dsn):
    await make_table(dsn)
    async with opened(dsn, lock_timeout=60.0) as (_bridge, pool), pool.transaction() as blocker:
        await blocker.execute("select pg_advisory_xact_lock(7)")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_when_it_waits, dsn, nursery.cancel_scope)
            with pytest.raises(OutcomeUnknown):
                await pool.autocommit(insert_behind_lock, 1)
        await wait_until_async(dsn, WAITS_FOR_LOCK, 0)
    assert await numbers(dsn) == []


async def cancel_when_it_waits(dsn: str, scope: trio.CancelScope) -> None:
    await wait_until_async(dsn, WAITS_FOR_LOCK, 1)
    scope.cancel()


async def test_sabotage_an_autocommit_statement_that_is_cut_at_once_commits_when_the_lock_is_free(dsn):
    await make_table(dsn)
    async with opened(dsn, lock_timeout=60.0) as (bridge, pool), pool.transaction() as blocker:
        await blocker.execute("select pg_advisory_xact_lock(7)")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bridge.call, cut_at_once, pool, insert_one_behind_lock)
            nursery.start_soon(cancel_when_it_waits, dsn, nursery.cancel_scope)
        await blocker.execute("select 1")
    await wait_until_async(dsn, "select count(*) from t", 1)


async def insert_one_behind_lock(conn: Connection) -> None:
    await insert_behind_lock(conn, 1)


# Waiting for a connection.


async def test_a_cancel_while_waiting_for_the_pool_is_plain_and_prompt(dsn):
    async with opened(dsn, size=1) as (_bridge, pool):
        async with pool.transaction() as tx:
            await tx.execute("select 1")
            with trio.move_on_after(0.1) as scope:
                await pool.read(fetch_one)
            assert scope.cancelled_caught
            assert pool.statistics().waiting == 0
        await assert_whole(pool, dsn)


async def test_an_exhausted_pool_is_unavailable_after_a_while_and_names_its_numbers(dsn):
    async with opened(dsn, size=1, acquire_timeout=0.1) as (_bridge, pool):
        async with pool.transaction():
            with pytest.raises(StoreUnavailable, match="size 1, connected 1, in use 1, waiting 1"):
                await pool.read(fetch_one)
        await assert_whole(pool, dsn)


async def test_random_deadlines_while_connecting_and_waiting_leave_no_session_behind(dsn):
    chance = random.Random(SEED)
    async with opened(dsn, size=2) as (_bridge, pool):

        async def one() -> None:
            with trio.move_on_after(chance.uniform(0, 0.05)):
                await pool.read(fetch_one)

        for _ in range(20):
            await sql_async(
                dsn,
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid() and $1",
                chance.random() < 0.3,
            )
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(one)
        await assert_whole(pool, dsn)
        sessions = await sql_async(
            dsn,
            "select 1 from pg_stat_activity where application_name = 'sqlstreams' and datname = current_database()",
        )
        assert len(sessions) <= 2


async def test_a_server_that_does_not_answer_a_connect_is_unavailable_in_time(dsn):
    async with open_proxy(dsn) as proxy, opened(proxy.dsn, size=2, connect_timeout=0.3) as (_bridge, pool):
        proxy.silent = True
        async with pool.transaction():
            with pytest.raises(StoreUnavailable, match="connecting took too long"):
                await pool.read(fetch_one)
            with trio.move_on_after(0.1) as scope:
                await pool.read(fetch_one)
            assert scope.cancelled_caught
        proxy.silent = False
        await assert_whole(pool, dsn)
