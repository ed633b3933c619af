"""What commands print: one JSON document, or text for people.

JSON has the snake_case names of the API's structs, durations in seconds, instants in RFC 3339 UTC, payloads as produced.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import IO, Any

import click
import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from sqlstreams.cli._errors import OutputClosed, for_shell
from sqlstreams.errors import SQLStreamsError

__all__ = [
    "console",
    "flush",
    "plain",
    "plural",
    "print_error",
    "print_fields",
    "print_json",
    "print_rows",
    "print_styled",
    "say",
    "shown",
]

WIDE = 10_000  # columns of what is no terminal: nothing is wrapped or cut there


def plain(value: Any) -> Any:  # noqa: ANN401 - any value of the API
    """Return a value of the API as what JSON has; instants and `Raw` stay, since msgspec writes them as wanted."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc)  # noqa: UP017 - the name is as good on 3.11
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


@contextmanager
def _to_stdout() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise OutputClosed(exc.strerror or type(exc).__name__, subject="stdout") from exc


def say(text: str | bytes, *, nl: bool = True) -> None:
    """Print on stdout. Raises: OutputClosed."""
    with _to_stdout():
        click.echo(text, nl=nl)


def flush() -> None:
    """Write out what is left. Raises: OutputClosed."""
    with _to_stdout():
        sys.stdout.flush()


def print_styled(*things: RenderableType) -> None:
    """Print what rich renders on stdout, a thing a line. Raises: OutputClosed."""
    text = io.StringIO()  # rich would end the process when nobody reads
    screen = console(file=text)
    for thing in things:
        screen.print(thing)
    say(text.getvalue(), nl=False)


def plural(count: int, what: str, several: str | None = None) -> str:
    """Return a number with its noun."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def print_json(value: Any) -> None:  # noqa: ANN401 - any value of the API
    """Print one document on stdout."""
    say(msgspec.json.encode(plain(value)))


def print_error(exc: SQLStreamsError, *, json: bool) -> None:
    """Print an error on stderr, where that can be written to."""
    exc = for_shell(exc)
    with suppress(OSError):
        _print_error(exc, json=json)


def _print_error(exc: SQLStreamsError, *, json: bool) -> None:
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
        print_styled(table)
    else:
        say(none)


def print_fields(value: msgspec.Struct, *, none: str = "-", without: Sequence[str] = ()) -> None:
    """Print a struct on stdout, a field a line; fields of a config stand indented below it.

    Args:
        value: what is printed.
        none: stands for what is not set in a config.
        without: fields that are left out.
    """
    above = set(value.__struct_fields__)
    for name in value.__struct_fields__:
        if name in without:
            continue
        each = getattr(value, name)
        if isinstance(each, msgspec.Struct | dict):
            say(f"{name}:")
            inner = (
                each
                if isinstance(each, dict)
                else {key: getattr(each, key) for key in each.__struct_fields__ if key not in above}
            )
            for key, below in inner.items():
                say(f"  {key}: {none if below is None else shown(below)}")
        else:
            say(f"{name}: {shown(each)}")


def shown(value: object) -> str:
    """Return a value as people read it, on one line without control characters."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3f}"
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


def console(*, stderr: bool = False, file: IO[str] | None = None) -> Console:
    """Return a console that writes no escape code where nobody sees them; `file` takes what is meant for it."""
    stream = sys.stderr if stderr else sys.stdout
    terminal = stream.isatty()
    return Console(
        stderr=stderr,
        file=file,
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        width=None if terminal else WIDE,
        highlight=False,
        markup=False,
        emoji=False,
    )
