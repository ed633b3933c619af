"""What a case hands back, as a table for people and as JSON for programs."""

import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Bar", "Report", "as_json", "as_text", "machine", "table"]


@dataclass(frozen=True)
class Bar:
    """What a figure has to reach."""

    what: str
    value: float
    limit: float
    at_least: bool = True
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether it does."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def text(self) -> str:
        """Return it in words."""
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else "MISSED"
        return f"{self.what}: {self.value:.2f}{self.unit} (bar {sign} {self.limit:g}{self.unit}): {verdict}"


@dataclass
class Report:
    """One run of a case.

    Attributes:
        title: the first line. about: what was done, in a sentence.
        surroundings: machine, server and settings.
        head, rows: the table. bars: what it is measured against.
        checks: of every measurement, what the checker said, empty when it was content.
        raw: everything that was measured, for the JSON.
    """

    title: str
    about: str
    surroundings: dict[str, str]
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    measurements: int = 0
    checks: list[str] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether something was measured, and nothing was lost or handled twice while it was."""
        return self.measurements > 0 and not self.checks

    def note(self, what: str, sound: bool, verdict: str) -> None:  # noqa: FBT001 - a fact
        """Count a measurement, and keep what its checker complained of."""
        self.measurements += 1
        if not sound:
            self.checks.append(f"{what}: {verdict}")


def as_text(report: Report) -> str:
    """Return the report for people."""
    lines = [report.title, report.about, ""]
    lines += [f"  {name:<12}{value}" for name, value in report.surroundings.items()]
    lines += ["", *table(report.head, report.rows), "", *(bar.text() for bar in report.bars)]
    if report.sound:
        lines.append(f"{report.measurements} measurements, in each nothing was lost or handled twice")
    else:
        lines += ["NOT SOUND:", *report.checks] if report.checks else ["NOT SOUND: nothing was measured"]
    return "\n".join(lines)


def as_json(report: Report) -> bytes:
    """Return the report for programs."""
    bars = [asdict(bar) | {"met": bar.met} for bar in report.bars]
    return msgspec.json.format(msgspec.json.encode(asdict(report) | {"bars": bars, "sound": report.sound}))


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Align a table: the first column to the left, figures to the right."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]

    def line(cells: list[str]) -> str:
        first, *others = [
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join([first, *others]).rstrip()

    return [line(head), "  ".join("-" * width for width in widths), *map(line, rows)]


def machine() -> str:
    """Return what this runs on: processor, cores, memory, system, Python."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, load before {load}"
    )
