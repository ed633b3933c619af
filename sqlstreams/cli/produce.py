"""`sqlstreams produce STREAM`: one payload, or JSON lines in their order, a batch a transaction.

Guarantee   messages have the order of their lines; payload bytes are the line's. What a failure names as produced is.
Stopped     what was read is produced first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
import trio
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

import sqlstreams
from sqlstreams.cli._errors import CommandLineError, InputFailed, Interrupted, advised
from sqlstreams.cli._input import Source, message_of
from sqlstreams.cli._options import STREAM, Settings, common_options, pass_settings
from sqlstreams.cli._output import console, plural, print_json, say
from sqlstreams.cli._running import Stop, open_client, run
from sqlstreams.errors import PayloadInvalid, SQLStreamsError

__all__ = ["produce"]

BATCH_MESSAGES = 1_000
BATCH_BYTES = (
    8 * 1024 * 1024
)  # far below what one transaction may hold, so that the next batch is read meanwhile
SHOWN_BAD_LINES = 20
SHOW_SECONDS = 0.1

Batch = tuple[int, int, list[sqlstreams.Outgoing[msgspec.Raw]]]  # first and last line, messages


class Produced(msgspec.Struct):
    """What `produce` did with a file.

    Attributes:
        skipped: bad lines that were passed over. bad_lines: the numbers of the first 20.
        last_line: the last line that was looked at.
    """

    produced: int = 0
    skipped: int = 0
    first_id: int | None = None
    last_id: int | None = None
    last_line: int = 0
    seconds: float = 0.0
    bad_lines: list[int] = []


@click.command(short_help="Append messages: one, a file's or stdin's lines.")
@click.argument("stream", type=STREAM)
@click.argument("payload", required=False)
@click.option("--file", "path", metavar="PATH", help="JSON lines, one message a line; - for stdin.")
@click.option("--key-field", metavar="NAME", help="The top-level string that becomes the message key.")
@click.option("--skip-bad", is_flag=True, help="Pass over lines that are no JSON; exit 1 if there were any.")
@common_options
@pass_settings
def produce(
    settings: Settings,
    stream: str,
    payload: str | None,
    path: str | None,
    key_field: str | None,
    *,
    skip_bad: bool,
) -> int:
    """Append messages to STREAM: one PAYLOAD, or the lines of --file or - (stdin).

    A line that is no JSON ends it with exit 1, its number is named, and the lines before it are produced.
    """
    if (payload is None) == (path is None):
        raise CommandLineError("give either a PAYLOAD, or --file PATH, or - for stdin", subject="produce")
    if path is None and payload != "-":
        return _produce_one(settings, stream, payload or "", key_field)
    name = path or "-"
    if name == "-" and not settings.stdin:
        raise InputFailed("it is closed; nothing was produced", subject="stdin")
    with _opened(name) as fd:
        source = Source(fd, "stdin" if name == "-" else name)

        async def work(stop: Stop) -> int:
            async with open_client(settings, name="sqlstreams produce") as client:
                handle = client.stream(stream, msgspec.Raw)
                await handle.resolve()
                stop.drains()
                lines = _Lines(handle, source, key_field, skip_bad=skip_bad)
                screen = console(stderr=True)
                async with trio.open_nursery() as nursery:
                    if screen.is_terminal and not settings.json:
                        nursery.start_soon(_show, source, lines.result, screen)
                    await lines.produce(stop)
                    nursery.cancel_scope.cancel(reason="everything is produced")
            return _report(settings, stream, source, lines.result)

        return run(work, after_sigterm=0)


def _produce_one(settings: Settings, stream: str, payload: str, key_field: str | None) -> int:
    outgoing = message_of(os.fsencode(payload), key_field, "PAYLOAD", what="payload")

    async def work(stop: Stop) -> int:
        del stop
        async with open_client(settings, name="sqlstreams produce") as client:
            sent = await client.stream(stream, msgspec.Raw).produce(
                outgoing.payload, message_key=outgoing.message_key
            )
        if settings.json:
            print_json(sent)
        else:
            say(f"produced message {sent.id} of stream {stream}")
        return 0

    return run(work)


class _Lines:
    """Produces the lines of a source: one task reads and checks, another sends, so that both go on at once."""

    def __init__(
        self, stream: sqlstreams.Stream[msgspec.Raw], source: Source, key_field: str | None, *, skip_bad: bool
    ) -> None:
        self._stream = stream
        self._source = source
        self._key_field = key_field
        self._skip_bad = skip_bad
        self._bad: SQLStreamsError | None = None
        self._messages: list[sqlstreams.Outgoing[msgspec.Raw]] = []
        self._size = 0
        self._first_line = 1
        self.result = Produced()

    async def produce(self, stop: Stop) -> None:
        """Produce to the end, to the first bad line, or until stopped.

        Raises: PayloadInvalid naming the line, once the lines before it are produced; what `produce_batch` raises, with
            the lines it was about.
        """
        began = time.monotonic()
        send, receive = trio.open_memory_channel[Batch](1)
        reading = trio.CancelScope()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_asked, stop, reading)
                async with trio.open_nursery() as sending, send:
                    sending.start_soon(self._send_batches, receive)
                    with reading:
                        await self._read(send)
                    await self._hand_over(send)
                nursery.cancel_scope.cancel(reason="everything is sent")
        finally:
            self.result.seconds = time.monotonic() - began
        if (bad := self._bad) is not None:
            before = _before(self.result.produced, "it")
            raise advised(type(bad)(f"{bad.message} ({before})", subject=bad.subject), bad.what_to_do)

    async def _read(self, send: trio.MemorySendChannel[Batch]) -> None:
        while (lines := await self._lines()) is not None:
            for line in lines:
                self.result.last_line += 1
                if line and not line.isspace() and not self._take(line):
                    return
                if len(self._messages) >= BATCH_MESSAGES or self._size >= BATCH_BYTES:
                    await self._hand_over(send)
            await self._hand_over(send)

    async def _lines(self) -> list[bytes] | None:
        """Return the source's next lines; one that cannot be read further ends as at a bad line."""
        try:
            return await self._source.lines()
        except InputFailed as exc:
            self._bad = exc
            await trio.lowlevel.checkpoint()
            return None

    def _take(self, line: bytes) -> bool:
        """Add a line to the batch; say whether to go on."""
        number = self.result.last_line
        try:
            message = message_of(line, self._key_field, f"line {number} of {self._source.name}")
        except PayloadInvalid as exc:
            if not self._skip_bad:
                self._bad = exc
                return False
            self.result.skipped += 1
            if len(self.result.bad_lines) < SHOWN_BAD_LINES:
                self.result.bad_lines.append(number)
            return True
        self._messages.append(message)
        self._size += len(line)
        return True

    async def _hand_over(self, send: trio.MemorySendChannel[Batch]) -> None:
        """Give the batch to the sender. Cancelled: it is still here."""
        if not self._messages:
            await trio.lowlevel.checkpoint()
        else:
            await send.send((self._first_line, self.result.last_line, self._messages))
            self._messages, self._size, self._first_line = [], 0, self.result.last_line + 1

    async def _send_batches(self, receive: trio.MemoryReceiveChannel[Batch]) -> None:
        result = self.result
        async for first, last, messages in receive:
            try:
                sent = await self._stream.produce_batch(messages)
            except SQLStreamsError as exc:
                where = f"lines {first} to {last} of {self._source.name}"
                raise type(exc)(
                    f"{exc.message} (at {where}; {_before(result.produced, 'them')})",
                    subject=exc.subject,
                ) from exc
            if result.first_id is None:
                result.first_id = sent[0].id
            result.last_id = sent[-1].id
            result.produced += len(sent)


def _before(count: int, what: str) -> str:
    if not count:
        return "nothing is produced"
    return f"the {plural(count, 'message')} before {what} {'is' if count == 1 else 'are'} produced"


async def _cancel_when_asked(stop: Stop, scope: trio.CancelScope) -> None:
    await stop.asked.wait()
    scope.cancel(reason="asked to stop")


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Give the file descriptor of a file, or of stdin."""
    if path == "-":
        yield 0
        return
    try:
        fd = os.open(path, os.O_RDONLY)
        if Path(path).is_dir():
            os.close(fd)
            raise IsADirectoryError(21, "Is a directory")
    except OSError as exc:
        raise advised(
            CommandLineError(f"it cannot be read: {exc.strerror}", subject=f"file {path!a}"),
            "Check the path and its permissions",
        ) from exc
    try:
        yield fd
    finally:
        os.close(fd)


async def _show(source: Source, result: Produced, screen: Console) -> None:
    """Show a bar and the rate until cancelled."""
    columns: tuple[ProgressColumn, ...] = (SpinnerColumn(),)
    if source.size:
        columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    text = TextColumn("{task.fields[produced]:,} messages, {task.fields[rate]:,.0f}/s")
    began = time.monotonic()
    with Progress(*columns, text, console=screen, transient=True) as progress:
        task = progress.add_task("produce", total=source.size, produced=0, rate=0.0)
        while True:
            await trio.sleep(SHOW_SECONDS)
            rate = result.produced / (time.monotonic() - began)
            progress.update(task, completed=source.read, produced=result.produced, rate=rate)


def _report(settings: Settings, stream: str, source: Source, result: Produced) -> int:
    """Print what was done; 1 when there is a finding."""
    if settings.json:
        print_json(result)
    else:
        rate = result.produced / max(result.seconds, 0.001)
        say(
            f"produced {plural(result.produced, 'message')} to stream {stream} in {result.seconds:.1f} s ({rate:,.0f}/s)"
        )
        if result.skipped:
            more = ", …" if result.skipped > len(result.bad_lines) else ""
            numbers = ", ".join(map(str, result.bad_lines))
            click.echo(
                f"skipped {plural(result.skipped, 'bad line')}: {numbers}{more}",
                err=True,
            )
    if not source.ended and source.size is not None:
        raise Interrupted(
            f"stopped behind line {result.last_line:,}: the rest was not produced",
            subject=f"file {source.name!a}",
        )
    return 1 if result.skipped else 0
