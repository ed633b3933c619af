"""The client: one connection to one installation, and the actors that serve everything made from it."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar, overload

import trio

from actors import ActorSpec, Backoff, Intensity, Shutdown, open_children, watch_signals
from sqlstreams._version import __version__
from sqlstreams.config import LeaseConfig, whole
from sqlstreams.errors import ConfigurationError, SQLStreamsError
from sqlstreams.model.names import check_schema
from sqlstreams.model.values import Token
from sqlstreams.postgres.bridge import open_bridge
from sqlstreams.postgres.listener import Listener
from sqlstreams.postgres.part import Database
from sqlstreams.postgres.pinned import Pinned
from sqlstreams.postgres.pool import Pool, open_pool
from sqlstreams.postgres.schema import install as install_schema
from sqlstreams.postgres.settings import PoolSettings
from sqlstreams.postgres.statements import Statements
from sqlstreams.postgres.store import PostgresStore
from sqlstreams.runtime.consumer import Process
from sqlstreams.runtime.core import Background, Core
from sqlstreams.runtime.doorbell import Doorbell, Rings
from sqlstreams.runtime.node import Identity, Nodes
from sqlstreams.runtime.observer import Observer
from sqlstreams.runtime.pulse import Pulse
from sqlstreams.store import NodeRow, StreamRow
from sqlstreams.stream import Stream
from sqlstreams.transaction import Transaction

__all__ = ["DATABASE_URL", "Client", "connect"]

T = TypeVar("T")

DATABASE_URL = "SQLSTREAMS_DATABASE_URL"
CHILD_GRACE = 1.0  # seconds that each actor of the client has to end
END_SECONDS = 2.0  # for the last ring and the end of the node
ACTOR_RESTARTS, ACTOR_WITHIN = 10, 60.0

_log = logging.getLogger("sqlstreams")


class Client:
    """One connection to one installation. Made by `connect`."""

    def __init__(self, core: Core, pool: Pool, sql: Statements) -> None:
        self._core = core
        self._pool = pool
        self._sql = sql

    @overload
    def stream(self, name: str, type_: type[T], *, version: int = 1) -> Stream[T]: ...
    @overload
    def stream(self, name: str, *, version: int = 1) -> Stream[Any]: ...
    def stream(self, name: str, type_: Any = Any, *, version: int = 1) -> Stream[Any]:
        """Return the handle of a stream. No I/O.

        Args:
            name: 1 to 200 bytes, printable; quotes and every script are fine.
            type_: of the payloads: whatever msgspec knows; none means any JSON, `msgspec.Raw` the bytes as they are.
            version: of the payload type, stored with each message.

        Raises: ConfigurationError.
        """
        return Stream(self._core, name, type_, version)

    async def streams(self) -> list[StreamRow]:
        """Return all declared streams by name."""
        self._core.check_open()
        return await self._core.store.streams()

    async def nodes(self, *, ended: bool = False) -> list[NodeRow]:
        """Return the nodes (processes that hold or held something), newest first; ended ones too if asked."""
        self._core.check_open()
        return await self._core.store.nodes(ended=ended)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """A transaction in which the application's SQL and any `produce(…, tx=tx)` commit together.

        Guarantee: left without an exception, it is committed, and consumers are woken; else nothing happened.
        Isolation is READ COMMITTED; it takes one of the pool's connections for as long as it lasts.

        Cancelled: nothing was done, or the commit was under way: then it is done, or `OutcomeUnknown` is raised.
        Raises: OutcomeUnknown, TransactionAborted (an error of a statement was swallowed), StoreUnavailable.
        """
        self._core.check_open()
        async with self._pool.transaction() as tx:
            transaction = Transaction(tx, self._sql)
            yield transaction
        for stream in transaction.committed():
            self._core.process.doorbell.produced(stream)

    def drain(self, reason: str = "asked by the program") -> None:
        """Ask every `consume` of this client to stop: no new messages, running handlers end, then `consume` returns.

        Handlers that outlast the shutdown budget (the group's timeout + 2 s by default) are cancelled; their messages are
        free at once, with no attempt counted.
        """
        self._core.process.shutdown.request(reason)

    @asynccontextmanager
    async def drain_on_signals(self, *signals: int) -> AsyncIterator[None]:
        """Drain at the first SIGTERM or SIGINT; at the second, leave the process at once with 128 + the signal's number.

        Args:
            signals: others than these two. Only the main thread may use it.
        """
        numbers = signals or (signal.SIGTERM, signal.SIGINT)
        try:
            async with trio.open_nursery() as nursery:

                async def watch(*, task_status: trio.TaskStatus[None]) -> None:
                    await watch_signals(
                        self._core.process.shutdown, numbers, on_second=_leave, task_status=task_status
                    )

                await nursery.start(watch)
                yield
                nursery.cancel_scope.cancel(reason="the block has ended")
        except BaseExceptionGroup as group:
            if len(group.exceptions) > 1:
                raise
            failure = group.exceptions[0]  # our nursery wrapped what the block raised
        else:
            return
        raise failure


@asynccontextmanager
async def connect(
    dsn: str | None = None,
    *,
    schema: str = "sqlstreams",
    pool_size: int = 4,
    manager: bool = True,
    listen: bool = True,
    pooler: bool = False,
    allow_destroy: bool = False,
    install: bool = True,
    lease: LeaseConfig | None = None,
    application_name: str | None = None,
) -> AsyncIterator[Client]:
    """Connect to an installation for a block, and install it when it is missing.

    Args:
        dsn: `postgresql://…`, several hosts are fine; None: $SQLSTREAMS_DATABASE_URL.
        schema: one schema is one installation.
        pool_size: connections for everybody; three more serve heartbeats, observations and LISTEN when needed.
        manager: run the system manager beside consumers (from the release on that has it).
        listen: be woken by LISTEN; without, messages arrive within 500 ms. Not behind a transaction pooler.
        pooler: there is a transaction pooler (PgBouncer) in between.
        allow_destroy: allow `destroy` at all.
        install: create or update the schema; otherwise `NotInstalled` when it is not there.
        lease: how long this process keeps what it holds when it falls silent.
        application_name: shown in pg_stat_activity.

    Cancelled, and at the end of the block: actors are stopped, the node is ended, connections are closed, within about 5 s.
    Raises: ConfigurationError (before any I/O), StoreUnavailable, AuthenticationFailed, PermissionDenied, NotInstalled,
        SchemaTooNew; what the block raises.
    """
    check_schema(schema)
    whole("connect", "pool_size", pool_size, 1, 1_000)
    lease = LeaseConfig() if lease is None else lease
    if not isinstance(lease, LeaseConfig):
        raise ConfigurationError(f"a LeaseConfig is needed, not {type(lease).__name__}", subject="lease")
    settings = PoolSettings(
        dsn=_dsn(dsn),
        size=pool_size,
        grace=lease.grace.total_seconds(),
        application_name=application_name,
        pooler=pooler,
    )
    sql = Statements(schema)
    rng = random.Random()  # noqa: S311 - jitter
    async with AsyncExitStack() as stack:
        bridge = await stack.enter_async_context(open_bridge(grace=settings.grace))
        pool = await stack.enter_async_context(open_pool(bridge, settings))
        pinned = {name: Pinned(bridge, settings, name=name) for name in ("node", "watch", "ddl")}
        for conn in pinned.values():
            stack.push_async_callback(conn.close)
        await install_schema(pool, sql, schema, allowed=install)
        channel = _channel(schema)
        store = PostgresStore(
            Database(pool, pinned["node"], pinned["watch"], pinned["ddl"], sql, _make_token), channel
        )
        nodes = Nodes(store, lease, _identity(application_name), _make_token, rng)
        listener: Listener | None = None
        observer = Observer(store, rng, lambda: listener is not None and listener.up)
        pulse = Pulse(store, nodes, rng)
        shutdown, sender = Shutdown(), uuid.uuid4().hex[:12]
        rings = Rings(observer.ring, pulse.ring, _both(observer.ring_all, pulse.look))
        doorbell = Doorbell(store, rings, sender)
        background = Background()
        process = Process(
            store, nodes, observer, pulse, doorbell, shutdown, _make_token, rng, lease.grace.total_seconds()
        )
        core = Core(process, background, rng, allow_destroy=allow_destroy, manager=manager)
        if listen and not pooler:
            listener = Listener(
                bridge,
                settings,
                channel,
                on_ring=lambda text: rings.arrived(text, sender),
                on_wake_all=rings.everything,
                random=rng,
            )
        children = await stack.enter_async_context(open_children(grace=CHILD_GRACE))
        await children.start("background", background.run)
        for name, actor in (
            ("node", nodes.run),
            ("observer", observer.run),
            ("pulse", pulse.run),
            ("doorbell", doorbell.run),
            *((("listener", listener.run),) if listener is not None else ()),
        ):
            backoff = Backoff(0.1, 5.0, random=rng, jitter=0.5)
            await children.start_kept(
                ActorSpec(name, actor, intensity=Intensity(ACTOR_RESTARTS, ACTOR_WITHIN), backoff=backoff)
            )
        try:
            yield Client(core, pool, sql)
        finally:
            core.closed = True
            with trio.move_on_after(END_SECONDS, shield=True):  # bounded: END_SECONDS, two graces
                await _end(doorbell, nodes)


async def _end(doorbell: Doorbell, nodes: Nodes) -> None:
    """Ring for what is pending and end the node; when that fails, the lease ends by itself."""
    await trio.lowlevel.checkpoint()
    try:
        await doorbell.flush()
        await nodes.end()
    except SQLStreamsError as exc:
        _log.info("the node could not be ended and runs out: %s", exc)


def _dsn(dsn: str | None) -> str:
    found = os.environ.get(DATABASE_URL) if dsn is None else dsn
    if not found:
        raise ConfigurationError(
            f"there is no database URL: neither the argument nor ${DATABASE_URL} is set", subject="dsn"
        )
    if not found.startswith(("postgresql://", "postgres://")):
        raise ConfigurationError("the database URL must start with postgresql://", subject="dsn")
    return found


def _identity(application_name: str | None) -> Identity:
    name = application_name or (os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python")  # noqa: PTH119
    return Identity(name[:100], socket.gethostname()[:100], os.getpid(), __version__)


def _make_token() -> Token:
    return Token(uuid.uuid4())


def _channel(schema: str) -> str:
    """Return the channel of an installation: the schema's name, where it fits into 63 bytes."""
    name = f"sqlstreams_{schema}"
    return name if len(name) < 63 else f"sqlstreams_{hashlib.sha256(schema.encode()).hexdigest()[:40]}"


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _leave(number: int) -> None:
    """Leave at once: a handler may hang in a thread that nothing can end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + number)
