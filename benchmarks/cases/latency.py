"""latency: from the call of produce to the handler, two processes, single messages at a steady rate."""

import sys
from collections.abc import Callable
from statistics import median

from benchmarks.figures import percentile, ratio_of
from benchmarks.report import Bar, Report
from benchmarks.server import open_server
from benchmarks.settings import CLAIM, CONNECTIONS, PAYLOAD_BYTES, Settings
from benchmarks.trial import TURNS, Trial, VariantName, produce_and_consume
from benchmarks.variants.load import Load

__all__ = ["run"]

RATE = 200.0
P50_BAR = 10.0  # milliseconds
VARIANTS: tuple[VariantName, VariantName] = ("baseline", "product")


async def run(settings: Settings) -> Report:
    """Measure."""
    seconds = settings.seconds or (20.0 if settings.full else 5.0)
    rounds = settings.rounds or (5 if settings.full else 3)
    async with open_server() as server:
        report = Report(
            f"latency: from produce to the handler at {RATE:g} messages/s",
            f"{rounds} rounds; {seconds:g} s each; single messages, each at its time; {CONNECTIONS} connections, claims of "
            f"up to {CLAIM:,}, {PAYLOAD_BYTES:,}-byte JSON; the baseline polls every 5 ms, the product is woken",
            server.surroundings,
            ["milliseconds", "baseline", "product", "product / baseline"],
        )
        found: dict[VariantName, list[Trial]] = {name: [] for name in VARIANTS}
        load = Load(
            dsn="", seconds=seconds, rate=RATE, capacity=int(2 * RATE * seconds) + 100, batch=1, timed=True
        )
        for number in range(rounds):
            for name in TURNS[number % 2]:
                trial = await produce_and_consume(server, name, load)
                report.note(f"{name}, round {number + 1}", trial.verdict.sound, trial.verdict.text())
                report.raw.append(trial.raw() | {"p50_ms": _ms(trial, 0.5), "p99_ms": _ms(trial, 0.99)})
                found[name].append(trial)
                print(
                    f"round {number + 1}, {name}: p50 {_ms(trial, 0.5):.2f} ms", file=sys.stderr, flush=True
                )
    figures: dict[str, Callable[[Trial], float]] = {
        "p50": lambda trial: _ms(trial, 0.5),
        "p99": lambda trial: _ms(trial, 0.99),
        "worst": lambda trial: _ms(trial, 1.0),
        "p50 of the call of produce alone": lambda trial: trial.call_p50 * 1e3,
    }
    for what, figure in figures.items():
        each = {name: [figure(trial) for trial in found[name]] for name in VARIANTS}
        medians = [f"{median(each[name]):.2f}" for name in VARIANTS]
        report.rows.append([what, *medians, ratio_of(each["product"], each["baseline"]).text()])
    p50 = median(_ms(trial, 0.5) for trial in found["product"])
    report.bars = [Bar("p50 of the product, median of the rounds", p50, P50_BAR, at_least=False, unit=" ms")]
    return report


def _ms(trial: Trial, share: float) -> float:
    return percentile(trial.ages, share) * 1e3
