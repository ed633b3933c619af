"""What both consumers share: the handler, and the task that ends them. Knows trio and no bridge."""

from collections.abc import Awaitable, Callable

import trio

from benchmarks.variants.load import TICK_SECONDS, Message, Tally, now

__all__ = ["handler_of", "watch"]


def handler_of(tally: Tally, *, timed: bool) -> Callable[[Message], Awaitable[None]]:
    """Return the handler: it does nothing but count."""
    counts, ages = tally.counts, tally.ages

    async def handle(message: Message) -> None:
        counts[message.n] += 1
        tally.handled += 1

    async def handle_timed(message: Message) -> None:
        ages.append(now() - message.sent)
        counts[message.n] += 1
        tally.handled += 1

    return handle_timed if timed else handle


async def watch(tally: Tally, scope: trio.CancelScope) -> None:
    """Note how far it is, and end the scope when all has been handled."""
    tally.sample()
    while True:
        await trio.sleep(TICK_SECONDS)
        if tally.sample():
            break
    scope.cancel(reason="all was handled")
