"""One process of the demo: `python -m sqlstreams.cli.demo.worker NAME …`. It produces, or consumes as one group.

Ends with SIGTERM, or when its stdin is closed, which happens too when the process that started it is killed. The database
URL comes in the environment: arguments can be seen by everybody on the machine.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import trio

import sqlstreams
from sqlstreams.cli.demo.journal import Journal, Sent, journal_path
from sqlstreams.cli.demo.plan import AUDIT, LEASE, STREAM, Kind, Orders, Payment

__all__ = ["main"]

TICK = 0.05  # seconds between two batches of the producer
BATCH, CONCURRENCY = 100, 8
CHARGE_SECONDS = 0.001, 0.006  # how long charging a card takes; auditing is faster
AUDIT_SECONDS = 0.0, 0.002
STALL_SECONDS = 8.0  # it is killed long before; below the group's timeout
FAILURES = 2  # of a payment that fails twice


class DeclinedError(Exception):
    """The bank said no."""


class Desk:
    """Handles payments and writes down what it does."""

    def __init__(self, orders: Orders, journal: Journal) -> None:
        self._name = orders.name
        self._group = orders.group or ""
        self._journal = journal
        self._random = Random(f"{orders.plan.seed} {orders.name}")  # noqa: S311 - a demo
        self._span = AUDIT_SECONDS if orders.group == AUDIT else CHARGE_SECONDS
        self._left = orders.plan.stalls_after if orders.stalls else -1

    async def handle(self, payment: Payment, meta: sqlstreams.Meta) -> None:
        """Charge a card, or audit a payment."""
        self._write(meta, "started")
        self._left -= 1
        if self._left == 0:
            self._write(meta, "stalls")
            await trio.sleep(STALL_SECONDS)
        await trio.sleep(self._random.uniform(*self._span))
        if self._declines(payment.card, meta.attempts - meta.delays):
            self._write(meta, "failed")
            raise DeclinedError(payment.card)
        self._write(meta, "handled")

    def _declines(self, card: Kind, failures: int) -> bool:
        if self._group == AUDIT:
            return False
        return card == "always fails" or (card == "fails twice" and failures < FAILURES)

    def _write(self, meta: sqlstreams.Meta, outcome: str) -> None:
        self._journal.ran(self._name, self._group, meta.id, meta.attempts, outcome)


async def _produce(client: sqlstreams.Client, orders: Orders, journal: Journal) -> None:
    """Produce payments at the plan's rate, and write down each id once `produce_batch` has returned it."""
    stream = client.stream(STREAM)
    random = Random(orders.plan.seed)  # noqa: S311 - a demo
    kinds = orders.plan.kinds()
    began, done = trio.current_time(), 0
    while True:
        await trio.sleep(TICK)
        due = min(round((trio.current_time() - began) * orders.plan.rate), done + 1_000)
        batch = kinds[done:due]
        payments = [_payment(number, kind, random) for number, kind in enumerate(batch, done)]
        sent = await stream.produce_batch(payments)
        if sent:
            journal.write(*(Sent(each.id, kind) for each, kind in zip(sent, batch, strict=True)))
        done += len(batch)
        if done == len(kinds):
            return


def _payment(number: int, kind: Kind, random: Random) -> Any:  # noqa: ANN401 - some are of no type
    cents = random.randint(100, 100_000)
    if kind == "undecodable":
        return {"number": number, "cents": f"{cents / 100} EUR", "card": kind}
    return Payment(number, cents, kind)


async def _consume(client: sqlstreams.Client, orders: Orders, journal: Journal) -> None:
    group = client.stream(STREAM, Payment).consumer(orders.group or "")
    options = sqlstreams.ConsumeOptions(batch=BATCH, concurrency=CONCURRENCY)
    async with client.drain_on_signals(), trio.open_nursery() as nursery:
        nursery.start_soon(_drain_at_end_of_stdin, client)
        await group.consume(Desk(orders, journal).handle, options)
        nursery.cancel_scope.cancel(reason="drained")


async def _drain_at_end_of_stdin(client: sqlstreams.Client) -> None:
    await trio.to_thread.run_sync(os.read, sys.stdin.fileno(), 1, abandon_on_cancel=True)
    client.drain("the demo has ended")


async def _main(orders: Orders) -> None:
    journal = Journal(journal_path(Path(orders.directory), orders.name))
    work = _produce if orders.role == "produce" else _consume
    async with sqlstreams.connect(
        schema=orders.schema,
        install=False,
        lease=LEASE,
        listen=orders.role == "consume",
        application_name=orders.name,
    ) as client:
        await work(client, orders, journal)


def main() -> None:
    """Do what the first argument says, as JSON."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    trio.run(_main, msgspec.json.decode(sys.argv[1], type=Orders))


if __name__ == "__main__":
    main()
