"""The Postgres of a run, a fresh database for each measurement, and statements from outside."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import trio

import sqlstreams
from benchmarks.report import machine

__all__ = ["Server", "open_server"]

SETTINGS = {"max_wal_size": "4GB", "shared_buffers": "512MB"}  # fewer checkpoints while something is timed
SHOWN = ("fsync", "synchronous_commit", "full_page_writes", *SETTINGS)


class Server:
    """A running server. Made by `open_server`.

    Attributes:
        surroundings: for the report: machine, Postgres, its settings, the library.
    """

    def __init__(self, dsn: str, surroundings: dict[str, str]) -> None:
        self._dsn = dsn
        self.surroundings = surroundings
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def database(self) -> AsyncIterator[str]:
        """Give the URL of an empty database, dropped afterwards; the server has nothing left to write when it begins."""
        name = f"bench_{next(self._numbers)}"
        await _ask(self._dsn, f"create database {name} template template0 strategy file_copy")
        await _ask(self._dsn, "checkpoint")
        try:
            yield urlunsplit(urlsplit(self._dsn)._replace(path=f"/{name}"))
        finally:
            with trio.move_on_after(30, shield=True):  # bounded: 30 s
                await _ask(self._dsn, f"drop database {name} with (force)")


@asynccontextmanager
async def open_server() -> AsyncIterator[Server]:
    """Start an embedded Postgres, as durable as it comes, for the block."""
    about_machine = machine()
    async with sqlstreams.embedded(settings=SETTINGS) as dsn:
        version = await _ask(dsn, "show server_version")
        settings = [f"{name}={await _ask(dsn, f'show {name}')}" for name in SHOWN]
        if not {"fsync=on", "synchronous_commit=on"} <= set(settings):
            raise RuntimeError(f"the server is not durable: {', '.join(settings)}")
        yield Server(
            dsn,
            {
                "machine": about_machine,
                "server": f"Postgres {version}, {', '.join(settings)}",
                "library": f"sqlstreams {sqlstreams.__version__}",
            },
        )


async def _ask(dsn: str, statement: str) -> object:
    """Run a statement in a thread with a loop of its own; return the first value."""

    async def ask() -> object:
        conn = await asyncpg.connect(dsn)
        try:
            return await conn.fetchval(statement, timeout=120)
        finally:
            await conn.close()  # noqa: ASYNC102 - asyncio-flavoured, in a thread that nobody cancels

    def in_thread() -> object:
        with asyncio.Runner() as runner:
            return runner.run(ask())

    return await trio.to_thread.run_sync(partial(in_thread), abandon_on_cancel=True)
