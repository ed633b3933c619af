"""The user's handler: what it must look like, and one run of it under its timeout.

Guarantee   a run ends in a result, or is cut short by a cancel from outside; nothing a handler raises ends the consumer
            but KeyboardInterrupt and SystemExit.
Cancelled   the handler is cancelled; a plain function runs on in its thread, and the run waits until it has ended.

Source: docs/explanation/delivery.md
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import trio

from sqlstreams.codec import Codec, Undecodable, decode_headers
from sqlstreams.errors import ConfigurationError
from sqlstreams.model.outcome import Result, Success, TerminalOutcome, classify, clean_text
from sqlstreams.runtime.failures import FailureLog
from sqlstreams.store import MessageRow

__all__ = ["Handler", "HandlerRunner", "Meta", "check_handler"]

T = TypeVar("T")
Handler = Callable[..., Any]

_SUCCESS = Success()
_NOT_ITS_OWN = (trio.Cancelled, KeyboardInterrupt, SystemExit)
_BOTH = 2


class Meta(msgspec.Struct, frozen=True):
    """What is known of a message besides its payload.

    Attributes:
        id: its position in the stream. stream, group: their names when `consume` began.
        attempts: how many runs have failed, were delayed, or lost their owner before this one.
        delays: how many of them were delayed by the handler.
        fence: grows with every new owner of the message; guard writes to other systems with it.
        tx: the transaction of a transactional consumer, else None.
    """

    id: int
    stream: str
    group: str
    created_at: datetime
    message_key: str | None
    routing_key: str | None
    headers: dict[str, str]
    schema_version: int
    attempts: int
    delays: int
    fence: int
    tx: Any = None


def check_handler(handler: object) -> tuple[bool, bool]:
    """Say whether a handler is async, and whether it takes the meta as well; refuse what cannot be called with a message.

    Two positional parameters, or `*args`, get both. Partials, bound methods and callable objects are fine.

    Raises: ConfigurationError.
    """
    if not callable(handler):
        raise ConfigurationError(
            f"a handler must be callable, not {type(handler).__name__}", subject="handler"
        )
    inner: Any = handler
    while isinstance(inner, partial):
        inner = inner.func
    function = (
        inner
        if inspect.isroutine(inner) or inspect.isclass(inner)
        else type(inner).__call__  # callable objects: their class says whether it is async
    )
    if (
        inspect.isclass(inner)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise ConfigurationError(
            "a handler must be a function, not a class or a generator", subject="handler"
        )
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(
            "the handler's parameters cannot be looked at; wrap it in a function", subject="handler"
        ) from exc
    positional = [
        each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    both = len(positional) >= _BOTH or any(each.kind is each.VAR_POSITIONAL for each in parameters)
    given = _BOTH if both else 1
    required = sum(each.default is each.empty for each in positional)
    named = [
        each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    ]
    if (not positional and not both) or required > given or named:
        raise ConfigurationError(
            "a handler is called with (message) or (message, meta), and this one does not accept that",
            subject="handler",
        )
    return inspect.iscoroutinefunction(function), both


class HandlerRunner(Generic[T]):
    """Runs a handler for one message at a time, as often as asked at once.

    Args:
        handler: checked before.
        codec: decodes payloads.
        names: of the stream and the group.
        timeout: seconds a run may take; may be changed while runs go on.
        threads: how many plain functions may run at once.
    """

    def __init__(
        self, handler: Handler, codec: Codec[T], names: tuple[str, str], timeout: float, threads: int
    ) -> None:
        is_async, self._both = check_handler(handler)
        self._call: Callable[..., Awaitable[Any]] = (
            handler if is_async else partial(_in_thread, handler, trio.CapacityLimiter(threads))
        )
        self._decode = codec.decode
        self._stream, self._group = names
        self._failures = FailureLog(names)
        self.timeout = timeout

    async def run(self, row: MessageRow, attempts: int, delays: int, fence: int) -> Result:
        """Decode a message, run the handler, and say what became of it.

        A payload that does not decode is dead at once. A handler that has not ended at its timeout is cancelled, and that
        is a failure whatever it does then.

        Cancelled: the handler was cancelled and has ended.
        """
        try:
            message = self._decode(row.payload)
        except Undecodable as exc:
            undecodable = TerminalOutcome(clean_text(f"Undecodable: {exc}"))
            self._failures.tell(row.id, attempts, undecodable, exc)
            return undecodable
        deadline = trio.current_time() + self.timeout
        scope = trio.CancelScope(deadline=deadline)
        raised: BaseException | None = None
        try:
            with scope:
                if self._both:
                    await self._call(message, self._meta(row, attempts, delays, fence))
                else:
                    await self._call(message)
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised again there, if it is not the handler's
            raised = _without_cut(exc)
        else:
            if not scope.cancel_called and trio.current_time() < deadline:
                return _SUCCESS
        result = classify(raised, scope.cancel_called or trio.current_time() >= deadline)
        self._failures.tell(row.id, attempts, result, raised)
        return result

    def _meta(self, row: MessageRow, attempts: int, delays: int, fence: int) -> Meta:
        return Meta(
            row.id,
            self._stream,
            self._group,
            row.created_at,
            row.message_key,
            row.routing_key,
            decode_headers(row.headers),
            row.schema_version,
            attempts,
            delays,
            fence,
        )


def _without_cut(exc: BaseException) -> BaseException:
    """Return what a handler raised by itself; raise again what is not its own: a cancel from outside, Ctrl-C, SystemExit.

    A handler that is cut short may raise on its way out: then it counts as cut short, and its message comes again.
    """
    if isinstance(exc, _NOT_ITS_OWN):
        raise exc
    if isinstance(exc, BaseExceptionGroup):
        cut, _ = exc.split(_NOT_ITS_OWN)
        if cut is not None:
            raise cut from None
    return exc


class _ReturnedAwaitable(Exception):
    """A plain function returned something that nobody would await."""


async def _in_thread(handler: Handler, limiter: trio.CapacityLimiter, *args: Any) -> None:
    result = await trio.to_thread.run_sync(handler, *args, limiter=limiter)
    if inspect.isawaitable(result):
        close = getattr(result, "close", None)
        if close is not None:
            close()
        raise _ReturnedAwaitable(
            "the handler is a plain function that returned an awaitable; make it `async def`"
        )
