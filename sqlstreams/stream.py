"""The handle of a stream. Making one does no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Generic, TypeVar

import msgspec
import trio

from sqlstreams.codec import Codec, Undecodable, decode_headers
from sqlstreams.config import StreamConfig, whole
from sqlstreams.consumer import ConsumerGroup
from sqlstreams.errors import ConfigurationError, DestroyRefused, NotFound, PayloadInvalid
from sqlstreams.model.names import check_name
from sqlstreams.producer import Outgoing, Sent, encode_batch, encode_one
from sqlstreams.runtime.batcher import append
from sqlstreams.runtime.core import Core
from sqlstreams.store import GroupRow, StreamRow
from sqlstreams.transaction import Transaction

__all__ = ["Message", "Stream"]

T = TypeVar("T")

READ_BYTES = 32 * 1024 * 1024


class Message(msgspec.Struct, Generic[T], frozen=True):
    """A message as `read` returns it."""

    id: int
    payload: T
    created_at: datetime
    message_key: str | None
    routing_key: str | None
    headers: dict[str, str]
    schema_version: int


class Stream(Generic[T]):
    """A stream by its name. After its first use the handle belongs to that very stream, also when it is renamed.

    Made by `client.stream(name, type, version=1)`; `name` is as it was given, or as `rename` set it.
    """

    def __init__(self, core: Core, name: str, type_: type[T], version: int) -> None:
        check_name("stream", name, system=True)
        whole("stream", "version", version, 1, 2**31 - 1)
        self.name = name
        self.version = version
        self._core = core
        self._codec: Codec[T] = Codec(type_, f"stream {name!a}")
        self._row: StreamRow | None = None

    async def register(self, config: StreamConfig | None = None) -> StreamRow:
        """Declare the stream, with its log, and return what is declared now.

        Guarantee: idempotent and safe from many processes at once; the newest declaration wins as a whole, an unchanged
        one writes nothing, a changed one is recorded in `config_event`.

        Cancelled: declared or not; calling again completes it.
        Raises: ConfigurationError (a reserved name, another partition size), PermissionDenied.
        """
        self._core.check_open()
        check_name("stream", self.name)
        config = StreamConfig() if config is None else config
        if not isinstance(config, StreamConfig):
            raise ConfigurationError(
                f"a StreamConfig is needed, not {type(config).__name__}", subject=self._subject
            )
        self._row = await self._core.store.register_stream(self.name, config)
        return self._row

    async def get(self) -> StreamRow | None:
        """Return what is declared, None when there is no such stream."""
        self._core.check_open()
        if self._row is not None:
            return await self._core.store.stream_by_id(self._row.id)
        return await self._core.store.stream_by_name(self.name)

    async def rename(self, name: str) -> None:
        """Give the stream another name; whoever works with it goes on.

        Raises: AlreadyExists, NotFound, ConfigurationError. Cancelled: renamed or not.
        """
        check_name("stream", name)
        row = await self.resolve()
        await self._core.store.rename_stream(row.id, name)
        self.name = name

    async def destroy(self, *, force: bool = False) -> None:
        """Drop the stream with all its messages and groups.

        Cut off anywhere, the stream counts as gone, and calling again drops the rest.

        Raises: DestroyRefused (without `allow_destroy`; or with messages or groups, without `force`), NotFound, Contended
            (a producer is in the way; call again).
        """
        if not self._core.allow_destroy:
            raise DestroyRefused("this client may not destroy anything", subject=self._subject)
        row = await self.resolve()
        await self._core.store.destroy_stream(row.id, force=force)

    async def produce(
        self,
        payload: T,
        *,
        message_key: str | None = None,
        routing_key: str | None = None,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tx: Transaction | None = None,
    ) -> Sent:
        """Append one message; calls of many tasks share transactions.

        Returned: it is committed (with `tx`: it will be, when the transaction is).

        Args:
            payload: of the stream's type; at most 16 MiB as JSON.
            message_key: at most 1,024 bytes.
            routing_key: at most 1,024 bytes.
            headers: at most 16 KiB as JSON.
            idempotency_key: not in this release.
            tx: of `client.transaction()`.

        Cancelled: stored or not.
        Raises: PayloadInvalid, LimitExceeded, NotFound, StoreUnavailable, PartitionMissing, StatementRefused (nothing was
            stored); OutcomeUnknown (stored or not).
        """
        outgoing = Outgoing(payload, message_key, routing_key, headers, idempotency_key)
        row = encode_one(self._codec, self.version, outgoing, self._subject)
        stream = self._row or await self.resolve(tx)
        self._core.check_open()
        batcher, runway = self._core.producer(stream)
        if tx is not None:
            return Sent((await tx.append(stream.id, [row], runway))[0])
        return Sent(await batcher.produce(row))

    async def produce_batch(
        self, items: Iterable[T | Outgoing[T]], *, tx: Transaction | None = None
    ) -> list[Sent]:
        """Append messages in one transaction; ids come back in the order of the items.

        Args:
            items: payloads, or `Outgoing(payload, message_key=…)`; at most 10,000 and 64 MiB.
            tx: of `client.transaction()`.

        Cancelled: all stored or none.
        Raises: as `produce`; a bad item is named by its index, and nothing was stored.
        """
        rows = encode_batch(self._codec, self.version, items, self._subject)
        stream = self._row or await self.resolve(tx)
        self._core.check_open()
        if not rows:
            await trio.lowlevel.checkpoint()
            return []
        _, runway = self._core.producer(stream)
        if tx is not None:
            return [Sent(id_) for id_ in await tx.append(stream.id, rows, runway)]
        ids = await append(self._core.store, stream.id, runway, rows, self._core.random)
        self._core.process.doorbell.produced(stream.id)
        return [Sent(id_) for id_ in ids]

    async def read(self, *, after: int = 0, limit: int = 100) -> list[Message[T]]:
        """Return committed messages in id order, for people who look; consumers have `consume`.

        Args:
            after: ids above it.
            limit: how many at most; fewer come back when they are large (about 32 MiB at once).

        Raises: PayloadInvalid (one does not decode; read it with type `msgspec.Raw`), NotFound.
        """
        stream = await self.resolve()
        top = 2**63 - 1
        rows = await self._core.store.read_range(stream.id, after, top, rows=limit, size=READ_BYTES)
        messages = []
        for row in rows:
            try:
                payload = self._codec.decode(row.payload)
            except Undecodable as exc:
                raise PayloadInvalid(
                    f"message {row.id} does not decode: {exc}", subject=self._subject
                ) from None
            messages.append(
                Message(
                    row.id,
                    payload,
                    row.created_at,
                    row.message_key,
                    row.routing_key,
                    decode_headers(row.headers),
                    row.schema_version,
                )
            )
        return messages

    def consumer(self, name: str) -> ConsumerGroup[T]:
        """Return the handle of a consumer group of this stream. No I/O."""
        return ConsumerGroup(self._core, self, name)

    async def consumers(self) -> list[GroupRow]:
        """Return the declared groups of this stream by name."""
        return list(await self._core.store.groups((await self.resolve()).id))

    async def resolve(self, tx: Transaction | None = None) -> StreamRow:
        """Return what is declared now. Raises: NotFound, also when the stream was destroyed and another has its name.

        Args:
            tx: look on its connection: waiting for another one of the pool while it holds this one could be for ever.
        """
        self._core.check_open()
        if tx is None:
            row = await self.get()
        elif self._row is not None:
            row = await tx.stream_by_id(self._row.id)
        else:
            row = await tx.stream_by_name(self.name)
        if row is None:
            raise NotFound("it is not registered", subject=self._subject)
        self._row = row
        return row

    @property
    def codec(self) -> Codec[T]:
        """Encodes and decodes this handle's payloads."""
        return self._codec

    @property
    def _subject(self) -> str:
        return f"stream {self.name!a}"
