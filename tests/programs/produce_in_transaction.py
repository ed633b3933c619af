"""Produces inside a transaction, says "ready", and never commits. Run with a JSON object as argument: dsn, stream."""

import json
import sys

import trio

import sqlstreams


async def main(wanted: dict[str, str]) -> None:
    async with sqlstreams.connect(wanted["dsn"]) as client, client.transaction() as tx:
        await client.stream(wanted["stream"]).produce({}, tx=tx)
        print("ready", flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]))
