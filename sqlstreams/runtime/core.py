"""What a client is made of, for the handles: the store and the actors that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import trio

from sqlstreams.errors import ClientClosed
from sqlstreams.model.values import StreamId
from sqlstreams.runtime.batcher import Batcher
from sqlstreams.runtime.consumer import Process
from sqlstreams.runtime.partitions import Runway
from sqlstreams.store import Store, StreamRow

__all__ = ["Background", "Core"]


class Background:
    """Tasks that outlive the call that needed them, and end with the client."""

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None

    def spawn(self, fn: Callable[..., Any], *args: Any) -> None:
        """Start a task. Raises: ClientClosed."""
        if self._nursery is None:
            raise ClientClosed("its block has ended")
        try:
            self._nursery.start_soon(fn, *args)
        except RuntimeError as exc:  # the nursery is closing
            raise ClientClosed("its block has ended") from exc

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the tasks."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None


class Core:
    """The inside of a client.

    Args:
        process: what consumers share.
        background: where tasks of producers run.
        random: jitter.
        allow_destroy: whether destroying is allowed at all.
        manager: whether consumers run the system manager beside them, once there is one.
    """

    def __init__(
        self, process: Process, background: Background, random: Random, *, allow_destroy: bool, manager: bool
    ) -> None:
        self.process = process
        self.background = background
        self.random = random
        self.allow_destroy = allow_destroy
        self.manager = manager
        self.closed = False
        self._producers: dict[StreamId, tuple[Batcher, Runway]] = {}

    @property
    def store(self) -> Store:
        """The store."""
        return self.process.store

    def check_open(self) -> None:
        """Refuse a call after the block has ended. Raises: ClientClosed."""
        if self.closed:
            raise ClientClosed("its block has ended")

    def producer(self, stream: StreamRow) -> tuple[Batcher, Runway]:
        """Return what all produces of one stream share."""
        found = self._producers.get(stream.id)
        if found is None:
            spawn = self.background.spawn
            runway = Runway(self.process.store, stream.id, stream.partition_size, spawn, self.random)
            batcher = Batcher(
                self.process.store, stream.id, runway, self.process.doorbell.produced, spawn, self.random
            )
            found = self._producers[stream.id] = batcher, runway
        return found
