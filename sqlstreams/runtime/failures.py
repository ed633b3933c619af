"""Says in the log that handlers fail, so that a typo does not look like a program that hangs.

A line names the message, the kind of exception and where it was raised: never its text, which may quote a payload. At most
one line a second for each consumer; the next one says how many were left out.
"""

from __future__ import annotations

import logging
import traceback

import trio

from sqlstreams.model.outcome import Delayed, Result, Success, TerminalOutcome

__all__ = ["FailureLog"]

GAP_SECONDS = 1.0

_log = logging.getLogger("sqlstreams.consumer")


class FailureLog:
    """The failures of one running `consume`.

    Args:
        names: of the stream and the group.
    """

    def __init__(self, names: tuple[str, str]) -> None:
        self._stream, self._group = names
        self._next_at = 0.0
        self._left_out = 0

    def tell(self, message: int, attempts: int, result: Result, exc: BaseException | None) -> None:
        """Log a result that is no success and no delay."""
        if isinstance(result, Success | Delayed):
            return
        now = trio.current_time()
        if now < self._next_at:
            self._left_out += 1
            return
        _log.warning(
            "message %s of stream %s, group %s %s at run %s: %s%s",
            message,
            self._stream,
            self._group,
            "was given up" if isinstance(result, TerminalOutcome) else "failed",
            attempts + 1,
            _what(exc),
            f" (and {self._left_out} others since the last such line)" if self._left_out else "",
        )
        self._next_at, self._left_out = now + GAP_SECONDS, 0


def _what(exc: BaseException | None) -> str:
    """Name an exception's kind and place; out of a group, those of its first member."""
    if exc is None:
        return "it had not finished at its timeout"
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    frames = traceback.extract_tb(exc.__traceback__)
    return (
        f"{type(exc).__name__} at {frames[-1].filename}:{frames[-1].lineno}" if frames else type(exc).__name__
    )
