"""PostgresServer: one private Postgres in a directory, shared by every program that names the directory.

Guarantee   at most one server runs in a directory; of the programs that use it the first starts it, the
            last stops it.
Relies on   flock, which the kernel releases when a program dies: nothing has to be cleaned up after a
            SIGKILL.
Killed      a program leaves its server running: the next one in the directory adopts it, and a temporary
            directory is removed, with its server, by the next program that asks for a temporary one.
Others      the server listens on 127.0.0.1 only and asks for a random password, kept in a file only its
            owner reads.

What is in the directory, every file but the cluster belonging to the program's user:

    lock         held exclusively by whoever starts, stops, joins or leaves; the first file ever made
    users        held shared by every program that uses the server
    running      held by the processes of the server, and of initdb, which inherit it when they are started
    server.json  the password, and the port that the last start chose
    server.log   what the server and initdb said
    cluster/     the Postgres data directory, of the user that runs the server
"""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlstreams._postgres_binaries import Account, Binaries, find, server_account
from sqlstreams._postgres_cluster import (
    LOG_LINES,
    Cluster,
    log_of,
    read_state,
    subject_of,
    tail,
    write_state,
)
from sqlstreams._postgres_locks import (
    Waiting,
    as_embedded_failed,
    locked_alone,
    nobody_cancels,
    open_lock,
    patient,
)
from sqlstreams._postgres_processes import StopMode, forget, halt, kill, running
from sqlstreams.errors import ConfigurationError, EmbeddedFailed

__all__ = ["PostgresServer", "StopMode"]

START_TIMEOUT = timedelta(seconds=60)
STOP_TIMEOUT = timedelta(seconds=20)
PORT_ATTEMPTS = 10
TEMPORARY = "sqlstreams-embedded-"
OURS_ALONE = ("port", "data_directory")


class PostgresServer:
    """A private Postgres server; synchronous, for tests and tools. Programs use `sqlstreams.embedded`.

    Guarantee: after `start` the server accepts connections at `dsn`; after `close` it is stopped unless
    another program uses the directory, and a temporary directory is gone. Data in a named directory is as
    durable as Postgres makes it: nothing is switched off unless `settings` does.

    Use it in a `with` block, or call `close`. Not for several threads at once.

    Args:
        data_dir: where the data lives, made when missing; any path without a line break. None: a private
            temporary directory, deleted at the end.
        port: the TCP port on 127.0.0.1; None: the one used before in this directory if it is free, else any
            free one.
        settings: of Postgres, as in postgresql.conf, given on the command line. They count only for the
            program that starts the server.
        binaries: the directory of `postgres` and `initdb`; None: the wheel's, pg_config's, PATH's, Debian's
            newest.
        temporary_in: where temporary directories are made; None: the system's place for temporary files.
        start_timeout: how long `start` may take, crash recovery included.

    Raises: ConfigurationError when an argument is wrong; nothing was done.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        binaries: str | os.PathLike[str] | None = None,
        temporary_in: str | os.PathLike[str] | None = None,
        start_timeout: timedelta = START_TIMEOUT,
    ) -> None:
        self._settings = dict(settings or {})
        for name in self._settings:
            if not name.replace("_", "").replace(".", "").isalnum() or name in OURS_ALONE:
                raise ConfigurationError("cannot be set here", subject=f"Postgres setting {name!r}")
        if port is not None and not 0 < port < 65536:
            raise ConfigurationError(f"is {port}, allowed is 1 to 65535", subject="port")
        self._temporary = data_dir is None
        self._directory = Path(data_dir).absolute() if data_dir is not None else None
        if self._directory is not None and any(character in str(self._directory) for character in "\r\n\0"):
            raise ConfigurationError("has a line break in its path", subject="data_dir")
        self._wanted_port = port
        self._wanted_binaries = Path(binaries) if binaries is not None else None
        self._temporary_in = Path(temporary_in or tempfile.gettempdir()).absolute()
        self._start_timeout = start_timeout
        self._users: int | None = None
        self._account: Account | None = None
        self._binaries: Binaries | None = None
        self._password = ""
        self._port = 0

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # What is known after start.

    @property
    def data_dir(self) -> Path:
        """The directory that is shared; the cluster itself is `data_dir / "cluster"`."""
        if self._directory is None:
            raise EmbeddedFailed(
                "has no directory before start() and after close()", subject="private Postgres"
            )
        return self._directory

    @property
    def cluster(self) -> Path:
        """What Postgres calls the data directory."""
        return self.data_dir / "cluster"

    @property
    def log_path(self) -> Path:
        """The log of the server and of initdb; moved to `server.log.1` when a start finds it above 16 MiB."""
        return log_of(self.data_dir)

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; `restart`, and `start` after `stop`, keep it if nobody else took it."""
        return self._port

    @property
    def password(self) -> str:
        """The password of the superuser `postgres`."""
        return self._password

    @property
    def dsn(self) -> str:
        """The URL of the database `postgres`, password included, for libpq, psql and asyncpg."""
        return self.dsn_for("postgres")

    @property
    def pid(self) -> int:
        """The process id of the server now. Raises: EmbeddedFailed when it does not run."""
        found = running(self.cluster)
        if found is None:
            raise EmbeddedFailed("does not run", subject=self._subject)
        return found.pid

    @property
    def version(self) -> int:
        """The major version of Postgres, such as 18."""
        return int((self.cluster / "PG_VERSION").read_text())

    @property
    def binaries(self) -> Path:
        """The directory of `postgres`, and of psql, pg_dump and so on where the installation has them."""
        if self._binaries is None:
            self._binaries = find(self._wanted_binaries, self._account, version=self.version)
        return self._binaries.directory

    def dsn_for(self, database: str) -> str:
        """Return the URL of `database`, which need not exist."""
        name = urllib.parse.quote(database, safe="")
        return f"postgresql://postgres:{self._password}@127.0.0.1:{self._port}/{name}?sslmode=disable"

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """Return the last `lines` lines of the log."""
        return tail(self.log_path, lines)

    # Verbs.

    def start(self, check: Callable[[], None] | None = None) -> None:
        """Join the directory's users, adopt the running server or start one; return when it is ready.

        Does nothing when it runs already.

        Args:
            check: called every few milliseconds; what it raises ends the start.

        Cancelled (`check` raised): what this call started was ended, a temporary directory was deleted.
        Raises: EmbeddedFailed (as after a cancel; the message has the end of the log), ConfigurationError
            (the directory holds something else, the port of a running server differs; nothing was changed).
        """
        waiting = Waiting(self._start_timeout.total_seconds(), check or nobody_cancels)
        try:
            with as_embedded_failed(f"data directory {self._directory or self._temporary_in}"):
                self._open_directory()
            with self._deciding(waiting):
                self._join()
                if not self._adopted(waiting):
                    self._launch(waiting)
        except BaseException:
            self.close()
            raise

    def stop(self, mode: StopMode = "fast", *, timeout: timedelta = STOP_TIMEOUT) -> None:
        """Stop the server for everybody; the data stays, and `start` starts it again.

        Args:
            mode: "smart" waits for clients to leave, "fast" ends their connections, "immediate" skips the
                checkpoint.
            timeout: after it, SIGQUIT; 10 s later, SIGKILL.

        Raises: EmbeddedFailed when it still runs after that.
        """
        with self._deciding(patient()):
            halt(self.cluster, mode, timeout)

    def restart(self, mode: StopMode = "fast", *, timeout: timedelta = STOP_TIMEOUT) -> None:
        """Stop and start the server, on its port if that is free. Raises: EmbeddedFailed (it is stopped)."""
        with self._deciding(patient()):
            halt(self.cluster, mode, timeout)
            self._launch(Waiting(self._start_timeout.total_seconds(), nobody_cancels))

    def kill(self) -> None:
        """SIGKILL the server with all its processes, as a crash of the machine would; `start` recovers it."""
        with self._deciding(patient()):
            kill(self.cluster)

    def close(self) -> None:
        """Leave: the last user stops the server; a temporary directory is deleted. Again: nothing.

        Raises: EmbeddedFailed when the server could not be stopped; it is no longer ours then.
        """
        if self._directory is None or self._users is None:
            self._delete_temporary()
            return
        try:
            with self._deciding(patient()):
                if locked_alone(self._users):
                    halt(self.cluster, "fast", STOP_TIMEOUT)
                else:
                    forget(self.cluster)
        finally:
            os.close(self._users)
            self._users = None
            self._delete_temporary()

    # The directory and its users.

    @property
    def _subject(self) -> str:
        return subject_of(self._directory)

    @contextlib.contextmanager
    def _deciding(self, waiting: Waiting) -> Iterator[None]:
        """Hold the directory's lock: nobody else starts, stops, joins or leaves meanwhile."""
        with as_embedded_failed(self._subject):
            lock = open_lock(self.data_dir / "lock")
            try:
                while not locked_alone(lock):
                    waiting.tick("another program to start or stop the server")
                yield
            finally:
                os.close(lock)

    def _open_directory(self) -> None:
        if self._directory is not None:
            self._directory.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
            found = list(self._directory.iterdir())
            if found and self._directory / "lock" not in found:  # the first file we make, before any other
                raise ConfigurationError(
                    "is neither empty nor made by sqlstreams", subject=f"data_dir {self._directory}"
                )
            return
        _remove_abandoned(self._temporary_in)
        # Renamed once it is held: a directory with the final name that nobody holds is an abandoned one.
        made = Path(tempfile.mkdtemp(prefix="sqlstreams-new-", dir=self._temporary_in))
        if os.geteuid() == 0:
            made.chmod(0o711)
        os.close(open_lock(made / "lock"))
        self._directory = made
        self._join()
        final = made.with_name(TEMPORARY + made.name.removeprefix("sqlstreams-new-"))
        self._directory = made.rename(final)

    def _join(self) -> None:
        if self._users is None:
            self._users = open_lock(self.data_dir / "users")
            fcntl.flock(self._users, fcntl.LOCK_SH)  # never waits: taken alone only by who holds `lock`

    def _delete_temporary(self) -> None:
        if self._temporary and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    # Starting; every method here runs while the directory's lock is held.

    def _adopted(self, waiting: Waiting) -> bool:
        """Return True with a running server that is ready, False when none runs."""
        while (found := running(self.cluster)) is not None:
            if found.ready:
                if self._wanted_port not in (None, found.port):
                    raise ConfigurationError(
                        f"is {self._wanted_port}, but the server runs on {found.port}", subject="port"
                    )
                self._password = read_state(self.data_dir)["password"]
                self._port = found.port
                self._account = server_account(self.cluster)
                return True
            waiting.tick("the server of a program that was killed while it started or stopped")
        return False

    def _launch(self, waiting: Waiting) -> None:
        """Start the server of a directory in which none runs; on any failure it has ended again."""
        self._account = server_account(self.cluster)
        version = self.version if (self.cluster / "PG_VERSION").exists() else None
        self._binaries = find(self._wanted_binaries, self._account, version=version)
        cluster = Cluster(data_dir=self.data_dir, account=self._account, binaries=self._binaries)
        cluster.put_log_aside()
        if version is None:
            cluster.make(waiting, sync=not self._temporary)
        state = read_state(self.data_dir)
        self._password = state["password"]
        port = self._wanted_port or int(state["port"]) or _free_port()
        for _ in range(PORT_ATTEMPTS):
            if cluster.start(port, self._settings, waiting):
                self._port = port
                write_state(self.data_dir, password=self._password, port=port)
                return
            if self._wanted_port is not None:
                break
            port = _free_port()
        raise cluster.failed(f"cannot listen on port {port}")

    # Stopping; every method here runs while the directory's lock is held.

    def _remove_if_abandoned(self) -> None:
        """Stop the server and delete the directory if nobody uses it; take the lock only if it is free."""
        lock, users = open_lock(self.data_dir / "lock"), open_lock(self.data_dir / "users")
        try:
            if locked_alone(lock) and locked_alone(users):
                halt(self.cluster, "immediate", STOP_TIMEOUT)
                shutil.rmtree(self.data_dir, ignore_errors=True)
        finally:
            os.close(lock)
            os.close(users)


def _remove_abandoned(parent: Path) -> None:
    """Delete the temporary directories, and stop the servers, of programs that were killed."""
    for path in parent.glob(TEMPORARY + "*"):
        with contextlib.suppress(OSError, EmbeddedFailed):
            status = path.lstat()
            if status.st_uid != os.geteuid() or path.is_symlink() or not (path / "users").exists():
                continue
            PostgresServer(path)._remove_if_abandoned()  # noqa: SLF001 - our own class


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
