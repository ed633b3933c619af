"""What all variants share: the load they are given, the message, the tally of what was handled, and how they are told."""

import os
import random
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.checks import check
from benchmarks.settings import BATCH, CLAIM, CONNECTIONS, PAYLOAD_BYTES

__all__ = ["PARTITION", "Control", "Load", "Maker", "Message", "Pace", "Tally", "memory_kib", "now"]

PARTITION = 1_000_000  # ids per partition of either log
TICK_SECONDS = 0.02  # how often progress is noted
QUIET_SECONDS = 0.1  # watched after the last message, for ones that come twice
STUCK_SECONDS = 15.0  # without progress after the last was produced: the rest is lost
OVERHEAD = 45  # bytes of a message's JSON besides its padding, about

now: Callable[[], float] = time.monotonic  # one clock for all processes of a machine


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a variant is to do.

    Attributes:
        dsn: of the database.
        seconds: how long to produce. rate: messages a second, 0 for as many as possible.
        capacity: most messages that may be produced.
        batch: messages a statement; 1: each by itself, on time, not waiting for the ones before it.
        claim: ids taken at once. connections: of the producer. payload: bytes of JSON.
        random: whether the padding cannot be compressed.
        timed: whether the time from produce to handler is kept for each message.
    """

    dsn: str
    seconds: float
    rate: float = 0.0
    capacity: int
    batch: int = BATCH
    claim: int = CLAIM
    connections: int = CONNECTIONS
    payload: int = PAYLOAD_BYTES
    random: bool = False
    timed: bool = False


class Message(msgspec.Struct):
    """The payload: its number, when it was made, and padding."""

    n: int
    sent: float
    pad: str


class Maker:
    """Makes the messages of a run, numbered from 0."""

    def __init__(self, load: Load) -> None:
        length = max(1, load.payload - OVERHEAD)
        if load.random:
            rng = random.Random(7)
            self._pads = [b64encode(rng.randbytes(length))[:length].decode() for _ in range(16)]
        else:
            self._pads = ["x" * length]
        self._capacity = load.capacity
        self.made = 0

    def take(self, most: int, moment: float) -> list[Message]:
        """Return the next messages, due at this moment; fewer or none when the capacity is reached."""
        first, pads = self.made, self._pads
        self.made = min(first + most, self._capacity)
        return [Message(n, moment, pads[n % len(pads)]) for n in range(first, self.made)]


class Pace:
    """When to go on, so that a rate is kept over time."""

    def __init__(self, load: Load, start: float) -> None:
        self._rate = load.rate
        self._start = start
        self._end = start + load.seconds

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return now() >= self._end

    def due(self, made: int) -> float:
        """When the next message after `made` is due; without a rate now."""
        return self._start + made / self._rate if self._rate else now()

    def wait(self, made: int) -> float:
        """How many seconds to wait before the next after `made` messages."""
        return max(0.0, self.due(made) - now())


class Control:
    """The other end of `processes.Variant`: lines on stdin and stdout, read by a thread so that any loop may be used."""

    def __init__(self) -> None:
        self.load = msgspec.json.decode(sys.argv[1], type=Load)
        self.expected: int | None = None
        self._start: float | None = None
        self._told = threading.Event()

    def ready(self) -> None:
        """Say that the work can begin, and listen from now on."""
        self.say(ready=os.getpid())
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_for_start(self) -> float:
        """Block until it is told when to begin, and return that time."""
        self._told.wait()
        assert self._start is not None
        return self._start

    def say(self, **what: object) -> None:
        """Send a line."""
        sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
        sys.stdout.buffer.flush()

    def _listen(self) -> None:
        # its own file object, since one that a thread reads while the interpreter ends makes it abort
        with open(0, "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                match msgspec.json.decode(line):
                    case {"start": float() as start}:
                        self._start = start
                        self._told.set()
                    case {"expected": int() as expected}:
                        self.expected = expected


class Tally:
    """What a consumer has handled."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.counts = bytearray(control.load.capacity)
        self.handled = 0
        self.ages: list[float] = []
        self.samples: list[tuple[float, int]] = []
        self._moved = now()
        self._cpu = time.process_time()
        self.floor_kib = memory_kib("VmRSS")

    def sample(self) -> bool:
        """Note how far it is, every `TICK_SECONDS`; return whether it is over."""
        moment = now()
        if not self.samples or self.samples[-1][1] != self.handled:
            self._moved = moment
        elif len(self.samples) > 1 and self.samples[-2][1] == self.handled:
            self.samples.pop()  # the same for long: its first and last moment are enough
        self.samples.append((moment, self.handled))
        expected = self._control.expected
        if expected is None:
            return False
        return moment - self._moved > (QUIET_SECONDS if self.handled >= expected else STUCK_SECONDS)

    def report(self) -> None:
        """Tell everything."""
        expected = self._control.expected or 0
        self._control.say(
            handled=self.handled,
            verdict=asdict(check(self.counts, expected)),
            samples=self.samples,
            last=self._moved,
            consumer_cpu=time.process_time() - self._cpu,
            ages=self.ages,
            floor_kib=self.floor_kib,
            peak_kib=memory_kib("VmHWM"),
        )


def memory_kib(field: str) -> int:
    """Return a field of /proc/self/status in KiB: VmRSS is what is resident, VmHWM its peak; 0 where there is none."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    found: list[Any] = [
        line.split() for line in status.read_text().splitlines() if line.startswith(f"{field}:")
    ]
    return int(found[0][1]) if found else 0
