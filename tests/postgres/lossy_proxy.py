"""A TCP proxy in front of Postgres that knows statements by their text, also prepared ones that are only executed again.

It cuts a connection just before a statement reaches the server, or just after the server has answered and before the client
hears of it; it tells a hook of every piece that goes by; and it can fall silent.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

import trio

When = Literal["before", "after"]
STARTUP = 196_608  # protocol version 3.0; what comes before it has no type byte either


@dataclass
class Loss:
    """Lose what has to do with statements that contain a text: at most `times` of them."""

    text: str
    when: When
    times: int = 1
    happened: int = 0
    hit: trio.Event = field(default_factory=trio.Event)

    def take(self, statement: str) -> bool:
        """Say whether this statement is one to lose."""
        if self.happened >= self.times or self.text not in statement:
            return False
        self.happened += 1
        self.hit.set()
        return True


class Frames:
    """Cuts what a client sends into messages of the protocol, and knows the texts of its prepared statements."""

    def __init__(self) -> None:
        self._data = b""
        self._started = False
        self._texts: dict[bytes, str] = {}

    def statements(self, data: bytes) -> Iterator[str]:
        """Take in data; yield the text of every statement that is executed by it."""
        self._data += data
        while (message := self._next()) is not None:
            kind, body = message
            if kind == b"P":
                name, text, _ = body.split(b"\0", 2)
                self._texts[name] = text.decode()
            elif kind == b"B":
                yield self._texts.get(body.split(b"\0", 2)[1], "")
            elif kind == b"Q":
                yield body.rstrip(b"\0").decode()

    def _next(self) -> tuple[bytes, bytes] | None:
        head = 1 if self._started else 0
        if len(self._data) < head + 4:
            return None
        size = head + int.from_bytes(self._data[head : head + 4], "big")
        if len(self._data) < size:
            return None
        kind, body, self._data = self._data[:head], self._data[head + 4 : size], self._data[size:]
        if not self._started and int.from_bytes(body[:4], "big") == STARTUP:
            self._started = True
        return kind, body


class LossyProxy:
    """The proxy. `losses` and `passed` may be changed at any time; `silent` swallows everything, both ways."""

    def __init__(self, dsn: str) -> None:
        self._parts = urlsplit(dsn)
        self.port = 0
        self.losses: list[Loss] = []
        self.passed: Callable[[], None] | None = None
        self.silent = False

    @property
    def dsn(self) -> str:
        """The server's URL, through the proxy."""
        user = self._parts.netloc.rpartition("@")[0]
        return urlunsplit(self._parts._replace(netloc=f"{user}@127.0.0.1:{self.port}"))

    def lose(self, text: str, when: When, times: int = 1) -> Loss:
        """Lose the next statements that contain the text."""
        loss = Loss(text, when, times)
        self.losses.append(loss)
        return loss

    async def handle(self, client: trio.SocketStream) -> None:
        """Serve one connection."""
        assert self._parts.hostname is not None
        assert self._parts.port is not None
        server = await trio.open_tcp_stream(self._parts.hostname, self._parts.port)
        answer_lost = trio.Event()
        async with client, server, trio.open_nursery() as nursery:

            async def up() -> None:
                frames = Frames()
                while data := await _receive(client):
                    self._tell()
                    hit = {self._hit(statement) for statement in frames.statements(data)}
                    if "before" in hit:
                        break
                    if "after" in hit:
                        answer_lost.set()
                    if not self.silent:
                        await server.send_all(data)
                nursery.cancel_scope.cancel()

            async def down() -> None:
                while data := await _receive(server):
                    if answer_lost.is_set():
                        break  # the server has answered, so it is done
                    self._tell()
                    if not self.silent:
                        await client.send_all(data)
                nursery.cancel_scope.cancel()

            nursery.start_soon(_until_broken, up, nursery.cancel_scope)
            nursery.start_soon(_until_broken, down, nursery.cancel_scope)

    def _hit(self, statement: str) -> When | None:
        return next((loss.when for loss in self.losses if loss.take(statement)), None)

    def _tell(self) -> None:
        if self.passed is not None:
            self.passed()


@asynccontextmanager
async def open_lossy_proxy(dsn: str) -> AsyncIterator[LossyProxy]:
    """Open a proxy before the server of `dsn` for the block."""
    proxy = LossyProxy(dsn)
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        proxy.port = listener.socket.getsockname()[1]
        await nursery.start(trio.serve_listeners, proxy.handle, [listener])
        yield proxy
        nursery.cancel_scope.cancel()


async def _receive(stream: trio.SocketStream) -> bytes:
    return bytes(await stream.receive_some())


async def _until_broken(work: Callable[[], object], both: trio.CancelScope) -> None:
    try:
        await work()  # type: ignore[misc]
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        both.cancel()
