"""The listener: one pinned connection that LISTENs for rings, checks itself, and comes back after a loss.

Guarantee   after every (re-)LISTEN everybody is woken, since notifications are lost while nobody listens: a ring is
            delivered, or `on_wake_all` is called after it. Rings with the same payload may be delivered once.
Relies on   the asyncio loop runs in trio's thread, so its callbacks may set a trio event; nothing polls.
Cancelled   the connection is closed, within a grace; nothing else happens.
Outage      `up` is false, the connection is tried again with capped, jittered backoff; `on_wake_all` once it is back. A
            frozen server is noticed by the self-check.

A ring is a hint. All callbacks are plain functions, are called in the listener's task, and must not block.

Source: https://www.postgresql.org/docs/current/sql-notify.html
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, NoReturn

import asyncpg
import trio

from sqlstreams.errors import ClientClosed, ConfigurationError, SQLStreamsError, StoreUnavailable
from sqlstreams.postgres.bridge import Bridge
from sqlstreams.postgres.connect import connect, hang_up
from sqlstreams.postgres.settings import PoolSettings
from sqlstreams.postgres.translate import is_database_error, translate

__all__ = ["Listener"]

MOST_RINGS = 1_000  # payloads that wait to be delivered; more become one call of on_wake_all
FIRST_BACKOFF = 0.1  # seconds; doubles up to the cap
BACKOFF_CAP = 5.0

_log = logging.getLogger("sqlstreams.listener")


class Listener:
    """An actor: `await nursery.start(listener.run)`.

    Attributes:
        up: whether it listens right now.
        listens: how often it has begun to listen.
    """

    def __init__(
        self,
        bridge: Bridge,
        settings: PoolSettings,
        channel: str,
        *,
        on_ring: Callable[[str], None],
        on_wake_all: Callable[[], None],
        on_up_change: Callable[[bool], None] = lambda _up: None,
        random: Random,
        check_every: float = 5.0,
        check_timeout: float = 2.0,
    ) -> None:
        """Make one; nothing is opened yet.

        Args:
            bridge: the program's bridge.
            settings: how to connect.
            channel: the channel to LISTEN on, any text up to 63 bytes.
            on_ring: called with the payload of a notification.
            on_wake_all: called when rings may have been missed.
            on_up_change: called when `up` has changed.
            random: the jitter of the backoff.
            check_every: seconds between two self-checks.
            check_timeout: seconds that a self-check may take.
        """
        if settings.pooler:
            raise ConfigurationError("LISTEN does not work behind a transaction pooler", subject="listen")
        self.up = False
        self.listens = 0
        self._bridge = bridge
        self._settings = settings
        self._channel = channel
        self._on_ring = on_ring
        self._on_wake_all = on_wake_all
        self._on_up_change = on_up_change
        self._random = random
        self._check_every = check_every
        self._check_timeout = check_timeout
        self._conn: asyncpg.Connection[asyncpg.Record] | None = None
        self._rings: dict[str, None] = {}  # in order, each payload once
        self._missed = False
        self._lost = False
        self._woken = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Listen until cancelled. Usable, as far as `started()` goes, after the first attempt, failed or not.

        Raises: AuthenticationFailed, ConfigurationError and others if the server refuses the first attempt for a reason
            that will not pass.
        """
        failures = 0
        usable = False
        try:
            while True:
                listening = await self._try_to_listen()
                if not usable:
                    usable = True
                    task_status.started()
                checks = await self._deliver_until_lost() if listening else 0
                failures = 0 if checks else failures + 1  # a connection that is lost at once is a failure too
                await trio.sleep(self._backoff(failures))
        finally:
            self._set_up(up=False)
            with trio.CancelScope(shield=True), suppress(ClientClosed):  # bounded: _hang_up takes one grace
                await self._bridge.call(self._hang_up)

    async def _try_to_listen(self) -> bool:
        """Connect and LISTEN, then wake everybody; say whether that worked."""
        self._lost = False
        try:
            await self._bridge.call(self._open)
        except Exception as exc:
            if not isinstance(exc, SQLStreamsError) and not is_database_error(exc):
                raise
            failure = translate(exc, subject=self._settings.where)
        else:
            self.listens += 1
            self._set_up(up=True)
            self._on_wake_all()
            return True
        if not self.listens and not isinstance(failure, StoreUnavailable):
            raise failure
        _log.info("cannot listen: %s", failure)  # a role or a server may be replaced under us: it may pass
        return False

    async def _deliver_until_lost(self) -> int:
        """Deliver what comes until the connection is lost; return how many self-checks went well."""
        checks = 0
        try:
            while not self._lost:
                with trio.move_on_after(self._check_every):
                    await self._woken.wait()
                if self._woken.is_set():
                    self._deliver()
                elif await self._bridge.call(self._check):
                    checks += 1
                else:
                    break
        finally:
            self._set_up(up=False)
            self._lost = True  # later callbacks of this connection say nothing new
        await self._bridge.call(self._cut)
        return checks

    def _deliver(self) -> None:
        self._woken = trio.Event()
        rings, self._rings = self._rings, {}
        missed, self._missed = self._missed, False
        if missed:
            self._on_wake_all()
        else:
            for payload in rings:
                self._on_ring(payload)

    def _set_up(self, *, up: bool) -> None:
        if self.up != up:
            self.up = up
            self._on_up_change(up)

    def _backoff(self, failures: int) -> float:
        doublings = min(max(failures - 1, 0), 16)  # 2**16 is past every cap
        return min(FIRST_BACKOFF * 2.0**doublings, BACKOFF_CAP) * self._random.uniform(0.5, 1.0)

    # From here on asyncio-flavoured. The callbacks of the driver run in the loop's task: they set, and never raise.

    async def _open(self) -> None:
        conn = await connect(self._settings, "listener")
        try:
            conn.add_termination_listener(self._when_terminated)
            async with asyncio.timeout(self._settings.connect_timeout):  # noqa: TID251 - asyncio-flavoured, its owner
                await conn.add_listener(self._channel, self._when_notified)
        except BaseException:
            conn.remove_termination_listener(self._when_terminated)
            conn.terminate()
            raise
        self._conn = conn

    async def _check(self) -> bool:
        if self._conn is None or self._conn.is_closed():
            return False
        try:
            await self._conn.execute("select 1", timeout=self._check_timeout)
        except Exception as exc:
            if not is_database_error(exc):
                raise
            return False
        return True

    async def _cut(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.remove_termination_listener(self._when_terminated)
            conn.terminate()

    async def _hang_up(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.remove_termination_listener(self._when_terminated)
            await hang_up(conn, self._settings.grace)

    def _when_notified(self, _conn: Any, _pid: int, _channel: str, payload: object) -> None:
        if len(self._rings) < MOST_RINGS:
            self._rings[str(payload)] = None
        else:
            self._missed = True
        self._woken.set()

    def _when_terminated(self, conn: Any) -> None:
        if conn is self._conn:
            self._lost = True
            self._woken.set()
