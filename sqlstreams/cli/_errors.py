"""Errors that only the command line has, and what an exception that reached it is about."""

from __future__ import annotations

from typing import TypeVar

from sqlstreams.errors import ConfigurationError, DestroyRefused, NotFound, NotInstalled, SQLStreamsError

__all__ = [
    "CommandLineError",
    "DemoFailed",
    "InputFailed",
    "Interrupted",
    "OutputClosed",
    "SystemFailed",
    "advised",
    "expected_error",
    "for_shell",
]

E = TypeVar("E", bound=SQLStreamsError)


class CommandLineError(SQLStreamsError):
    """The command line cannot be understood, or asks for something that needs an answer; nothing was done."""

    code = "SQLS-USAGE"
    what_to_do = "Look at --help of the command"


class OutputClosed(SQLStreamsError):
    """Stdout cannot be written to any more; messages whose line was not written come again."""

    code = "SQLS-OUTPUT-CLOSED"
    what_to_do = "Give it an output that takes everything; `consume` prints again what was not written"


class InputFailed(SQLStreamsError):
    """A file or stdin cannot be read any further; what the error names as produced is produced."""

    code = "SQLS-INPUT-FAILED"
    what_to_do = "Check what the input is and that it is open"


class SystemFailed(SQLStreamsError):
    """The operating system refused what the command needs, for example a file, memory or one more descriptor."""

    code = "SQLS-SYSTEM"
    what_to_do = "Look at the reason it names; what was committed before stays"


class Interrupted(SQLStreamsError):
    """The command was asked to stop before the end of its input; what it names as done is done."""

    code = "SQLS-INTERRUPTED"
    what_to_do = "Go on behind the line it names"


class DemoFailed(SQLStreamsError):
    """A process of the demo did not do its part, so there is no result."""

    code = "SQLS-DEMO"
    what_to_do = "Run it again with --keep DIR, and read the logs of its processes there"


def expected_error(exc: BaseException) -> BaseException:
    """Return what an exception is about: out of a group an interrupt, else its only member, else the first of our errors.

    An OSError becomes one of our errors: nobody reads stdout any more, or the system refused something.
    """
    leaves: list[BaseException] = []
    todo = [exc]
    while todo:
        each = todo.pop(0)
        if isinstance(each, BaseExceptionGroup):
            todo.extend(each.exceptions)
        else:
            leaves.append(_of_system(each) if isinstance(each, OSError) else each)
    for leaf in leaves:
        if isinstance(leaf, KeyboardInterrupt):
            return leaf
    if all(isinstance(leaf, SQLStreamsError) for leaf in leaves) or len(leaves) == 1:
        return leaves[0]
    return exc


def _of_system(exc: OSError) -> SQLStreamsError:
    why = exc.strerror or type(exc).__name__
    if isinstance(exc, BrokenPipeError):
        return OutputClosed(why, subject="stdout")
    return SystemFailed(why, subject=f"file {str(exc.filename)!a}" if exc.filename else None)


def advised(exc: E, what_to_do: str) -> E:
    """Return the error with another advice than its class has."""
    vars(exc)["what_to_do"] = what_to_do
    return exc


def for_shell(exc: SQLStreamsError) -> SQLStreamsError:
    """Return the error with advice for a shell, where its class speaks of Python."""
    if "what_to_do" in vars(exc):
        return exc
    subject = exc.subject or ""
    if isinstance(exc, NotInstalled):
        return advised(
            exc,
            "Run `sqlstreams stream register NAME` with a role that may create a schema, or check --schema and the URL",
        )
    if isinstance(exc, DestroyRefused):
        if subject.startswith("group "):
            return advised(exc, "End its consumers, or give --force to destroy it all the same")
        return advised(exc, "Give --force to destroy it with its messages and groups")
    if isinstance(exc, ConfigurationError) and exc.message.startswith("there is no database URL"):
        return advised(exc, "Give --database-url or set SQLSTREAMS_DATABASE_URL")
    if isinstance(exc, NotFound) and subject.startswith("stream "):
        return advised(
            exc, "`sqlstreams stream register NAME` declares it; `sqlstreams stream list` shows what there is"
        )
    if isinstance(exc, NotFound) and subject.startswith("group "):
        return advised(
            exc,
            "`sqlstreams group register STREAM GROUP` declares it; `sqlstreams group list STREAM` lists what there is",
        )
    return exc
