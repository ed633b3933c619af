"""What commands print: one JSON document, or text for people.

JSON has the snake_case names of the API's structs, durations in seconds, instants in RFC 3339 UTC, payloads as produced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sqlstreams.errors import SQLStreamsError

__all__ = ["console", "plain", "print_error", "print_fields", "print_json", "print_rows", "shown"]

WIDE = 10_000  # columns of what is no terminal: nothing is wrapped or cut there


def plain(value: Any) -> Any:  # noqa: ANN401 - any value of the API
    """Return a value of the API as what JSON has; instants and `Raw` stay, since msgspec writes them as wanted."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc)  # noqa: UP017 - the name is as good on 3.11
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def print_json(value: Any) -> None:  # noqa: ANN401 - any value of the API
    """Print one document on stdout."""
    click.echo(msgspec.json.encode(plain(value)))


def print_error(exc: SQLStreamsError, *, json: bool) -> None:
    """Print an error on stderr."""
    if json:
        document = {
            "code": exc.code,
            "subject": exc.subject,
            "message": exc.message,
            "what_to_do": exc.what_to_do,
            "may_retry": exc.may_retry,
        }
        click.echo(msgspec.json.encode(document), err=True)
    else:
        click.echo(f"sqlstreams: {exc}", err=True)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, none: str) -> None:
    """Print a table on stdout, or the sentence `none` when it has no rows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(each)) for each in row))
    if table.row_count:
        console().print(table)
    else:
        click.echo(none)


def print_fields(value: msgspec.Struct, *, without: Sequence[str] = ()) -> None:
    """Print a struct on stdout, a field a line; fields of a config stand indented below it."""
    for name in value.__struct_fields__:
        if name in without:
            continue
        each = getattr(value, name)
        if isinstance(each, msgspec.Struct | dict):
            click.echo(f"{name}:")
            inner = (
                each
                if isinstance(each, dict)
                else {key: getattr(each, key) for key in each.__struct_fields__}
            )
            for key, below in inner.items():
                click.echo(f"  {key}: {shown(below)}")
        else:
            click.echo(f"{name}: {shown(each)}")


def shown(value: object) -> str:
    """Return a value as people read it, on one line without control characters."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, datetime):
        return f"{value.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}Z"  # noqa: UP017 - as above
    if isinstance(value, msgspec.Raw):
        return bytes(value).decode("utf-8", "replace")
    return "".join(each if each.isprintable() else " " for each in str(value))


def duration_text(value: timedelta) -> str:
    """Return a duration in its largest unit that leaves no fraction."""
    seconds = value.total_seconds()
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,g} s"


def console(*, stderr: bool = False) -> Console:
    """Return a console that writes no escape code where nobody sees them."""
    stream = sys.stderr if stderr else sys.stdout
    terminal = stream.isatty()
    return Console(
        stderr=stderr,
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        width=None if terminal else WIDE,
        highlight=False,
        markup=False,
        emoji=False,
    )
