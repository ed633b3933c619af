"""Connecting: one connection to the first host that answers, and what can be known of one without asking the server.

Guarantee   a connection that cannot be made is one of our errors; `is_stale` sees a server that has hung up.
Relies on   the driver's socket, which it has no public way to reach: without it nothing is known, and nothing fails.
Cancelled   there is no connection.
Outage      the hosts of the URL share the time, so one that is silent does not use up that of the next.

All of it is asyncio-flavoured; durations are seconds.
"""

import select
import socket
from contextlib import suppress
from typing import TypeAlias
from urllib.parse import unquote_plus, urlsplit, urlunsplit

import asyncpg
import asyncpg.pool

from sqlstreams.errors import ConfigurationError, SQLStreamsError, StoreUnavailable
from sqlstreams.postgres.settings import (
    KEEPALIVE_COUNT,
    KEEPALIVE_IDLE,
    KEEPALIVE_INTERVAL,
    NO_LIMIT,
    PoolSettings,
)
from sqlstreams.postgres.translate import is_database_error, translate

__all__ = ["Connection", "DriverConnection", "connect", "hang_up", "is_closed", "is_lost", "is_stale"]

Connection: TypeAlias = (
    "asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"
)


class DriverConnection(asyncpg.Connection):
    """The driver's connection, which can be told that there is nothing to reset."""

    pooler = False
    _skip = False

    def skip_reset(self) -> None:
        """Save the next reset its round trip."""
        self._skip = True

    def get_reset_query(self) -> str:  # type: ignore[explicit-override, unused-ignore]
        """Return what the pool sends when the connection is given back."""
        skip, self._skip = self._skip, False
        return "" if skip or self.pooler else str(super().get_reset_query())


async def connect(settings: PoolSettings, name: str | None = None) -> DriverConnection:
    """Connect to the first host of the URL that answers. asyncio-flavoured.

    Args:
        settings: where, and how long it may take.
        name: what the connection is for; added to the application name.

    Cancelled: there is no connection.
    Raises: ConfigurationError, AuthenticationFailed, PermissionDenied or StoreUnavailable.
    """
    dsn, limit = _limit_of(settings.dsn, settings.connect_timeout)
    urls = _each_host(dsn)
    failure: SQLStreamsError | None = None
    for url in urls:
        try:
            return await _connect_to(url, settings, name, limit / len(urls))
        except Exception as exc:  # noqa: BLE001 - what is not the database's is a URL that could not be read
            failure = _failure_to_connect(exc, settings.where)
            if not isinstance(
                exc, OSError | asyncpg.TargetServerAttributeNotMatched | asyncpg.CannotConnectNowError
            ):
                break
    assert failure is not None
    raise failure


async def hang_up(conn: "asyncpg.Connection[asyncpg.Record]", grace: float) -> None:
    """Close a connection that is not the pool's; after the grace it is cut. asyncio-flavoured."""
    try:
        await conn.close(timeout=grace)
    except Exception:  # noqa: BLE001 - the server does not answer; the driver has cut the connection
        conn.terminate()


def is_closed(conn: Connection) -> bool:
    """Say whether the driver has closed it or taken it back."""
    try:
        return conn.is_closed()
    except asyncpg.InterfaceError:  # the driver has taken it back by itself, and then refuses to say
        return True


def is_stale(conn: Connection) -> bool:
    """Say whether the server has hung up, also when the driver has not read that yet: an idle socket has nothing to read."""
    if is_closed(conn):
        return True
    sock = _socket(conn)
    if sock is None or not hasattr(select, "poll"):
        return False
    readable = select.poll()
    readable.register(sock.fileno(), select.POLLIN)
    return bool(readable.poll(0))


def is_lost(exc: BaseException) -> bool:
    """Say whether the connection failed, as against a slow or an unwilling server."""
    ours = translate(exc) if is_database_error(exc) and not isinstance(exc, TimeoutError) else None
    return isinstance(ours, StoreUnavailable)


async def _connect_to(url: str, settings: PoolSettings, name: str | None, limit: float) -> DriverConnection:
    if not url.startswith(("postgresql://", "postgres://")):
        raise ConfigurationError("it must start with postgresql://", subject="database URL")
    _ = urlsplit(url).port  # ValueError when it is out of range; the driver would connect to another one
    wanted = settings.server_settings(name)
    conn: DriverConnection | None = None
    with suppress(
        asyncpg.InvalidParameterValueError, asyncpg.UndefinedObjectError, asyncpg.FeatureNotSupportedError
    ):
        conn = await _dial(url, settings, wanted, limit)
    if conn is None:
        # not every system can watch a connection, and then the server refuses to be asked
        wanted = {key: value for key, value in wanted.items() if not key.startswith(("tcp_", "client_"))}
        conn = await _dial_or_name_the_parameter(url, settings, wanted, limit)
    try:
        conn.pooler = settings.pooler
        _keep_alive(conn)
        await conn.set_type_codec(
            "json", schema="pg_catalog", encoder=_as_is, decoder=_as_is, format="binary"
        )
    except BaseException:
        conn.terminate()
        raise
    return conn


async def _dial(url: str, settings: PoolSettings, wanted: dict[str, str], limit: float) -> DriverConnection:
    conn: DriverConnection = await asyncpg.connect(
        url,
        timeout=limit,
        command_timeout=settings.command_timeout,
        statement_cache_size=0 if settings.pooler else 1024,  # texts carry the stream's id, so there are many
        server_settings=wanted,
        connection_class=DriverConnection,
    )
    return conn


async def _dial_or_name_the_parameter(
    url: str, settings: PoolSettings, wanted: dict[str, str], limit: float
) -> DriverConnection:
    """Dial; when the server refuses a parameter of the URL, say which, without its value."""
    try:
        return await _dial(url, settings, wanted, limit)
    except (asyncpg.InvalidParameterValueError, asyncpg.UndefinedObjectError) as exc:
        names = [unquote_plus(part.partition("=")[0]) for part in urlsplit(url).query.split("&")]
        said = str(exc.args[0] if exc.args else "")
        wrong = next((name for name in names if name and f'parameter "{name}"' in said), None)
        if wrong is None:
            raise
        what = (
            "is not known" if isinstance(exc, asyncpg.UndefinedObjectError) else "has a value that is refused"
        )
    raise ConfigurationError(f"its parameter {wrong!a} {what}", subject="database URL")


def _failure_to_connect(exc: Exception, where: str) -> SQLStreamsError:
    if isinstance(exc, asyncpg.ProtocolViolationError):
        return ConfigurationError(
            "the server refused a startup parameter; behind PgBouncer, connect with pooler=True",
            subject=where,
        )
    if isinstance(exc, TimeoutError):
        return StoreUnavailable("connecting took too long", subject=where)
    if is_database_error(exc) or isinstance(exc, SQLStreamsError):
        return translate(exc, subject=where)
    return ConfigurationError(f"it is not valid ({type(exc).__name__})", subject="database URL")


def _limit_of(dsn: str, limit: float) -> tuple[str, float]:
    """Take libpq's connect_timeout out of a URL, which the driver would send to the server; 0 and below mean our own."""
    try:
        parts = urlsplit(dsn)
    except ValueError:
        return dsn, limit
    kept = []
    for part in parts.query.split("&"):
        name, _, value = part.partition("=")
        if unquote_plus(name) != "connect_timeout":
            kept.append(part)
            continue
        try:
            seconds = int(unquote_plus(value))
        except ValueError:
            seconds = None
        if seconds is None:
            raise ConfigurationError(
                "its parameter 'connect_timeout' must be a whole number of seconds", subject="database URL"
            )
        if 0 < seconds < NO_LIMIT:
            limit = float(seconds)
    if len(kept) == parts.query.count("&") + 1:
        return dsn, limit
    return urlunsplit(parts._replace(query="&".join(kept))), limit


def _each_host(dsn: str) -> list[str]:
    """Split a URL of several hosts into one for each: the driver would spend all the time on the first that is silent."""
    with suppress(ValueError):
        parts = urlsplit(dsn)
        user, at, hosts = parts.netloc.rpartition("@")
        if "," in hosts and "prefer-standby" not in parts.query:  # that one has to see all of them
            return [urlunsplit(parts._replace(netloc=f"{user}{at}{host}")) for host in hosts.split(",")]
    return [dsn]


def _keep_alive(conn: Connection) -> None:
    """Let the kernel notice a server that vanished, under statements without a timeout too."""
    sock = _socket(conn)
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", 1000 * (KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_COUNT)),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _socket(conn: Connection) -> socket.socket | None:
    transport = getattr(conn, "_transport", None)  # the driver has no public way
    found: socket.socket | None = None if transport is None else transport.get_extra_info("socket")
    return found


def _as_is(value: bytes) -> bytes:
    return value
