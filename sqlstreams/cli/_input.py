"""Lines of a file or of stdin, as they arrive, and each as a message.

Guarantee   no line is kept that is longer than a payload may be; lines of a slow pipe are handed on as soon as they are whole.
Cancelled   a read of a pipe that is under way is abandoned: what it reads is lost, so cancel when no more is wanted.
"""

from __future__ import annotations

import os
import re
import stat

import msgspec
import trio

from sqlstreams.cli._errors import InputFailed, advised
from sqlstreams.codec import check_json, encode_key
from sqlstreams.config import PAYLOAD_LIMIT_BYTES
from sqlstreams.errors import LimitExceeded, PayloadInvalid
from sqlstreams.producer import Outgoing

__all__ = ["LineSplitter", "Source", "message_of"]

CHUNK_BYTES = 1024 * 1024
_decode = msgspec.json.Decoder().decode
_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode
_QUOTES_NOTHING = re.compile(
    r"Input data was truncated|JSON is malformed: [a-z ,'\":\[\]{}]{1,60} \(byte \d+\)"
)


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
        name: for messages. subject: for errors.
        size: in bytes, None when it cannot be known.
        read: bytes read so far.
        ended: whether everything was read.
    """

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name
        self.subject = "stdin" if name == "stdin" else f"file {name!a}"
        status = os.fstat(fd)
        self.size = status.st_size if stat.S_ISREG(status.st_mode) else None
        self._splitter = LineSplitter()
        self.read = 0
        self.ended = False

    async def lines(self) -> list[bytes] | None:
        """Wait for more and return the lines that are whole now, None at the end. Raises: InputFailed."""
        while not self.ended:
            try:
                chunk = await trio.to_thread.run_sync(os.read, self._fd, CHUNK_BYTES, abandon_on_cancel=True)
            except OSError as exc:
                raise InputFailed(
                    f"it cannot be read: {exc.strerror or type(exc).__name__}", subject=self.subject
                ) from exc
            self.read += len(chunk)
            self.ended = not chunk
            if lines := self._splitter.feed(chunk) if chunk else self._splitter.finish():
                return lines
        await trio.lowlevel.checkpoint()
        return None


def message_of(
    line: bytes, key_field: str | None, subject: str, *, what: str = "line"
) -> Outgoing[msgspec.Raw]:
    """Return a line as a message; its payload are the line's bytes.

    Args:
        line: without its line break.
        key_field: the top-level string that becomes the message key; None: there is no key.
        subject: for errors.
        what: "line", or "payload" for one that can only be corrected, not skipped.

    Raises: PayloadInvalid, LimitExceeded.
    """
    if len(line) > PAYLOAD_LIMIT_BYTES:
        raise LimitExceeded(f"the {what} has more than {PAYLOAD_LIMIT_BYTES:,} bytes", subject=subject)
    skip = ", or pass --skip-bad" if what == "line" else ""
    try:
        check_json(line, subject)
    except PayloadInvalid as exc:
        why = _position(line)
        found = f"the {what} is not valid JSON text ({why})" if why else exc.message
        raise advised(PayloadInvalid(found, subject=subject), f"Correct the {what}{skip}") from None
    if key_field is None:
        return Outgoing(msgspec.Raw(line))
    value = _decode(line)
    key = value.get(key_field) if isinstance(value, dict) else None
    if not isinstance(key, str):
        advice = (
            f"Correct the {what}, leave --key-field out{skip}"
            if skip
            else f"Correct the {what}, or leave --key-field out"
        )
        raise advised(
            PayloadInvalid(f"it has no string {key_field!a} at its top level", subject=subject), advice
        )
    return Outgoing(msgspec.Raw(line), message_key=encode_key("message key", key, subject))


def _position(line: bytes) -> str | None:
    """Say where a line is no JSON, without quoting any of it; None when nothing is known."""
    try:
        line.decode("utf-8")
        _decode_raw(line)
    except UnicodeDecodeError as exc:
        return f"not UTF-8 (byte {exc.start})"
    except msgspec.DecodeError as exc:
        found = _QUOTES_NOTHING.fullmatch(str(exc))
        return found[0] if found else None
    except RecursionError:
        return "nested too deeply"
    return None
