"""Installing the schema, and the handshake with one that is there.

A schema has a version, and each step that raised it says the oldest release of the schema that still works with it: so an
older process goes on beside an additive step and is refused by a breaking one.
"""

from __future__ import annotations

from sqlstreams.errors import NotInstalled, SchemaTooNew
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.part import execute, fetchrow, fetchval, patiently
from sqlstreams.postgres.pool import Pool
from sqlstreams.postgres.statements import Statements

__all__ = ["STREAM_VERSION", "SYSTEM_VERSION", "install"]

SYSTEM_VERSION = 1  # the newest step in sql/schema/system_N.sql
STREAM_VERSION = 1  # the newest step in sql/schema/stream_N.sql
WORKS_WITH = {1: 1}  # step -> the oldest SYSTEM_VERSION that still works with it


async def install(pool: Pool, sql: Statements, schema: str, *, allowed: bool) -> None:
    """Bring the schema to this release's version, or find it good enough.

    Guarantee: each call sees either nothing or all of a step; many processes at once do it once. An installed schema
    costs one read.

    Raises:
        NotInstalled: it is not there and `allowed` is False.
        SchemaTooNew: it was written by a release that this one does not work with.
        PermissionDenied: the role may not create a schema in this database.
    """
    there = await _version(pool, sql, schema)
    if there < SYSTEM_VERSION:
        if not allowed:
            raise NotInstalled(
                f"it has version {there}, this release needs {SYSTEM_VERSION}"
                if there
                else "it is not there",
                subject=f"schema {schema!a}",
            )
        await patiently(lambda: pool.unit_of_work(_install, sql, schema))


async def _version(pool: Pool, sql: Statements, schema: str) -> int:
    if not await pool.read(fetchval, sql("installed"), schema):
        return 0
    version, works_with = await pool.read(fetchrow, sql("versions"))
    if works_with > SYSTEM_VERSION:
        raise SchemaTooNew(
            f"it has version {version}, which needs at least {works_with}; this release knows {SYSTEM_VERSION}",
            subject=f"schema {schema!a}",
        )
    return int(version)


async def _install(conn: Connection, sql: Statements, schema: str) -> None:
    await execute(conn, sql("install_lock"), schema)
    there = 0
    if await conn.fetchval(sql("installed"), schema):
        there = await conn.fetchval(sql("versions"))
    else:
        await conn.execute(sql("create_schema"))
    for version in range(there + 1, SYSTEM_VERSION + 1):
        await conn.execute(sql.script(f"system_{version}"))
        await conn.execute(sql("add_migration"), version, WORKS_WITH[version], f"sqlstreams schema {version}")
