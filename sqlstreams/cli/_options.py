"""Options that every command has, before or after the verb, and the types of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click

from sqlstreams.model.names import check_name, check_schema

__all__ = [
    "DURATION",
    "GROUP",
    "INSTANT",
    "MESSAGE_ID",
    "STREAM",
    "Settings",
    "common_options",
    "pass_settings",
    "wants_json",
]

F = TypeVar("F", bound=Callable[..., Any])

URL_HELP = "postgresql://…, by default $SQLSTREAMS_DATABASE_URL. Prefer the variable: an option's password shows in ps."
MESSAGE_ID = click.IntRange(1, 2**63 - 1)

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*(ms|s|m|h|d)?\s*")


@dataclass
class Settings:
    """What the options of every command say.

    Attributes:
        database_url: None means $SQLSTREAMS_DATABASE_URL.
        schema: None means the default, so that a command may have another one.
        output: "text" or "json".
        stdin: whether it was open when the command started.
    """

    database_url: str | None = None
    schema: str | None = None
    output: str = "text"
    stdin: bool = True

    @property
    def json(self) -> bool:
        """Whether results and errors are JSON."""
        return self.output == "json"


pass_settings = click.make_pass_decorator(Settings)


def common_options(function: F, *, url_help: str = URL_HELP) -> F:
    """Add the options that stand before or after the verb; the last one given counts."""
    for option in (
        click.option(
            "--output",
            type=click.Choice(["text", "json"]),
            callback=_store("output"),
            expose_value=False,
            help="text for people (default), or one JSON document.",
        ),
        click.option(
            "--schema",
            callback=_store("schema"),
            expose_value=False,
            metavar="NAME",
            help="The installation's schema, sqlstreams by default.",
        ),
        click.option(
            "--database-url",
            callback=_store("database_url"),
            expose_value=False,
            metavar="URL",
            help=url_help,
        ),
    ):
        function = option(function)
    return function


def wants_json(arguments: Sequence[str]) -> bool:
    """Say whether the arguments ask for JSON, also where they cannot be parsed as a whole."""
    wanted = False
    for at, each in enumerate(arguments):
        if each == "--":
            break
        if each == "--output":
            wanted = arguments[at + 1 : at + 2] == ["json"]
        elif each.startswith("--output="):
            wanted = each == "--output=json"
    return wanted


def _store(name: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def store(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        del param
        if value is not None:
            if name == "schema":
                check_schema(value)
            setattr(ctx.ensure_object(Settings), name, value)

    return store


def STREAM(value: str) -> str:  # noqa: N802 - a type of arguments, named as click's are
    """Return a stream's name, checked before any I/O. Raises: ConfigurationError."""
    check_name("stream", value, system=True)
    return value


def GROUP(value: str) -> str:  # noqa: N802 - as above
    """Return a group's name, checked before any I/O. Raises: ConfigurationError."""
    check_name("group", value)
    return value


def DURATION(value: str) -> timedelta:  # noqa: N802 - as above
    """Return a duration: seconds, or a number with ms, s, m, h or d. Whether it makes sense is up to the setting."""
    if found := _DURATION.fullmatch(value):
        with suppress(OverflowError):
            return timedelta(seconds=float(found[1]) * _UNITS[found[2] or ""])
    raise click.BadParameter(f"{value!r} is no duration: use seconds, or a number with ms, s, m, h or d")


def INSTANT(value: str) -> datetime:  # noqa: N802 - as above
    """Return an instant as RFC 3339 writes it, with its time zone."""
    with suppress(ValueError):
        instant = datetime.fromisoformat(value)
        if instant.utcoffset() is not None:
            return instant
    raise click.BadParameter(
        f"{value!r} is no instant: use RFC 3339 with a time zone, as 2026-01-31T08:00:00Z"
    )
