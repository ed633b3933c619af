"""Stdout as `consume` needs it: each line is written out at once, and a reader that is slow never blocks the process.

Guarantee   a line stands in the output as a whole: what a cancel cut off is written first the next time.
Relies on   a pipe or terminal that is ready takes PIPE_BUF bytes without blocking; a regular file never blocks.
"""

from __future__ import annotations

import os
import select
import stat

import trio

__all__ = ["LineWriter"]

PIPE_BUF = getattr(select, "PIPE_BUF", 512)


class LineWriter:
    """Writes lines to a file descriptor.

    Args:
        fd: a file, a pipe, a socket or a terminal.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll: select.poll | None = None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            self._poll = select.poll()
            self._poll.register(fd, select.POLLOUT)
        self._torn = b""

    async def write(self, line: bytes) -> None:
        """Write a line. No checkpoint while the reader keeps up: it would cost more than the write.

        Cancelled: the line counts as not written; where a part of it is, the rest follows before the next line.
        Raises: OSError, BrokenPipeError when nobody reads any more.
        """
        if self._torn:
            await self._write(self._torn, torn=True)
        await self._write(line, torn=False)

    async def finish(self) -> None:
        """Write the rest of a line that was cut, if there is one. Raises: as `write`."""
        if self._torn:
            await self._write(self._torn, torn=True)
        else:
            await trio.lowlevel.checkpoint()

    async def wait_ready(self) -> None:
        """Wait until the reader takes more, or is gone."""
        if self._poll is not None and not self._poll.poll(0):
            await trio.lowlevel.wait_writable(self._fd)
        else:
            await trio.lowlevel.checkpoint()

    def closed(self) -> bool:
        """Say whether the reader is gone."""
        gone = select.POLLERR | select.POLLHUP | select.POLLNVAL
        return self._poll is not None and any(seen & gone for _, seen in self._poll.poll(0))

    async def _write(self, data: bytes, *, torn: bool) -> None:
        at = 0
        try:
            while at < len(data):
                if self._poll is None:
                    at += os.write(self._fd, data[at:] if at else data)
                elif self._poll.poll(0):
                    at += self._write_ready(data[at : at + PIPE_BUF])
                else:
                    await trio.lowlevel.wait_writable(self._fd)
        finally:
            self._torn = data[at:] if at or torn else b""

    def _write_ready(self, data: bytes) -> int:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:  # somebody made the descriptor non-blocking, and it takes less than it said
            return 0
