"""Payloads: encoded to JSON bytes before the database is asked, decoded in the process that handles them.

No error of this module quotes a payload: it names the field and the expected type, never a value.
"""

from __future__ import annotations

import re
from typing import Generic, TypeVar

import msgspec

from sqlstreams.config import HEADERS_LIMIT_BYTES, KEY_LIMIT_BYTES, PAYLOAD_LIMIT_BYTES
from sqlstreams.errors import ConfigurationError, LimitExceeded, PayloadInvalid

__all__ = ["Codec", "Undecodable", "check_json", "decode_headers", "encode_headers", "encode_key"]

T = TypeVar("T")

_EXPECTED = re.compile(r"^Expected `[^`]*`(?:, got `[^`]*`)?")
_AT = re.compile(r" - at `([^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `([^`]*)`")
_encode_headers = msgspec.json.Encoder().encode


class Undecodable(Exception):
    """A payload that is not of the stream's type; the text names the place and the type, never the value."""


class Codec(Generic[T]):
    """Encodes and decodes the payloads of one stream handle.

    Args:
        type_: any type msgspec knows (Struct, dataclass, TypedDict, dict, …); `msgspec.Raw` passes bytes through.
        subject: what errors are about, for example "stream 'orders'".
    """

    def __init__(self, type_: type[T], subject: str) -> None:
        self._subject = subject
        self._raw = type_ is msgspec.Raw
        self._encode = msgspec.json.Encoder().encode
        try:
            self._decode = msgspec.json.Decoder(type_).decode
        except (TypeError, NotImplementedError, RecursionError) as exc:
            raise ConfigurationError(
                f"the payload type is not one that msgspec can decode ({exc})", subject=subject
            ) from exc

    def encode(self, payload: T) -> bytes:
        """Return the payload as JSON bytes.

        Raises:
            PayloadInvalid: it does not encode, or a `Raw` is not valid JSON. Nothing was done.
            LimitExceeded: it is larger than 16 MiB.
        """
        why, data = "", b""
        try:
            if isinstance(payload, msgspec.Raw):
                data = bytes(payload)
                check_json(data, self._subject)
            else:
                data = self._encode(payload)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as exc:
            why = type(exc).__name__
        if why:  # raised out here: the text of a UnicodeEncodeError quotes the payload, and would be our error's context
            raise PayloadInvalid(
                f"a payload of type {type(payload).__name__} does not encode to JSON ({why})",
                subject=self._subject,
            )
        if len(data) > PAYLOAD_LIMIT_BYTES:
            raise LimitExceeded(
                f"the payload has {len(data):,} bytes, allowed are {PAYLOAD_LIMIT_BYTES:,}",
                subject=self._subject,
            )
        return data

    def decode(self, data: bytes) -> T:
        """Return the payload.

        Raises:
            Undecodable: it is not of this type; the text holds no part of the payload.
        """
        if self._raw:
            return msgspec.Raw(data)  # type: ignore[return-value]  # T is Raw; the decoder would trim white space
        try:
            return self._decode(data)
        except msgspec.ValidationError as exc:
            why = _without_values(str(exc))
        except msgspec.DecodeError:
            why = "the payload is not JSON that this process can decode"
        except RecursionError:
            why = "the payload is nested too deeply"
        except Exception as exc:  # noqa: BLE001 - a hook or __post_init__ of the user's type may raise anything
            why = f"the payload's type refused it ({type(exc).__name__})"
        raise Undecodable(
            why
        )  # out here: the caught error quotes the payload, and would be our error's context


def check_json(data: bytes, subject: str) -> None:
    """Refuse bytes that Postgres' `json` would refuse.

    Raises:
        PayloadInvalid: not UTF-8, not JSON, or nested more than about a thousand levels. The text quotes nothing.
    """
    try:
        data.decode("utf-8")
        msgspec.json.decode(data, type=msgspec.Raw)  # looks at the syntax only: 1e400 is JSON
    except (ValueError, RecursionError, msgspec.MsgspecError) as exc:
        why = type(exc).__name__
    else:
        return
    raise PayloadInvalid(
        f"the payload is not valid JSON text ({why})", subject=subject
    )  # out here: see Codec.encode


def encode_key(kind: str, key: str | None, subject: str) -> str | None:
    """Check a message key or routing key and return it.

    Raises:
        PayloadInvalid: not a str, or it holds U+0000 or a lone surrogate.
        LimitExceeded: it has more than 1,024 bytes of UTF-8.
    """
    if key is None:
        return None
    size = len(_text(kind, key, subject))
    if size > KEY_LIMIT_BYTES:
        raise LimitExceeded(
            f"the {kind} has {size:,} bytes, allowed are {KEY_LIMIT_BYTES:,}", subject=subject
        )
    return key


def encode_headers(headers: dict[str, str] | None, subject: str) -> bytes | None:
    """Return headers as JSON bytes, None when there are none.

    Raises:
        PayloadInvalid: not a dict of str to str, or a text holds U+0000 or a lone surrogate.
        LimitExceeded: more than 16 KiB.
    """
    if not headers:
        if headers is None or headers == {}:
            return None
        raise PayloadInvalid("headers must be a dict of str to str", subject=subject)
    if not isinstance(headers, dict):
        raise PayloadInvalid("headers must be a dict of str to str", subject=subject)
    for name, value in headers.items():
        _text("header's name", name, subject)
        _text("header's value", value, subject)
    data = _encode_headers(headers)
    if len(data) > HEADERS_LIMIT_BYTES:
        raise LimitExceeded(
            f"the headers have {len(data):,} bytes, allowed are {HEADERS_LIMIT_BYTES:,}", subject=subject
        )
    return data


def _text(kind: str, value: object, subject: str) -> bytes:
    if not isinstance(value, str):
        raise PayloadInvalid(f"the {kind} must be a str, not {type(value).__name__}", subject=subject)
    if "\0" in value:
        raise PayloadInvalid(f"the {kind} holds U+0000, which Postgres cannot store", subject=subject)
    data = value.encode("utf-8", "surrogatepass")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise PayloadInvalid(f"the {kind} holds a lone surrogate", subject=subject)
    return data


def _without_values(text: str) -> str:
    """Reduce a message of msgspec to its place and its expectation; the rest may quote a value."""
    at = _AT.search(text)
    place = f" at {at.group(1)}" if at else ""
    if found := _EXPECTED.match(text):
        return found.group(0) + place
    if found := _MISSING.match(text):
        return f"Object missing required field `{found.group(1)}`{place}"
    return f"the payload does not match the stream's type{place}"


def decode_headers(data: bytes | None) -> dict[str, str]:
    """Return stored headers as a dict; whatever was written by hand and is no dict of str becomes empty."""
    if data is None:
        return {}
    try:
        return msgspec.json.decode(data, type=dict[str, str])
    except (msgspec.MsgspecError, RecursionError):
        return {}
