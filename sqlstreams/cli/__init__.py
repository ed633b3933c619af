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

import click

from sqlstreams._version import __version__
from sqlstreams.cli._errors import CommandLineError, expected_error
from sqlstreams.cli._options import Settings, common_options, wants_json
from sqlstreams.cli._output import print_error
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
    arguments = list(sys.argv[1:] if argv is None else argv)
    json = wants_json(arguments)
    logging.basicConfig(format="sqlstreams: %(levelname)s: %(message)s", level=logging.WARNING)
    try:
        code = root.main(arguments, prog_name="sqlstreams", standalone_mode=False, obj=Settings())
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except click.ClickException as exc:
        return _refuse(exc, json=json)
    except BrokenPipeError:
        _forget_stdout()
        return FAILED
    except (SQLStreamsError, BaseExceptionGroup) as exc:
        found = expected_error(exc)
        if isinstance(found, KeyboardInterrupt):
            return INTERRUPTED
        if not isinstance(found, SQLStreamsError):
            raise
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
    """Nobody reads stdout any more: let the interpreter's last flush go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
