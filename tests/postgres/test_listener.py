"""Rings arrive, and whoever could have missed one is woken: after every LISTEN, after a kill, a freeze, a restart."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import trio

from sqlstreams.errors import AuthenticationFailed, ConfigurationError
from sqlstreams.postgres import listener as module
from sqlstreams.postgres.bridge import open_bridge
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.listener import Listener
from sqlstreams.postgres.pinned import Pinned
from tests.postgres.proxy import open_proxy
from tests.postgres.rig import GRACE, SLACK, settings_for
from tests.servers import backends, frozen, sql_async, terminate_backends, wait_until_async

CHANNEL = 'a "channel" of ours'


class Heard:
    """What a listener said, in order: the payload of a ring, or "all", "up", "down"."""

    def __init__(self) -> None:
        self.everything: list[str] = []
        self._changed = trio.Event()

    def add(self, what: str) -> None:
        self.everything.append(what)
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, *expected: str) -> None:
        """Wait until everything is this, and forget it."""
        with trio.fail_after(10):
            while len(self.everything) < len(expected):
                await self._changed.wait()
        assert tuple(self.everything) == expected
        self.everything.clear()


@asynccontextmanager
async def listening(dsn: str, **options: Any) -> AsyncIterator[tuple[Listener, Heard]]:
    heard = Heard()
    async with open_bridge() as bridge, trio.open_nursery() as nursery:
        listener = Listener(
            bridge,
            settings_for(dsn, connect_timeout=2.0),
            CHANNEL,
            on_ring=heard.add,
            on_wake_all=lambda: heard.add("all"),
            on_up_change=lambda up: heard.add("up" if up else "down"),
            random=Random(1),
            **options,
        )
        await nursery.start(listener.run)
        yield listener, heard
        nursery.cancel_scope.cancel()
    assert bridge.reported == 0
    assert not listener.up


async def ring(dsn: str, *payloads: str) -> None:
    await sql_async(
        dsn, "select pg_notify($1, payload) from unnest($2::text[]) as payload", CHANNEL, list(payloads)
    )


async def test_everybody_is_woken_once_it_listens_and_rings_are_delivered(any_dsn):
    async with listening(any_dsn) as (listener, heard):
        assert listener.up
        await heard.until("up", "all")
        await ring(any_dsn, "1")
        await heard.until("1")
        await ring(any_dsn, "1", "2", "3")
        await heard.until("1", "2", "3")
    await wait_until_async(
        any_dsn, "select count(*) from pg_stat_activity where datname = current_database()", 1
    )


async def test_rings_that_wait_are_delivered_once_each_and_too_many_wake_everybody(dsn, monkeypatch):
    monkeypatch.setattr(module, "MOST_RINGS", 3)
    async with listening(dsn) as (listener, heard):
        await heard.until("up", "all")
        for payload in ("1", "2", "1", "2"):
            listener._when_notified(None, 0, CHANNEL, payload)
        await heard.until("1", "2")
        for n in range(5):
            listener._when_notified(None, 0, CHANNEL, str(n))
        await heard.until("all")
        await ring(dsn, "3")
        await heard.until("3")


async def test_after_its_backend_was_killed_it_listens_again_and_wakes_everybody(dsn):
    async with listening(dsn) as (listener, heard):
        await heard.until("up", "all")
        for times in range(2, 4):
            await trio.to_thread.run_sync(terminate_backends, dsn)
            await heard.until("down", "up", "all")
            assert listener.listens == times
        await ring(dsn, "1")
        await heard.until("1")


async def test_a_frozen_backend_is_found_by_the_self_check(dsn):
    async with listening(dsn, check_every=0.1, check_timeout=0.2) as (listener, heard):
        await heard.until("up", "all")
        (pid,) = backends(dsn)
        with frozen(pid):
            began = trio.current_time()
            await heard.until("down", "up", "all")
            assert trio.current_time() - began < 0.1 + 0.2 + SLACK
            assert listener.up
            await ring(dsn, "1")
            await heard.until("1")


async def test_self_checks_lose_no_rings(dsn):
    async with listening(dsn, check_every=0.002) as (_listener, heard):
        await heard.until("up", "all")
        sent = [str(n) for n in range(100)]
        for payload in sent:
            await ring(dsn, payload)
        await heard.until(*sent)


async def test_it_comes_back_after_a_restart_of_the_server(durable_server):
    server = durable_server(fsync="off")
    async with listening(server.dsn) as (listener, heard):
        await heard.until("up", "all")
        await trio.to_thread.run_sync(server.stop)
        await heard.until("down")
        assert not listener.up
        await trio.to_thread.run_sync(server.start)
        await heard.until("up", "all")
        await ring(server.dsn, "1")
        await heard.until("1")


async def test_without_a_server_it_is_usable_but_not_up(dsn):
    async with open_proxy(dsn) as proxy:
        proxy.silent = True
        with trio.fail_after(2 + SLACK):
            async with listening(proxy.dsn) as (listener, heard):
                assert not listener.up
                assert heard.everything == []
                proxy.silent = False
                await heard.until("up", "all")


async def test_a_refusal_of_the_first_attempt_is_an_error(dsn):
    with pytest.RaisesGroup(AuthenticationFailed):
        async with listening(dsn.replace("/test_", "/gone_")):
            pass


async def test_it_is_cancelled_within_a_grace_even_when_it_is_frozen(dsn):
    async with listening(dsn, check_every=60.0) as (_listener, heard):
        await heard.until("up", "all")
        (pid,) = backends(dsn)
        with frozen(pid):
            began = trio.current_time()
            async with open_bridge() as bridge, trio.open_nursery() as nursery:
                other = Listener(
                    bridge,
                    settings_for(dsn),
                    CHANNEL,
                    on_ring=heard.add,
                    on_wake_all=lambda: None,
                    random=Random(1),
                )
                await nursery.start(other.run)
                (second,) = [one for one in backends(dsn) if one != pid]
                with frozen(second):
                    began = trio.current_time()
                    nursery.cancel_scope.cancel()
                    with trio.CancelScope(
                        shield=True, deadline=began + GRACE + SLACK
                    ):  # bounded: by its deadline
                        while other.up:
                            await trio.sleep(0.01)  # because `up` is a plain attribute; under a deadline
            assert trio.current_time() - began < GRACE + SLACK


async def test_behind_a_pooler_it_is_refused(dsn):
    async with open_bridge() as bridge:
        with pytest.raises(ConfigurationError, match="pooler"):
            Listener(
                bridge,
                settings_for(dsn, pooler=True),
                CHANNEL,
                on_ring=print,
                on_wake_all=lambda: None,
                random=Random(1),
            )


async def test_the_backoff_grows_to_its_cap_with_jitter(dsn):
    async with open_bridge() as bridge:
        listener = Listener(
            bridge, settings_for(dsn), CHANNEL, on_ring=print, on_wake_all=lambda: None, random=Random(1)
        )
        for failures in range(1, 3_000):
            full = min(module.FIRST_BACKOFF * 2 ** min(failures - 1, 16), module.BACKOFF_CAP)
            assert full / 2 <= listener._backoff(failures) <= full


async def test_a_ring_takes_milliseconds_and_nothing_polls(dsn):
    async def notify(conn: Connection, payload: str) -> None:
        await conn.fetchval("select pg_notify($1, $2)", CHANNEL, payload)

    took: list[float] = []
    async with listening(dsn, check_every=60.0) as (_listener, heard), open_bridge() as bridge:
        await heard.until("up", "all")
        bell = Pinned(bridge, settings_for(dsn), name="bell")
        await bell.read(notify, "0")
        await heard.until("0")
        for n in range(50):
            began = trio.current_time()
            await bell.autocommit(notify, str(n))
            await heard.until(str(n))
            took.append(trio.current_time() - began)
        await bell.close()
    took.sort()
    print(f"ring to trio task: median {took[25] * 1000:.2f} ms, p98 {took[48] * 1000:.2f} ms")
    assert took[25] < 0.05
