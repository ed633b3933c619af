"""The store on Postgres, put together from its parts."""

from __future__ import annotations

from sqlstreams.postgres.claims import Claims
from sqlstreams.postgres.exceptions import Exceptions
from sqlstreams.postgres.log import Log
from sqlstreams.postgres.nodes import Nodes
from sqlstreams.postgres.operate import Operate
from sqlstreams.postgres.part import Database, execute
from sqlstreams.postgres.registry import Registry

__all__ = ["PostgresStore"]


class PostgresStore(Registry, Log, Claims, Exceptions, Nodes, Operate):
    """Everything that `sqlstreams.store.Store` asks for, in one schema of one database.

    Args:
        database: the connections and statements.
        channel: the LISTEN channel of this installation.
    """

    def __init__(self, database: Database, channel: str) -> None:
        super().__init__(database)
        self._channel = channel

    async def ring(self, what: str) -> None:
        """Notify the channel, in a transaction of its own: inside a producer's it would serialise commits."""
        await self._pool.autocommit(execute, self._sql("ring"), self._channel, what)
