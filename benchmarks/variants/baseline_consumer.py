"""The baseline's consumer: trio, one asyncpg connection through trio-asyncio, one loop.

Observe, claim, read, decode, call the handler under a deadline, complete. No lease, no retry, no second process.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import trio
import trio_asyncio

from benchmarks.variants.baseline_connection import connect
from benchmarks.variants.baseline_sql import CLAIM, COMPLETE, OBSERVE, READ, schema
from benchmarks.variants.consuming import handler_of, watch
from benchmarks.variants.load import Control, Message, Tally

__all__: list[str] = []

IDLE_SECONDS = 0.005
DEADLINE_SECONDS = 30.0

Ask = Callable[..., Awaitable[Any]]


class Fence:
    """Up to where every id is committed or rolled back."""

    def __init__(self) -> None:
        self.settled = 0
        self._pending: deque[tuple[int, frozenset[str]]] = deque()

    def add(self, head: int, writers: frozenset[str]) -> None:
        """Take in an observation: an earlier head is settled when none of its writers is left."""
        self._pending.append((head, writers))
        while self._pending and not self._pending[0][1] & writers:
            self.settled = max(self.settled, self._pending.popleft()[0])


async def consume(fetchrow: Ask, fetch: Ask, execute: Ask, most: int, handle: Ask) -> None:
    """Consume for ever."""
    decode = msgspec.json.Decoder(Message).decode
    fence = Fence()
    while True:
        seen = await fetchrow(OBSERVE)
        fence.add(seen[0], frozenset(seen[1]))
        claim = await fetchrow(CLAIM, most, fence.settled)
        if claim is None:
            await trio.sleep(IDLE_SECONDS)
            continue
        low, high, token = claim
        for row in await fetch(READ, low, high):
            message = decode(row[1])
            with trio.move_on_after(DEADLINE_SECONDS):
                await handle(message)
        await execute(COMPLETE, low, token)


async def main() -> None:
    """Consume what is produced until told how much that was."""
    control = Control()
    load = control.load
    crossing = trio_asyncio.aio_as_trio
    async with trio_asyncio.open_loop():
        conn = await crossing(connect)(load.dsn)
        await crossing(conn.execute)(schema(load.capacity))
        tally = Tally(control)
        control.ready()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, tally, nursery.cancel_scope)
            await consume(
                crossing(conn.fetchrow),
                crossing(conn.fetch),
                crossing(conn.execute),
                load.claim,
                handler_of(tally, timed=load.timed),
            )
        tally.report()
        conn.terminate()


if __name__ == "__main__":
    trio.run(main)
