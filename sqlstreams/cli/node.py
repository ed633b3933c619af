"""`sqlstreams node list`: the processes that hold something."""

from __future__ import annotations

import click

from sqlstreams.cli._options import Settings, common_options, pass_settings
from sqlstreams.cli._output import plain, print_json, print_rows
from sqlstreams.cli._running import Stop, open_client, run

__all__ = ["node"]


@click.group(short_help="List the processes that hold something.")
@common_options
def node() -> None:
    """Processes that hold leases."""


@node.command("list")
@click.option("--all", "ended", is_flag=True, help="Ended ones too.")
@common_options
@pass_settings
def list_nodes(settings: Settings, *, ended: bool) -> int:
    """List the nodes, newest first."""

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            rows = await client.nodes(ended=ended)
        if settings.json:
            print_json([plain(row) | ({"lease_left": None} if row.ended_at else {}) for row in rows])
        else:
            print_rows(
                ("id", "name", "host", "pid", "version", "started", "lease left", "ended", "holds"),
                (
                    (
                        str(row.id),
                        row.name,
                        row.host,
                        str(row.pid),
                        row.version,
                        row.started_at,
                        "-" if row.ended_at else f"{row.lease_left:.1f} s",
                        row.ended_at,
                        row.holds,
                    )
                    for row in rows
                ),
                none="no node is running",
            )
        return 0

    return run(work)
