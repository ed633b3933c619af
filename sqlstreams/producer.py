"""What a produce takes and gives, and how it is checked before the database is asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec

from sqlstreams.codec import Codec, encode_headers, encode_key
from sqlstreams.config import BATCH_LIMIT_BYTES, BATCH_LIMIT_MESSAGES
from sqlstreams.errors import LimitExceeded, NotBuiltYet, PayloadInvalid
from sqlstreams.store import OutgoingRow

__all__ = ["Outgoing", "Sent", "encode_batch", "encode_one"]

T = TypeVar("T")


class Sent(msgspec.Struct, frozen=True):
    """What became of a produced message.

    Attributes:
        id: its position in the stream.
        duplicate: whether its idempotency key had been used before, so that `id` is the earlier message's.
    """

    id: int
    duplicate: bool = False


class Outgoing(msgspec.Struct, Generic[T], frozen=True):
    """A payload with its options, as an item of `produce_batch`."""

    payload: T
    message_key: str | None = None
    routing_key: str | None = None
    headers: dict[str, str] | None = None
    idempotency_key: str | None = None


def encode_one(codec: Codec[T], version: int, item: Outgoing[T], subject: str) -> OutgoingRow:
    """Check and encode one message.

    Raises: PayloadInvalid, LimitExceeded, NotBuiltYet.
    """
    if item.idempotency_key is not None:
        raise NotBuiltYet("idempotency keys are not in this release", subject="idempotency_key")
    return OutgoingRow(
        version,
        encode_key("routing key", item.routing_key, subject),
        encode_key("message key", item.message_key, subject),
        encode_headers(item.headers, subject),
        codec.encode(item.payload),
    )


def encode_batch(
    codec: Codec[T], version: int, items: Iterable[T | Outgoing[T]], subject: str
) -> list[OutgoingRow]:
    """Check and encode a batch; the error of a bad item names its index.

    Raises: PayloadInvalid, LimitExceeded, NotBuiltYet. Nothing was stored.
    """
    rows: list[OutgoingRow] = []
    size = 0
    for index, item in enumerate(items):
        if index >= BATCH_LIMIT_MESSAGES:
            raise LimitExceeded(f"a batch holds more than {BATCH_LIMIT_MESSAGES:,} messages", subject=subject)
        outgoing: Outgoing[Any] = item if isinstance(item, Outgoing) else Outgoing(item)
        try:
            row = encode_one(codec, version, outgoing, subject)
        except PayloadInvalid as exc:
            raise type(exc)(f"item {index} of the batch: {exc.message}", subject=exc.subject) from None
        size += len(row.payload)
        if size > BATCH_LIMIT_BYTES:
            raise LimitExceeded(
                f"the payloads of a batch have more than {BATCH_LIMIT_BYTES:,} bytes", subject=subject
            )
        rows.append(row)
    return rows
