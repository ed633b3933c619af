"""Scenarios B11, B16 to B18 and D5: what a person does to a group, also while its consumers run.

Not here: D6, because nothing removes partitions by itself in this release.
"""

from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import trio

import sqlstreams
from sqlstreams import operations
from sqlstreams.errors import ConfigurationError, GroupBusy, GroupDamaged, LeaseLost, NotFound, SettleTimeout
from sqlstreams.model.progress import forward, marks_of
from sqlstreams.operations import Position
from tests.postgres.opened import (
    eventually_equal,
    ids_of,
    open_installation,
    span,
)
from tests.postgres.scenario_rig import (
    HOUR,
    Seen,
    consuming,
    exceptions,
    history,
    move_clock,
    opened,
    other_node,
    own_clock,
    seconds,
    server_run,
    store_of,
    take_range,
    until_done,
    until_resolved,
    until_status,
)
from tests.servers import sql_async, wait_until_async

UTC = timezone.utc  # noqa: UP017 - the name is as good on 3.11
MARKS = "select epoch, ranges_done, committed from sqlstreams.group_cursor where group_id = 1"
START = datetime(2024, 1, 1, tzinfo=UTC)


def failing(*ids: int, text: str = "broken") -> Seen:
    """A handler that fails for these messages."""

    def act(meta):
        if meta.id in ids:
            raise ValueError(f"{text} {meta.id}")

    return Seen(act)


async def marks(dsn: str) -> tuple[int, int, int]:
    """Return epoch, ranges_done and committed of group 1."""
    return tuple((await sql_async(dsn, MARKS))[0])


@asynccontextmanager
async def dead_letters_of(dsn: str, *dead: int, total: int = 6, **config: Any):
    """A group whose consumers have ended, with these dead letters."""
    async with opened(dsn, sqlstreams.GroupConfig(max_retries=0, **config)) as (client, stream, group):
        await stream.produce_batch([{}] * total)
        async with consuming(group, failing(*dead)):
            await until_done(dsn, total)
            await until_resolved(dsn, total)
        yield client, stream, group


@asynccontextmanager
async def writer_open(client: sqlstreams.Client, stream: Any):
    """Within the block, a transaction has drawn an id of the stream; it commits at the end."""
    async with client.transaction() as tx:
        sent = await stream.produce({"late": True}, tx=tx)
        yield sent.id


@asynccontextmanager
async def numbered_log(dsn: str, there: str):
    """A log of ids up to 800 in partitions of 100, created one a minute from START on; `there` says which exist."""
    async with opened(dsn, stream=sqlstreams.StreamConfig(partition_size=100)) as (client, stream, group):
        await store_of(client).make_partitions((await stream.get()).id, 100, 900)
        await sql_async(
            dsn,
            "insert into sqlstreams.message_log_1 (id, created_at, payload)"
            f" select n, $1::timestamptz + n * interval '1 min', '{{}}' from generate_series(1, 800) n where {there}",
            START,
        )
        await sql_async(dsn, "select setval('sqlstreams.message_log_1_id', 800)")
        yield client, stream, group


# B16


async def test_b16_after_a_seek_owners_of_open_ranges_lose_them_and_everything_comes_again(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 5_000)
        while (taken := await here.claim(group, node, 4_800, limit=1_600)) is not None:
            await here.finish(group, node, taken)
        open_ranges = [await here.claim(group, node, 5_000, limit=100) for _ in range(2)]
        assert [span(each) for each in open_ranges] == [(4_800, 4_900), (4_900, 5_000)]
        await here.advance(group)
        assert await here.committed(group) == 4_800
        epoch = await here.store.seek(group, 0, run=None, force=False)
        assert epoch == group.epoch + 1
        assert await here.claims(group) == [(-1, 0, True, 0)]
        for each in open_ranges:
            with pytest.raises(LeaseLost):
                await here.finish(group, node, each)
        assert await here.committed(group) == 0
        assert await here.exceptions(group) == []
        again = []
        while (taken := await here.claim(group, node, 5_000, limit=1_000)) is not None:
            again += ids_of(taken)
            await here.finish(group, node, taken)
        assert again == list(range(1, 5_001))
        await here.advance(group)
        assert await here.committed(group) == 5_000


async def test_b16_an_advancer_that_read_before_the_seek_changes_nothing(any_dsn):
    async with open_installation(any_dsn) as here:
        stream = await here.stream()
        group, node = await here.group(stream), await here.node()
        await here.produce_many(stream, 50)
        while (taken := await here.claim(group, node, 50, limit=10)) is not None:
            await here.finish(group, node, taken)
        progress = await here.store.read_progress(stream.id, group.id)
        wanted = forward(progress, marks_of(progress))
        assert (wanted.ranges_done, wanted.committed) == (50, 50)
        await here.store.seek(group, 0, run=None, force=False)
        fresh = await here.claim(group, node, 50, limit=10)
        await here.finish(group, node, fresh)
        before = await here.claims(group)
        store = here.store
        assert not await store.advance(group.id, progress.epoch, wanted.ranges_done, wanted.committed)
        assert await store.delete_done_claims(stream.id, group.id, progress.epoch, 50, limit=100) == 0
        assert (await here.claims(group), await here.committed(group)) == (before, 0)


async def test_b16_an_advancer_that_waits_for_the_seek_changes_nothing(dsn):
    """Its statement has begun when the seek commits: the epoch is looked at again on the new row."""
    async with open_installation(dsn) as here:
        stream = await here.stream()
        group, seeker = await here.group(stream), await here.session()
        await seeker.execute("begin")
        await seeker.execute("update sqlstreams.group_cursor set epoch = epoch + 1")
        moved = []

        async def advance() -> None:
            moved.append(await here.store.advance(group.id, group.epoch, 50, 50))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(advance)
            await eventually_equal(
                lambda: here.admin.fetchval("select count(*) from pg_locks where not granted"), 1
            )
            await seeker.execute("commit")
        assert (moved, await here.committed(group)) == ([False], 0)


async def slow_record(client: sqlstreams.Client, group: Any, dsn: str, *, during: Any) -> None:
    """Record an exception of range (0, 10] as record_range does, and wait in the middle until a seek waits."""
    node, _ = await other_node(client)
    await take_range(client, await group.get(), node, client._core.process.make_token(), 10)
    async with client.transaction() as tx:
        await tx.execute("update sqlstreams.claim_1 set done = true where low = 0")
        during()
        await wait_until_async(dsn, "select count(*) > 0 from pg_locks where not granted", True)
        await tx.execute(
            "insert into sqlstreams.exception_queue_1 (group_id, message_id, status) values (1, 5, 'ready')"
        )


async def test_b16_a_seek_waits_for_a_range_that_is_being_recorded_and_forgets_what_it_left(any_dsn):
    async with opened(any_dsn) as (client, stream, group), trio.open_nursery() as nursery:
        await stream.produce_batch([{}] * 10)
        done = trio.Event()

        async def seek() -> None:
            await group.seek(Position.beginning())
            done.set()

        await slow_record(client, group, any_dsn, during=lambda: nursery.start_soon(seek))
        with trio.fail_after(10):
            await done.wait()
        assert await exceptions(any_dsn) == {}
        assert await marks(any_dsn) == (1, 0, 0)


async def test_b16_a_seek_that_is_cancelled_while_it_waits_has_moved_nothing(dsn):
    async with opened(dsn) as (client, stream, group), trio.open_nursery() as nursery:
        await stream.produce_batch([{}] * 10)
        scope = trio.CancelScope()

        async def seek() -> None:
            with scope:
                await group.seek(Position.beginning())

        async with client.transaction() as tx:
            await tx.execute("select from sqlstreams.claim_1 where group_id = 1 for update")
            nursery.start_soon(seek)
            await wait_until_async(dsn, "select count(*) > 0 from pg_locks where not granted", True)
            scope.cancel()
            await wait_until_async(dsn, "select count(*) from pg_locks where not granted", 0)
        assert await marks(dsn) == (0, 0, 0)
        assert (await group.seek(Position.beginning())).done


async def test_b16_consumers_that_run_start_again_and_record_nothing_of_before(any_dsn):
    gate = trio.Event()

    def act(meta):
        if meta.id == 16 and seen.ids.count(16) == 1:
            raise ValueError("of before the seek")
        return gate.wait() if meta.id == 15 and seen.ids.count(15) == 1 else None

    seen = Seen(act)
    async with opened(any_dsn) as (_client, stream, group):
        await stream.produce_batch([{}] * 20)
        async with consuming(group, seen, batch=10):
            await seen.until_runs(15)
            await wait_until_async(any_dsn, "select committed >= 10 from sqlstreams.group_cursor", True)
            with pytest.raises(GroupBusy):
                await group.seek(Position.beginning())
            assert (await marks(any_dsn))[0] == 0
            told = await group.seek(Position.beginning(), force=True)
            assert (told.target, told.count, told.first, told.last) == (0, 20, 1, 20)
            gate.set()
            await until_resolved(any_dsn, 20)
            await wait_until_async(any_dsn, "select committed from sqlstreams.group_cursor", 20)
            await stream.produce({})
            await until_done(any_dsn, 21)
        assert [id_ for id_ in range(1, 16) if seen.ids.count(id_) != 2] == []
        assert [id_ for id_ in range(16, 21) if seen.ids.count(id_) not in (1, 2)] == []
        assert {run[1:] for run in seen.runs} == {(0, 0)}
        assert await exceptions(any_dsn) == {}
        assert await history(any_dsn) == []
        assert (await group.lag()).messages == 0


# B17


async def test_b17_a_dead_letter_that_fails_again_after_a_seek_is_a_first_failure(any_dsn):
    config = sqlstreams.GroupConfig(max_retries=1, initial_backoff=seconds(0), base=seconds(0.001))
    async with opened(any_dsn, config) as (_client, stream, group):
        await stream.produce_batch([{}] * 8)
        async with consuming(group, failing(5)):
            await until_status(any_dsn, 5, "dead", 2, 0)
            await until_done(any_dsn, 8)
        await group.register(sqlstreams.GroupConfig(max_retries=1))
        await group.seek(Position.beginning())
        again = failing(5, 7)
        async with consuming(group, again):
            await until_status(any_dsn, 5, "ready", 1, 0)
            await until_done(any_dsn, 8)
        assert again.runs == [(each, 0, 0) for each in range(1, 9)]
        assert await exceptions(any_dsn) == {5: ("ready", 1, 0), 7: ("ready", 1, 0)}


async def test_b17_a_dead_row_that_is_still_there_is_replaced(any_dsn):
    """A dead letter that an operator put back by hand, or that came from before: no violation, the rest is recorded."""
    async with opened(any_dsn) as (_client, stream, group):
        await stream.produce_batch([{}] * 8)
        await sql_async(
            any_dsn,
            "insert into sqlstreams.exception_queue_1 (group_id, message_id, status, attempts, delays, last_error)"
            " values (1, 5, 'dead', 4, 0, 'before')",
        )
        seen = failing(5, 7)
        async with consuming(group, seen):
            await until_done(any_dsn, 8)
        assert await exceptions(any_dsn) == {5: ("ready", 1, 0), 7: ("ready", 1, 0)}
        errors = await sql_async(
            any_dsn, "select last_error from sqlstreams.exception_queue_1 order by message_id"
        )
        assert "broken 5" in errors[0][0]


# B18


async def test_b18_a_group_at_the_head_gets_what_comes_after_and_a_second_registration_moves_nothing(any_dsn):
    async with opened(any_dsn) as (_client, stream, _group):
        await stream.produce_batch([{}] * 3)
        late = stream.consumer("late")
        row = await late.register(start="head")
        assert await late.register(start="beginning") == row
        await stream.produce_batch([{}] * 2)
        assert await late.register(sqlstreams.GroupConfig(max_retries=9), start="beginning") != row
        seen = Seen()
        async with consuming(late, seen):
            await seen.until_runs(2)
        assert seen.ids == [4, 5]


async def test_b18_paused_it_starts_no_range_no_retry_and_no_takeover(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        await own_clock(any_dsn)
        await stream.produce_batch([{}] * 2)
        async with consuming(group, failing(1)):
            await until_status(any_dsn, 1, "ready", 1, 0)
            await until_done(any_dsn, 2)
        row = await group.get()
        dead, dead_token = await other_node(client)
        await stream.produce_batch([{}] * 2)
        taken = await take_range(client, row, dead, client._core.process.make_token(), 4)
        assert (taken.claim.low, taken.claim.high) == (2, 4)
        await sql_async(
            any_dsn,
            "insert into sqlstreams.exception_queue_1 (group_id, message_id, status, node_id, token)"
            " values (1, 2, 'inflight', $1, gen_random_uuid())",
            dead,
        )
        seen = Seen()
        async with consuming(group, seen, concurrency=4):
            assert await group.pause()
            assert not await group.pause()
            assert (await group.get()).paused
            assert (await group.snapshot()).paused
            await store_of(client).end_own_node(dead, dead_token)
            await stream.produce_batch([{}] * 2)
            await move_clock(any_dsn, HOUR, client)
            node, _ = await other_node(client)
            token = client._core.process.make_token()
            assert await take_range(client, row, node, token, 6) is None
            assert await store_of(client).claim_exceptions(row, node, token, reads=(1,), limit=9) == []
            pulse = next(iter(client._core.process.pulse._groups))
            looked = pulse.freed
            with trio.fail_after(10):
                while pulse.freed < looked + 2 or not pulse.paused:
                    client._core.process.pulse.look()
                    await trio.sleep(0.02)  # because a look tells nobody
            assert seen.runs == []
            assert await group.resume()
            assert not await group.resume()
            await until_resolved(any_dsn, 6)
        assert sorted(seen.runs) == [(1, 1, 0), (2, 1, 0), (3, 0, 0), (4, 0, 0), (5, 0, 0), (6, 0, 0)]
        assert await exceptions(any_dsn) == {}


async def test_b18_what_runs_when_a_pause_comes_is_finished_and_nothing_comes_twice(dsn):
    gate = trio.Event()
    seen = Seen(lambda _meta: gate.wait())
    async with opened(dsn) as (_client, stream, group):
        await stream.produce_batch([{}] * 10)
        async with consuming(group, seen, batch=5, concurrency=5):
            await seen.until_runs(5)
            await group.pause()
            gate.set()
            await until_done(dsn, 5)
            assert len(seen.runs) == 5
            assert (await group.snapshot()).held_by == "the group is paused"
            await group.resume()
            await until_done(dsn, 10)
        assert sorted(seen.ids) == list(range(1, 11))


async def test_b18_a_pause_and_a_resume_faster_than_a_pulse_leave_no_consumer_standing(dsn):
    async with opened(dsn, listen=False) as (client, stream, group):
        seen = Seen()
        store = store_of(client)
        row = await group.get()
        async with consuming(group, seen):
            for round_ in range(1, 6):
                await store.pause(row.id)  # as another process does it: nobody rings here
                sent = await stream.produce({})
                await wait_until_async(dsn, "select count(*) from sqlstreams.message_log_1", round_)
                await trio.sleep(0.03 * round_)  # because the claim that finds the pause tells nobody
                await store.resume(row.id)
                await seen.until(lambda id_=sent.id: id_ in seen.ids, 5)
        assert seen.ids == [1, 2, 3, 4, 5]


# D5


async def test_d5_redrive_of_one_of_some_by_error_and_of_all(any_dsn):
    async with dead_letters_of(any_dsn, 1, 2, 3, 12, total=12) as (_client, _stream, group):
        assert await group.redrive([2, 4, 99]) == 1
        assert (await exceptions(any_dsn))[2] == ("ready", 0, 0)
        assert await group.redrive(error_contains="broken 1") == 2
        assert await group.redrive(error_contains="broken 1") == 0
        assert [letter.message_id for letter in await group.dead_letters()] == [3]
        assert await group.redrive([]) == 0
        assert await group.redrive(all=True) == 1
        assert await exceptions(any_dsn) == dict.fromkeys((1, 2, 3, 12), ("ready", 0, 0))


async def test_d5_a_redriven_letter_runs_at_once_with_a_fresh_budget(any_dsn):
    config = sqlstreams.GroupConfig(max_retries=1, initial_backoff=seconds(0), base=seconds(0.001))
    async with opened(any_dsn, config) as (_client, stream, group):
        await stream.produce({})
        seen = failing(1)
        async with consuming(group, seen):
            await until_status(any_dsn, 1, "dead", 2, 0)
            assert await group.redrive([1]) == 1
            await seen.until_runs(4)
            await until_status(any_dsn, 1, "dead", 2, 0)
        assert seen.runs == [(1, 0, 0), (1, 1, 0)] * 2


async def test_d5_two_redrives_at_once_start_a_letter_once(any_dsn):
    async with dead_letters_of(any_dsn, 1, 2, 3) as (_client, _stream, group):
        counts: list[int] = []

        async def redrive() -> None:
            counts.append(await group.redrive(all=True))

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(redrive)
        assert sorted(counts) == [0, 0, 0, 3]
        seen = Seen()
        async with consuming(group, seen):
            await until_resolved(any_dsn, 6)
        assert sorted(seen.runs) == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]


async def test_d5_a_large_redrive_goes_in_steps(dsn, monkeypatch):
    monkeypatch.setattr("sqlstreams.postgres.operate.ROWS_AT_ONCE", 2)
    async with dead_letters_of(dsn, 1, 2, 3, 4, 5) as (_client, _stream, group):
        assert await group.redrive(all=True) == 5
        await sql_async(dsn, "update sqlstreams.exception_queue_1 set status = 'dead'")
        assert await group.discard(all=True) == 5


async def test_d5_a_letter_that_fails_again_while_a_redrive_goes_on_is_left_dead(dsn, monkeypatch):
    monkeypatch.setattr("sqlstreams.postgres.operate.ROWS_AT_ONCE", 1)
    async with dead_letters_of(dsn, 1, 2, 3) as (_client, _stream, group):
        seen = failing(1, 2, 3)
        async with consuming(group, seen, concurrency=3):
            with trio.fail_after(10):
                assert await group.redrive(all=True) == 3
            await seen.until_runs(3)
            await until_resolved(dsn, 6)
        assert len(seen.runs) == 3


async def test_d5_discard_deletes_letters_and_notes_it(any_dsn):
    async with dead_letters_of(any_dsn, 1, 2, 3) as (_client, stream, group):
        assert await group.discard([2]) == 1
        assert await group.discard(error_contains="broken 3") == 1
        assert [letter.message_id for letter in await group.dead_letters()] == [1]
        assert await group.discard(all=True) == 1
        assert await exceptions(any_dsn) == {}
        assert [line for line in await history(any_dsn) if line[2] == "discarded"] == [
            (1, 1, "discarded"),
            (2, 1, "discarded"),
            (3, 1, "discarded"),
        ]
        assert [message.id for message in await stream.read(limit=9)] == [1, 2, 3, 4, 5, 6]


async def test_d5_only_dead_letters_are_touched(dsn):
    async with dead_letters_of(dsn) as (_client, _stream, group):
        for id_, status in enumerate(("ready", "inflight", "deferred", "parked", "superseded"), 1):
            await sql_async(
                dsn,
                "insert into sqlstreams.exception_queue_1 (group_id, message_id, status) values (1, $1, $2)",
                id_,
                status,
            )
        for call in (group.redrive, group.discard):
            assert (await call(all=True), await call([1, 2, 3, 4, 5])) == (0, 0)
        assert len(await exceptions(dsn)) == 5


# B11


async def test_b11_a_redrive_does_not_lower_committed(any_dsn):
    def act(meta):
        if meta.id == 3 and meta.attempts == 0:
            raise ValueError("broken")
        if meta.id == 5 and not again:
            raise sqlstreams.Terminal("never")

    again: list[int] = []
    async with opened(any_dsn) as (client, stream, group):
        await own_clock(any_dsn)
        await stream.produce_batch([{}] * 6)
        committed = "select committed from sqlstreams.group_cursor"
        async with consuming(group, Seen(act)):
            await wait_until_async(any_dsn, committed, 2)
            await move_clock(any_dsn, HOUR, client)
            await wait_until_async(any_dsn, committed, 6)
        await group.redrive([5])
        assert (await group.lag()).committed == 6
        again.append(5)
        async with consuming(group, Seen(act)):
            await until_resolved(any_dsn, 6)
            await stream.produce({})
            await wait_until_async(any_dsn, committed, 7)


# Seek.


async def test_seek_to_the_beginning_tells_what_comes_and_a_dry_run_writes_nothing(any_dsn):
    async with dead_letters_of(any_dsn, 2) as (_client, _stream, group):
        before = (
            await marks(any_dsn),
            await exceptions(any_dsn),
            await sql_async(any_dsn, "table sqlstreams.claim_1"),
        )
        told = await group.seek(Position.beginning(), dry_run=True)
        assert (told.target, told.count, told.first, told.last, told.retained_above) == (0, 6, 1, 6, 0)
        assert not told.done
        after = (
            await marks(any_dsn),
            await exceptions(any_dsn),
            await sql_async(any_dsn, "table sqlstreams.claim_1"),
        )
        assert after == before
        done = await group.seek(Position.beginning())
        assert done == operations.Seeked(0, 6, 1, 6, 0, done=True)
        assert await marks(any_dsn) == (1, 0, 0)
        assert (await group.lag()).messages == 6


async def test_seek_to_the_head_waits_for_writers_and_skips_what_they_wrote(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        await stream.produce_batch([{}] * 3)
        told: list[operations.Seeked] = []

        async def seek() -> None:
            told.append(await group.seek(Position.head()))

        async with trio.open_nursery() as nursery, writer_open(client, stream) as late:
            nursery.start_soon(seek)
            await trio.sleep(0.1)  # because a look that finds a writer tells nobody
            assert told == []
        assert [(each.target, each.count) for each in told] == [(late, 0)]
        seen = Seen()
        async with consuming(group, seen):
            await stream.produce({})
            await seen.until_runs(1)
        assert seen.ids == [late + 1]


async def test_seek_to_the_head_names_who_keeps_a_transaction_open(dsn, monkeypatch):
    monkeypatch.setattr(operations, "SETTLE_SECONDS", 0.3)
    async with opened(dsn) as (client, stream, group):
        await stream.produce_batch([{}] * 3)
        async with client.transaction() as tx:
            await stream.produce({}, tx=tx)
            pid = await tx.fetchval("select pg_backend_pid()")
            with pytest.raises(SettleTimeout, match=rf"pid {pid} \(sqlstreams"):
                await group.seek(Position.head())
            with pytest.raises(SettleTimeout):
                await group.seek(Position.at_time(datetime(2999, 1, 1, tzinfo=UTC)))
        assert await marks(dsn) == (0, 0, 0)


async def test_seek_to_an_id_and_what_lies_beyond(any_dsn):
    async with dead_letters_of(any_dsn, 2, 5) as (_client, stream, group):
        told = await group.seek(Position.at_id(4))
        assert (told.target, told.count, told.first) == (3, 3, 4)
        assert await exceptions(any_dsn) == {2: ("dead", 1, 0)}  # those below stay
        assert (await group.seek(Position.at_id(7))).target == 6  # the next one that will be drawn
        for id_ in (8, 2**63 - 1):
            with pytest.raises(ConfigurationError, match="not drawn"):
                await group.seek(Position.at_id(id_))
        await sql_async(any_dsn, "select nextval('sqlstreams.message_log_1_id') from generate_series(1, 10)")
        await stream.produce({})
        told = await group.seek(Position.at_id(10))  # a burnt one
        assert (told.target, told.count, told.first, told.last) == (9, 1, 17, 17)
        seen = Seen()
        async with consuming(group, seen):
            await seen.until_runs(1)
        assert seen.ids == [17]


async def test_seek_leaves_committed_below_an_unresolved_exception_below_the_target(dsn):
    async with opened(dsn) as (_client, stream, group):
        await stream.produce_batch([{}] * 9)
        async with consuming(group, failing(3, 7)):
            await until_done(dsn, 9)
        await group.seek(Position.at_id(6))
        assert await exceptions(dsn) == {3: ("ready", 1, 0)}
        assert await marks(dsn) == (1, 5, 2)


async def test_seek_below_what_is_retained_is_clamped_and_told(any_dsn):
    async with numbered_log(any_dsn, "n % 3 > 0") as (_client, _stream, group):
        await sql_async(
            any_dsn, "drop table sqlstreams.message_log_1_0; drop table sqlstreams.message_log_1_1"
        )
        long_ago = datetime(2000, 1, 1, tzinfo=UTC)
        for position in (Position.beginning(), Position.at_id(5), Position.at_time(long_ago)):
            told = await group.seek(position)
            assert (told.target, told.retained_above) == (199, 199)
            assert (told.first, told.last) == (200, 800)
            assert told.count == len([n for n in range(200, 801) if n % 3])
        assert await marks(any_dsn) == (3, 199, 199)


async def test_seek_to_an_instant_across_partitions_and_holes(any_dsn, monkeypatch):
    monkeypatch.setattr("sqlstreams.postgres.operate.SCAN_IDS", 10)  # so that the search has many steps
    # every third id burnt, a whole partition without any
    async with numbered_log(any_dsn, "n % 3 > 0 and n / 100 <> 4") as (_client, _stream, group):
        there = [n for n in range(1, 801) if n % 3 and n // 100 != 4]
        for minute in (-5, 1, 1.5, 2.5, 98.5, 101, 396, 398.5, 399.5, 450, 499.5, 500, 797.5, 799, 800):
            told = await group.seek(Position.at_time(START + timedelta(minutes=minute)), dry_run=True)
            expected = next(n for n in there if n >= minute)
            assert told.first == expected, minute
        told = await group.seek(Position.at_time(START + timedelta(minutes=801)))
        assert (told.target, told.count, told.done) == (800, 0, True)


@pytest.mark.parametrize("later", [True, False], ids=["others came after it", "it is the last"])
async def test_seek_to_an_instant_does_not_pass_a_message_that_commits_late(any_dsn, later):
    async with opened(any_dsn) as (client, stream, group):
        await stream.produce_batch([{}] * 3)
        instant = (await sql_async(any_dsn, "select clock_timestamp()"))[0][0]
        async with trio.open_nursery() as nursery, writer_open(client, stream) as late:
            if later:
                await stream.produce({})
                await group.seek(Position.at_time(instant))
            else:
                nursery.start_soon(group.seek, Position.at_time(instant))
                await trio.sleep(0.1)  # because a look that finds a writer tells nobody
        seen = Seen()
        async with consuming(group, seen):
            await seen.until_runs(1 + later)
        assert seen.ids == [late, late + 1][: 1 + later]


async def test_seek_is_refused_while_another_process_consumes_and_not_after_it_ended(dsn):
    async with opened(dsn) as (client, stream, group):
        await stream.produce({})
        node, token = await other_node(client)
        row = await group.get()
        assert await store_of(client).join(row.worker_id, node, client._core.process.make_token())
        with pytest.raises(GroupBusy) as caught:
            await group.seek(Position.beginning())
        assert "g" in str(caught.value)
        assert not (await group.seek(Position.beginning(), dry_run=True)).done
        await store_of(client).end_own_node(node, token)
        assert (await group.seek(Position.beginning())).done


async def test_seek_on_another_server_run_is_refused(dsn):
    async with opened(dsn) as (client, stream, group):
        await stream.produce({})
        row = await group.get()
        run = await server_run(client, row)
        await sql_async(dsn, "update sqlstreams.server_run set id = gen_random_uuid()")
        with pytest.raises(sqlstreams.SQLStreamsError) as caught:
            await store_of(client).seek(row, 1, run=run, force=False)
        assert caught.value.code == "SQLS-SERVER-RUN-CHANGED"
        assert await marks(dsn) == (0, 0, 0)


# Inspect.


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("ready", "runs again"),
        ("inflight", "a node that is gone"),
        ("deferred", "message key"),
        ("parked", "payload version"),
        ("dead", "redrive"),
        ("superseded", "superseded"),
    ],
)
async def test_inspect_tells_every_state_of_an_exception(dsn, status, says):
    async with dead_letters_of(dsn) as (_client, _stream, group):
        await sql_async(
            dsn,
            "insert into sqlstreams.exception_queue_1 (group_id, message_id, status, attempts, delays, last_error)"
            " values (1, 3, $1, 2, 1, 'why')",
            status,
        )
        found = await group.inspect(3)
        assert (found.state, found.attempts, found.delays, found.error) == (status, 2, 1, "why")
        assert found.present
        assert says in found.explanation


async def test_inspect_names_the_owner_until_its_node_has_ended(any_dsn):
    async with opened(any_dsn) as (client, stream, group):
        await stream.produce_batch([{}] * 2)
        row = await group.get()
        node, token = await other_node(client)
        mine = client._core.process.make_token()
        await take_range(client, row, node, mine, 2, limit=1)
        await sql_async(
            any_dsn,
            "insert into sqlstreams.exception_queue_1 (group_id, message_id, status) values (1, 2, 'ready')",
        )
        assert len(await store_of(client).claim_exceptions(row, node, mine, reads=(1,), limit=1)) == 1
        ranged, excepted = await group.inspect(1), await group.inspect(2)
        assert (ranged.state, ranged.owner) == ("in a range", "other (1)")
        assert (excepted.state, excepted.owner) == ("inflight", "other (1)")
        assert ranged.fence is not None
        assert excepted.fence is not None
        await store_of(client).end_own_node(node, token)
        ranged, excepted = await group.inspect(1), await group.inspect(2)
        assert (ranged.owner, excepted.owner) == (None, None)
        assert "waits to be taken" in ranged.explanation
        assert "gone" in excepted.explanation


async def test_inspect_tells_what_no_row_stands_for(any_dsn):
    async with dead_letters_of(any_dsn, 2) as (client, stream, group):
        resolved = await group.inspect(1)
        assert (resolved.state, resolved.present, resolved.history) == ("resolved", True, [])
        dead = await group.inspect(2)
        assert [(run.attempt, run.status) for run in dead.history] == [(0, "dead")]
        assert "broken 2" in (dead.history[0].error or "")
        await stream.produce({})
        assert (await group.inspect(7)).state == "waiting"
        assert (await group.inspect(8)).state == "not drawn"
        with pytest.raises(KeyError):
            async with writer_open(client, stream):
                raise KeyError
        rolled_back = await group.inspect(8)
        assert (rolled_back.state, rolled_back.present) == ("waiting", False)
        assert "rolled back" in rolled_back.explanation


async def test_inspect_of_a_group_without_claim_rows_says_so(dsn):
    async with dead_letters_of(dsn) as (_client, _stream, group):
        await sql_async(dsn, "delete from sqlstreams.claim_1")
        with pytest.raises(GroupDamaged):
            await group.inspect(1)


# Bad input.

BAD: list[tuple[str, Any]] = [
    ("redrive nothing", lambda group: group.redrive()),
    ("redrive two ways", lambda group: group.redrive([1], all=True)),
    ("redrive three ways", lambda group: group.redrive([1], error_contains="x", all=True)),
    ("redrive text as ids", lambda group: group.redrive("12")),
    ("redrive a number as ids", lambda group: group.redrive(5)),
    ("redrive id 0", lambda group: group.redrive([0])),
    ("redrive a bool", lambda group: group.redrive([True])),
    ("redrive an id beyond", lambda group: group.redrive([2**63])),
    ("redrive a fraction", lambda group: group.redrive([1.5])),
    ("redrive an empty text", lambda group: group.redrive(error_contains="")),
    ("redrive a NUL", lambda group: group.redrive(error_contains="\0")),
    ("redrive a lone surrogate", lambda group: group.redrive(error_contains="\ud800")),
    ("redrive a text that is none", lambda group: group.redrive(error_contains=5)),
    ("redrive all=1", lambda group: group.redrive(all=1)),
    ("redrive all='no'", lambda group: group.redrive(all="no")),
    ("discard nothing", lambda group: group.discard()),
    ("discard an empty text", lambda group: group.discard(error_contains="")),
    ("discard id -1", lambda group: group.discard([-1])),
    ("inspect 0", lambda group: group.inspect(0)),
    ("inspect text", lambda group: group.inspect("1")),
    ("inspect beyond", lambda group: group.inspect(2**63)),
    ("seek text", lambda group: group.seek("beginning")),
    ("seek None", lambda group: group.seek(None)),
    ("seek an unknown kind", lambda group: group.seek(Position("end"))),
    ("seek id without a value", lambda group: group.seek(Position("id"))),
    ("seek beginning with a value", lambda group: group.seek(Position("beginning", 3))),
    ("seek id 0", lambda group: group.seek(Position.at_id(0))),
    ("seek id True", lambda group: group.seek(Position.at_id(True))),
    ("seek a naive time", lambda group: group.seek(Position.at_time(datetime(2024, 1, 1)))),  # noqa: DTZ001
    ("seek a text as time", lambda group: group.seek(Position.at_time("2024-01-01"))),
    (
        "seek before all time",
        lambda group: group.seek(
            Position.at_time(datetime.min.replace(tzinfo=timezone(timedelta(hours=14))))
        ),
    ),
]


@pytest.mark.parametrize("call", [each[1] for each in BAD], ids=[each[0] for each in BAD])
async def test_bad_input_is_refused_before_any_io(call):
    """A handle whose client was never opened: any I/O would fail differently."""
    group = object.__new__(sqlstreams.ConsumerGroup)
    group.name = "g"
    with pytest.raises(ConfigurationError) as caught:
        await call(group)
    assert caught.value.code == "SQLS-CONFIGURATION"
    assert caught.value.subject


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.pause(),
        lambda group: group.resume(),
        lambda group: group.redrive(all=True),
        lambda group: group.discard(all=True),
        lambda group: group.inspect(1),
        lambda group: group.seek(Position.beginning()),
        lambda group: group.seek(Position.head(), dry_run=True),
    ],
    ids=["pause", "resume", "redrive", "discard", "inspect", "seek", "dry run"],
)
async def test_what_is_not_registered_or_was_destroyed_is_not_found(dsn, call):
    async with opened(dsn) as (client, stream, group):
        for absent in (stream.consumer("nope"), client.stream("nope").consumer("g")):
            with pytest.raises(NotFound):
                await call(absent)
        await group.destroy()
        with pytest.raises(NotFound):
            await call(group)


# Cancellation, seen from the handle.


@pytest.mark.parametrize("what", ["seek", "redrive", "discard", "pause"])
async def test_cancelled_anywhere_an_operation_is_done_as_a_whole_or_not_at_all(dsn, what):
    async with dead_letters_of(dsn, 2, 3) as (_client, _stream, group):
        calls = {
            "seek": lambda: group.seek(Position.beginning()),
            "redrive": lambda: group.redrive(all=True),
            "discard": lambda: group.discard(all=True),
            "pause": group.pause,
        }
        ends = set()
        for step in range(12):
            with trio.move_on_after(step * 0.002) as scope:
                await calls[what]()
            ends.add(scope.cancelled_caught)
            epoch, _done, committed = await marks(dsn)
            left = await exceptions(dsn)
            lows = [row[0] for row in await sql_async(dsn, "select low from sqlstreams.claim_1 order by low")]
            if what == "seek":
                assert (committed, left, lows) in (
                    (6, dict.fromkeys((2, 3), ("dead", 1, 0)), lows),
                    (0, {}, [-1]),
                )
                assert (epoch == 0) == bool(left)
            else:
                assert len(set(left.values())) <= 1
                assert len(left) in (0, 2)
            if what == "pause":
                await group.resume()
        assert True in ends
