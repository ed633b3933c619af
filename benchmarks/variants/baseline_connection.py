"""The connection of the baseline: the driver as it comes, JSON as bytes."""

from typing import TypeAlias

import asyncpg

__all__ = ["Connection", "connect"]

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


async def connect(dsn: str) -> Connection:
    """Connect. asyncio-flavoured."""
    conn: Connection = await asyncpg.connect(dsn, server_settings={"jit": "off"})
    await conn.set_type_codec("json", schema="pg_catalog", encoder=bytes, decoder=bytes, format="binary")
    return conn
