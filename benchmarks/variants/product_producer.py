"""The product's producer: `produce_batch` from a few tasks, or `produce` for each message at its time."""

import time

import trio

import sqlstreams
from benchmarks.figures import percentile
from benchmarks.variants.load import Control, Load, Maker, Message, Pace, now

__all__: list[str] = []

Stream = sqlstreams.Stream[Message]


async def produce_batches(stream: Stream, load: Load, maker: Maker, pace: Pace, took: list[float]) -> None:
    """Append one batch after the other until the time is up."""
    while not pace.over:
        if (wait := pace.wait(maker.made)) > 0:
            await trio.sleep(wait)
        messages = maker.take(load.batch, now())
        if not messages:
            break
        began = now()
        await stream.produce_batch(messages)
        took.append(now() - began)


async def produce_singly(stream: Stream, maker: Maker, pace: Pace, took: list[float]) -> None:
    """Append each message by itself at its time, however long those before it take."""

    async def one(message: Message) -> None:
        began = now()
        await stream.produce(message)
        took.append(now() - began)

    async with trio.open_nursery() as nursery:
        while not pace.over:
            await trio.sleep(pace.wait(maker.made))
            for message in maker.take(1, pace.due(maker.made)):
                nursery.start_soon(one, message)


async def main() -> None:
    """Produce what stdin asks for."""
    control = Control()
    load = control.load
    async with sqlstreams.connect(load.dsn, pool_size=load.connections) as client:
        stream = client.stream("bench", Message)
        await stream.resolve()
        control.ready()
        start = await trio.to_thread.run_sync(control.wait_for_start)
        await trio.sleep(max(0.0, start - now()))
        maker, pace = Maker(load), Pace(load, start)
        took: list[float] = []
        cpu = time.process_time()
        if load.batch == 1:
            await produce_singly(stream, maker, pace, took)
        else:
            async with trio.open_nursery() as nursery:
                for _ in range(load.connections):
                    nursery.start_soon(produce_batches, stream, load, maker, pace, took)
        control.say(
            sent=maker.made,
            started=start,
            ended=now(),
            call_p50=percentile(took, 0.5),
            producer_cpu=time.process_time() - cpu,
        )


if __name__ == "__main__":
    trio.run(main)
