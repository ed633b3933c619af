"""Checked by mypy, never run: what a user's program may rely on in types."""

from datetime import timedelta
from typing import assert_type

import msgspec
import trio

import sqlstreams


class Order(msgspec.Struct):
    """A payload."""

    order_id: str


async def program() -> None:
    """The shapes of the public API."""
    async with sqlstreams.embedded() as dsn, sqlstreams.connect(dsn) as client:
        orders = client.stream("orders", Order)
        assert_type(orders, sqlstreams.Stream[Order])
        assert_type(await orders.produce(Order("o-1")), sqlstreams.Sent)
        assert_type(
            await orders.produce_batch([Order("o-2"), sqlstreams.Outgoing(Order("o-3"))]),
            list[sqlstreams.Sent],
        )
        messages = await orders.read()
        assert_type(messages[0].payload, Order)
        await orders.produce("not an order")  # type: ignore[arg-type]
        group = orders.consumer("billing")
        assert_type(group, sqlstreams.ConsumerGroup[Order])
        assert_type(await group.lag(), sqlstreams.Lag)
        async with client.transaction() as tx, trio.open_nursery() as nursery:
            await orders.produce(Order("o-4"), tx=tx)
            await nursery.start(group.consume, handle)


async def handle(order: Order, meta: sqlstreams.Meta) -> None:
    """A handler."""
    if meta.attempts:
        raise sqlstreams.Delay(timedelta(seconds=1))
