"""`sqlstreams group …`, what a person does to a running group: pause, resume, seek, redrive, discard, inspect."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import click

from sqlstreams.cli._confirm import confirm
from sqlstreams.cli._options import (
    GROUP,
    INSTANT,
    MESSAGE_ID,
    STREAM,
    Settings,
    common_options,
    pass_settings,
)
from sqlstreams.cli._output import print_fields, print_json, print_rows, say, shown
from sqlstreams.cli._running import Stop, open_client, run
from sqlstreams.operations import Position, Seeked

__all__ = ["OPERATIONS"]


@click.command()
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@common_options
@pass_settings
def pause(settings: Settings, stream: str, name: str) -> int:
    """Hand out nothing more of GROUP; what runs goes on and is recorded."""
    return _pause_or_resume(settings, stream, name, paused=True)


@click.command()
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@common_options
@pass_settings
def resume(settings: Settings, stream: str, name: str) -> int:
    """Hand out again what GROUP has not had; nothing is lost or repeated by a pause."""
    return _pause_or_resume(settings, stream, name, paused=False)


@click.command()
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@click.option(
    "--to",
    type=click.Choice(["beginning", "head"]),
    help="All that is retained, or only what comes from now on.",
)
@click.option("--to-id", type=MESSAGE_ID, metavar="ID", help="So that the message with this id is the next.")
@click.option(
    "--to-time",
    type=INSTANT,
    metavar="RFC3339",
    help="So that the first message that is not older is the next.",
)
@click.option("--dry-run", is_flag=True, help="Only tell what it would do.")
@click.option(
    "--force", is_flag=True, help="Also while a consumer of it runs: what it holds counts for nothing."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@common_options
@pass_settings
def seek(
    settings: Settings,
    /,
    stream: str,
    name: str,
    *,
    to: Literal["beginning", "head"] | None,
    to_id: int | None,
    to_time: datetime | None,
    dry_run: bool,
    force: bool,
    yes: bool,
) -> int:
    """Move GROUP: what lies above the position comes next, or again; its exceptions above it are forgotten.

    Say where in exactly one of the three ways.
    """
    position = _position(to, to_id, to_time)
    question = f"Move the group {name} of stream {stream}?"
    if not dry_run and not confirm(lambda: question, subject=f"group {name!a}", yes=yes):
        click.echo("nothing was moved", err=True)
        return 1

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            done = await client.stream(stream).consumer(name).seek(position, dry_run=dry_run, force=force)
        if settings.json:
            print_json(done)
        else:
            _say(name, done)
        return 0

    return run(work)


@click.command()
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@click.argument("ids", type=MESSAGE_ID, nargs=-1, metavar="[ID]...")
@click.option("--error-contains", metavar="TEXT", help="Those with this text in their error.")
@click.option("--all", "everything", is_flag=True, help="All of them.")
@common_options
@pass_settings
def redrive(
    settings: Settings,
    /,
    stream: str,
    name: str,
    *,
    ids: tuple[int, ...],
    error_contains: str | None,
    everything: bool,
) -> int:
    """Give dead letters of GROUP a fresh budget; they run again at once.

    Say which in exactly one of the three ways. Exit 1 when one of the IDs is no dead letter.
    """
    return _on_dead_letters(settings, "redrive", stream, name, ids, error_contains, everything=everything)


@click.command()
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@click.argument("ids", type=MESSAGE_ID, nargs=-1, metavar="[ID]...")
@click.option("--error-contains", metavar="TEXT", help="Those with this text in their error.")
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@common_options
@pass_settings
def discard(
    settings: Settings,
    /,
    stream: str,
    name: str,
    *,
    ids: tuple[int, ...],
    error_contains: str | None,
    everything: bool,
    yes: bool,
) -> int:
    """Delete dead letters of GROUP for good; the stream's messages stay.

    Say which in exactly one of the three ways. Exit 1 when one of the IDs is no dead letter.
    """
    _one_way(ids, error_contains, everything=everything)
    question = f"Delete dead letters of the group {name} of stream {stream}?"
    if not confirm(lambda: question, subject=f"group {name!a}", yes=yes):
        click.echo("nothing was deleted", err=True)
        return 1
    return _on_dead_letters(settings, "discard", stream, name, ids, error_contains, everything=everything)


@click.command()
@click.argument("stream", type=STREAM)
@click.argument("name", type=GROUP, metavar="GROUP")
@click.argument("id_", type=MESSAGE_ID, metavar="ID")
@common_options
@pass_settings
def inspect(settings: Settings, stream: str, name: str, id_: int) -> int:
    """Show where the message ID stands in GROUP, and what became of its runs."""

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            found = await client.stream(stream).consumer(name).inspect(id_)
        if settings.json:
            print_json(found)
            return 0
        print_fields(found, without=("history",))
        if found.history:
            say("history:")
            print_rows(
                ("at", "attempt", "status", "error"),
                ((each.at, each.attempt, each.status, each.error) for each in found.history),
                none="",
            )
        return 0

    return run(work)


OPERATIONS = (pause, resume, seek, redrive, discard, inspect)


def _pause_or_resume(settings: Settings, stream: str, name: str, *, paused: bool) -> int:
    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            group = client.stream(stream).consumer(name)
            changed = await (group.pause() if paused else group.resume())
        if settings.json:
            print_json({"group": name, "paused": paused, "changed": changed})
        else:
            already = "" if changed else " already"
            say(f"group {name} is{already} {'paused' if paused else 'running'}")
        return 0

    return run(work)


def _position(
    to: Literal["beginning", "head"] | None, to_id: int | None, to_time: datetime | None
) -> Position:
    if (to is not None) + (to_id is not None) + (to_time is not None) != 1:
        raise click.UsageError("Say where: exactly one of --to, --to-id and --to-time.")
    if to_id is not None:
        return Position.at_id(to_id)
    if to_time is not None:
        return Position.at_time(to_time)
    return Position.head() if to == "head" else Position.beginning()


def _say(name: str, done: Seeked) -> None:
    count = f"{shown(done.count)} {'message' if done.count == 1 else 'messages'}"
    there = "nothing" if done.first is None else f"{count}, {shown(done.first)} to {shown(done.last)}"
    word = "stands" if done.done else "would stand"
    say(f"group {name} {word} at {shown(done.target)}; above it there is now: {there}")
    if done.target == done.retained_above and done.retained_above:
        say(f"everything up to {shown(done.retained_above)} is gone for good")


def _one_way(ids: tuple[int, ...], error_contains: str | None, *, everything: bool) -> None:
    if bool(ids) + (error_contains is not None) + everything != 1:
        raise click.UsageError("Say which: exactly one of IDs, --error-contains and --all.")
    if error_contains == "":
        raise click.UsageError("--error-contains needs a text; --all means all.")


def _on_dead_letters(
    settings: Settings,
    what: Literal["redrive", "discard"],
    stream: str,
    name: str,
    ids: tuple[int, ...],
    error_contains: str | None,
    *,
    everything: bool,
) -> int:
    _one_way(ids, error_contains, everything=everything)

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings) as client:
            group = client.stream(stream).consumer(name)
            call = group.redrive if what == "redrive" else group.discard
            count = await call(ids or None, error_contains=error_contains, all=everything)
        done = "redriven" if what == "redrive" else "discarded"
        if settings.json:
            print_json({done: count})
        else:
            say(f"{done}: {shown(count)}")
        return 1 if count < len(set(ids)) else 0

    return run(work)
