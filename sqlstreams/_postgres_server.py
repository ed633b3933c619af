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
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

from sqlstreams._postgres_binaries import Account, Binaries, blocked_at, find, server_account, spawn
from sqlstreams.errors import ConfigurationError, EmbeddedFailed

__all__ = ["PostgresServer", "StopMode"]

StopMode = Literal["smart", "fast", "immediate"]

START_TIMEOUT = timedelta(seconds=60)
STOP_TIMEOUT = timedelta(seconds=20)
QUIT_SECONDS = 10.0  # Postgres itself kills children that ignored its SIGQUIT after 5 s
KILL_SECONDS = 10.0
POLL_SECONDS = 0.005
PORT_ATTEMPTS = 10
LOCK_SECONDS = 90.0  # longer than another program may take to start or to stop the server
LOG_BYTES = 16 * 1024 * 1024
LOG_LINES = 20
TEMPORARY = "sqlstreams-embedded-"
OURS_ALONE = ("port", "data_directory")
SIGNALS: dict[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}

_children: dict[int, subprocess.Popen[bytes]] = {}  # servers this process started, to reap them


class Waiting:
    """A bounded wait that a caller can end early: `check` raises when the caller was cancelled."""

    def __init__(self, seconds: float, check: Callable[[], None]) -> None:
        self._end = time.monotonic() + seconds
        self._seconds = seconds
        self._check = check

    def tick(self, what: str) -> None:
        """Sleep a moment. Raises: EmbeddedFailed when the time is over, whatever `check` raises."""
        self._check()
        if time.monotonic() > self._end:
            raise EmbeddedFailed(f"waited {self._seconds:g} s for {what}")
        time.sleep(POLL_SECONDS)


class Postmaster(NamedTuple):
    """What `postmaster.pid` says about a running server."""

    pid: int
    port: int
    ready: bool


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
        return self.data_dir / "server.log"

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
        running = _running(self.cluster)
        if running is None:
            raise EmbeddedFailed("does not run", subject=self._subject)
        return running.pid

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
        return _tail(self.log_path, lines)

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
        waiting = Waiting(self._start_timeout.total_seconds(), check or _nobody_cancels)
        try:
            with _as_embedded_failed(f"data directory {self._directory or self._temporary_in}"):
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
        with self._deciding(_patient()):
            self._halt(mode, timeout)

    def restart(self, mode: StopMode = "fast", *, timeout: timedelta = STOP_TIMEOUT) -> None:
        """Stop and start the server, on its port if that is free. Raises: EmbeddedFailed (it is stopped)."""
        with self._deciding(_patient()):
            self._halt(mode, timeout)
            self._launch(Waiting(self._start_timeout.total_seconds(), _nobody_cancels))

    def kill(self) -> None:
        """SIGKILL the server with all its processes, as a crash of the machine would; `start` recovers it."""
        with self._deciding(_patient()):
            self._kill()

    def close(self) -> None:
        """Leave: the last user stops the server; a temporary directory is deleted. Again: nothing.

        Raises: EmbeddedFailed when the server could not be stopped; it is no longer ours then.
        """
        if self._directory is None or self._users is None:
            self._delete_temporary()
            return
        try:
            with self._deciding(_patient()):
                if _locked_alone(self._users):
                    self._halt("fast", STOP_TIMEOUT)
                else:
                    _forget(self.cluster)
        finally:
            os.close(self._users)
            self._users = None
            self._delete_temporary()

    # The directory and its users.

    @property
    def _subject(self) -> str:
        return f"private Postgres in {self._directory}"

    @contextlib.contextmanager
    def _deciding(self, waiting: Waiting) -> Iterator[None]:
        """Hold the directory's lock: nobody else starts, stops, joins or leaves meanwhile."""
        with _as_embedded_failed(self._subject):
            lock = _open_lock(self.data_dir / "lock")
            try:
                while not _locked_alone(lock):
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
        os.close(_open_lock(made / "lock"))
        self._directory = made
        self._join()
        final = made.with_name(TEMPORARY + made.name.removeprefix("sqlstreams-new-"))
        self._directory = made.rename(final)

    def _join(self) -> None:
        if self._users is None:
            self._users = _open_lock(self.data_dir / "users")
            fcntl.flock(self._users, fcntl.LOCK_SH)  # never waits: taken alone only by who holds `lock`

    def _delete_temporary(self) -> None:
        if self._temporary and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    # Starting; every method here runs while the directory's lock is held.

    def _adopted(self, waiting: Waiting) -> bool:
        """Return True with a running server that is ready, False when none runs."""
        while (running := _running(self.cluster)) is not None:
            if running.ready:
                if self._wanted_port not in (None, running.port):
                    raise ConfigurationError(
                        f"is {self._wanted_port}, but the server runs on {running.port}", subject="port"
                    )
                self._password = self._state()["password"]
                self._port = running.port
                self._account = server_account(self.cluster)
                return True
            waiting.tick("the server of a program that was killed while it started or stopped")
        return False

    def _launch(self, waiting: Waiting) -> None:
        """Start the server of a directory in which none runs; on any failure it has ended again."""
        self._account = server_account(self.cluster)
        version = self.version if (self.cluster / "PG_VERSION").exists() else None
        self._binaries = find(self._wanted_binaries, self._account, version=version)
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_BYTES:
            self.log_path.replace(self.log_path.with_name("server.log.1"))
        if version is None:
            self._make_cluster(waiting)
        state = self._state()
        self._password = state["password"]
        port = self._wanted_port or int(state["port"]) or _free_port()
        for _ in range(PORT_ATTEMPTS):
            if self._ran(port, waiting):
                self._port = port
                self._write_state(port=port)
                return
            if self._wanted_port is not None:
                break
            port = _free_port()
        raise self._failed(f"cannot listen on port {port}")

    def _ran(self, port: int, waiting: Waiting) -> bool:
        """Start the server and return True when it is ready, False when somebody else has the port."""
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "lc_messages": "C"}
        settings |= self._settings | {"port": str(port)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with self._none_running(waiting) as held:
            # No process is left, so a pid file is from a crash, and its number may be a stranger's by now.
            (self.cluster / "postmaster.pid").unlink(missing_ok=True)
            mark = self.log_path.stat().st_size if self.log_path.exists() else 0
            child = self._spawn(
                self.cluster, lambda directory: ["postgres", "-D", directory, *options], (held,)
            )
        _children[child.pid] = child
        try:
            while child.poll() is None:
                running = _running(self.cluster)
                if running is not None and running.pid == child.pid and running.ready:
                    return True
                waiting.tick("the server to get ready")
        except EmbeddedFailed as late:
            failed = self._failed(late.message)
            self._kill(child.pid)
            raise failed from None
        except BaseException:
            self._kill(child.pid)
            raise
        del _children[child.pid]
        with self.log_path.open("rb") as log:
            log.seek(mark)
            said = log.read()
        if b"could not bind" in said or b"could not create any TCP/IP sockets" in said:
            return False
        raise self._failed(f"the server ended with {child.returncode} while starting")

    def _make_cluster(self, waiting: Waiting) -> None:
        """Run initdb beside, then rename: a `cluster` is always a complete one."""
        with self._none_running(waiting) as held:
            for leftover in self.data_dir.glob("initdb-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            password = secrets.token_urlsafe(24)
            self._write_state(password=password, port=0)
            made = Path(tempfile.mkdtemp(prefix="initdb-", dir=self.data_dir))
            try:
                self._run_initdb(made, password, held, waiting)
                (made / "cluster").rename(self.cluster)
            finally:
                shutil.rmtree(made, ignore_errors=True)

    def _run_initdb(self, made: Path, password: str, held: int, waiting: Waiting) -> None:
        """Make `made / "cluster"`; on any failure initdb has ended."""
        made.chmod(0o711)
        new, word = made / "cluster", made / "password"
        new.mkdir(mode=0o700)
        word.touch(mode=0o600)
        word.write_text(password + "\n")
        if self._account is not None:
            os.chown(new, self._account.uid, self._account.gid)
            os.chown(word, self._account.uid, self._account.gid)
        with word.open("rb") as opened:
            options = [
                "--username=postgres",
                "--encoding=UTF8",
                "--no-locale",
                "--auth=scram-sha-256",
                f"--pwfile={_by_descriptor(opened.fileno(), word)}",
            ]
            if self._temporary:
                options.append("--no-sync")
            child = self._spawn(
                new, lambda directory: ["initdb", "-D", directory, *options], (held, opened.fileno())
            )
        try:
            while child.poll() is None:
                waiting.tick("initdb")
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        if child.returncode != 0:
            raise self._failed(f"initdb ended with {child.returncode}")

    @contextlib.contextmanager
    def _none_running(self, waiting: Waiting) -> Iterator[int]:
        """Wait until the last process of an earlier server or initdb has ended; give the next one's lock.

        They outlive a killed program, and the children of a killed server live until they miss it. Two
        servers in one cluster, or two programs that make it, would destroy it.
        """
        held = _open_lock(self.data_dir / "running")
        try:
            while not _locked_alone(held):
                waiting.tick("the processes of an earlier server to end")
            yield held
        finally:
            os.close(held)

    def _spawn(
        self, directory: Path, command: Callable[[str], list[str]], descriptors: tuple[int, ...]
    ) -> subprocess.Popen[bytes]:
        """Start a program of Postgres on `directory`, which its user may be unable to reach by name.

        As root we can, below /root for instance, so it gets an open descriptor and goes there through /proc.
        """
        assert self._binaries is not None
        name, opened = str(directory), None
        if blocked_at(directory.parent.resolve(), self._account) is not None:
            opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            name = f"/proc/self/fd/{opened}"
        try:
            program, *arguments = command(name)
            with open(_open_private(self.log_path, os.O_WRONLY | os.O_APPEND), "ab") as log:
                return spawn(
                    [str(self._binaries.directory / program), *arguments],
                    self._account,
                    output=log,
                    pass_fds=descriptors if opened is None else (*descriptors, opened),
                )
        finally:
            if opened is not None:
                os.close(opened)

    def _state(self) -> dict[str, str]:
        path = self.data_dir / "server.json"
        try:
            state = json.loads(path.read_text())
            return {"password": str(state["password"]), "port": str(state["port"])}
        except (OSError, ValueError, KeyError) as error:
            raise EmbeddedFailed(
                f"cannot read {path}, which has the password ({error})", subject=self._subject
            ) from None

    def _write_state(self, *, port: int, password: str | None = None) -> None:
        path = self.data_dir / "server.json"
        new = path.with_name("server.json.new")
        new.touch(mode=0o600)
        with new.open("w") as out:
            json.dump({"password": self._password if password is None else password, "port": port}, out)
            out.flush()
            os.fsync(out.fileno())
        new.rename(path)

    def _failed(self, what: str) -> EmbeddedFailed:
        said = self.log_tail()
        return EmbeddedFailed(f"{what}; {self.log_path} ends with:\n{said}\n", subject=self._subject)

    # Stopping; every method here runs while the directory's lock is held.

    def _remove_if_abandoned(self) -> None:
        """Stop the server and delete the directory if nobody uses it; take the lock only if it is free."""
        lock, users = _open_lock(self.data_dir / "lock"), _open_lock(self.data_dir / "users")
        try:
            if _locked_alone(lock) and _locked_alone(users):
                self._halt("immediate", STOP_TIMEOUT)
                shutil.rmtree(self.data_dir, ignore_errors=True)
        finally:
            os.close(lock)
            os.close(users)

    def _halt(self, mode: StopMode, timeout: timedelta) -> None:
        running = _running(self.cluster)
        if running is None:
            return
        for sent, seconds in ((SIGNALS[mode], timeout.total_seconds()), (signal.SIGQUIT, QUIT_SECONDS)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, sent)
            waiting = Waiting(seconds, _nobody_cancels)
            with contextlib.suppress(EmbeddedFailed):
                while _running(self.cluster, running.pid) is not None:
                    waiting.tick("the server to stop")
                _reap(running.pid)
                return
        self._kill(running.pid)

    def _kill(self, pid: int | None = None) -> None:
        """SIGKILL the server and its processes, and wait until they are gone."""
        if pid is None:
            running = _running(self.cluster)
            if running is None:
                return
            pid = running.pid
        children: list[int] = []
        with contextlib.suppress(OSError):  # no /proc: they end by themselves when they miss their parent
            os.kill(pid, signal.SIGSTOP)  # no new children while we read
            children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        for process in (pid, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        waiting = Waiting(KILL_SECONDS, _nobody_cancels)
        held = _open_lock(self.data_dir / "running")
        try:
            while _is_at(pid, self.cluster) or not _locked_alone(held):
                waiting.tick("the killed server to be gone")
            _reap(pid)
        finally:
            os.close(held)


def _running(cluster: Path, pid: int | None = None) -> Postmaster | None:
    """Return the server that runs in `cluster` now (only if it is `pid`), None when there is none."""
    try:
        lines = (cluster / "postmaster.pid").read_text(errors="replace").splitlines()
        found = int(lines[0])
    except (FileNotFoundError, NotADirectoryError, IndexError, ValueError):
        return None if pid is None or not _is_at(pid, cluster) else Postmaster(pid, 0, ready=False)
    if (pid is not None and pid != found) or not _is_at(found, cluster):
        return None
    ready = len(lines) >= 8 and lines[7].strip() == "ready"
    return Postmaster(found, int(lines[3]) if ready else 0, ready)


def _is_at(pid: int, cluster: Path) -> bool:
    """Return whether process `pid` lives and works in `cluster`, as every process of its server does."""
    if pid in _children:
        _children[pid].poll()
    if pid <= 0:
        return False
    if not Path("/proc/self").exists():
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return True
        return False
    try:
        return Path(f"/proc/{pid}/cwd").samefile(cluster)
    except OSError:  # gone, a zombie, or somebody else's
        return False


def _reap(pid: int) -> None:
    """Take the exit status of a server that has ended, or ends just now, if this process started it."""
    child = _children.pop(pid, None)
    if child is not None:
        child.wait()


def _forget(cluster: Path) -> None:
    """Leave a server that we started to the programs that still use it."""
    running = _running(cluster)
    child = _children.pop(running.pid, None) if running is not None else None
    if child is not None:
        child.returncode = 0  # not ours to wait for; otherwise Popen warns that it still runs


def _nobody_cancels() -> None:
    """Let a wait go on."""


def _patient() -> Waiting:
    """Wait for the directory's lock as long as its holder may need."""
    return Waiting(LOCK_SECONDS, _nobody_cancels)


def _remove_abandoned(parent: Path) -> None:
    """Delete the temporary directories, and stop the servers, of programs that were killed."""
    for path in parent.glob(TEMPORARY + "*"):
        with contextlib.suppress(OSError, EmbeddedFailed):
            status = path.lstat()
            if status.st_uid != os.geteuid() or path.is_symlink() or not (path / "users").exists():
                continue
            PostgresServer(path)._remove_if_abandoned()  # noqa: SLF001 - our own class


def _open_private(path: Path, flags: int) -> int:
    """Open a file that only we may read, made when missing; closed when we execute something."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _open_lock(path: Path) -> int:
    return _open_private(path, os.O_RDWR)


def _locked_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _by_descriptor(descriptor: int, path: Path) -> str:
    own = Path(f"/proc/self/fd/{descriptor}")
    return str(own) if own.exists() else str(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(path: Path, lines: int) -> str:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 16_384))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(nothing)"


@contextlib.contextmanager
def _as_embedded_failed(subject: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EmbeddedFailed(f"cannot be used ({error})", subject=subject) from error
