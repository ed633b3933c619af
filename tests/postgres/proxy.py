"""A TCP proxy in front of Postgres that loses answers: the statement arrives, and nobody hears of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

import trio

Fault = Literal["none", "mute", "cut"]


class Proxy:
    """Forwards bytes until a pattern goes by.

    `lose_answer(b"commit", "mute")`: what the server says after that pattern was forwarded is swallowed, the connection
    stays. With "cut" the client's side is closed when the server begins to answer. Connections that are made later are
    not touched. `silent = True`: new connections are accepted, and nothing is ever said.
    """

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        assert parts.hostname is not None
        assert parts.port is not None
        self._parts = parts
        self._server = (parts.hostname, parts.port)
        self._pattern = b""
        self._fault: Fault = "none"
        self.silent = False
        self.seen = trio.Event()
        self.port = 0

    @property
    def dsn(self) -> str:
        """The server's URL, through the proxy."""
        user, _, _ = self._parts.netloc.rpartition("@")
        return urlunsplit(self._parts._replace(netloc=f"{user}@127.0.0.1:{self.port}"))

    def lose_answer(self, pattern: bytes, fault: Fault) -> None:
        """Lose the answer to the next statement that contains the pattern, in lower case."""
        self._pattern, self._fault = pattern, fault
        self.seen = trio.Event()

    async def handle(self, client: trio.SocketStream) -> None:
        """Serve one connection."""
        if self.silent:
            await trio.sleep_forever()
        server = await trio.open_tcp_stream(*self._server)
        fault: list[Fault] = ["none"]
        async with client, server, trio.open_nursery() as nursery:
            nursery.start_soon(self._up, client, server, fault, nursery.cancel_scope)
            nursery.start_soon(self._down, client, server, fault, nursery.cancel_scope)

    async def _up(
        self, client: trio.SocketStream, server: trio.SocketStream, fault: list[Fault], both: trio.CancelScope
    ) -> None:
        try:
            while data := await client.receive_some():
                if self._pattern and self._pattern in data.lower():
                    fault[0], self._pattern = self._fault, b""
                    self.seen.set()
                await server.send_all(data)
        except trio.BrokenResourceError:
            pass
        both.cancel()

    async def _down(
        self, client: trio.SocketStream, server: trio.SocketStream, fault: list[Fault], both: trio.CancelScope
    ) -> None:
        try:
            while data := await server.receive_some():
                if fault[0] == "cut":
                    break
                if fault[0] == "none":
                    await client.send_all(data)
        except trio.BrokenResourceError:
            pass
        both.cancel()


@asynccontextmanager
async def open_proxy(dsn: str) -> AsyncIterator[Proxy]:
    """Open a proxy before the server of `dsn` for the block."""
    proxy = Proxy(dsn)
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        proxy.port = listener.socket.getsockname()[1]
        await nursery.start(trio.serve_listeners, proxy.handle, [listener])
        yield proxy
        nursery.cancel_scope.cancel()
