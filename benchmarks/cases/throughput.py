"""throughput: how many messages a second go through, produced and consumed at once.

Two figures of each variant and round. Sustained: the highest paced rate at which nearly nothing is left when the time is
up. Unpaced: produced as fast as it goes, timed until the last one is handled.
"""

import sys
from statistics import median

from benchmarks.figures import backlog_seconds, done_at, highest_rate, ratio_of, sustained
from benchmarks.report import Bar, Report
from benchmarks.server import Server, open_server
from benchmarks.settings import BATCH, CLAIM, CONNECTIONS, PAYLOAD_BYTES, Settings
from benchmarks.trial import TURNS, Trial, VariantName, produce_and_consume
from benchmarks.variants.load import Load

__all__ = ["run"]

RATIO_BAR = 0.6
MOST_PER_S = 300_000  # nothing here is that fast; bounds the tally
FIRST_SHARE = 1.1  # of the unpaced rate: where the first search begins
VARIANTS: tuple[VariantName, VariantName] = ("baseline", "product")


async def run(settings: Settings) -> Report:
    """Measure."""
    seconds = settings.seconds or (20.0 if settings.full else 5.0)
    rounds = settings.rounds or (5 if settings.full else 3)
    precision = 0.02 if settings.full else 0.05
    async with open_server() as server:
        report = Report(
            "throughput: produce and consume at once",
            f"{rounds} rounds; {seconds:g} s each; {CONNECTIONS} connections, batches of {BATCH}, claims of {CLAIM:,}, "
            f"{PAYLOAD_BYTES:,}-byte JSON, empty handler; a process each for producer and consumer",
            server.surroundings,
            ["messages/s", "baseline", "product", "product / baseline"],
        )
        paced: dict[VariantName, list[float]] = {name: [] for name in VARIANTS}
        unpaced: dict[VariantName, list[Trial]] = {name: [] for name in VARIANTS}
        for number in range(rounds):
            for name in TURNS[number % 2]:
                trial = await _measure(server, report, name, seconds, 0.0)
                unpaced[name].append(trial)
                guess = paced[name][-1] if paced[name] else FIRST_SHARE * trial.through_per_s
                paced[name].append(await _sustained(server, report, name, seconds, guess, precision))
                _tell(
                    f"round {number + 1}, {name}: {paced[name][-1]:,.0f} sustained, {trial.through_per_s:,.0f} unpaced"
                )
    ratio = ratio_of(paced["product"], paced["baseline"])
    report.rows = [
        _row("sustained", paced),
        _row(
            "unpaced, until the last is handled", {n: [t.through_per_s for t in unpaced[n]] for n in VARIANTS}
        ),
        _row("unpaced, the producer alone", {n: [t.produced_per_s for t in unpaced[n]] for n in VARIANTS}),
    ]
    for at, role in enumerate(("producer", "consumer")):
        each = {name: [trial.cpu_us[at] for trial in unpaced[name]] for name in VARIANTS}
        report.rows.append(_row(f"µs of CPU a message, unpaced, {role}", each, digits=1))
    report.bars = [Bar("sustained, product / baseline, median of the rounds", ratio.median, RATIO_BAR)]
    report.raw.append({"sustained": dict(paced)})
    return report


async def _sustained(
    server: Server, report: Report, name: VariantName, seconds: float, guess: float, precision: float
) -> float:
    """Search. A rate gets a second try: whatever else runs on the machine can only make it look worse."""

    async def lasts(rate: float) -> bool:
        return await once(rate) or await once(rate)

    async def once(rate: float) -> bool:
        trial = await _measure(server, report, name, seconds, rate)
        left = backlog_seconds(trial.sent, done_at(trial.samples, trial.ended), rate)
        answer = sustained(rate=rate, sent=trial.sent, seconds=seconds, backlog=left)
        _tell(
            f"  {name} at {rate:,.0f}: {trial.produced_per_s:,.0f} produced, {left:.2f} s left, "
            f"{'lasts' if answer else 'does not last'}"
        )
        return answer

    return await highest_rate(lasts, guess, precision)


async def _measure(server: Server, report: Report, name: VariantName, seconds: float, rate: float) -> Trial:
    load = Load(dsn="", seconds=seconds, rate=rate, capacity=int(MOST_PER_S * seconds))
    trial = await produce_and_consume(server, name, load)
    report.note(f"{name} at {rate:,.0f}/s", trial.verdict.sound, trial.verdict.text())
    report.raw.append(trial.raw())
    return trial


def _row(what: str, found: dict[VariantName, list[float]], digits: int = 0) -> list[str]:
    medians = [f"{median(found[name]):,.{digits}f}" for name in VARIANTS]
    return [what, *medians, ratio_of(found["product"], found["baseline"]).text()]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
