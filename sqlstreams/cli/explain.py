"""`sqlstreams explain CODE`: what an error's code means, and what to do."""

from __future__ import annotations

import inspect

import click

from sqlstreams.cli._errors import CommandLineError
from sqlstreams.cli._options import Settings, common_options, pass_settings
from sqlstreams.cli._output import print_json, print_rows, say
from sqlstreams.errors import SQLStreamsError, all_errors

__all__ = ["explain"]


@click.command(short_help="What the code of an error means.")
@click.argument("code", required=False)
@common_options
@pass_settings
def explain(settings: Settings, code: str | None) -> int:
    """Say what the error CODE means and what to do; without CODE, list all codes."""
    known = all_errors()
    if code is None:
        if settings.json:
            print_json([_told(cls) for cls in known.values()])
        else:
            print_rows(
                ("code", "meaning"), ((key, _meaning(cls)) for key, cls in known.items()), none="no codes"
            )
        return 0
    found = known.get(code.upper()) or known.get(f"SQLS-{code.upper()}")
    if found is None:
        raise CommandLineError(
            "there is no such code; `sqlstreams explain` lists all", subject=f"code {code[:80]!a}"
        )
    if settings.json:
        print_json(_told(found))
    else:
        say(f"{found.code}  {found.__name__}")
        say(f"  {_meaning(found)}")
        say(f"  What to do: {found.what_to_do}.")
        say(f"  A retry may help: {'yes' if found.may_retry else 'no'}.")
    return 0


def _meaning(cls: type[SQLStreamsError]) -> str:
    """Return the first paragraph of the class's docstring on one line."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())


def _told(cls: type[SQLStreamsError]) -> dict[str, object]:
    return {
        "code": cls.code,
        "name": cls.__name__,
        "meaning": _meaning(cls),
        "what_to_do": cls.what_to_do,
        "may_retry": cls.may_retry,
    }
