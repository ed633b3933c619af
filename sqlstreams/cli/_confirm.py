"""Destructive verbs ask first, or are told --yes."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from sqlstreams.cli._errors import CommandLineError

__all__ = ["confirm"]


def confirm(question: Callable[[], str], *, subject: str, yes: bool) -> bool:
    """Say whether to go on: --yes was given, or a person at a terminal said so.

    Args:
        question: looks what would go and returns what to ask, "" to give up; not called without a person.
        subject: for errors.
        yes: --yes was given.

    Raises: CommandLineError when there is nobody to ask, what `question` raises.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise CommandLineError(
            "it cannot be undone, and there is no terminal to ask: give --yes", subject=subject
        )
    asked = question()
    return bool(asked) and click.confirm(asked, err=True)
