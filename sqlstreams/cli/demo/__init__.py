"""`sqlstreams demo`: payments flow, fail, are retried and survive a killed process, and nothing is lost.

Real processes produce and consume on a real Postgres, by default a private one. What happened is counted from files that
these processes wrote, not from our tables: `plan` says what is produced, `journal` is what is written down, `worker` is a
process, `report` counts, `show` shows, `stage` runs it all.
"""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

import click

from sqlstreams.cli._options import Settings, common_options, pass_settings
from sqlstreams.cli._output import print_json, say
from sqlstreams.cli._running import Stop, run
from sqlstreams.cli.demo.journal import read_history
from sqlstreams.cli.demo.plan import Plan
from sqlstreams.cli.demo.report import Report, judge
from sqlstreams.cli.demo.show import Show, print_report
from sqlstreams.cli.demo.stage import play

__all__ = ["demo"]


@click.command(short_help="Payments flow, fail, survive a kill; none is lost.")
@click.option(
    "--messages", type=click.IntRange(100, 1_000_000), default=20_000, show_default=True, help="Payments."
)
@click.option(
    "--rate", type=click.IntRange(1, 1_000_000), default=1_600, show_default=True, help="Payments a second."
)
@click.option(
    "--seed", type=int, default=1, show_default=True, help="Which payments are bad, and how long each takes."
)
@click.option(
    "--keep", metavar="DIR", type=click.Path(path_type=Path), help="Keep the files that it counts from."
)
@click.option(
    "--check",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Only count again from the files of an earlier --keep.",
)
@partial(common_options, url_help="postgresql://… of a database to use instead of a private one.")
@pass_settings
def demo(
    settings: Settings, messages: int, rate: int, seed: int, keep: Path | None, check: Path | None
) -> int:
    """Watch payments flow, fail, and survive a killed process, with nothing lost.

    Runs on a private Postgres, unless --database-url is given: for this command alone the variable
    $SQLSTREAMS_DATABASE_URL counts for nothing. Exit 1 when a single payment is missing.
    """
    if check is not None:
        return _conclude(settings, judge(read_history(check)))
    plan = Plan(messages=messages, seed=seed, rate=rate)

    async def work(stop: Stop) -> int:
        del stop
        show = Show(plan, stderr=settings.json)
        code = _conclude(settings, await play(settings, plan, show, keep))
        if keep is not None and not settings.json:
            say(f"count again: sqlstreams demo --check {shlex.quote(str(keep))}")
        return code

    return run(work)


def _conclude(settings: Settings, report: Report) -> int:
    if settings.json:
        print_json(report)
    else:
        print_report(report)
    return 0 if report.passed else 1
