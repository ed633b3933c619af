"""The product's consumer: `consume` with the empty handler."""

import trio

import sqlstreams
from benchmarks.variants.consuming import handler_of, watch
from benchmarks.variants.load import Control, Message, Tally

__all__: list[str] = []


async def main() -> None:
    """Consume what is produced until told how much that was."""
    control = Control()
    load = control.load
    async with sqlstreams.connect(load.dsn) as client:
        stream = client.stream("bench", Message)
        group = stream.consumer("bench")
        tally = Tally(control)
        async with trio.open_nursery() as nursery:
            options = sqlstreams.ConsumeOptions(batch=load.claim)
            await nursery.start(group.consume, handler_of(tally, timed=load.timed), options)
            nursery.start_soon(watch, tally, nursery.cancel_scope)
            control.ready()
        tally.report()


if __name__ == "__main__":
    trio.run(main)
