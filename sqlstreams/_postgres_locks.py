"""Locks: files that the programs of one directory lock, and the bounded waits for what others do there.

Guarantee   a wait ends at its bound, or at the moment its caller is cancelled; nobody else reads what we open here.
Relies on   flock, which the kernel releases when a program dies: nothing has to be cleaned up after a SIGKILL.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlstreams.errors import EmbeddedFailed

__all__ = [
    "Waiting",
    "as_embedded_failed",
    "locked_alone",
    "nobody_cancels",
    "open_lock",
    "open_private",
    "patient",
]

POLL_SECONDS = 0.005
LOCK_SECONDS = 90.0  # longer than another program may take to start or to stop the server


class Waiting:
    """A bounded wait that a caller can end early: `check` raises when the caller was cancelled."""

    def __init__(self, seconds: float, check: Callable[[], None]) -> None:
        self._end = time.monotonic() + seconds
        self._seconds = seconds
        self._check = check

    def tick(self, what: str) -> None:
        """Sleep a moment. Raises: EmbeddedFailed when the time is over, whatever `check` raises."""
        self._check()
        if time.monotonic() > self._end:
            raise EmbeddedFailed(f"waited {self._seconds:g} s for {what}")
        time.sleep(POLL_SECONDS)


def nobody_cancels() -> None:
    """Let a wait go on."""


def patient() -> Waiting:
    """Wait for the directory's lock as long as its holder may need."""
    return Waiting(LOCK_SECONDS, nobody_cancels)


def open_private(path: Path, flags: int) -> int:
    """Open a file that only we may read, made when missing; closed when we execute something."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)


def open_lock(path: Path) -> int:
    """Open a file to lock it; closing it gives the lock back."""
    return open_private(path, os.O_RDWR)


def locked_alone(descriptor: int) -> bool:
    """Take the exclusive lock and return True, or return False at once when somebody has a lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def as_embedded_failed(subject: str) -> Iterator[None]:
    """Turn what the operating system refuses into EmbeddedFailed."""
    try:
        yield
    except OSError as error:
        raise EmbeddedFailed(f"cannot be used ({error})", subject=subject) from error
