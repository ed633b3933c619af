"""One measurement: a producer and a consumer of one variant on a fresh database."""

import time
from typing import Any, Literal

import msgspec

import sqlstreams
from benchmarks.checks import Verdict
from benchmarks.processes import start
from benchmarks.server import Server
from benchmarks.variants.load import Load, Message

__all__ = ["TURNS", "Trial", "VariantName", "drain", "produce_and_consume"]

VariantName = Literal["baseline", "product"]
TURNS: tuple[tuple[VariantName, VariantName], ...] = (("baseline", "product"), ("product", "baseline"))
"""The order of odd and of even rounds, so that neither is always the one that finds a warm machine."""

LEAD_SECONDS = 0.2  # from being told to the start
SLACK_SECONDS = 300.0  # for a consumer that is far behind


class Trial(msgspec.Struct, frozen=True):
    """What one measurement found. Times are of the machine's monotonic clock.

    Attributes:
        variant: whose. rate: the wanted one, 0 for as many as possible.
        sent, started, ended: of the producer. call_p50: seconds that its calls took.
        handled: how many the consumer's handler saw. last: when the last one was.
        producer_cpu, consumer_cpu: seconds of processor time of the two processes, without the server's.
        samples: (time, handled so far). ages: seconds from produce to handler of each, when that was asked for.
        floor_kib, peak_kib: the consumer's memory before the first message, and its peak.
        verdict: the checker's.
    """

    variant: VariantName
    rate: float
    sent: int
    started: float
    ended: float
    call_p50: float
    handled: int
    last: float
    producer_cpu: float
    consumer_cpu: float
    samples: list[tuple[float, int]]
    ages: list[float]
    floor_kib: int
    peak_kib: int
    verdict: Verdict

    @property
    def produced_per_s(self) -> float:
        """Messages a second while the producer ran."""
        return self.sent / (self.ended - self.started)

    @property
    def through_per_s(self) -> float:
        """Messages a second from the start to the last one handled."""
        return self.handled / (self.last - self.started)

    @property
    def cpu_us(self) -> tuple[float, float]:
        """Microseconds of processor time a message in the producer and in the consumer; other programs do not disturb it."""
        return self.producer_cpu * 1e6 / self.sent, self.consumer_cpu * 1e6 / self.handled

    @property
    def drained_per_s(self) -> float:
        """Messages a second from when the consumer began to the last one handled."""
        return self.handled / (self.last - self.samples[0][0])

    def raw(self) -> dict[str, Any]:
        """Return it for the JSON, without what is long."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in found.items() if name not in ("samples", "ages")}


async def produce_and_consume(server: Server, variant: VariantName, load: Load) -> Trial:
    """Produce and consume at once."""
    async with server.database() as dsn:
        load = msgspec.structs.replace(load, dsn=dsn)
        if variant == "product":  # the baseline's consumer makes its tables by itself
            await _declare(dsn)
        async with (
            start(f"{variant}_consumer", load) as consumer,
            start(f"{variant}_producer", load) as producer,
        ):
            await producer.tell(start=time.monotonic() + LEAD_SECONDS)
            produced = await producer.answer(load.seconds + SLACK_SECONDS)
            await consumer.tell(expected=produced["sent"])
            consumed = await consumer.answer(load.seconds + SLACK_SECONDS)
    return _trial(variant, load, produced, consumed)


async def drain(server: Server, load: Load) -> Trial:
    """Produce all that the load's capacity allows, then start the consumer, of the product."""
    async with server.database() as dsn:
        load = msgspec.structs.replace(load, dsn=dsn)
        await _declare(dsn)
        async with start("product_producer", load) as producer:
            await producer.tell(start=time.monotonic())
            produced = await producer.answer(load.seconds + SLACK_SECONDS)
        async with start("product_consumer", load) as consumer:
            await consumer.tell(expected=produced["sent"])
            consumed = await consumer.answer(load.seconds + SLACK_SECONDS)
    return _trial("product", load, produced, consumed)


async def _declare(dsn: str) -> None:
    async with sqlstreams.connect(dsn) as client:
        stream = client.stream("bench", Message)
        await stream.register()
        await stream.consumer("bench").register()


def _trial(variant: VariantName, load: Load, produced: dict[str, Any], consumed: dict[str, Any]) -> Trial:
    facts = {"variant": variant, "rate": load.rate} | produced | consumed
    return msgspec.convert(facts, Trial)
