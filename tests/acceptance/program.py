"""Runs the real command `sqlstreams` as a process."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

import sqlstreams

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "sqlstreams")
DEADLINE_SECONDS = 30


def environment(dsn: str | None) -> dict[str, str]:
    """The environment of a command that works on `dsn`, or on nothing."""
    env = {key: value for key, value in os.environ.items() if key != "SQLSTREAMS_DATABASE_URL"}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    return env if dsn is None else env | {"SQLSTREAMS_DATABASE_URL": dsn}


def run_cli(
    dsn: str | None, *arguments: str, stdin: bytes = b"", deadline: float = DEADLINE_SECONDS
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end."""
    return subprocess.run(
        (*COMMAND, *arguments),
        input=stdin,
        capture_output=True,
        env=environment(dsn),
        timeout=deadline,
        check=False,
    )


def ok(dsn: str | None, *arguments: str, stdin: bytes = b"") -> bytes:
    """Run a command that must succeed; return its stdout."""
    done = run_cli(dsn, *arguments, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b""), done
    return done.stdout


def document(dsn: str | None, *arguments: str) -> Any:
    """Run a command that must succeed; return its JSON."""
    return json.loads(ok(dsn, *arguments, "--output", "json"))


@contextmanager
def start_cli(dsn: str, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command beside the block; its stdout and stderr are pipes. It ends with the block, or at the deadline.

    At the deadline it gets SIGABRT: reads of its pipes end, and its stderr says where it hung.
    """
    command = (*COMMAND, *arguments)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment(dsn), **options) as process:
        watchdog = threading.Timer(DEADLINE_SECONDS, process.send_signal, (signal.SIGABRT,))
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def register(dsn: str, stream: str, *groups: str) -> None:
    """Install the schema and declare a stream with groups, in this process: faster than a command for each."""

    async def work() -> None:
        async with sqlstreams.connect(dsn, listen=False) as client:
            handle = client.stream(stream)
            await handle.register()
            for group in groups:
                await handle.consumer(group).register()

    trio.run(work)
