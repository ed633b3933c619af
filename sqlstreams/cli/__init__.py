"""The command `sqlstreams NOUN VERB`.

Guarantee   errors that are expected come as one line, or one JSON document, with a code; never as a traceback.
Exit        0 done; 1 failed, absent, or there is a finding; 2 used wrongly; 130 SIGINT; 143 a second SIGTERM. The first
            SIGTERM lets what runs end, then exits 0.

Source: docs/reference/cli.md
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from sqlstreams._version import __version__
from sqlstreams.cli._descriptors import fill_closed
from sqlstreams.cli._errors import CommandLineError, OutputClosed, expected_error
from sqlstreams.cli._options import Settings, common_options, wants_json
from sqlstreams.cli._output import flush, print_error
from sqlstreams.cli.consume import consume
from sqlstreams.cli.demo import demo
from sqlstreams.cli.explain import explain
from sqlstreams.cli.group import group
from sqlstreams.cli.node import node
from sqlstreams.cli.produce import produce
from sqlstreams.cli.stream import stream
from sqlstreams.errors import ConfigurationError, SQLStreamsError

__all__ = ["main"]

FAILED, USAGE, INTERRUPTED = 1, 2, 130


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit: 0 done, 1 failed, absent or a finding, 2 usage, 130 SIGINT, 143 second SIGTERM.",
)
@click.version_option(__version__, prog_name="sqlstreams", message="%(prog)s %(version)s")
@common_options
def root() -> None:
    """Messaging that is just Postgres: streams, consumer groups, retries, dead letters."""


for command in (demo, produce, consume, stream, group, node, explain):
    root.add_command(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: without the program's name; None: the process' own.
    """
    closed = fill_closed()  # before anything opens a descriptor
    arguments = list(sys.argv[1:] if argv is None else argv)
    json = wants_json(arguments)
    logging.basicConfig(format="sqlstreams: %(levelname)s: %(message)s", level=logging.WARNING)
    if 1 in closed:  # every command prints, and one that cannot does nothing
        print_error(OutputClosed("it is closed; nothing was done", subject="stdout"), json=json)
        return FAILED
    try:
        code = root.main(
            arguments, prog_name="sqlstreams", standalone_mode=False, obj=Settings(stdin=0 not in closed)
        )
        flush()
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except click.ClickException as exc:
        return _refuse(exc, json=json)
    except (SQLStreamsError, OSError, BaseExceptionGroup) as exc:
        found = expected_error(exc)
        if isinstance(found, KeyboardInterrupt):
            return INTERRUPTED
        if not isinstance(found, SQLStreamsError):
            raise
        _forget_stdout()
        print_error(found, json=json)
        return USAGE if isinstance(found, ConfigurationError | CommandLineError) else FAILED
    return code if isinstance(code, int) else 0


def _refuse(exc: click.ClickException, *, json: bool) -> int:
    """Show what was wrong with the command line, with click's usage line in text."""
    if json:
        context = getattr(exc, "ctx", None)
        subject = context.command_path if context is not None else None
        print_error(CommandLineError(exc.format_message().rstrip("."), subject=subject), json=True)
    else:
        exc.show()
    return exc.exit_code


def _forget_stdout() -> None:
    """When stdout takes nothing any more, let the interpreter's last flush go nowhere."""
    with suppress(OutputClosed):
        flush()
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
