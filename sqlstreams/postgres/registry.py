"""Streams and groups in Postgres: declared, listed, renamed, destroyed.

Everything that one declaration does is one transaction, so one that was cut off left nothing. Destroying is the exception:
a stream counts as gone from its first step on, and each partition goes in a transaction of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sqlstreams.config import GroupConfig, StreamConfig
from sqlstreams.errors import (
    AlreadyExists,
    ConfigurationError,
    DestroyRefused,
    NotFound,
    ServerRunChanged,
    StatementRefused,
)
from sqlstreams.model.values import GroupId, ServerRun, StreamId
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.part import Part, execute, fetch, fetchrow, fetchval, gone_is_not_found, patiently
from sqlstreams.postgres.schema import STREAM_VERSION
from sqlstreams.store import GroupRow, StreamRow

__all__ = ["Registry", "stream_there"]


class Registry(Part):
    """RegistryStore on Postgres."""

    async def register_stream(self, name: str, config: StreamConfig) -> StreamRow:
        """Declare a stream; unchanged, it costs one read."""
        found = await self.stream_by_name(name)
        if found is not None and found.partition_size == config.partition_size and found.config == config:
            return found
        row = await patiently(lambda: self._pool.unit_of_work(self._register_stream, name, config))
        if row["destroying_at"] is not None:
            await self._drop(StreamId(row["id"]))  # an earlier destroy was cut off: finish it first
            row = await patiently(lambda: self._pool.unit_of_work(self._register_stream, name, config))
        return _stream(row)

    async def stream_by_name(self, name: str) -> StreamRow | None:
        """Return a stream."""
        return stream_there(await self._pool.read(fetchrow, self._sql("stream_by_name"), name))

    async def stream_by_id(self, stream: StreamId) -> StreamRow | None:
        """Return a stream."""
        return stream_there(await self._pool.read(fetchrow, self._sql("stream_by_id"), stream))

    async def streams(self) -> list[StreamRow]:
        """Return all streams by name."""
        return [_stream(row) for row in await self._pool.read(fetch, self._sql("stream_list"))]

    async def rename_stream(self, stream: StreamId, name: str) -> None:
        """Give a stream another name."""
        try:
            done = await self._pool.autocommit(fetchval, self._sql("stream_rename"), stream, name)
        except StatementRefused as exc:
            if exc.sqlstate == "23505":
                raise AlreadyExists("the name is taken", subject=f"stream {name!a}") from exc
            raise
        if done is None:
            raise NotFound("it was destroyed", subject=f"stream {stream}")

    async def destroy_stream(self, stream: StreamId, *, force: bool) -> None:
        """Drop a stream; cut off anywhere, the next call goes on."""
        row = await self._pool.read(fetchrow, self._sql("stream_by_id"), stream)
        if row is None:
            raise NotFound("it was destroyed", subject=f"stream {stream}")
        if row["destroying_at"] is None:
            await self._pool.unit_of_work(self._doom, stream, row["name"], force)
        await self._drop(stream)

    async def register_group(
        self, stream: StreamRow, name: str, config: GroupConfig, *, start: int | None, run: ServerRun | None
    ) -> GroupRow:
        """Declare a group; unchanged, it costs one read."""
        found = await self.group_by_name(stream.id, name)
        if found is not None and found.config == config:
            return found
        with gone_is_not_found(stream.id):
            row = await patiently(
                lambda: self._pool.unit_of_work(self._register_group, stream, name, config, start, run)
            )
        return _group(row)

    async def group_by_name(self, stream: StreamId, name: str) -> GroupRow | None:
        """Return a group."""
        row = await self._pool.read(fetchrow, self._sql("group_by_name"), stream, name)
        return None if row is None else _group(row)

    async def group_by_id(self, group: GroupId) -> GroupRow | None:
        """Return a group."""
        row = await self._pool.read(fetchrow, self._sql("group_by_id"), group)
        return None if row is None else _group(row)

    async def groups(self, stream: StreamId) -> list[GroupRow]:
        """Return all groups of a stream by name."""
        return [_group(row) for row in await self._pool.read(fetch, self._sql("group_list"), stream)]

    async def destroy_group(self, group: GroupRow, *, force: bool) -> None:
        """Delete a group in one transaction, its claims first."""
        with gone_is_not_found(group.stream_id):
            await self._pool.unit_of_work(self._destroy_group, group, force)

    async def _register_stream(self, conn: Connection, name: str, config: StreamConfig) -> Any:
        await conn.execute(self._sql("registry_lock"))
        row = await conn.fetchrow(self._sql("stream_by_name"), name)
        new = msgspec.json.encode(config)
        if row is None:
            row = await conn.fetchrow(
                self._sql("stream_add"), name, config.partition_size, new, STREAM_VERSION
            )
            assert row is not None
            stream = row["id"]
            for version in range(1, STREAM_VERSION + 1):
                await conn.execute(self._sql.script(f"stream_{version}", stream))
            for number in (0, 1):
                await conn.execute(self._sql("make_partition", stream), number, config.partition_size)
            await conn.execute(self._sql("config_changed"), f"stream {name}", None, new)
            return row
        if row["destroying_at"] is not None:
            return row
        if row["partition_size"] != config.partition_size:
            raise ConfigurationError(
                f"partition_size is {config.partition_size:,}, but it was created with {row['partition_size']:,} and stays so",
                subject=f"stream {name!a}",
            )
        if _decoded(row["config"], StreamConfig) == config:
            return row
        await conn.execute(self._sql("config_changed"), f"stream {name}", row["config"], new)
        return await conn.fetchrow(self._sql("stream_change"), row["id"], new)

    async def _doom(self, conn: Connection, stream: StreamId, name: str, force: bool) -> None:  # noqa: FBT001 - private
        await conn.execute(self._sql("registry_lock"))
        if not force:
            if not await conn.fetchval(self._sql("stream_is_empty", stream)):
                raise DestroyRefused("it holds messages", subject=f"stream {name!a}")
            if groups := await conn.fetch(self._sql("group_list"), stream):
                raise DestroyRefused(
                    f"it has {len(groups)} group{'s' * (len(groups) != 1)}", subject=f"stream {name!a}"
                )
        await conn.execute(self._sql("stream_doom"), stream)

    async def _drop(self, stream: StreamId) -> None:
        """Drop partitions one transaction each, so that no transaction takes many locks, then the rest."""
        row = await self._pool.read(fetchrow, self._sql("log_oids", stream))
        if row[0] is not None:
            numbers, _ = await self._pool.read(fetchrow, self._sql("partitions", stream))
            for number in numbers:
                text = self._sql("drop_partition", stream).replace("{partition}", str(int(number)))
                await self._pool.unit_of_work(execute, text)
        await self._pool.unit_of_work(self._drop_rest, stream)

    async def _drop_rest(self, conn: Connection, stream: StreamId) -> None:
        await conn.execute(self._sql("registry_lock"))
        await conn.execute(self._sql("drop_stream", stream))
        await conn.execute(self._sql("stream_delete"), stream)

    async def _register_group(
        self,
        conn: Connection,
        stream: StreamRow,
        name: str,
        config: GroupConfig,
        start: int | None,
        run: ServerRun | None,
    ) -> Any:
        await conn.execute(self._sql("registry_lock"))
        there = await conn.fetchrow(self._sql("stream_by_id"), stream.id)
        if there is None or there["destroying_at"] is not None:
            raise NotFound("it was destroyed", subject=f"stream {stream.name!a}")
        row = await conn.fetchrow(self._sql("group_by_name"), stream.id, name)
        new = msgspec.json.encode(config)
        subject = f"group {name} of stream {there['name']}"
        if row is None:
            await conn.execute(self._sql("stream_lock", stream.id))
            if run is not None and not await conn.fetchval(self._sql("same_run"), run.run):
                raise ServerRunChanged(
                    "the server restarted while the head was looked for", subject=f"group {name!a}"
                )
            if start is None:
                start = await conn.fetchval(self._sql("group_start", stream.id), stream.partition_size)
            group = await conn.fetchval(self._sql("group_add"), stream.id, name, new)
            await conn.execute(self._sql("group_sentinel", stream.id), group, start)
            await conn.execute(self._sql("group_cursor_add"), group, start)
            await conn.execute(self._sql("group_worker_add"), group)
            await conn.execute(self._sql("config_changed"), subject, None, new)
        elif _decoded(row["config"], GroupConfig) != config:
            await conn.execute(self._sql("config_changed"), subject, row["config"], new)
            await conn.execute(self._sql("group_change"), row["id"], new)
        return await conn.fetchrow(self._sql("group_by_name"), stream.id, name)

    async def _destroy_group(self, conn: Connection, group: GroupRow, force: bool) -> None:  # noqa: FBT001 - private
        await conn.execute(self._sql("stream_lock", group.stream_id))
        if not force and (live := await conn.fetchval(self._sql("group_live"), group.id)):
            raise DestroyRefused(f"{live} consumers of it run", subject=f"group {group.name!a}")
        if await conn.fetchval(self._sql("group_wipe", group.stream_id), group.id) is None:
            raise NotFound("it was destroyed", subject=f"group {group.name!a}")
        await conn.execute(self._sql("group_wipe_rest", group.stream_id), group.id)
        await conn.execute(self._sql("group_wipe_history", group.stream_id), group.id)


def _decoded(data: bytes, type_: Any) -> Any:
    """Decode a stored declaration; settings that a newer release added are left out."""
    known = {field.name for field in msgspec.structs.fields(type_)}
    return msgspec.convert(
        {name: value for name, value in msgspec.json.decode(data).items() if name in known},
        type_,
        strict=False,
    )


def stream_there(row: Any) -> StreamRow | None:
    """Turn a row of stream_by_name or stream_by_id into a value; None also for a stream that is being destroyed."""
    return None if row is None or row["destroying_at"] is not None else _stream(row)


def _stream(row: Any) -> StreamRow:
    return StreamRow(
        id=row["id"],
        name=row["name"],
        partition_size=row["partition_size"],
        config=_decoded(row["config"], StreamConfig),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def _group(row: Any) -> GroupRow:
    return GroupRow(
        id=row["id"],
        stream_id=row["stream_id"],
        name=row["name"],
        config=_decoded(row["config"], GroupConfig),
        epoch=row["epoch"],
        worker_id=row["worker_id"],
        paused=row["paused_at"] is not None,
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
