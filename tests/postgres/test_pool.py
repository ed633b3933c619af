"""The pool in fair weather and through restarts; transactions of the user; pinned connections."""

import functools
import logging
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import trio

from sqlstreams.errors import (
    ClientClosed,
    ConfigurationError,
    OutcomeUnknown,
    StatementRefused,
    StoreUnavailable,
    TransactionAborted,
    TransactionInUse,
)
from sqlstreams.postgres.bridge import Bridge, open_bridge
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.pinned import Pinned
from sqlstreams.postgres.pool import Pool, open_pool
from sqlstreams.postgres.settings import PoolSettings
from sqlstreams.postgres.settle import settle
from sqlstreams.postgres.tx import Tx
from tests.postgres.proxy import open_proxy
from tests.postgres.rig import (
    GRACE,
    SLACK,
    Freezer,
    assert_whole,
    insert,
    make_table,
    numbers,
    opened,
    pid_of,
    settings_for,
)
from tests.servers import sql, sql_async, sql_value, terminate_backends, wait_until, wait_until_async


async def value(conn: Connection, query: str, *args: Any) -> Any:
    return await conn.fetchval(query, *args)


async def raise_key_error(_conn: Connection) -> None:
    raise KeyError("the function's own")


# One crossing each.


async def test_each_way_returns_what_the_function_returns(dsn):
    await make_table(dsn)
    async with opened(dsn) as (_bridge, pool):
        assert await pool.unit_of_work(insert, 1) == 1
        assert await pool.autocommit(insert, 2) == 2
        assert await pool.autocommit(insert, 3, then=double) == (3, 6)
        assert await pool.read(value, "select sum(n)::int from t") == 6
        await assert_whole(pool, dsn)


async def double(conn: Connection, n: int) -> int:
    return int(await conn.fetchval("select 2 * n from t where n = $1", n))


async def test_errors_of_the_function_itself_pass_through_and_leave_nothing(dsn):
    async with opened(dsn) as (bridge, pool):
        pinned = Pinned(bridge, pool.settings, name="test")
        for way in (pool.unit_of_work, pool.autocommit, pool.read, pinned.read, pinned.autocommit):
            with pytest.raises(KeyError):
                await way(raise_key_error)
        with pytest.raises(KeyError):
            async with pool.transaction() as tx:
                await tx.run(raise_key_error)
        await pinned.close()
        await assert_whole(pool, dsn)


async def test_a_read_that_fails_after_the_commit_does_not_hide_it(dsn):
    await make_table(dsn)

    async def refused(conn: Connection, _n: int) -> None:
        await conn.execute("select 1 / 0")

    async def cut(conn: Connection, _n: int) -> None:
        sql(dsn, "select pg_terminate_backend($1, 5000)", conn.get_server_pid())
        await conn.execute("select 1")

    async with opened(dsn) as (_bridge, pool):
        with pytest.raises(StatementRefused, match="22012"):
            await pool.autocommit(insert, 1, then=refused)
        with pytest.raises(OutcomeUnknown, match="committed, but the read after it failed"):
            await pool.autocommit(insert, 2, then=cut)
        await assert_whole(pool, dsn)
    assert await numbers(dsn) == [1, 2]


async def test_json_goes_in_and_comes_out_as_the_same_bytes(any_dsn):
    body = b'{"b":  1,\n "a": [1.0, "\\u0000"]}'
    async with opened(any_dsn) as (bridge, pool):
        pinned = Pinned(bridge, pool.settings, name="test")
        for way in (pool.unit_of_work, pool.autocommit, pool.read, pinned.read):
            for _ in range(2):  # also after a release
                assert await way(value, "select $1::json", body) == body
        assert await pool.read(value, "select $1::json[]", [body, None]) == [body, None]
        await pinned.close()


# Settings.

WANTED = {
    "application_name": "app",
    "jit": "off",
    "lock_timeout": "2s",
    "default_transaction_isolation": "read committed",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25000",
    "client_connection_check_interval": "5s",
}


async def show(conn: Connection, names: list[str]) -> dict[str, str]:
    return {name: await conn.fetchval(f"show {name}") for name in names}


async def change_settings(conn: Connection) -> None:
    await conn.execute("set lock_timeout = 1; set jit = on")


async def test_settings_count_on_every_connection_and_survive_its_release(any_dsn):
    database = urlsplit(any_dsn).path[1:]
    await sql_async(any_dsn, f"alter database {database} set default_transaction_isolation = 'serializable'")
    async with opened(any_dsn, application_name="app", size=1) as (_bridge, pool):
        assert await pool.read(show, list(WANTED)) == WANTED
        async with pool.transaction() as tx:
            await tx.run(change_settings)
            assert await tx.fetchval("show transaction_isolation") == "read committed"
        assert await pool.read(show, list(WANTED)) == WANTED
        idle = ["idle_in_transaction_session_timeout"]
        assert await pool.unit_of_work(show, idle) == {idle[0]: "15s"}
        async with pool.transaction() as tx:
            assert await tx.run(show, idle) == {idle[0]: "0"}


async def test_a_unit_whose_process_does_not_go_on_is_ended_by_the_server(dsn):
    await make_table(dsn)

    async def insert_and_stop(conn: Connection) -> None:
        await insert(conn, 1)
        gone = f"select count(*) = 0 from pg_stat_activity where pid = {conn.get_server_pid()}"
        wait_until(dsn, gone)  # blocks the loop, like a process that was stopped

    async with opened(dsn, idle_in_transaction=0.2) as (_bridge, pool):
        with pytest.raises((StoreUnavailable, OutcomeUnknown)):
            await pool.unit_of_work(insert_and_stop)
        await assert_whole(pool, dsn)
    assert await numbers(dsn) == []


async def test_session_state_of_a_transaction_of_the_user_does_not_leak(dsn):
    async with opened(dsn, size=1) as (_bridge, pool):
        async with pool.transaction() as tx:
            await tx.execute("set search_path = pg_catalog")
            await tx.fetchval("select pg_advisory_lock(1)")
        assert await pool.read(value, "show search_path") == '"$user", public'
        assert await pool.read(value, "select count(*) from pg_locks where locktype = 'advisory'") == 0


@pytest.mark.parametrize(
    ("url", "setting", "found"),
    [
        ("", None, "sqlstreams"),
        ("?application_name=mine", None, "mine"),
        ("?application_name=mine", "app", "app"),
    ],
)
async def test_the_application_name_is_that_of_the_setting_then_of_the_url(dsn, url, setting, found):
    plain = urlunsplit(urlsplit(dsn)._replace(query=""))
    async with opened(plain + url, application_name=setting) as (bridge, pool):
        assert await pool.read(value, "show application_name") == found
        pinned = Pinned(bridge, pool.settings, name="heartbeat")
        assert (await pinned.read(value, "show application_name")).endswith(" heartbeat")
        await pinned.close()


async def test_behind_a_pooler_nothing_is_left_in_the_session(dsn):
    await make_table(dsn)
    settings = settings_for(dsn, pooler=True)
    assert set(settings.server_settings(None)) == {"application_name"}
    async with opened(dsn, pooler=True) as (_bridge, pool):
        assert await pool.unit_of_work(show, ["lock_timeout", "jit"]) == {"lock_timeout": "2s", "jit": "off"}
        assert await pool.autocommit(insert, 1) == 1
        async with pool.transaction() as tx:
            assert await tx.fetchval("show lock_timeout") == "2s"
            await tx.execute("set application_name = 'kept'")
        names = set()
        for _ in range(4):
            names.add(await pool.read(value, "show application_name"))
            assert await pool.read(value, "select count(*) from pg_prepared_statements") <= 1
        assert "kept" in names  # no reset query
        assert await pool.read(value, "select $1::json", b"[ ]") == b"[ ]"
        await assert_whole(pool, dsn)


def test_settings_are_checked():
    for wrong in ({"size": 0}, {"grace": 0.0}, {"acquire_timeout": -1.0}, {"command_timeout": float("nan")}):
        with pytest.raises(ConfigurationError):
            PoolSettings(dsn="postgresql://x/y", **wrong)


# Waiting, closing, restarts.


async def test_callers_that_wait_are_logged_with_the_numbers_of_the_pool(dsn, caplog):
    lines: list[str] = []
    caplog.set_level(logging.WARNING, logger="sqlstreams.pool")
    settings = settings_for(dsn, size=1, warn_after=0.05)
    async with open_bridge() as bridge, open_pool(bridge, settings, report=lines.append) as pool:
        async with trio.open_nursery() as nursery, pool.transaction():
            for _ in range(3):
                nursery.start_soon(pool.read, pid_of)
            with trio.fail_after(5):
                while not lines:
                    await trio.sleep(0.01)  # because a report is a plain call; under fail_after
            assert pool.statistics().waiting == 3
            await trio.sleep(0.1)  # because no second and third line must come
        await assert_whole(pool, dsn)
    assert len(lines) == 1
    assert "(pool: size 1, connected 1, in use 1, waiting 3)" in lines[0]
    assert [record.getMessage() for record in caplog.records] == lines


async def test_after_the_block_the_pool_is_closed_and_no_session_is_left(dsn):
    async with open_bridge() as bridge:
        async with open_pool(bridge, settings_for(dsn)) as pool:
            await pool.read(pid_of)
        for way in (pool.unit_of_work, pool.autocommit, pool.read):
            with pytest.raises(ClientClosed):
                await way(pid_of)
        with pytest.raises(ClientClosed):
            async with pool.transaction():
                pass
    await wait_until_async(dsn, "select count(*) from pg_stat_activity where datname = current_database()", 1)


async def test_a_pool_that_closes_does_not_wait_for_callers_for_ever(dsn):
    errors: list[BaseException] = []

    async def long_read(pool: Pool) -> None:
        try:
            await pool.read(value, "select pg_sleep(60)")
        except (StoreUnavailable, ClientClosed) as exc:
            errors.append(exc)

    async def use(bridge: Bridge, nursery: trio.Nursery) -> None:
        async with open_pool(bridge, settings_for(dsn, size=1)) as pool:
            nursery.start_soon(long_read, pool)
            await wait_until_async(
                dsn, "select count(*) from pg_stat_activity where wait_event = 'PgSleep'", 1
            )
            nursery.start_soon(long_read, pool)  # waits for the first
            await trio.testing.wait_all_tasks_blocked(0.05)

    with trio.fail_after(2 * GRACE + SLACK + 1):
        async with open_bridge() as bridge, trio.open_nursery() as outside:
            await use(bridge, outside)
    assert sorted(type(error).__name__ for error in errors) == ["ClientClosed", "StoreUnavailable"]


async def test_callers_do_not_notice_that_idle_connections_were_ended(dsn):
    await make_table(dsn)
    async with opened(dsn, size=3) as (bridge, pool):
        pinned = Pinned(bridge, pool.settings, name="test")

        async def in_transaction() -> None:
            async with pool.transaction() as tx:
                await tx.fetchval("select 1")

        for way in (
            functools.partial(pool.unit_of_work, insert, 1),
            functools.partial(pool.autocommit, insert, 1),
            functools.partial(pool.read, pid_of),
            functools.partial(pinned.read, pid_of),
            functools.partial(pinned.autocommit, insert, 1),
            in_transaction,
        ):
            await assert_whole(pool, dsn)  # all connected
            await pinned.read(pid_of)
            terminate_backends(dsn)  # blocks: the loop has read nothing of it
            await way()
        await pinned.close()


async def test_callers_do_not_notice_a_restart_of_the_server_either(durable_server):
    server = durable_server(fsync="off")
    async with opened(server.dsn, size=2) as (_bridge, pool):
        await assert_whole(pool, server.dsn)
        server.restart()  # blocks
        assert await pool.read(value, "select 1") == 1
        await trio.to_thread.run_sync(server.stop)
        with pytest.raises(StoreUnavailable):
            await pool.read(value, "select 1")
        await trio.to_thread.run_sync(server.start)
        assert await pool.unit_of_work(value, "select 1") == 1
        await assert_whole(pool, server.dsn)


async def test_of_several_hosts_the_first_that_answers_is_taken(dsn):
    parts = urlsplit(dsn)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{unused.getsockname()[1]}"
        async with open_proxy(dsn) as silent:
            silent.silent = True
            hosts = f"{dead},127.0.0.1:{silent.port},{parts.hostname}:{parts.port}"
            user = parts.netloc.rpartition("@")[0]
            several = urlunsplit(
                parts._replace(netloc=f"{user}@{hosts}", query="target_session_attrs=read-write")
            )
            with trio.fail_after(5):
                async with opened(several, connect_timeout=1.0) as (_bridge, pool):
                    assert await pool.read(value, "select 1") == 1
                    assert hosts in pool.settings.where


async def test_connect_timeout_in_the_url_bounds_connecting(dsn):
    async with opened(f"{dsn}&connect_timeout=3") as (_bridge, pool):
        assert await pool.read(value, "select 1") == 1
    async with opened(f"{dsn}&connect_timeout=0") as (_bridge, pool):  # libpq: no bound; ours stays
        assert await pool.read(value, "select 1") == 1
    async with open_proxy(dsn) as silent:
        silent.silent = True
        user, _, behind = dsn.rpartition("@")
        url = f"{user}@127.0.0.1:{silent.port}/{behind.partition('/')[2]}&connect_timeout=1"
        began = trio.current_time()
        with pytest.raises(StoreUnavailable, match="connecting took too long"):
            async with opened(url):
                pass
        assert 0.9 < trio.current_time() - began < 3
    with pytest.raises(ConfigurationError, match="connect_timeout") as caught:
        async with opened(f"{dsn}&connect_timeout=geheim"):
            pass
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [("keepalives_idel", "is not known"), ("statement_timeout", "has a value that is refused")],
)
async def test_a_parameter_of_the_url_that_is_refused_is_named_without_its_value(any_dsn, name, what):
    with pytest.raises(ConfigurationError, match=f"'{name}' {what}") as caught:
        async with opened(f"{any_dsn}&{name}=geheim"):
            pass
    assert "geheim" not in str(caught.value)
    assert caught.value.__context__ is None


# Transactions of the user.


async def test_a_transaction_runs_statements_and_commits_at_its_end(dsn):
    await make_table(dsn)
    async with opened(dsn) as (_bridge, pool):
        async with pool.transaction() as tx:
            assert await tx.execute("insert into t values ($1), ($2)", 1, 2) == "INSERT 0 2"
            assert [row["n"] for row in await tx.fetch("select n from t order by n")] == [1, 2]
            row = await tx.fetchrow("select n, n + 1 as m from t where n = $1", 1)
            assert row is not None
            assert (row["n"], row["m"]) == (1, 2)
            assert await tx.fetchrow("select n from t where n = 9") is None
            assert await tx.fetchval("select n, n + 1 from t where n = $1", 1, column=1) == 2
            assert await tx.run(insert, 3) == 3
            assert await numbers(dsn) == []
        assert await numbers(dsn) == [1, 2, 3]
        with pytest.raises(ClientClosed):
            await tx.execute("select 1")
        await assert_whole(pool, dsn)


async def test_an_exception_of_the_block_rolls_back(dsn):
    await make_table(dsn)
    async with opened(dsn) as (_bridge, pool):
        with pytest.raises(ZeroDivisionError):
            async with pool.transaction() as tx:
                await tx.run(insert, 1)
                raise ZeroDivisionError
        with pytest.raises(StatementRefused, match="22012"):
            async with pool.transaction() as tx:
                await tx.run(insert, 1)
                await tx.execute("select 1 / 0")
        await assert_whole(pool, dsn)
    assert await numbers(dsn) == []


async def test_two_tasks_in_one_transaction_are_told_and_nothing_is_sent(dsn):
    await make_table(dsn)
    async with opened(dsn) as (_bridge, pool):
        async with pool.transaction() as tx:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tx.execute, "select pg_sleep(0.2)")
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(TransactionInUse, match="two tasks"):
                    await tx.run(insert, 1)
            await tx.run(insert, 2)
        async with trio.open_nursery() as nursery:
            with pytest.raises(TransactionInUse, match="two tasks"):
                await leave_a_statement_behind(pool, nursery)
        await assert_whole(pool, dsn)
    assert await numbers(dsn) == [2]


async def leave_a_statement_behind(pool: Pool, nursery: trio.Nursery) -> None:
    async def sleep(tx: Tx) -> None:
        with suppress(StoreUnavailable):
            await tx.execute("select pg_sleep(0.2)")

    async with pool.transaction() as tx:
        await tx.run(insert, 3)
        nursery.start_soon(sleep, tx)
        await trio.testing.wait_all_tasks_blocked()


async def test_a_transaction_with_a_cancelled_statement_does_not_commit(dsn):
    await make_table(dsn)
    async with opened(dsn) as (_bridge, pool):
        with pytest.raises(TransactionAborted, match="cancelled"):
            async with pool.transaction() as tx:
                await tx.run(insert, 1)
                with trio.move_on_after(0.05):
                    await tx.execute("select pg_sleep(10)")
        with pytest.raises(TransactionAborted, match="took too long"):
            async with pool.transaction() as tx:
                await tx.run(insert, 1)
                with pytest.raises(StoreUnavailable):
                    await tx.execute("select pg_sleep(10)", timeout=0.05)
        await assert_whole(pool, dsn)
    assert await numbers(dsn) == []


@pytest.mark.parametrize("ending", ["rollback", "commit", "rollback and chain; rollback"])
async def test_h18_a_transaction_that_a_statement_ended_says_so_and_sends_nothing_after_it(any_dsn, ending):
    await make_table(any_dsn)
    async with opened(any_dsn) as (_bridge, pool):
        with pytest.raises(TransactionAborted, match="ended the transaction itself"):
            async with pool.transaction() as tx:
                await tx.run(insert, 1)
                await tx.execute(ending)
        with pytest.raises(TransactionAborted, match="ended the transaction itself"):
            async with pool.transaction() as tx:
                await tx.execute(ending)
                await tx.run(insert, 2)
        with pytest.raises(ZeroDivisionError):
            async with pool.transaction() as tx:
                await tx.execute(ending)
                raise ZeroDivisionError
        async with pool.transaction() as tx:
            await tx.execute("savepoint s; rollback to s; release s")
            await tx.run(insert, 3)
        await assert_whole(pool, any_dsn)
    assert await numbers(any_dsn) == ([1, 3] if ending == "commit" else [3])


async def test_the_users_statements_are_not_bounded_by_the_command_timeout(dsn):
    async with opened(dsn, command_timeout=0.1) as (_bridge, pool):
        async with pool.transaction() as tx:
            await tx.execute("select pg_sleep(0.3)")
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            await pool.read(value, "select pg_sleep(0.3)")
        await assert_whole(pool, dsn)


# Pinned connections.


async def test_a_pinned_connection_stays_and_reopens_by_itself(dsn):
    async with opened(dsn) as (bridge, pool):
        pinned = Pinned(bridge, pool.settings, name="heartbeat")
        first = await pinned.read(pid_of)
        assert await pinned.autocommit(pid_of) == first
        with pytest.raises(StatementRefused):
            await pinned.read(value, "select 1 / 0")
        with trio.move_on_after(0.05) as scope:
            await pinned.read(value, "select pg_sleep(10)")
        assert scope.cancelled_caught
        assert await pinned.read(pid_of) == first  # neither a refusal nor a cancel costs the connection
        terminate_backends(dsn, application_name="sqlstreams heartbeat")
        second = await pinned.read(pid_of)
        assert second != first
        await pinned.close()
        with pytest.raises(ClientClosed):
            await pinned.read(pid_of)
        assert sql_value(dsn, "select count(*) from pg_stat_activity where pid = $1", second) == 0


async def test_a_pinned_connection_serves_one_caller_after_the_other(dsn):
    order: list[int] = []
    async with opened(dsn) as (bridge, pool):
        pinned = Pinned(bridge, pool.settings, name="test")

        async def one(n: int) -> None:
            await pinned.read(value, "select pg_sleep(0.05)")
            order.append(n)

        async with trio.open_nursery() as nursery:
            for n in range(3):
                nursery.start_soon(one, n)
        assert sorted(order) == [0, 1, 2]
        assert (
            sql_value(dsn, "select count(*) from pg_stat_activity where application_name like '% test'") == 1
        )
        await pinned.close()


async def test_a_frozen_pinned_connection_times_out_and_the_next_call_has_another(dsn):
    await make_table(dsn)
    async with opened(dsn) as (bridge, pool):
        pinned = Pinned(bridge, pool.settings, name="test")
        with Freezer() as freezer:
            began = trio.current_time()
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await pinned.read(frozen_value, freezer, timeout=0.3)
            assert trio.current_time() - began < 0.3 + GRACE + SLACK
            began = trio.current_time()
            with pytest.raises(OutcomeUnknown):
                await pinned.autocommit(frozen_insert, freezer, 1, timeout=0.3)
            assert trio.current_time() - began < 0.3 + GRACE + SLACK
            began = trio.current_time()
            with trio.CancelScope(deadline=began + 0.2), pytest.raises(OutcomeUnknown):
                await pinned.autocommit(frozen_insert, freezer, 2)
            assert trio.current_time() - began < 0.2 + GRACE + SLACK
            assert await pinned.read(value, "select 1") == 1
        await wait_until_async(dsn, "select count(*) from t", 2)  # both came true after the thaw
        await pinned.close()


async def frozen_value(conn: Connection, freezer: Freezer) -> None:
    freezer.freeze(conn)
    await conn.execute("select 1")


async def frozen_insert(conn: Connection, freezer: Freezer, n: int) -> None:
    freezer.freeze(conn)
    await conn.execute(f"insert into t values ({n})")


async def test_closing_a_frozen_pinned_connection_takes_a_grace(dsn):
    async with opened(dsn) as (bridge, pool):
        pinned = Pinned(bridge, pool.settings, name="test")
        with Freezer() as freezer:

            async def freeze(conn: Connection) -> None:
                freezer.freeze(conn)

            await pinned.read(freeze)
            with trio.fail_after(GRACE + SLACK):
                await pinned.close()


async def test_a_pinned_connection_tries_once_a_call_and_comes_back_with_the_server(durable_server):
    server = durable_server(fsync="off")
    async with open_bridge() as bridge:
        pinned = Pinned(bridge, settings_for(server.dsn), name="test")
        await pinned.read(pid_of)
        await trio.to_thread.run_sync(server.stop)
        for _ in range(2):
            with trio.fail_after(SLACK), pytest.raises(StoreUnavailable):
                await pinned.autocommit(pid_of)
        await trio.to_thread.run_sync(server.start)
        await pinned.autocommit(pid_of)
        await pinned.close()


# settle.


async def test_settle_lets_a_function_end_within_the_grace(dsn):
    del dsn  # no database: only the loop
    import asyncio

    async def take(seconds: float) -> str:
        await asyncio.sleep(seconds)  # because real time is what settle bounds
        return "done"

    async with open_bridge() as bridge:
        with trio.CancelScope(deadline=trio.current_time() + 0.05) as scope:
            assert await bridge.call(settle, 1.0, take, 0.2) == "done"
        assert scope.cancel_called
        with trio.CancelScope(deadline=trio.current_time() + 0.05), pytest.raises(OutcomeUnknown):
            await bridge.call(settle, 0.1, take, 10.0)
        assert bridge.reported == 0
