"""Nodes in Postgres: register, beat, end. The heartbeat has a connection of its own, so that it never waits for the pool.

Source: docs/explanation/leases.md
"""

from __future__ import annotations

from datetime import timedelta

from sqlstreams.model.values import NodeId, Token
from sqlstreams.postgres.part import Part, fetch, fetchval
from sqlstreams.store import NodeRow

__all__ = ["Nodes"]


class Nodes(Part):
    """NodeStore on Postgres."""

    async def register_node(
        self,
        name: str,
        host: str,
        pid: int,
        version: str,
        ttl: timedelta,
        token: Token,
        former: tuple[NodeId, Token] | None,
    ) -> NodeId:
        """Register this process, and end the node it was before in the same statement."""
        node, its_token = former or (None, None)
        registered = await self._db.node.autocommit(
            fetchval, self._sql("node_register"), name, host, pid, version, ttl, token, node, its_token
        )
        return NodeId(registered)

    async def heartbeat(self, node: NodeId, token: Token, ttl: timedelta) -> bool:
        """Extend the lease: one UPDATE of one row."""
        return (
            await self._db.node.autocommit(fetchval, self._sql("node_heartbeat"), node, token, ttl)
            is not None
        )

    async def end_own_node(self, node: NodeId, token: Token) -> bool:
        """End our own node."""
        return await self._db.node.autocommit(fetchval, self._sql("node_end_own"), node, token) is not None

    async def end_expired_nodes(self) -> int:
        """End nodes whose lease is over, each guarded by the beats that were read."""
        ended = 0
        for node, beats in await self._pool.read(fetch, self._sql("node_expired")):
            ended += await self._pool.autocommit(fetchval, self._sql("node_end"), node, beats) is not None
        return ended

    async def beats(self, own: NodeId) -> dict[NodeId, tuple[int, float]]:
        """Return the beats, and the ttl in seconds, of every other node that has not ended."""
        rows = await self._pool.read(fetch, self._sql("node_live"), own)
        return {NodeId(row[0]): (row[1], row[2]) for row in rows}

    async def end_silent_node(self, node: NodeId, beats: int) -> bool:
        """End a node whose beats stood still."""
        return await self._pool.autocommit(fetchval, self._sql("node_end_silent"), node, beats) is not None

    async def nodes(self, *, ended: bool) -> list[NodeRow]:
        """Return the nodes, newest first."""
        rows = await self._pool.read(fetch, self._sql("node_list"), ended)
        return [
            NodeRow(
                id=row["id"],
                name=row["name"],
                host=row["host"],
                pid=row["pid"],
                version=row["version"],
                started_at=row["started_at"],
                ended_at=row["ended_at"],
                lease_left=row["lease_left"],
                holds=row["holds"],
            )
            for row in rows
        ]

    async def join(self, worker_id: int, node: NodeId, token: Token) -> bool:
        """Become an instance of a worker."""
        return (
            await self._pool.autocommit(fetchval, self._sql("instance_claim"), worker_id, node, token)
            is not None
        )

    async def leave(self, token: Token) -> None:
        """Stop being an instance."""
        await self._pool.autocommit(fetchval, self._sql("instance_release"), token)
