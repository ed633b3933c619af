"""The node: this process as the holder of one lease, registered when something first needs it.

Guarantee   whoever works under a node's guard is cancelled before the node can be ended by anybody else.
Relies on   a heartbeat that names its token; a node that ended never comes back.
Cancelled   a registration that was cut off runs out by itself: nobody holds anything by it.
Outage      registering waits and tries again; the guards of the old node fire in time, without any answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import trio

from actors import Backoff, Lease, heartbeat
from sqlstreams.config import LeaseConfig
from sqlstreams.errors import Contended, OutcomeUnknown, SQLStreamsError, StoreUnavailable
from sqlstreams.model.values import NodeId, Token
from sqlstreams.store import NodeStore

__all__ = ["OUTAGES", "Identity", "Node", "Nodes"]

OUTAGES = (StoreUnavailable, OutcomeUnknown, Contended)  # conditions that pass by themselves
RETRY_FIRST, RETRY_CAP = 0.2, 2.0  # seconds between two tries to register

_log = logging.getLogger("sqlstreams.node")


@dataclass(frozen=True)
class Identity:
    """What a node says about its process."""

    name: str
    host: str
    pid: int
    version: str


@dataclass(frozen=True)
class Node:
    """A registered node and its lease."""

    id: NodeId
    token: Token
    lease: Lease


class Nodes:
    """Registers this process, keeps its lease, and registers it anew when the lease was lost.

    Args:
        store: where nodes are kept.
        config: how long the lease lasts.
        identity: what to tell about this process.
        make_token: mints tokens.
        random: the jitter of heartbeats and of tries to register.
    """

    def __init__(
        self,
        store: NodeStore,
        config: LeaseConfig,
        identity: Identity,
        make_token: Callable[[], Token],
        random: Random,
    ) -> None:
        self._store = store
        self.config = config
        self._identity = identity
        self._make_token = make_token
        self._random = random
        self._lock = trio.Lock()
        self._node: Node | None = None
        self._registered = trio.Event()
        self._silent: dict[NodeId, tuple[int, float]] = {}

    @property
    def held(self) -> Node | None:
        """The node if its lease is held, else None."""
        return None if self._node is None or self._node.lease.lost else self._node

    async def current(self) -> Node:
        """Return this process' node, registering it when there is none or its lease was lost.

        Waits while Postgres cannot be reached. A former node is ended in the same statement, so its work is free at once.

        Cancelled: a node may have been registered; it holds nothing and runs out.
        Raises: PermissionDenied and whatever else does not pass by itself.
        """
        async with self._lock:
            if self.held is None:
                self._node = await self._register()
                self._registered.set()
                self._registered = trio.Event()
            assert self._node is not None
            return self._node

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Beat for the current node, and for the next one when it was lost."""
        task_status.started()
        while True:
            if (node := self.held) is None:
                await self._registered.wait()
                continue
            every = self.config.heartbeat.total_seconds()
            await heartbeat(
                node.lease,
                lambda node=node: self._store.heartbeat(node.id, node.token, self.config.ttl),  # type: ignore[misc]
                every,
                self._random,
                outage=SQLStreamsError,
            )
            if self._node is not node:
                continue  # ended by ourselves
            _log.warning(
                "the lease of node %s was lost (%s); everything it held has been cancelled",
                node.id,
                node.lease.reason or "no heartbeat was answered in time",
            )

    async def end_others(self) -> None:
        """End nodes whose lease is over; and those that stood still for two leases by our own clock.

        The second covers a database clock that was set back, after which no lease seems to run out.
        """
        await self._store.end_expired_nodes()

    async def watch_silent(self) -> None:
        """Look at everybody's beats, and end who has not beaten for two of its own leases by our clock."""
        if (node := self.held) is None:
            return
        now, seen = trio.current_time(), await self._store.beats(node.id)
        kept: dict[NodeId, tuple[int, float]] = {}
        for other, (beats, ttl) in seen.items():
            before = self._silent.get(other)
            since = now if before is None or before[0] != beats else before[1]
            if now - since > 2 * ttl:
                await self._store.end_silent_node(other, beats)
            else:
                kept[other] = (beats, since)
        self._silent = kept

    async def end(self) -> None:
        """End our node: what it still holds is free at once. The caller bounds it."""
        if (node := self._node) is not None:
            self._node = None
            node.lease.lose("the process stops")
            await self._store.end_own_node(node.id, node.token)

    async def _register(self) -> Node:
        config, identity = self.config, self._identity
        former = None if self._node is None else (self._node.id, self._node.token)
        backoff = Backoff(RETRY_FIRST, RETRY_CAP, random=self._random, jitter=0.5)
        while True:
            asked, token = trio.current_time(), self._make_token()
            try:
                with trio.fail_after(config.heartbeat.total_seconds()):
                    node = await self._store.register_node(
                        identity.name,
                        identity.host,
                        identity.pid,
                        identity.version,
                        config.ttl,
                        token,
                        former,
                    )
            except (*OUTAGES, trio.TooSlowError) as exc:
                _log.info("registering this process waits: %s", exc)
            else:
                lease = Lease(asked, config.ttl.total_seconds(), config.margin.total_seconds())
                if not lease.lost:
                    return Node(node, token, lease)
                former = (node, token)
            await trio.sleep(backoff())
