"""A small service: produces batches at a steady rate until SIGTERM and writes the ids it was told to an append-only file.

Run with a JSON object as argument. Keys: dsn, stream, log; optional: rate (messages a second, default 1,000), batch (50).
"""

import json
import os
import signal
import sys
from typing import Any

import trio

import sqlstreams


async def main(wanted: dict[str, Any]) -> None:
    log = os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    batch = wanted.get("batch", 50)
    every = batch / wanted.get("rate", 1_000)
    async with sqlstreams.connect(wanted["dsn"], application_name="producer") as client:
        stream = client.stream(wanted["stream"])
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            print("ready", flush=True)
            async with trio.open_nursery() as nursery:

                async def stop() -> None:
                    async for _ in signals:
                        break
                    nursery.cancel_scope.cancel()

                nursery.start_soon(stop)
                due = trio.current_time()
                while True:
                    await trio.sleep_until(due)
                    due += every
                    with trio.CancelScope(
                        shield=True
                    ):  # bounded: produce_batch gives up; else its ids were lost
                        sent = await stream.produce_batch([{"n": n} for n in range(batch)])
                    os.write(log, b"".join(b"%d\n" % each.id for each in sent))


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]))
