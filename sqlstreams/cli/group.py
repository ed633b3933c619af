"""`sqlstreams group …`: declare, look at, operate and destroy consumer groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import click

from sqlstreams.cli._confirm import confirm
from sqlstreams.cli._options import DURATION, GROUP, STREAM, Settings, common_options, pass_settings
from sqlstreams.cli._output import print_fields, print_json, print_rows
from sqlstreams.cli._running import Stop, open_client, run
from sqlstreams.cli.group_operations import OPERATIONS
from sqlstreams.config import GroupConfig
from sqlstreams.errors import NotFound

__all__ = ["group"]


@click.group()
@common_options
def group() -> None:
    """Consumers that share one progress through a stream."""


for operation in OPERATIONS:
    group.add_command(operation)


@group.command()
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@click.option(
    "--start", type=click.Choice(["beginning", "head"]), default="beginning", help="Of a new group."
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
@click.option("--max-range-reclaims", type=int, help="Owners a range may lose. Default 3.")
@click.option("--unknown-version", type=click.Choice(["park", "skip"]), help="Of a payload. Default park.")
@click.option("--history", type=click.Choice(["failures", "all", "none"]), help="Default failures.")
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
            click.echo(f"group {row.name} of stream {stream} is registered")
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


@group.command()
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


@group.command()
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
        click.echo(f"open_ranges: {seen.open_ranges}")
        click.echo(f"in_flight: {seen.in_flight}")
        click.echo(
            "exceptions: " + ", ".join(f"{count} {status}" for status, count in seen.by_status.items())
        )
        if seen.paused:
            click.echo("paused: yes")
        if seen.held_by is not None:
            click.echo(f"held_by: {seen.held_by}")
        return 0

    return run(work)


@group.command("dead-letters")
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


@group.command()
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also while a consumer of it runs.")
@common_options
@pass_settings
def destroy(settings: Settings, stream: str, name: str, *, yes: bool, force: bool) -> int:
    """Delete GROUP with its progress, exceptions and history; the stream's messages stay."""
    question = f"Delete the group {name} of stream {stream} with its progress?"
    if not confirm(question, subject=f"group {name!a}", yes=yes):
        click.echo("nothing was destroyed", err=True)
        return 1

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings, allow_destroy=True) as client:
            await client.stream(stream).consumer(name).destroy(force=force)
        if settings.json:
            print_json({"destroyed": name})
        else:
            click.echo(f"group {name} is destroyed")
        return 0

    return run(work)
