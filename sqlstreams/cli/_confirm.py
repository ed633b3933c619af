"""Destructive verbs ask first, or are told --yes."""

from __future__ import annotations

import sys

import click

from sqlstreams.cli._errors import CommandLineError

__all__ = ["confirm"]


def confirm(question: str, *, subject: str, yes: bool) -> bool:
    """Say whether to go on: --yes was given, or a person at a terminal said so.

    Raises: CommandLineError when there is nobody to ask.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise CommandLineError(
            "it cannot be undone, and there is no terminal to ask: give --yes", subject=subject
        )
    return click.confirm(question, err=True)
