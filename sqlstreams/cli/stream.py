"""`sqlstreams stream …`: declare, look at and destroy streams."""

from __future__ import annotations

from datetime import timedelta

import click
import msgspec

from sqlstreams.cli._confirm import confirm
from sqlstreams.cli._lines import line_of
from sqlstreams.cli._options import DURATION, STREAM, Settings, common_options, pass_settings
from sqlstreams.cli._output import print_fields, print_json, print_rows
from sqlstreams.cli._running import Stop, open_client, run
from sqlstreams.config import StreamConfig
from sqlstreams.errors import NotFound

__all__ = ["stream"]


@click.group()
@common_options
def stream() -> None:
    """Named logs of messages."""


@stream.command()
@click.argument("name", type=STREAM)
@click.option(
    "--retention",
    type=DURATION,
    metavar="DURATION",
    help="Older messages may be removed; by default they stay.",
)
@click.option("--partition-size", type=int, help="Ids per partition, fixed for ever. Default 1,000,000.")
@click.option(
    "--idempotency-retention",
    type=DURATION,
    metavar="DURATION",
    help="How long idempotency keys count. Default 24h.",
)
@click.option(
    "--history-retention", type=DURATION, metavar="DURATION", help="How long outcomes are kept. Default 7d."
)
@click.option(
    "--allow-drop-past-committed", is_flag=True, default=None, help="Retention does not wait for groups."
)
@common_options
@pass_settings
def register(settings: Settings, /, name: str, **options: timedelta | int | bool | None) -> int:
    """Declare the stream NAME as the options say, all of it anew; installs the schema when it is missing.

    Durations are seconds, or 500ms, 30s, 5m, 12h, 7d.
    """
    config = StreamConfig(**{key: value for key, value in options.items() if value is not None})  # type: ignore[arg-type]

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings, install=True) as client:
            row = await client.stream(name).register(config)
        if settings.json:
            print_json(row)
        else:
            click.echo(f"stream {row.name} is registered")
        return 0

    return run(work)


@stream.command("list")
@common_options
@pass_settings
def list_streams(settings: Settings) -> int:
    """List the streams by name."""

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            rows = await client.streams()
        if settings.json:
            print_json(rows)
        else:
            print_rows(
                ("name", "id", "retention", "partition size", "created"),
                (
                    (
                        row.name,
                        str(row.id),
                        row.config.retention or "keep",
                        row.partition_size,
                        row.created_at,
                    )
                    for row in rows
                ),
                none="no stream is registered",
            )
        return 0

    return run(work)


@stream.command()
@click.argument("name", type=STREAM)
@common_options
@pass_settings
def get(settings: Settings, name: str) -> int:
    """Show what is declared of the stream NAME; exit 1 when there is none."""

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            row = await client.stream(name).get()
        if row is None:
            raise NotFound("it is not registered", subject=f"stream {name!a}")
        if settings.json:
            print_json(row)
        else:
            print_fields(row)
        return 0

    return run(work)


@stream.command()
@click.argument("name", type=STREAM)
@click.option("--after", type=click.IntRange(0), default=0, help="Message ids above this one.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="How many at most."
)
@common_options
@pass_settings
def read(settings: Settings, name: str, after: int, limit: int) -> int:
    """Print messages of the stream NAME without consuming them, in text one JSON object a line."""

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            messages = await client.stream(name, msgspec.Raw).read(after=after, limit=limit)
        if settings.json:
            print_json(messages)
        else:
            for message in messages:
                click.echo(line_of(message), nl=False)
        return 0

    return run(work)


@stream.command()
@click.argument("name", type=STREAM)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also when it has messages or groups.")
@common_options
@pass_settings
def destroy(settings: Settings, name: str, *, yes: bool, force: bool) -> int:
    """Drop the stream NAME with its messages and groups."""
    if not confirm(
        f"Drop the stream {name} with its messages and groups?", subject=f"stream {name!a}", yes=yes
    ):
        click.echo("nothing was destroyed", err=True)
        return 1

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings, allow_destroy=True) as client:
            await client.stream(name).destroy(force=force)
        if settings.json:
            print_json({"destroyed": name})
        else:
            click.echo(f"stream {name} is destroyed")
        return 0

    return run(work)
