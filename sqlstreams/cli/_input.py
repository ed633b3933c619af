"""Lines of a file or of stdin, as they arrive, and each as a message.

Guarantee   no line is kept that is longer than a payload may be; lines of a slow pipe are handed on as soon as they are whole.
Cancelled   a read of a pipe that is under way is abandoned: what it reads is lost, so cancel when no more is wanted.
"""

from __future__ import annotations

import os
import stat

import msgspec
import trio

from sqlstreams.codec import check_json, encode_key
from sqlstreams.config import PAYLOAD_LIMIT_BYTES
from sqlstreams.errors import LimitExceeded, PayloadInvalid
from sqlstreams.producer import Outgoing

__all__ = ["LineSplitter", "Source", "message_of"]

CHUNK_BYTES = 1024 * 1024
_decode = msgspec.json.Decoder().decode


class LineSplitter:
    """Cuts chunks of bytes into lines; a line that is too long is cut behind the limit, so that it still shows as too long."""

    def __init__(self, limit: int = PAYLOAD_LIMIT_BYTES) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that are whole now, without their line breaks."""
        *whole, rest = chunk.split(b"\n")
        if whole:
            self._keep(whole[0])
            whole[0] = self._take()
        self._keep(rest)
        return whole

    def finish(self) -> list[bytes]:
        """Return the last line, if it has no line break behind it."""
        return [self._take()] if self._size else []

    def _keep(self, piece: bytes) -> None:
        room = self._limit + 1 - self._size
        if piece and room > 0:
            self._pieces.append(piece[:room])
            self._size += min(len(piece), room)

    def _take(self) -> bytes:
        line = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._size = [], 0
        return line


class Source:
    """A file or stdin.

    Attributes:
        name: for messages.
        size: in bytes, None when it cannot be known.
        read: bytes read so far.
        ended: whether everything was read.
    """

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name
        status = os.fstat(fd)
        self.size = status.st_size if stat.S_ISREG(status.st_mode) else None
        self._splitter = LineSplitter()
        self.read = 0
        self.ended = False

    async def lines(self) -> list[bytes] | None:
        """Wait for more and return the lines that are whole now, None at the end."""
        while not self.ended:
            chunk = await trio.to_thread.run_sync(os.read, self._fd, CHUNK_BYTES, abandon_on_cancel=True)
            self.read += len(chunk)
            self.ended = not chunk
            if lines := self._splitter.feed(chunk) if chunk else self._splitter.finish():
                return lines
        await trio.lowlevel.checkpoint()
        return None


def message_of(line: bytes, key_field: str | None, subject: str) -> Outgoing[msgspec.Raw]:
    """Return a line as a message; its payload are the line's bytes.

    Args:
        line: without its line break.
        key_field: the top-level string that becomes the message key; None: there is no key.
        subject: for errors.

    Raises: PayloadInvalid, LimitExceeded.
    """
    if len(line) > PAYLOAD_LIMIT_BYTES:
        raise LimitExceeded(f"the line has more than {PAYLOAD_LIMIT_BYTES:,} bytes", subject=subject)
    check_json(line, subject)
    if key_field is None:
        return Outgoing(msgspec.Raw(line))
    value = _decode(line)
    key = value.get(key_field) if isinstance(value, dict) else None
    if not isinstance(key, str):
        raise PayloadInvalid(f"it has no string {key_field!a} at its top level", subject=subject)
    return Outgoing(msgspec.Raw(line), message_key=encode_key("message key", key, subject))
