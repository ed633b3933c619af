"""PoolSettings: how to connect, how long to wait for what, and what the server is told about it.

Guarantee   every wait has a bound above zero; a session that starts is told of ours, and both ends of a connection
            notice a host that vanished.
Relies on   the server keeps what came with the start of a connection through the pool's resets.
"""

from dataclasses import dataclass, field

from sqlstreams.errors import ConfigurationError
from sqlstreams.postgres.translate import address

__all__ = ["KEEPALIVE_COUNT", "KEEPALIVE_IDLE", "KEEPALIVE_INTERVAL", "NO_LIMIT", "PoolSettings"]

NO_LIMIT = 10 * 365 * 86_400.0  # the driver takes None for command_timeout
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 10, 5, 3  # a host that vanished is noticed after 25 s


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """How to connect, and how long to wait for what, in seconds. Its text does not show the URL.

    Args:
        dsn: a database URL, `postgresql://…`; several hosts are tried in order.
        size: how many connections the pool may open.
        grace: how long a call may go on after its cancellation, at each of two steps.
        command_timeout: bound of each statement but the user's own.
        connect_timeout: bound of connecting, all hosts together; `connect_timeout` in the URL goes first.
        acquire_timeout: bound of the wait for a connection of the pool.
        warn_after: a caller that waits for a connection longer than this is logged.
        lock_timeout: the server's, for every statement.
        idle_in_transaction: after this the server ends a unit of work whose process does not go on.
        application_name: shown by `pg_stat_activity`; None: that of the URL, else "sqlstreams".
        pooler: there is a transaction pooler (PgBouncer) in between: no session state, no prepared statements, no LISTEN.
    """

    dsn: str = field(repr=False)
    size: int = 4
    grace: float = 0.5
    command_timeout: float = 30.0
    connect_timeout: float = 10.0
    acquire_timeout: float = 30.0
    warn_after: float = 1.0
    lock_timeout: float = 2.0
    idle_in_transaction: float = 15.0
    application_name: str | None = None
    pooler: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigurationError(f"must be at least 1, not {self.size}", subject="pool_size")
        for name in (
            "grace",
            "command_timeout",
            "connect_timeout",
            "acquire_timeout",
            "warn_after",
            "lock_timeout",
            "idle_in_transaction",
        ):
            if not 0 < getattr(self, name) < NO_LIMIT:
                raise ConfigurationError(f"must be above 0 s, not {getattr(self, name)}", subject=name)

    @property
    def where(self) -> str:
        """What errors call the server: host and port, where they can be told from a password for certain."""
        return f"database server {address(self.dsn) or '(URL not shown)'}"

    @property
    def begin(self) -> str:
        """The first round trip of a unit of work."""
        idle = f"set local idle_in_transaction_session_timeout = {round(self.idle_in_transaction * 1000)}"
        return f"{self.begin_plain}; {idle}"

    @property
    def begin_plain(self) -> str:
        """The first round trip of a transaction of the user."""
        begin = "begin isolation level read committed"
        if not self.pooler:
            return begin
        return f"{begin}; set local lock_timeout = {round(self.lock_timeout * 1000)}; set local jit = off"

    def server_settings(self, name: str | None) -> dict[str, str]:
        """Return what is told the server when a connection starts, and survives the pool's resets."""
        settings = {}
        if self.application_name is not None or name is not None or "application_name=" not in self.dsn:
            settings["application_name"] = " ".join(
                filter(None, (self.application_name or "sqlstreams", name))
            )
        if not self.pooler:
            settings |= {
                "jit": "off",
                "lock_timeout": str(round(self.lock_timeout * 1000)),
                "default_transaction_isolation": "read committed",
                # A client whose host vanished holds its locks until the server notices.
                "tcp_keepalives_idle": str(KEEPALIVE_IDLE),
                "tcp_keepalives_interval": str(KEEPALIVE_INTERVAL),
                "tcp_keepalives_count": str(KEEPALIVE_COUNT),
                "tcp_user_timeout": str(1000 * (KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_COUNT)),
                "client_connection_check_interval": str(1000 * KEEPALIVE_INTERVAL),
            }
        return settings
