"""Cluster: the Postgres data directory inside a shared directory, and the programs that make it and serve it.

Guarantee   `cluster` is always a complete one: initdb works beside it, and the result is renamed. What a call started has
            ended when it fails; the error names the log and has its end.
Relies on   the caller holds the directory's lock; the lock `running`, inherited by every process started here.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlstreams._postgres_binaries import Account, Binaries, blocked_at, spawn
from sqlstreams._postgres_locks import Waiting, locked_alone, open_lock, open_private
from sqlstreams._postgres_processes import kill, reap, running, started
from sqlstreams.errors import EmbeddedFailed

__all__ = ["Cluster", "log_of", "read_state", "subject_of", "tail", "write_state"]

LOG_BYTES = 16 * 1024 * 1024
LOG_LINES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The cluster in `data_dir`, made or not, with the programs of `binaries`, which run as `account`."""

    data_dir: Path
    account: Account | None
    binaries: Binaries

    @property
    def path(self) -> Path:
        """What Postgres calls the data directory."""
        return self.data_dir / "cluster"

    @property
    def log_path(self) -> Path:
        """The log of the server and of initdb."""
        return log_of(self.data_dir)

    def failed(self, what: str) -> EmbeddedFailed:
        """Return the error, with the end of the log."""
        said = tail(self.log_path)
        return EmbeddedFailed(
            f"{what}; {self.log_path} ends with:\n{said}\n", subject=subject_of(self.data_dir)
        )

    def put_log_aside(self) -> None:
        """Move an overgrown log to `server.log.1`."""
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_BYTES:
            self.log_path.replace(self.log_path.with_name("server.log.1"))

    def make(self, waiting: Waiting, *, sync: bool) -> None:
        """Run initdb beside, then rename; `sync`: wait until it is on the disk."""
        with self._none_running(waiting) as held:
            for leftover in self.data_dir.glob("initdb-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            password = secrets.token_urlsafe(24)
            write_state(self.data_dir, password=password, port=0)
            made = Path(tempfile.mkdtemp(prefix="initdb-", dir=self.data_dir))
            try:
                self._run_initdb(made, password, held, waiting, sync=sync)
                (made / "cluster").rename(self.path)
            finally:
                shutil.rmtree(made, ignore_errors=True)

    def start(self, port: int, wanted: Mapping[str, str], waiting: Waiting) -> bool:
        """Start the server and return True when it is ready, False when somebody else has the port.

        `wanted`: the caller's settings; they win over ours, but for the port.
        """
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "lc_messages": "C"}
        settings |= dict(wanted) | {"port": str(port)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with self._none_running(waiting) as held:
            # No process is left, so a pid file is from a crash, and its number may be a stranger's by now.
            (self.path / "postmaster.pid").unlink(missing_ok=True)
            mark = self.log_path.stat().st_size if self.log_path.exists() else 0
            child = self._spawn(self.path, lambda directory: ["postgres", "-D", directory, *options], (held,))
        started(child)
        try:
            while child.poll() is None:
                found = running(self.path)
                if found is not None and found.pid == child.pid and found.ready:
                    return True
                waiting.tick("the server to get ready")
        except EmbeddedFailed as late:
            failed = self.failed(late.message)
            kill(self.path, child.pid)
            raise failed from None
        except BaseException:
            kill(self.path, child.pid)
            raise
        reap(child.pid)
        with self.log_path.open("rb") as log:
            log.seek(mark)
            said = log.read()
        if b"could not bind" in said or b"could not create any TCP/IP sockets" in said:
            return False
        raise self.failed(f"the server ended with {child.returncode} while starting")

    def _run_initdb(self, made: Path, password: str, held: int, waiting: Waiting, *, sync: bool) -> None:
        """Make `made / "cluster"`; on any failure initdb has ended."""
        made.chmod(0o711)
        new, word = made / "cluster", made / "password"
        new.mkdir(mode=0o700)
        word.touch(mode=0o600)
        word.write_text(password + "\n")
        if self.account is not None:
            os.chown(new, self.account.uid, self.account.gid)
            os.chown(word, self.account.uid, self.account.gid)
        with word.open("rb") as opened:
            options = [
                "--username=postgres",
                "--encoding=UTF8",
                "--no-locale",
                "--auth=scram-sha-256",
                f"--pwfile={_by_descriptor(opened.fileno(), word)}",
            ]
            if not sync:
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
            raise self.failed(f"initdb ended with {child.returncode}")

    @contextlib.contextmanager
    def _none_running(self, waiting: Waiting) -> Iterator[int]:
        """Wait until the last process of an earlier server or initdb has ended; give the next one's lock.

        They outlive a killed program, and the children of a killed server live until they miss it. Two
        servers in one cluster, or two programs that make it, would destroy it.
        """
        held = open_lock(self.data_dir / "running")
        try:
            while not locked_alone(held):
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
        name, opened = str(directory), None
        if blocked_at(directory.parent.resolve(), self.account) is not None:
            opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            name = f"/proc/self/fd/{opened}"
        try:
            program, *arguments = command(name)
            with os.fdopen(open_private(self.log_path, os.O_WRONLY | os.O_APPEND), "ab") as log:
                return spawn(
                    [str(self.binaries.directory / program), *arguments],
                    self.account,
                    output=log,
                    pass_fds=descriptors if opened is None else (*descriptors, opened),
                )
        finally:
            if opened is not None:
                os.close(opened)


def subject_of(data_dir: Path | None) -> str:
    """Return what errors are about."""
    return f"private Postgres in {data_dir}"


def log_of(data_dir: Path) -> Path:
    """Return where the log of a directory is."""
    return data_dir / "server.log"


def read_state(data_dir: Path) -> dict[str, str]:
    """Return the password, and the port that the last start chose. Raises: EmbeddedFailed."""
    path = data_dir / "server.json"
    try:
        state = json.loads(path.read_text())
        return {"password": str(state["password"]), "port": str(state["port"])}
    except (OSError, ValueError, KeyError) as error:
        raise EmbeddedFailed(
            f"cannot read {path}, which has the password ({error})", subject=subject_of(data_dir)
        ) from None


def write_state(data_dir: Path, *, password: str, port: int) -> None:
    """Replace what `read_state` returns, all of it or nothing."""
    path = data_dir / "server.json"
    new = path.with_name("server.json.new")
    new.touch(mode=0o600)
    with new.open("w") as out:
        json.dump({"password": password, "port": port}, out)
        out.flush()
        os.fsync(out.fileno())
    new.rename(path)


def tail(path: Path, lines: int = LOG_LINES) -> str:
    """Return the last `lines` lines of a log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 16_384))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(nothing)"


def _by_descriptor(descriptor: int, path: Path) -> str:
    own = Path(f"/proc/self/fd/{descriptor}")
    return str(own) if own.exists() else str(path)
