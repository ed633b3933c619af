"""Scenarios N: connections that end, servers that restart, calls that are cancelled at every step.

Not here: N4 and N7 (the simulation's), N5 (test_cancellation_table.py and J3), N8.
"""

import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, get_type_hints

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import sqlstreams
from sqlstreams.model.outcome import ExceptionRow, HistoryRow, NextOutcome
from sqlstreams.model.values import MessageId, NodeId, Token
from sqlstreams.postgres.listener import Listener
from sqlstreams.runtime.holdings import Holdings
from sqlstreams.runtime.pulse import GroupPulse
from sqlstreams.store import GroupRow, Held, OutgoingRow, RangeRecord, Store, Watched
from sqlstreams.store.protocols import (
    ClaimStore,
    ExceptionStore,
    LogStore,
    NodeStore,
    OperateStore,
    RegistryStore,
)
from tests.postgres.lossy_proxy import open_lossy_proxy
from tests.postgres.scenario_rig import (
    BUSY,
    SHORT,
    Seen,
    assert_nothing_left,
    consuming,
    opened,
    other_node,
    seconds,
    server_run,
    store_of,
    take_range,
    until,
    until_done,
    until_resolved,
)
from tests.servers import sql_async, terminate_backends

SEED = 3


# Load.


@dataclass
class Load:
    """Producers that go on whatever happens; what each call was told."""

    stream: sqlstreams.Stream[Any]
    sent: list[int] = field(default_factory=list)
    unknown: int = 0
    stopped: bool = False

    async def produce(self) -> None:
        """Produce one after the other; only an unknown outcome may be seen."""
        while not self.stopped:
            try:
                self.sent.append((await self.stream.produce({})).id)
            except sqlstreams.OutcomeUnknown:
                self.unknown += 1
            await trio.sleep(0.001)  # because this is the rate of the load

    async def until_more(self, count: int) -> None:
        """Wait until so many more were sent."""
        wanted = len(self.sent) + count
        await until(lambda: not (len(self.sent) < wanted), 20)


async def assert_all_handled(dsn: str, seen: Seen, load: Load) -> None:
    """Everything that is in the log was handled, and everything that produce returned is in the log, once."""
    head = (await sql_async(dsn, "select max(id) from sqlstreams.message_log_1"))[0][0]
    await until_resolved(dsn, head, 30)
    stored = {row[0] for row in await sql_async(dsn, "select id from sqlstreams.message_log_1")}
    assert len(load.sent) == len(set(load.sent))
    assert set(load.sent) <= stored
    assert len(stored) <= len(load.sent) + load.unknown
    assert set(seen.ids) == stored


@pytest.mark.slow
async def test_n1_every_kind_of_connection_may_end_under_load(any_dsn, caplog):
    caplog.set_level(logging.WARNING, "sqlstreams")
    async with opened(any_dsn, stream=sqlstreams.StreamConfig(partition_size=200)) as (
        _client,
        stream,
        group,
    ):
        load, seen = Load(stream), Seen()
        async with consuming(group, seen, concurrency=4), trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(load.produce)
            await load.until_more(50)
            for name in ("node", "watch", "ddl", "listener", None):
                for _ in range(3):
                    application = "sqlstreams" if name is None else f"sqlstreams {name}"
                    await trio.to_thread.run_sync(
                        partial(terminate_backends, any_dsn, application_name=application)
                    )
                    await load.until_more(100)
            load.stopped = True
        async with consuming(group, seen, concurrency=4):
            await assert_all_handled(any_dsn, seen, load)
    assert load.unknown <= 3 * 2 * 3  # of each round at most the batches that were under way
    assert [each.getMessage() for each in caplog.records if each.levelno > logging.WARNING] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_n2_consuming_goes_on_within_five_seconds_of_a_restart(durable_server, mode):
    server = durable_server()
    dsn = server.dsn
    async with opened(dsn) as (_client, stream, group):
        load, seen = Load(stream), Seen()
        async with consuming(group, seen), trio.open_nursery() as nursery:
            nursery.start_soon(patient, load)
            await load.until_more(200)
            await trio.to_thread.run_sync(lambda: server.restart(mode))
            ready, runs = trio.current_time(), len(seen.runs)
            with trio.fail_after(20):
                await load.until_more(1)
                await seen.until_runs(runs + 1)
            assert trio.current_time() - ready < 5.0 + BUSY
            await load.until_more(100)
            load.stopped = True
        async with consuming(group, seen):
            await assert_all_handled(dsn, seen, load)


async def patient(load: Load) -> None:
    """Produce through an outage that may last longer than a produce waits."""
    while not load.stopped:
        try:
            await load.produce()
        except sqlstreams.StoreUnavailable:
            await trio.sleep(0.05)  # because the server is away


# N3.

Call = Callable[[], Awaitable[object]]


class Everything:
    """A call of every method of the store, with arguments under which it has something to do.

    Preparing a call may use the store; the call itself is what is cancelled.
    """

    def __init__(
        self, client: sqlstreams.Client, stream: Any, group: Any, node: tuple[NodeId, Token]
    ) -> None:
        self.client = client
        self.store: Store = store_of(client)
        self.stream = stream
        self.group = group
        self.node, self.token = node
        self.ids = 0
        self.used: dict[Token, None] = {}

    def mint(self) -> Token:
        return self.client._core.process.make_token()

    def name(self, kind: str) -> str:
        self.ids += 1
        return f"{kind} {self.ids}"

    async def prepared(self, method: str) -> Call:
        """Return a call of a method."""
        make = getattr(self, f"make_{method}")
        made: Call = await make()
        return made

    # Registry.

    async def make_register_stream(self) -> Call:
        name = self.name("stream")
        return lambda: self.store.register_stream(name, sqlstreams.StreamConfig())

    async def make_stream_by_name(self) -> Call:
        return lambda: self.store.stream_by_name("s")

    async def make_stream_by_id(self) -> Call:
        return lambda: self.store.stream_by_id(self.stream.id)

    async def make_streams(self) -> Call:
        return lambda: self.store.streams()

    async def make_rename_stream(self) -> Call:
        row = await self.store.register_stream(self.name("stream"), sqlstreams.StreamConfig())
        return lambda: self.store.rename_stream(row.id, self.name("renamed"))

    async def make_destroy_stream(self) -> Call:
        row = await self.store.register_stream(self.name("stream"), sqlstreams.StreamConfig())
        return lambda: self.store.destroy_stream(row.id, force=True)

    async def make_register_group(self) -> Call:
        name = self.name("group")
        return lambda: self.store.register_group(
            self.stream, name, sqlstreams.GroupConfig(), start=None, run=None
        )

    async def make_group_by_name(self) -> Call:
        return lambda: self.store.group_by_name(self.stream.id, "g")

    async def make_group_by_id(self) -> Call:
        return lambda: self.store.group_by_id(self.group.id)

    async def make_groups(self) -> Call:
        return lambda: self.store.groups(self.stream.id)

    async def make_destroy_group(self) -> Call:
        row = await self.store.register_group(
            self.stream, self.name("group"), sqlstreams.GroupConfig(), start=None, run=None
        )
        return lambda: self.store.destroy_group(row, force=True)

    # Log.

    async def make_log_refs(self) -> Call:
        return lambda: self.store.log_refs([self.stream.id])

    async def make_observe(self) -> Call:
        refs = await self.store.log_refs([self.stream.id])
        return lambda: self.store.observe(refs)

    async def make_holders(self) -> Call:
        return lambda: self.store.holders([1])

    async def make_append(self) -> Call:
        rows = [OutgoingRow(1, None, "key", None, b"{}")] * 3
        return lambda: self.store.append(self.stream.id, rows)

    async def make_make_partitions(self) -> Call:
        _, end = await self.store.runway(self.stream.id, self.stream.partition_size)
        return lambda: self.store.make_partitions(self.stream.id, self.stream.partition_size, end)

    async def make_runway(self) -> Call:
        return lambda: self.store.runway(self.stream.id, self.stream.partition_size)

    async def make_read_range(self) -> Call:
        return lambda: self.store.read_range(self.stream.id, 0, 100, rows=10, size=1_000)

    # Claims.

    async def more(self) -> int:
        """Append a message and return its id."""
        return (await self.store.append(self.stream.id, [OutgoingRow(1, None, None, None, b"{}")]))[-1]

    async def make_claim(self) -> Call:
        settled = await self.more()
        token = self.mint()
        return lambda: take_range(
            self.client, self.group, self.node, token, settled, limit=1, freed_first=False
        )

    async def claimed(self) -> RangeRecord:
        settled, token = await self.more(), self.mint()
        taken = None
        while taken is None or taken.empty:
            taken = await take_range(self.client, self.group, self.node, token, settled, limit=1)
        exception = ExceptionRow(MessageId(taken.claim.high), "ready", 1, 0, timedelta(days=1), "x", None, 1)
        line = HistoryRow(MessageId(taken.claim.high), 0, "failed", "x")
        return RangeRecord(
            self.group.id,
            taken.claim.low,
            token,
            0,
            "finish",
            taken.claim.high,
            self.node,
            (exception,),
            (line,),
        )

    async def make_record(self) -> Call:
        record = await self.claimed()
        return lambda: self.store.record(self.stream.id, record)

    async def make_read_progress(self) -> Call:
        return lambda: self.store.read_progress(self.stream.id, self.group.id)

    async def make_advance(self) -> Call:
        progress = await self.store.read_progress(self.stream.id, self.group.id)
        assert progress is not None
        return lambda: self.store.advance(
            self.group.id, progress.epoch, progress.ranges_done, progress.committed
        )

    async def make_delete_done_claims(self) -> Call:
        return lambda: self.store.delete_done_claims(self.stream.id, self.group.id, 0, 0, limit=10)

    async def make_held(self) -> Call:
        return lambda: self.store.held(self.stream.id, self.group.id, self.node, 0)

    async def make_release(self) -> Call:
        record = await self.claimed()
        held = Held(record.low, record.token, "range")
        return lambda: self.store.release(self.stream.id, self.group.id, held)

    # Exceptions.

    async def excepted(self) -> int:
        message = await self.more()
        await sql_async(
            self.client._pool.settings.dsn,
            "insert into sqlstreams.exception_queue_1 (group_id, message_id, status) values ($1, $2, 'ready')"
            " on conflict (group_id, message_id) do update set status = 'ready', can_run_after = now()",
            self.group.id,
            message,
        )
        return message

    async def make_claim_exceptions(self) -> Call:
        await self.excepted()
        token = self.mint()
        return lambda: self.store.claim_exceptions(self.group, self.node, token, reads=(1,), limit=10)

    async def make_record_exception(self) -> Call:
        await self.excepted()
        token = self.mint()
        taken = await self.store.claim_exceptions(self.group, self.node, token, reads=(1,), limit=10)
        outcome = NextOutcome("resolved", 0, 0, None, None, "succeeded")
        return lambda: self.store.record_exception(
            self.group, taken[-1].message_id, token, outcome, self.node, seen_attempts=0, history="succeeded"
        )

    async def make_due(self) -> Call:
        return lambda: self.store.due([Watched(self.group.id, self.stream.id, (1,))])

    async def make_snapshot(self) -> Call:
        return lambda: self.store.snapshot(self.stream.id, self.group.id)

    async def make_dead_letters(self) -> Call:
        return lambda: self.store.dead_letters(
            self.stream.id, self.group.id, after=0, limit=9, error_contains=None
        )

    # Operations.

    async def another_group(self) -> GroupRow:
        """A group that nobody consumes, so that the others go on."""
        config = sqlstreams.GroupConfig()
        return await self.store.register_group(self.stream, self.name("group"), config, start=None, run=None)

    async def make_pause(self) -> Call:
        row = await self.another_group()
        return lambda: self.store.pause(row.id)

    async def make_resume(self) -> Call:
        row = await self.another_group()
        await self.store.pause(row.id)
        return lambda: self.store.resume(row.id)

    async def died(self) -> int:
        message = await self.excepted()
        await sql_async(
            self.client._pool.settings.dsn,
            "update sqlstreams.exception_queue_1 set status = 'dead' where message_id = $1",
            message,
        )
        return message

    async def make_redrive(self) -> Call:
        ids = [await self.died()]
        return lambda: self.store.redrive(self.stream.id, self.group.id, ids=ids, error_contains=None)

    async def make_discard(self) -> Call:
        ids = [await self.died()]
        return lambda: self.store.discard(self.stream.id, self.group.id, ids=ids, error_contains=None)

    async def make_inspect(self) -> Call:
        message = MessageId(await self.died())
        return lambda: self.store.inspect(self.stream.id, self.group.id, message)

    async def make_before_instant(self) -> Call:
        high = await self.more()
        instant = self.stream.created_at
        return lambda: self.store.before_instant(self.stream.id, 0, high, instant)

    async def make_oldest_retained(self) -> Call:
        return lambda: self.store.oldest_retained(self.stream)

    async def make_count_between(self) -> Call:
        high = await self.more()
        return lambda: self.store.count_between(self.stream.id, 0, high)

    async def make_seek(self) -> Call:
        row = await self.another_group()
        return lambda: self.store.seek(row, 0, run=None, force=False)

    # Nodes.

    async def make_register_node(self) -> Call:
        former = await other_node(self.client)
        return lambda: self.store.register_node("n", "h", 1, "0", seconds(600), self.mint(), former)

    async def make_heartbeat(self) -> Call:
        return lambda: self.store.heartbeat(self.node, self.token, seconds(600))

    async def make_end_own_node(self) -> Call:
        node, token = await other_node(self.client)
        return lambda: self.store.end_own_node(node, token)

    async def make_end_expired_nodes(self) -> Call:
        await other_node(self.client, ttl=0)
        return self.store.end_expired_nodes

    async def make_beats(self) -> Call:
        return lambda: self.store.beats(self.node)

    async def make_end_silent_node(self) -> Call:
        node, _ = await other_node(self.client)
        return lambda: self.store.end_silent_node(node, 0)

    async def make_nodes(self) -> Call:
        return lambda: self.store.nodes(ended=True)

    async def make_join(self) -> Call:
        token = self.mint()
        return lambda: self.store.join(self.group.worker_id, self.node, token)

    async def make_leave(self) -> Call:
        token = self.mint()
        await self.store.join(self.group.worker_id, self.node, token)
        return lambda: self.store.leave(token)

    async def make_ring(self) -> Call:
        return lambda: self.store.ring("nobody;p1")

    # Afterwards.

    async def assert_nothing_is_held(self) -> None:
        """The comparison of holdings gives back whatever a lost call took; nobody runs anything here."""
        watched = Watched(self.group.id, self.stream.id, (1,))
        holdings = Holdings(self.store, GroupPulse(watched), 5.0, lambda: None)
        with trio.fail_after(10):
            while await self.store.held(self.stream.id, self.group.id, self.node, 0):
                await holdings.compare(await self.as_node())

    async def as_node(self) -> Any:
        @dataclass
        class Named:
            id: NodeId

        return Named(self.node)


def methods() -> list[str]:
    """Return the name of every method of the store."""
    protocols = (RegistryStore, LogStore, ClaimStore, ExceptionStore, NodeStore, OperateStore, Store)
    return sorted(
        name
        for each in protocols
        for name, value in vars(each).items()
        if callable(value) and not name.startswith("_")
    )


def test_n3_every_method_of_the_store_is_called_here():
    assert {f"make_{name}" for name in methods()} == {
        name for name in vars(Everything) if name.startswith("make_")
    }
    assert all(get_type_hints(getattr(Store, name))["return"] is not None for name in methods())


@pytest.mark.parametrize("method", methods())
async def test_n3_cancelled_at_each_step_a_call_leaves_nothing_behind(dsn, method):
    """Each piece of data that goes by, in either direction, is a step: between two of them lie all awaits of the call."""
    async with (
        open_lossy_proxy(dsn) as proxy,
        opened(proxy.dsn, listen=False, stream=sqlstreams.StreamConfig(partition_size=1_000)) as (
            client,
            stream,
            group,
        ),
    ):
        every = Everything(client, await stream.get(), await group.get(), await other_node(client))
        await (await every.prepared(method))()  # everything that is connected or prepared once
        passed = 0

        def count() -> None:
            nonlocal passed
            passed += 1

        call = await every.prepared(method)
        proxy.passed = count
        await call()
        await wait_all_tasks_blocked()
        proxy.passed = None
        cancelled = 0
        for step in range(-1, passed + 1):
            call = await every.prepared(method)
            scope = trio.CancelScope()
            left = step

            def countdown() -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    scope.cancel()  # noqa: B023

            with scope:
                if step < 0:
                    scope.cancel()
                else:
                    proxy.passed = countdown
                try:
                    await call()
                except sqlstreams.OutcomeUnknown:
                    pytest.fail("the server answers: the outcome can be known")
                except sqlstreams.SQLStreamsError:
                    if not scope.cancel_called:
                        raise
            proxy.passed = None
            cancelled += scope.cancelled_caught
            await assert_nothing_left(client, dsn)
        await every.assert_nothing_is_held()
        await (await every.prepared(method))()  # and it works as before
        assert cancelled > 0
        assert client._core.store is every.store


@pytest.mark.slow
async def test_n3_random_deadlines_leave_nothing_behind(any_dsn):
    chance = random.Random(SEED)
    async with opened(any_dsn, listen=False, stream=sqlstreams.StreamConfig(partition_size=10_000)) as (
        client,
        stream,
        group,
    ):
        every = Everything(client, await stream.get(), await group.get(), await other_node(client))
        await server_run(client, every.group)
        ends = {"cancelled": 0, "returned": 0}
        for method in methods():
            took = []
            for _ in range(5):
                call = await every.prepared(method)
                began = trio.current_time()
                await call()
                took.append(trio.current_time() - began)
            for _ in range(40):
                call = await every.prepared(method)
                with trio.move_on_after(chance.uniform(0, 1.5 * sorted(took)[2])) as scope:
                    await call()
                ends["cancelled" if scope.cancelled_caught else "returned"] += 1
        await assert_nothing_left(client, any_dsn)
        await every.assert_nothing_is_held()
        print(ends)
        assert min(ends.values()) > 300


@pytest.mark.slow
async def test_n3_a_consumer_that_is_cancelled_at_random_holds_nothing_and_loses_nothing(any_dsn):
    chance = random.Random(SEED)

    async def a_step() -> None:
        await trio.lowlevel.checkpoint()

    def act(meta):
        if meta.id % 7 == 0 and meta.attempts == 0:
            raise ValueError("broken")
        return a_step() if meta.id % 2 else None

    config = sqlstreams.GroupConfig(initial_backoff=seconds(0))
    async with opened(any_dsn, config) as (client, stream, group):
        seen = Seen(act)
        total = 0
        for _ in range(60):
            total += len(await stream.produce_batch([{}] * 20))
            with trio.move_on_after(chance.uniform(0, 0.06)):
                await group.consume(
                    seen, sqlstreams.ConsumeOptions(batch=10, concurrency=chance.choice([1, 4]))
                )
            held = await sql_async(
                any_dsn,
                "select (select count(*) from sqlstreams.claim_1 where not done and node_id is not null)"
                " + (select count(*) from sqlstreams.exception_queue_1 where status = 'inflight')",
            )
            assert held[0][0] == 0, "a cancelled consumer gives everything back"
        await assert_nothing_left(client, any_dsn)
        async with consuming(group, seen, concurrency=4):
            await until_resolved(any_dsn, total, 30)
        assert set(seen.ids) == set(range(1, total + 1))
        reclaims = await sql_async(any_dsn, "select coalesce(max(reclaims), 0) from sqlstreams.claim_1")
        assert reclaims[0][0] == 0


# N6.


async def test_n6_a_killed_listener_comes_back_wakes_everyone_and_meanwhile_polling_finds_messages(
    any_dsn, monkeypatch
):
    barred = [False]
    try_to_listen = Listener._try_to_listen

    async def unless_barred(self: Listener) -> bool:
        if barred[0]:
            await trio.lowlevel.checkpoint()
            return False
        return await try_to_listen(self)

    monkeypatch.setattr(Listener, "_try_to_listen", unless_barred)
    async with (
        opened(any_dsn) as (client, _stream, group),
        sqlstreams.connect(any_dsn, listen=False) as other,
    ):
        stream = other.stream("s")  # another process: its rings come through the server
        up = client._core.process.observer._listening
        seen = Seen()

        async def arrives() -> None:
            count = len(seen.runs) + 1
            sent = trio.current_time()
            await stream.produce({})
            await seen.until_runs(count)
            assert seen.at[-1] - sent < 0.5 + BUSY
            await until_done(any_dsn, count)

        async with consuming(group, seen):
            await arrives()
            barred[0] = True
            await trio.to_thread.run_sync(
                partial(terminate_backends, any_dsn, application_name="sqlstreams listener")
            )
            await until(lambda: not up(), 10)
            for _ in range(2):
                await arrives()
            assert not up()
            barred[0] = False
            await until(up, 10)
            await arrives()
        assert seen.ids == [1, 2, 3, 4]


async def test_n6_many_produces_ring_at_most_200_times_a_second_and_never_in_a_producers_transaction(dsn):
    async with opened(dsn) as (client, stream, _group):
        doorbell = client._core.process.doorbell
        before, began = doorbell.sent, trio.current_time()
        async with trio.open_nursery() as nursery:

            async def produce() -> None:
                for _ in range(100):
                    await stream.produce({})

            for _ in range(50):
                nursery.start_soon(produce)
        took = trio.current_time() - began
        assert 1 <= doorbell.sent - before <= 200 * took + 5
        await doorbell.flush()
        sent = doorbell.sent
        with pytest.raises(KeyError):
            async with client.transaction() as tx:
                await stream.produce({}, tx=tx)
                await doorbell.flush()
                raise KeyError
        await doorbell.flush()
        assert doorbell.sent == sent


async def test_n6_a_ring_is_not_needed_at_all(dsn):
    async with (
        opened(dsn, listen=False, lease=SHORT) as (_client, _stream, group),
        sqlstreams.connect(dsn, listen=False) as other,
    ):
        seen = Seen()
        async with consuming(group, seen):
            for count in range(1, 5):
                sent = trio.current_time()
                await other.stream("s").produce({})
                await seen.until_runs(count)
                assert seen.at[-1] - sent < 0.5 + BUSY
                await until_done(dsn, count)
