"""The descriptors 0, 1 and 2 when somebody closed them: what this process opens must not come to stand there."""

from __future__ import annotations

import os
import sys

__all__ = ["fill_closed"]


def fill_closed() -> frozenset[int]:
    """Open the null device on those of 0, 1 and 2 that are closed, and return them.

    Call it before anything else is opened: a descriptor that is opened later takes the lowest free number, and what is
    printed would be written into it. `sys.stdin` and the like, None for a closed one, become the null device too.
    """
    closed = set()
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, f"__{name}__") is None:  # closed when the interpreter started
            closed.add(fd)
        try:
            os.fstat(fd)
        except OSError:
            closed.add(fd)
            _open_null(fd)
        if fd in closed:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115, PTH123 - for as long as the process lives
            setattr(sys, name, stream)
    return frozenset(closed)


def _open_null(fd: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != fd:
        os.dup2(opened, fd)
        os.close(opened)
    os.set_inheritable(fd, True)  # noqa: FBT003 - positional only
