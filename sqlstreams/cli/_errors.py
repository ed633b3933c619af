"""Errors that only the command line has, and what an exception that reached it is about."""

from __future__ import annotations

from sqlstreams.errors import SQLStreamsError

__all__ = ["CommandLineError", "DemoFailed", "Interrupted", "OutputClosed", "expected_error"]


class CommandLineError(SQLStreamsError):
    """The command line cannot be understood, or asks for something that needs an answer; nothing was done."""

    code = "SQLS-USAGE"
    what_to_do = "Look at --help of the command"


class OutputClosed(SQLStreamsError):
    """Stdout cannot be written to any more; messages whose line was not written come again."""

    code = "SQLS-OUTPUT-CLOSED"
    what_to_do = "Consume again: it goes on with the messages that were not written"


class Interrupted(SQLStreamsError):
    """The command was asked to stop before the end of its input; what it names as done is done."""

    code = "SQLS-INTERRUPTED"
    what_to_do = "Go on behind the line it names"


class DemoFailed(SQLStreamsError):
    """A process of the demo did not do its part, so there is no result."""

    code = "SQLS-DEMO"
    what_to_do = "Run it again with --keep DIR, and read the logs of its processes there"


def expected_error(exc: BaseException) -> BaseException:
    """Return what an exception is about: out of a group an interrupt, else its only member, else the first of our errors."""
    leaves: list[BaseException] = []
    todo = [exc]
    while todo:
        each = todo.pop(0)
        if isinstance(each, BaseExceptionGroup):
            todo.extend(each.exceptions)
        else:
            leaves.append(each)
    for leaf in leaves:
        if isinstance(leaf, KeyboardInterrupt):
            return leaf
    if all(isinstance(leaf, SQLStreamsError) for leaf in leaves) or len(leaves) == 1:
        return leaves[0]
    return exc
