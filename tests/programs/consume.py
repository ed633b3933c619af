"""A small service: consumes one group and writes what it handles to an append-only file. Run with a JSON object as argument.

Keys: dsn, stream, group, log; optional: name, ttl (seconds; the other times of the lease follow it), batch, concurrency,
shutdown, take (seconds a handler takes), shield (it cannot be cancelled), deadly (the id whose handler kills the process).
It says "ready" on standard output when it consumes.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import trio

import sqlstreams


def lease_of(ttl: float | None) -> sqlstreams.LeaseConfig:
    if ttl is None:
        return sqlstreams.LeaseConfig()
    return sqlstreams.LeaseConfig(
        ttl=timedelta(seconds=ttl),
        heartbeat=timedelta(seconds=ttl / 3),
        margin=timedelta(seconds=ttl * 0.4),
        grace=timedelta(seconds=min(0.5, ttl / 6)),
    )


async def main(wanted: dict[str, Any]) -> None:
    log = os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    take = wanted.get("take", 0.0)

    async def handle(_message: object, meta: sqlstreams.Meta) -> None:
        os.write(log, b"began %d %d %d\n" % (meta.id, meta.attempts, os.getpid()))
        if meta.id == wanted.get("deadly"):
            os.kill(os.getpid(), signal.SIGKILL)
        with trio.CancelScope(shield=wanted.get("shield", False)):  # bounded: take seconds
            await trio.sleep(take)  # because the handler is to take so long
        os.write(log, b"ended %d %d %d\n" % (meta.id, meta.attempts, os.getpid()))

    shutdown = wanted.get("shutdown")
    options = sqlstreams.ConsumeOptions(
        batch=wanted.get("batch", 100),
        concurrency=wanted.get("concurrency", 1),
        shutdown=None if shutdown is None else timedelta(seconds=shutdown),
    )
    async with (
        sqlstreams.connect(
            wanted["dsn"], lease=lease_of(wanted.get("ttl")), application_name=wanted.get("name")
        ) as client,
        client.drain_on_signals(),
        trio.open_nursery() as nursery,
    ):
        group = client.stream(wanted["stream"]).consumer(wanted["group"])
        await nursery.start(group.consume, handle, options)
        print("ready", flush=True)


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]))
