"""What the tests of `sqlstreams.postgres` share: open bridge and pool, and check afterwards that nothing is left behind."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import trio

from sqlstreams.postgres.bridge import Bridge, open_bridge
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.pool import Pool, open_pool
from sqlstreams.postgres.settings import PoolSettings
from tests.servers import sql_async, thaw, wait_until_async

GRACE = 0.3
SLACK = 1.5  # seconds that a busy machine may take beyond what is asserted


@asynccontextmanager
async def opened(dsn: str, **settings: Any) -> AsyncIterator[tuple[Bridge, Pool]]:
    """Open both; the loop must have had no error that nobody waited for."""
    reports: list[str] = []
    async with (
        open_bridge(reports.append) as bridge,
        open_pool(bridge, settings_for(dsn, **settings)) as pool,
    ):
        yield bridge, pool
    assert reports == [], reports
    assert bridge.reported == 0


def settings_for(dsn: str, **settings: Any) -> PoolSettings:
    """Return settings with a short grace."""
    return PoolSettings(dsn=dsn, **({"grace": GRACE, "size": 2} | settings))


async def assert_whole(pool: Pool, dsn: str) -> None:
    """The pool gives out all its connections at once, and no session is busy or in a transaction."""
    with trio.fail_after(10):
        while pool.statistics().in_use:  # somebody still cleans up: at most two graces
            await trio.sleep(0.01)  # because no event says so; under fail_after
        pids: set[int] = set()
        everybody_there = trio.Event()

        async def meet() -> None:
            async with pool.transaction() as tx:
                pids.add(await tx.fetchval("select pg_backend_pid()"))
                if len(pids) == pool.settings.size:
                    everybody_there.set()
                await everybody_there.wait()

        async with trio.open_nursery() as nursery:
            for _ in range(pool.settings.size):
                nursery.start_soon(meet)
    assert pool.statistics().in_use == 0
    assert pool.statistics().waiting == 0
    await wait_until_async(
        dsn,
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        " and backend_type = 'client backend' and state <> 'idle'",
        0,
    )


async def make_table(dsn: str) -> None:
    """Make the table `t` of one number."""
    await sql_async(dsn, "create table t (n bigint)")


async def numbers(dsn: str) -> list[int]:
    """Return what is in `t`."""
    return [row[0] for row in await sql_async(dsn, "select n from t order by n")]


async def insert(conn: Connection, n: int) -> int:
    """Put a number into `t`; asyncio-flavoured."""
    await conn.execute("insert into t values ($1)", n)
    return n


async def pid_of(conn: Connection) -> int:
    """Return the backend's process; asyncio-flavoured."""
    return int(conn.get_server_pid())


class Freezer:
    """Stops backends; the block thaws them."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def freeze(self, conn: Connection) -> None:
        """SIGSTOP this connection's backend. It is stopped before it sees what is sent next."""
        pid = int(conn.get_server_pid())
        self.pids.append(pid)
        os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let all go on."""
        for pid in self.pids:
            thaw(pid)
        self.pids.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.thaw()
