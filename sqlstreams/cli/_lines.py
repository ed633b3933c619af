"""Messages as lines: one JSON object a line, or the payload as it was produced."""

from __future__ import annotations

from datetime import datetime

import msgspec

from sqlstreams.runtime.handler import Meta
from sqlstreams.stream import Message

__all__ = ["line_of", "meta_line", "payload_line"]

_encode = msgspec.json.Encoder().encode


class _Line(msgspec.Struct):
    """What `consume` prints of a message."""

    id: int
    key: str | None
    headers: dict[str, str]
    created_at: datetime
    attempts: int
    payload: msgspec.Raw


def meta_line(payload: msgspec.Raw, meta: Meta) -> bytes:
    """Return the line that `consume` prints of a message."""
    line = _Line(meta.id, meta.message_key, meta.headers, meta.created_at, meta.attempts, payload)
    return _on_one_line(_encode(line))


def payload_line(payload: msgspec.Raw) -> bytes:
    """Return a payload as it was produced, on one line."""
    return _on_one_line(bytes(payload))


def line_of(message: Message[msgspec.Raw]) -> bytes:
    """Return a message as `stream read` prints it."""
    return _on_one_line(_encode(message))


def _on_one_line(data: bytes) -> bytes:
    """End the line; a line break inside, which JSON has only between its tokens, becomes a space."""
    return (data.replace(b"\n", b" ") if b"\n" in data else data) + b"\n"
