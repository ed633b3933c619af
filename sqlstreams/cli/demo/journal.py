"""What processes of the demo write down: append-only files, a line each time something is certain.

Guarantee   a line is in the file when `write` has returned, whatever happens to the process afterwards: one `write` of the
            operating system appends it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sqlstreams.cli.demo.plan import Kind

__all__ = [
    "Dead",
    "History",
    "Journal",
    "Killed",
    "Planned",
    "Ran",
    "Sent",
    "Tail",
    "encode_lines",
    "journal_path",
    "read_history",
]

_encode = msgspec.json.Encoder().encode


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """`produce` returned this id."""

    id: int
    kind: Kind


class Ran(msgspec.Struct, frozen=True, tag="ran"):
    """A handler was called with a message, or came to an end with it. `at` is the machine's monotonic clock."""

    process: str
    group: str
    id: int
    attempt: int
    outcome: str  # "started", "stalls", "handled", "failed"
    at: float


class Dead(msgspec.Struct, frozen=True, tag="dead"):
    """The group has this message among its dead letters at the end."""

    group: str
    id: int


class Killed(msgspec.Struct, frozen=True, tag="killed"):
    """A process got SIGKILL at this time of the machine's monotonic clock."""

    process: str
    group: str
    at: float


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """What was meant to happen."""

    messages: int
    groups: tuple[str, ...]


Record = Sent | Ran | Dead | Killed | Planned
_decode = msgspec.json.Decoder(Record).decode


class History(msgspec.Struct):
    """Everything that was written down."""

    messages: int
    groups: tuple[str, ...]
    sent: Sequence[Sent] = ()
    ran: Sequence[Ran] = ()
    dead: Sequence[Dead] = ()
    killed: Sequence[Killed] = ()


class Journal:
    """Appends to a file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *records: Record) -> None:
        """Append records."""
        data = encode_lines(records)
        written = os.write(self._fd, data)
        assert written == len(data), "the disk is full"

    def ran(self, process: str, group: str, id_: int, attempt: int, outcome: str) -> None:
        """Append what a handler did just now."""
        self.write(Ran(process, group, id_, attempt, outcome, time.monotonic()))


class Tail:
    """Reads what is new in a file that others append to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> Iterator[Record]:
        """Yield the records since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data.rpartition(b"\n")[0]
        self._at += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            yield _decode(line)


def journal_path(directory: Path, process: str) -> Path:
    """Return where a process writes; no space in the name, so that a shell needs no quotes."""
    return directory / f"{process.replace(' ', '-')}.jsonl"


def encode_lines(records: Sequence[Record]) -> bytes:
    """Return records as lines."""
    return b"".join(_encode(record) + b"\n" for record in records)


def read_history(directory: Path) -> History:
    """Read all journals of a directory."""
    records = [record for path in sorted(directory.glob("*.jsonl")) for record in Tail(path).read()]
    planned = next((record for record in records if isinstance(record, Planned)), Planned(0, ()))
    return History(
        planned.messages,
        planned.groups,
        [record for record in records if isinstance(record, Sent)],
        [record for record in records if isinstance(record, Ran)],
        [record for record in records if isinstance(record, Dead)],
        [record for record in records if isinstance(record, Killed)],
    )
