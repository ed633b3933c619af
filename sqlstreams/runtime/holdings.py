"""What the tasks of this process know they hold of a group, compared with what Postgres says, again and again.

A claim whose answer was lost may have been done, even long after it was asked. Tokens are minted before they are sent, so
whatever the store says we hold under a token that no task knows is given back.

Guarantee   within two heartbeats of its commit nothing is held by a live node that nobody runs.
Cancelled   nothing is lost: the next comparison finds it. Outage: as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

from actors import Due
from sqlstreams.errors import SQLStreamsError
from sqlstreams.model.values import Token
from sqlstreams.runtime.node import Node
from sqlstreams.runtime.pulse import GroupPulse
from sqlstreams.store import ClaimStore

__all__ = ["Holdings"]

SOON = 1.0  # seconds after a lost answer

_log = logging.getLogger("sqlstreams.consumer")


class Holdings:
    """The tokens that tasks of one process use, and the comparison for one group.

    Args:
        store: what to compare with.
        pulse: the group.
        every: seconds between two comparisons.
        freed: told when something was given back.
        known: the tokens that tasks of this process use, and how often: a node's holdings are those of all its
            consumers; None when there is only one.
    """

    def __init__(
        self,
        store: ClaimStore,
        pulse: GroupPulse,
        every: float,
        freed: Callable[[], None],
        known: dict[Token, int] | None = None,
    ) -> None:
        self._store = store
        self._pulse = pulse
        self._every = every
        self._freed = freed
        self._known: dict[Token, int] = {} if known is None else known
        self._due = Due()
        self.given_back = 0

    def use(self, token: Token) -> None:
        """Tell that a task uses a token, from before it is sent until nothing is held under it: then call `done`."""
        self._known[token] = self._known.get(token, 0) + 1

    def done(self, token: Token) -> None:
        """End one use."""
        self._known[token] -= 1
        if not self._known[token]:
            del self._known[token]

    @contextmanager
    def using(self, token: Token) -> Iterator[None]:
        """Use a token for a block."""
        self.use(token)
        try:
            yield
        finally:
            self.done(token)

    def doubt(self) -> None:
        """Compare soon: an answer was lost."""
        self._due.mark_at(trio.current_time() + SOON)

    async def run(self, node: Node, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Compare once a heartbeat, for as long as the node lives."""
        task_status.started()
        while True:
            self._due.mark_at(trio.current_time() + self._every)
            await self._due.wait()
            self._due.clear()
            try:
                await self.compare(node)
            except SQLStreamsError as exc:
                _log.debug("the comparison of holdings waits: %s", exc)

    async def compare(self, node: Node) -> int:
        """Give back what nobody here runs; return how much that was."""
        group = self._pulse.watched
        given_back = 0
        for held in await self._store.held(group.stream, group.group, node.id, self._pulse.mark):
            # a token that became unknown meanwhile was recorded: then this changes nothing
            if held.token not in self._known and await self._store.release(group.stream, group.group, held):
                given_back += 1
                _log.info(
                    "gave back %s %s of group %s: its claim's answer had been lost",
                    held.kind,
                    held.id,
                    group.group,
                )
        if given_back:
            self.given_back += given_back
            self._freed()
        return given_back
