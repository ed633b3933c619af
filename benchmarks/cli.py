"""The command line: which case, how long, how often, and where the JSON goes."""

import argparse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

from benchmarks.cases import latency, memory, throughput
from benchmarks.report import Report, as_json, as_text
from benchmarks.settings import Settings

__all__ = ["CASES", "arguments", "main"]

Case = Callable[[Settings], Awaitable[Report]]

CASES: dict[str, tuple[Case, str]] = {
    "throughput": (throughput.run, "produce and consume at once: the highest rate that lasts, and unpaced"),
    "latency": (latency.run, "from the call of produce to the handler, at 200 messages a second"),
    "memory": (memory.run, "the consumer's peak memory over a backlog of small and one of large messages"),
}
"""Case -> how it runs, and one line about it. A further case is a module in `cases/` and a line here."""


def arguments(args: Sequence[str] | None = None) -> tuple[str, Settings, Path | None]:
    """Read the command line. Exits with 2 and the list of cases when there is no such case."""
    listed = "\n".join(f"  {name:<12}{about}" for name, (_, about) in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures the library beside bare loops.",
        epilog=f"cases:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", choices=CASES, help="what to measure")
    parser.add_argument("--seconds", type=_positive, help="how long each measurement lasts")
    parser.add_argument("--rounds", type=_count, help="how often baseline and product take turns")
    parser.add_argument("--full", action="store_true", help="the sizes that the bars are for")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything that was measured there")
    found = parser.parse_args(args)
    return found.case, Settings(seconds=found.seconds, rounds=found.rounds, full=found.full), found.json


def main(args: Sequence[str] | None = None) -> int:
    """Run a case, print its table, write its JSON. Returns 1 when a message was lost or handled twice."""
    name, settings, path = arguments(args)
    report = trio.run(CASES[name][0], settings)
    print(as_text(report))
    if path is not None:
        path.write_bytes(as_json(report))
    return 0 if report.sound else 1


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
