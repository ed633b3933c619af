"""Processes: the server that runs in a cluster, who started it or not, and how it is ended.

Guarantee   a process is taken for the server only if it works in the cluster's directory: a pid file from a crash may
            name a stranger. After `halt` and `kill` no process of the server is left, or EmbeddedFailed is raised.
Relies on   the lock `running` beside the cluster, which every process of the server inherits; /proc where there is one.
"""

import contextlib
import os
import signal
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple

from sqlstreams._postgres_locks import Waiting, locked_alone, nobody_cancels, open_lock
from sqlstreams.errors import EmbeddedFailed

__all__ = ["Postmaster", "StopMode", "forget", "halt", "is_at", "kill", "reap", "running", "started"]

StopMode = Literal["smart", "fast", "immediate"]

QUIT_SECONDS = 10.0  # Postgres itself kills children that ignored its SIGQUIT after 5 s
KILL_SECONDS = 10.0
SIGNALS: dict[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}

_children: dict[int, subprocess.Popen[bytes]] = {}  # servers this process started, to reap them


class Postmaster(NamedTuple):
    """What `postmaster.pid` says about a running server."""

    pid: int
    port: int
    ready: bool


def running(cluster: Path, pid: int | None = None) -> Postmaster | None:
    """Return the server that runs in `cluster` now (only if it is `pid`), None when there is none."""
    try:
        lines = (cluster / "postmaster.pid").read_text(errors="replace").splitlines()
        found = int(lines[0])
    except (FileNotFoundError, NotADirectoryError, IndexError, ValueError):
        return None if pid is None or not is_at(pid, cluster) else Postmaster(pid, 0, ready=False)
    if (pid is not None and pid != found) or not is_at(found, cluster):
        return None
    ready = len(lines) >= 8 and lines[7].strip() == "ready"
    return Postmaster(found, int(lines[3]) if ready else 0, ready)


def is_at(pid: int, cluster: Path) -> bool:
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


def started(child: subprocess.Popen[bytes]) -> None:
    """Remember a server that this process started; `reap` or `forget` it."""
    _children[child.pid] = child


def reap(pid: int) -> None:
    """Take the exit status of a server that has ended, or ends just now, if this process started it."""
    child = _children.pop(pid, None)
    if child is not None:
        child.wait()


def forget(cluster: Path) -> None:
    """Leave a server that we started to the programs that still use it."""
    found = running(cluster)
    child = _children.pop(found.pid, None) if found is not None else None
    if child is not None:
        child.returncode = 0  # not ours to wait for; otherwise Popen warns that it still runs


def halt(cluster: Path, mode: StopMode, timeout: timedelta) -> None:
    """Stop the server if one runs: after `timeout` SIGQUIT, 10 s later SIGKILL."""
    found = running(cluster)
    if found is None:
        return
    for sent, seconds in ((SIGNALS[mode], timeout.total_seconds()), (signal.SIGQUIT, QUIT_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(found.pid, sent)
        waiting = Waiting(seconds, nobody_cancels)
        with contextlib.suppress(EmbeddedFailed):
            while running(cluster, found.pid) is not None:
                waiting.tick("the server to stop")
            reap(found.pid)
            return
    kill(cluster, found.pid)


def kill(cluster: Path, pid: int | None = None) -> None:
    """SIGKILL the server and its processes, and wait until they are gone."""
    if pid is None:
        found = running(cluster)
        if found is None:
            return
        pid = found.pid
    children: list[int] = []
    with contextlib.suppress(OSError):  # no /proc: they end by themselves when they miss their parent
        os.kill(pid, signal.SIGSTOP)  # no new children while we read
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for process in (pid, *children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    waiting = Waiting(KILL_SECONDS, nobody_cancels)
    held = open_lock(cluster.parent / "running")
    try:
        while is_at(pid, cluster) or not locked_alone(held):
            waiting.tick("the killed server to be gone")
        reap(pid)
    finally:
        os.close(held)
