"""`sqlstreams stream …`: declare, look at and destroy streams."""

from __future__ import annotations

from datetime import timedelta

import click
import msgspec

from sqlstreams.cli._confirm import confirm
from sqlstreams.cli._lines import line_of
from sqlstreams.cli._options import DURATION, STREAM, Settings, common_options, pass_settings
from sqlstreams.cli._output import plural, print_fields, print_json, print_rows, say
from sqlstreams.cli._running import SCHEMA, Stop, open_client, run
from sqlstreams.config import StreamConfig
from sqlstreams.errors import DestroyRefused, NotFound
from sqlstreams.model.names import quote_ident

__all__ = ["stream"]


@click.group(short_help="Declare, look at, read, destroy streams.")
@common_options
def stream() -> None:
    """Named logs of messages."""


@stream.command(short_help="Declare a stream; installs the schema.")
@click.argument("name", type=STREAM)
@click.option(
    "--retention",
    type=DURATION,
    metavar="DURATION",
    help="Older messages may be removed; by default they stay. Stored; has no effect in this release.",
)
@click.option("--partition-size", type=int, help="Ids per partition, fixed for ever. Default 1,000,000.")
@click.option(
    "--idempotency-retention",
    type=DURATION,
    metavar="DURATION",
    help="How long idempotency keys count. Default 24h. Stored; has no effect in this release.",
)
@click.option(
    "--history-retention",
    type=DURATION,
    metavar="DURATION",
    help="How long outcomes are kept. Default 7d. Stored; has no effect in this release.",
)
@click.option(
    "--allow-drop-past-committed",
    is_flag=True,
    default=None,
    help="Retention does not wait for groups. Stored; has no effect in this release.",
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
            say(f"stream {row.name} is registered")
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


@stream.command(short_help="Show what is declared of a stream.")
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
            print_fields(row, none="keep")
        return 0

    return run(work)


@stream.command(short_help="Print messages without consuming them.")
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
                say(line_of(message), nl=False)
        return 0

    return run(work)


@stream.command(short_help="Drop a stream, its messages and groups.")
@click.argument("name", type=STREAM)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also when it has messages or groups.")
@common_options
@pass_settings
def destroy(settings: Settings, name: str, *, yes: bool, force: bool) -> int:
    """Drop the stream NAME with its messages and groups."""
    if not confirm(lambda: _question(settings, name, force=force), subject=f"stream {name!a}", yes=yes):
        click.echo("nothing was destroyed", err=True)
        return 1

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings, allow_destroy=True) as client:
            await client.stream(name).destroy(force=force)
        if settings.json:
            print_json({"destroyed": name})
        else:
            say(f"stream {name} is destroyed")
        return 0

    return run(work)


COUNTED = 10_000_000  # messages; counting more takes too long for a question


def _question(settings: Settings, name: str, *, force: bool) -> str:
    """Return what to ask before a stream is dropped. Raises: NotFound, DestroyRefused."""
    asked = ""

    async def look(stop: Stop) -> int:
        nonlocal asked
        del stop
        async with open_client(settings) as client:
            handle = client.stream(name)
            row, groups = await handle.resolve(), await handle.consumers()
            log = f"{quote_ident(settings.schema or SCHEMA)}.message_log_{row.id}"
            async with client.transaction() as tx:
                count = await tx.fetchval(
                    f"select count(*) from (select from {log} limit {COUNTED + 1}) m"  # noqa: S608 - quoted
                )
        more = "more than " if count > COUNTED else ""
        what = f"{more}{plural(min(count, COUNTED), 'message')} and {plural(len(groups), 'group')}"
        if (count or groups) and not force:
            raise DestroyRefused(f"it has {what}", subject=f"stream {name!a}")
        asked = f"Drop stream {name} with {what}?"
        return 0

    return asked if run(look) == 0 else ""
