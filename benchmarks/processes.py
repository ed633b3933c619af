"""Variants as processes: started with their load, let go together, and asked for what they measured."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import trio

from benchmarks.variants.load import Load

__all__ = ["Failed", "Variant", "start"]

ROOT = Path(__file__).parents[1]
READY_SECONDS = 60.0


class Failed(Exception):
    """A variant ended without a result; what it wrote to stderr stands above."""


class Variant:
    """A running variant. Made by `start`."""

    def __init__(self, name: str, process: trio.Process) -> None:
        self.name = name
        self._process = process
        self._pending = b""

    async def tell(self, **what: object) -> None:
        """Send it a line. Raises: Failed."""
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(msgspec.json.encode(what) + b"\n")
        except trio.BrokenResourceError as exc:
            raise Failed(f"{self.name} has ended early") from exc

    async def answer(self, seconds: float) -> dict[str, Any]:
        """Return the next line it writes. Raises: Failed, trio.TooSlowError."""
        assert self._process.stdout is not None
        with trio.fail_after(seconds):
            await trio.lowlevel.checkpoint()
            while b"\n" not in self._pending:
                got = await self._process.stdout.receive_some()
                if not got:
                    raise Failed(f"{self.name} ended early, with {await self._process.wait()}")
                self._pending += got
        line, _, self._pending = self._pending.partition(b"\n")
        found: dict[str, Any] = msgspec.json.decode(line)
        return found


@asynccontextmanager
async def start(name: str, load: Load) -> AsyncIterator[Variant]:
    """Start `benchmarks.variants.<name>` and wait until it is ready; it is killed at the end of the block."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", f"benchmarks.variants.{name}", msgspec.json.encode(load).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    variant = Variant(name, process)
    try:
        await variant.answer(READY_SECONDS)
        yield variant
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        with trio.move_on_after(10, shield=True):  # bounded: 10 s, after a SIGKILL
            await process.wait()
