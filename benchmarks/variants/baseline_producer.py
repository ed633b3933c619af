"""The baseline's producer: plain asyncio, batches by INSERT .. SELECT FROM unnest on a few connections."""

import asyncio
import time

import msgspec

from benchmarks.figures import percentile
from benchmarks.variants.baseline_connection import Connection, connect
from benchmarks.variants.baseline_sql import INSERT
from benchmarks.variants.load import Control, Load, Maker, Pace, now

__all__: list[str] = []


async def produce_batches(conn: Connection, load: Load, maker: Maker, pace: Pace, took: list[float]) -> None:
    """Append one batch after the other until the time is up."""
    encode = msgspec.json.Encoder().encode
    while not pace.over:
        if (wait := pace.wait(maker.made)) > 0:
            await asyncio.sleep(wait)
        payloads = [encode(message) for message in maker.take(load.batch, now())]
        if not payloads:
            break
        began = now()
        await conn.fetch(INSERT, payloads)
        took.append(now() - began)


async def produce_singly(
    idle: "asyncio.Queue[Connection]", maker: Maker, pace: Pace, took: list[float]
) -> None:
    """Append each message by itself at its time, however long those before it take."""

    async def one(payload: bytes) -> None:
        conn = await idle.get()
        began = now()
        await conn.fetch(INSERT, [payload])
        took.append(now() - began)
        idle.put_nowait(conn)

    encode = msgspec.json.Encoder().encode
    async with asyncio.TaskGroup() as group:
        while not pace.over:
            await asyncio.sleep(pace.wait(maker.made))
            for message in maker.take(1, pace.due(maker.made)):
                group.create_task(one(encode(message)))


async def main() -> None:
    """Produce what stdin asks for."""
    control = Control()
    load = control.load
    conns = [await connect(load.dsn) for _ in range(load.connections)]
    control.ready()
    start = await asyncio.to_thread(control.wait_for_start)
    await asyncio.sleep(start - now())
    maker, pace = Maker(load), Pace(load, start)
    took: list[float] = []
    cpu = time.process_time()
    if load.batch == 1:
        idle: asyncio.Queue[Connection] = asyncio.Queue()
        for conn in conns:
            idle.put_nowait(conn)
        await produce_singly(idle, maker, pace, took)
    else:
        await asyncio.gather(*(produce_batches(conn, load, maker, pace, took) for conn in conns))
    control.say(
        sent=maker.made,
        started=start,
        ended=now(),
        call_p50=percentile(took, 0.5),
        producer_cpu=time.process_time() - cpu,
    )
    for conn in conns:
        await conn.close()


if __name__ == "__main__":
    asyncio.run(main())  # noqa: TID251 - the baseline knows nothing of the bridge
