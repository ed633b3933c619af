"""`sqlstreams consume STREAM GROUP`: one line a message, written out before the message is recorded.

Guarantee   at least once: a message whose line was not written as a whole comes again. A reader that is slow costs no
            attempt: when it takes nothing for a while, what this process holds is given back until it reads on.
Ends        when the group is drained (not with --follow), after --max lines, when nobody reads stdout any more, on a signal.
"""

from __future__ import annotations

from typing import Any, Literal

import click
import msgspec
import trio

import sqlstreams
from sqlstreams.cli._drained import Drained
from sqlstreams.cli._errors import OutputClosed
from sqlstreams.cli._lines import meta_line, payload_line
from sqlstreams.cli._options import GROUP, STREAM, Settings, common_options, pass_settings
from sqlstreams.cli._output import plural
from sqlstreams.cli._running import Stop, open_client, run
from sqlstreams.cli._stdout import LineWriter
from sqlstreams.config import ConsumeOptions
from sqlstreams.errors import OutcomeUnknown, SQLStreamsError

__all__ = ["consume"]

BATCH = 1_000
LOOK_FIRST, LOOK_LAST = 0.05, 0.5  # seconds between two looks whether the group is drained
CLOSED_SECONDS = 0.5  # how often an idle process looks whether its reader is gone
FINISH_SECONDS = 2.0  # at the end, for the rest of a line that was cut
PATIENCE_SECONDS = 5.0  # for a slow reader; at most half of the group's timeout


@click.command(short_help="Consume as a group, a line a message.")
@click.argument("stream", type=STREAM)
@click.argument("group", type=GROUP)
@click.option("--max", "most", type=click.IntRange(1), metavar="N", help="End after N messages.")
@click.option("--follow", is_flag=True, help="Wait for more instead of ending when the group is drained.")
@click.option("--payload-only", is_flag=True, help="Print the payload as it was produced, nothing else.")
@click.option(
    "--start",
    type=click.Choice(["beginning", "head"]),
    default="beginning",
    help="Where a new group starts (default beginning).",
)
@common_options
@pass_settings
def consume(
    settings: Settings,
    stream: str,
    group: str,
    most: int | None,
    start: Literal["beginning", "head"],
    *,
    follow: bool,
    payload_only: bool,
) -> int:
    """Consume STREAM as GROUP and print a line a message.

    A line is {"id", "key", "headers", "created_at", "attempts", "payload"}. A missing group is registered, a missing
    stream is an error. Ends when everything up to the head at the start is resolved or waits for a retry.
    """

    async def work(stop: Stop) -> int:
        async with open_client(settings, name="sqlstreams consume", listen=follow) as client:
            consumers = client.stream(stream, msgspec.Raw).consumer(group)
            if await consumers.get() is None:
                await consumers.register(start=start)
            drained = None if follow else await Drained.of(client, consumers, settings)
            if drained is not None and await drained.reached():
                return 0
            stop.drains()
            await _Printer(client, consumers, payload_only=payload_only, most=most).run(stop, drained)
        return 0

    return run(work, after_sigterm=0)


class _Printer:
    """Consumes and prints, one message after the other."""

    def __init__(
        self,
        client: sqlstreams.Client,
        group: sqlstreams.ConsumerGroup[msgspec.Raw],
        *,
        payload_only: bool,
        most: int | None,
    ) -> None:
        self._client = client
        self._group = group
        self._payload_only = payload_only
        self._most = most
        self._out = LineWriter(1)
        self._patience = PATIENCE_SECONDS
        self._scope = trio.CancelScope()
        self._slow = False
        self._failed: OutputClosed | None = None
        self.printed = 0

    async def run(self, stop: Stop, drained: Drained | None) -> None:
        """Print until there is a reason to end.

        Raises: OutputClosed, what `consume` raises.
        """
        declared = await self._group.get()
        if declared is not None:
            self._patience = min(PATIENCE_SECONDS, declared.config.timeout.total_seconds() / 2)
        options = ConsumeOptions(batch=min(BATCH, self._most or BATCH))
        async with trio.open_nursery() as nursery:
            ended = nursery.cancel_scope
            nursery.start_soon(self._end_when_asked, stop)
            nursery.start_soon(self._end_when_closed)
            if drained is not None:
                nursery.start_soon(self._end_when, drained)
            while True:
                with trio.CancelScope() as self._scope:
                    await self._group.consume(self._print, options)
                if not self._slow or stop.number is not None or self._failed is not None:
                    break
                with trio.CancelScope() as self._scope:
                    await self._out.wait_ready()
                self._slow = False
            ended.cancel(reason="there is nothing more to print")
        if self._failed is None:
            await self._finish_line()
        if self._failed is not None:
            raise self._failed

    async def _finish_line(self) -> None:
        """Write the rest of a line that was cut, so that no half of it stands before what another process prints."""
        failed: OSError | None = None
        with trio.move_on_after(FINISH_SECONDS) as patience:
            await trio.lowlevel.checkpoint()
            try:
                await self._out.finish()
            except OSError as exc:
                failed = exc
        if failed is not None:
            self._fail(failed.strerror or type(failed).__name__)
        if patience.cancelled_caught:
            self._fail("Nobody reads it: the last line is cut and comes again")

    async def _print(self, payload: msgspec.Raw, meta: sqlstreams.Meta) -> None:
        """Write a message's line; returning means that it is out."""
        if self._most is not None and self.printed >= self._most:
            await self._cut()
        line = payload_line(payload) if self._payload_only else meta_line(payload, meta)
        try:
            with trio.move_on_after(self._patience) as patience:
                await self._out.write(line)
            if patience.cancelled_caught:
                self._slow = True
                await self._cut()
        except OSError as exc:
            self._fail(exc.strerror or type(exc).__name__)
            await self._cut()
        self.printed += 1
        if self.printed == self._most:
            self._client.drain("--max is reached")

    async def _cut(self) -> Any:  # noqa: ANN401 - it does not return
        """Give the message back, and all that is held, by cancelling `consume`."""
        self._scope.cancel(reason="this message cannot be printed now")
        await trio.sleep_forever()

    def _fail(self, why: str) -> None:
        self._failed = OutputClosed(f"{why}, after {plural(self.printed, 'message')}", subject="stdout")

    async def _end_when_asked(self, stop: Stop) -> None:
        await stop.asked.wait()
        self._client.drain("asked by a signal")
        if self._slow:
            self._scope.cancel(reason="asked by a signal")

    async def _end_when_closed(self) -> None:
        while True:
            await trio.sleep(CLOSED_SECONDS)
            if self._out.closed():
                break
        if self._failed is None:
            self._fail("Nobody reads it any more")
        self._scope.cancel(reason="nobody reads stdout any more")

    async def _end_when(self, drained: Drained) -> None:
        pause = LOOK_FIRST
        while True:
            await trio.sleep(pause)
            pause = min(pause * 1.5, LOOK_LAST)
            try:
                if await drained.reached():
                    self._client.drain("the group is drained")
                    return
            except SQLStreamsError as exc:
                if not (exc.may_retry or isinstance(exc, OutcomeUnknown)):
                    raise
