"""memory: the peak of a consumer that drains a backlog of small messages, and one of large ones.

The product alone: a loop that reads whole ranges at once would hold gigabytes of the large ones.
"""

import sys

from benchmarks.report import Bar, Report
from benchmarks.server import open_server
from benchmarks.settings import BATCH, CLAIM, PAYLOAD_BYTES, Settings
from benchmarks.trial import Trial, drain
from benchmarks.variants.load import Load

__all__ = ["run"]

PEAK_BAR = 200.0  # MiB
FILL_SECONDS = 3_600.0  # the capacity ends it
MIB = 1024 * 1024


async def run(settings: Settings) -> Report:
    """Measure."""
    small = Load(
        dsn="", seconds=FILL_SECONDS, capacity=2_000_000 if settings.full else 100_000, payload=PAYLOAD_BYTES
    )
    large = Load(
        dsn="",
        seconds=FILL_SECONDS,
        capacity=5_000 if settings.full else 300,
        payload=MIB,
        batch=8,
        random=True,
    )
    async with open_server() as server:
        report = Report(
            "memory: the peak of a consumer that drains a backlog",
            f"{settings.rounds or 1} rounds; claims of {CLAIM:,}, empty handler, a process of its own; VmHWM of "
            f"/proc/self/status; produced in batches of {BATCH} and {large.batch}",
            server.surroundings,
            ["backlog", "messages/s", "before, MiB", "peak, MiB"],
        )
        for _ in range(settings.rounds or 1):
            for load, size in ((small, f"{PAYLOAD_BYTES:,} bytes"), (large, "1 MiB, random")):
                trial = await drain(server, load)
                what = f"{trial.sent:,} messages of {size}"
                report.note(what, trial.verdict.sound and trial.sent == load.capacity, trial.verdict.text())
                report.raw.append(trial.raw())
                report.rows.append(_row(what, trial))
                report.bars.append(
                    Bar(f"peak, {what}", trial.peak_kib / 1024, PEAK_BAR, at_least=False, unit=" MiB")
                )
                print(f"{what}: {trial.peak_kib / 1024:.0f} MiB", file=sys.stderr, flush=True)
    return report


def _row(what: str, trial: Trial) -> list[str]:
    return [
        what,
        f"{trial.drained_per_s:,.0f}",
        f"{trial.floor_kib / 1024:.0f}",
        f"{trial.peak_kib / 1024:.0f}",
    ]
