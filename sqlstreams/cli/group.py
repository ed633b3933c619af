"""`sqlstreams group …`: declare, look at, operate and destroy consumer groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import click

from sqlstreams.cli._confirm import confirm
from sqlstreams.cli._options import DURATION, GROUP, STREAM, Settings, common_options, pass_settings
from sqlstreams.cli._output import plural, print_fields, print_json, print_rows, say
from sqlstreams.cli._running import SCHEMA, Stop, open_client, run
from sqlstreams.cli.group_operations import OPERATIONS
from sqlstreams.config import GroupConfig
from sqlstreams.errors import DestroyRefused, NotFound
from sqlstreams.model.names import quote_ident

__all__ = ["group"]


@click.group(short_help="Declare, look at, destroy groups.")
@common_options
def group() -> None:
    """Consumers that share one progress through a stream."""


for operation in OPERATIONS:
    group.add_command(operation)


@group.command(short_help="Declare a group as the options say.")
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@click.option(
    "--start",
    type=click.Choice(["beginning", "head"]),
    default="beginning",
    help="Where a new group starts (default beginning).",
)
@click.option(
    "--timeout",
    type=DURATION,
    metavar="DURATION",
    help="A handler that runs longer is cancelled. Default 30s.",
)
@click.option("--max-retries", type=int, help="Failures allowed after the first. Default 3.")
@click.option(
    "--initial-backoff", type=DURATION, metavar="DURATION", help="Wait after the first failure. Default 5s."
)
@click.option(
    "--base",
    type=DURATION,
    metavar="DURATION",
    help="The wait after the second failure is up to this. Default 1s.",
)
@click.option("--cap", type=DURATION, metavar="DURATION", help="No wait is longer. Default 5m.")
@click.option("--max-range-reclaims", type=int, help="Owners a range of messages may lose. Default 3.")
@click.option(
    "--unknown-version",
    type=click.Choice(["park", "skip"]),
    help="What becomes of payloads of a version that no consumer knows. Default park.",
)
@click.option(
    "--history",
    type=click.Choice(["failures", "all", "none"]),
    help="Which outcomes are kept. Default failures.",
)
@common_options
@pass_settings
def register(
    settings: Settings,
    /,
    stream: str,
    name: str,
    start: Literal["beginning", "head"],
    **options: timedelta | int | str | None,
) -> int:
    """Declare GROUP of STREAM as the options say, all of it anew.

    Durations are seconds, or 500ms, 30s, 5m, 12h, 7d.
    """
    config = GroupConfig(**{key: value for key, value in options.items() if value is not None})  # type: ignore[arg-type]

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            row = await client.stream(stream).consumer(name).register(config, start=start)
        if settings.json:
            print_json(row)
        else:
            say(f"group {row.name} of stream {stream} is registered")
        return 0

    return run(work)


@group.command("list")
@click.argument("stream", type=STREAM)
@common_options
@pass_settings
def list_groups(settings: Settings, stream: str) -> int:
    """List the groups of STREAM by name."""

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            rows = await client.stream(stream).consumers()
        if settings.json:
            print_json(rows)
        else:
            print_rows(
                ("name", "id", "timeout", "max retries", "paused", "created"),
                (
                    (
                        row.name,
                        str(row.id),
                        row.config.timeout,
                        row.config.max_retries,
                        row.paused,
                        row.created_at,
                    )
                    for row in rows
                ),
                none="the stream has no group",
            )
        return 0

    return run(work)


@group.command(short_help="Show what is declared of a group.")
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@common_options
@pass_settings
def get(settings: Settings, stream: str, name: str) -> int:
    """Show what is declared of GROUP; exit 1 when there is none."""

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            row = await client.stream(stream).consumer(name).get()
        if row is None:
            raise NotFound("it is not registered", subject=f"group {name!a} of stream {stream!a}")
        if settings.json:
            print_json(row)
        else:
            print_fields(row)
        return 0

    return run(work)


@group.command(short_help="Show how far a group is behind, and why.")
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@common_options
@pass_settings
def lag(settings: Settings, stream: str, name: str) -> int:
    """Show how far GROUP is behind, in text also what holds it back."""

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            consumers = client.stream(stream).consumer(name)
            if settings.json:
                print_json(await consumers.lag())
                return 0
            seen = await consumers.snapshot()
        print_fields(seen.lag)
        say(f"open_ranges: {seen.open_ranges}")
        say(f"in_flight: {seen.in_flight}")
        say("exceptions: " + ", ".join(f"{count:,} {status}" for status, count in seen.by_status.items()))
        if seen.paused:
            say("paused: yes")
        if seen.held_by is not None:
            say(f"held_by: {seen.held_by}")
        return 0

    return run(work)


@group.command("dead-letters", short_help="List the messages that a group gave up.")
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@click.option("--after", type=click.IntRange(0), default=0, help="Message ids above this one.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="How many at most."
)
@click.option("--error-contains", metavar="TEXT", help="Only those with this text in their error.")
@common_options
@pass_settings
def dead_letters(
    settings: Settings, stream: str, name: str, after: int, limit: int, error_contains: str | None
) -> int:
    """List the messages that GROUP gave up, in id order; their payloads are in the JSON."""

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            rows = (
                await client.stream(stream)
                .consumer(name)
                .dead_letters(after=after, limit=limit, error_contains=error_contains)
            )
        if settings.json:
            print_json(rows)
        else:
            print_rows(
                ("message", "attempts", "died", "key", "error"),
                (
                    (str(row.message_id), row.attempts, row.died_at, row.message_key, row.error)
                    for row in rows
                ),
                none="no dead letters",
            )
        return 0

    return run(work)


@group.command(short_help="Delete a group with its progress.")
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also while a consumer of it runs.")
@common_options
@pass_settings
def destroy(settings: Settings, stream: str, name: str, *, yes: bool, force: bool) -> int:
    """Delete GROUP with its progress, exceptions and history; the stream's messages stay."""
    if not confirm(
        lambda: _question(settings, stream, name, force=force), subject=f"group {name!a}", yes=yes
    ):
        click.echo("nothing was destroyed", err=True)
        return 1

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings, allow_destroy=True) as client:
            await client.stream(stream).consumer(name).destroy(force=force)
        if settings.json:
            print_json({"destroyed": name})
        else:
            say(f"group {name} is destroyed")
        return 0

    return run(work)


# $1 group
LIVE = """
select count(*) from {schema}.worker_instance i
join {schema}.worker w on w.id = i.worker_id
join {schema}.node n on n.id = i.node_id
where w.group_id = $1 and n.ended_at is null
"""


def _question(settings: Settings, stream: str, name: str, *, force: bool) -> str:
    """Return what to ask before a group is deleted. Raises: NotFound, DestroyRefused."""
    asked = ""

    async def look(stop: Stop) -> int:
        nonlocal asked
        del stop
        async with open_client(settings) as client:
            consumers = client.stream(stream).consumer(name)
            row = await consumers.get()
            if row is None:
                raise NotFound("it is not registered", subject=f"group {name!a} of stream {stream!a}")
            async with client.transaction() as tx:
                live = await tx.fetchval(LIVE.format(schema=quote_ident(settings.schema or SCHEMA)), row.id)
        if live and not force:
            raise DestroyRefused(f"{plural(live, 'consumer')} of it run", subject=f"group {name!a}")
        running = f" while {plural(live, 'consumer')} of it run" if live else ""
        asked = f"Delete group {name} of stream {stream} with its progress{running}?"
        return 0

    return asked if run(look) == 0 else ""
