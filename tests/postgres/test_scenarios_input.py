"""Scenarios Q: what is not accepted is refused with a code, and no payload is ever quoted. Not here: Q4 (patterns)."""

import ast
import logging
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

import sqlstreams
from sqlstreams.cli import main
from sqlstreams.errors import (
    ConfigurationError,
    LimitExceeded,
    OutcomeUnknown,
    PayloadInvalid,
    SQLStreamsError,
    StatementRefused,
    all_errors,
)
from tests.postgres.lossy_proxy import open_lossy_proxy
from tests.postgres.scenario_rig import (
    Seen,
    consuming,
    exceptions,
    opened,
    seconds,
    until_done,
    until_resolved,
    until_status,
)
from tests.servers import sql_async, terminate_backends

CANARY = "CANARY7f3a9e"


class Card(msgspec.Struct):
    number: str
    cents: int


class Picky(msgspec.Struct):
    """A type whose own check quotes what it refuses."""

    number: str

    def __post_init__(self) -> None:
        raise ValueError(f"not a card: {self.number}")


class Leaks:
    """Everything that was logged or raised, to look for the canary in."""

    def __init__(self, caplog: Any) -> None:
        self._caplog = caplog
        self.texts: list[str] = []

    def raised(self, exc: BaseException) -> None:
        """Take in an error with its causes and tracebacks, as a log would show them, and its fields."""
        self.texts.append("".join(traceback.format_exception(exc)))
        todo: list[BaseException | None] = [exc]
        while todo:
            each = todo.pop()
            if each is not None:
                self.texts.append(f"{each!r} {each.args!r} {vars(each)!r}")
                todo += [each.__cause__, None if each.__suppress_context__ else each.__context__]

    def check(self) -> None:
        formatter = logging.Formatter()
        logged = [formatter.format(record) for record in self._caplog.records]
        found = [text for text in self.texts + logged if CANARY in text]
        assert found == []


@pytest.fixture
def leaks(caplog):
    caplog.set_level(logging.DEBUG)
    return Leaks(caplog)


SECRET = {"number": CANARY, "cents": 1}
WITH_SECRETS: dict[str, Any] = {
    "message_key": f"key {CANARY}",
    "routing_key": f"route {CANARY}",
    "headers": {f"name {CANARY}": f"value {CANARY}"},
}


@pytest.mark.parametrize(
    ("payload", "options"),
    [
        ({"number": CANARY, "x": object()}, WITH_SECRETS),
        ({"number": CANARY + "\ud800"}, {}),
        (msgspec.Raw(b'{"number":"' + CANARY.encode()), {}),
        (msgspec.Raw(b"\xff" + CANARY.encode()), {}),
        (msgspec.Raw(b"[" * 100_000 + CANARY.encode()), {}),
        (CANARY * 2_000_000, {}),
        ({}, {"message_key": CANARY * 300}),
        ({}, {"routing_key": CANARY + "\0"}),
        ({}, {"message_key": CANARY + "\ud800"}),
        ({}, {"headers": {CANARY: CANARY * 3_000}}),
        ({}, {"headers": {CANARY: 1}}),
        ({}, {"headers": {CANARY: CANARY + "\0"}}),
        ({}, {"headers": [CANARY]}),
        ({2: CANARY, CANARY: {1, object()}}, {}),
    ],
)
async def test_q1_no_payload_key_or_header_is_quoted_when_it_cannot_be_encoded(dsn, leaks, payload, options):
    async with opened(dsn) as (client, stream, _group):
        with pytest.raises(PayloadInvalid) as caught:
            await stream.produce(payload, **options)
        leaks.raised(caught.value)
        with pytest.raises(PayloadInvalid) as caught:
            await stream.produce_batch([sqlstreams.Outgoing(payload, **options)])
        leaks.raised(caught.value)
        with pytest.raises(PayloadInvalid) as caught:
            async with client.transaction() as tx:
                await stream.produce(payload, tx=tx, **options)
        leaks.raised(caught.value)
    leaks.check()


@pytest.mark.parametrize(
    "refusal",
    [
        # what the server says of each of these quotes the row
        "create function public.refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'refused %', new.payload using detail = new.payload::text, hint = new.message_key; end $$;"
        "create trigger refuse before insert on sqlstreams.message_log_1 for each row execute function public.refuse()",
        "alter table sqlstreams.message_log_1 add constraint short check (length(payload::text) < 5)",
        "alter table sqlstreams.message_log_1 alter column compaction_rank set not null",
        "create function public.number() returns trigger language plpgsql as"
        " $$ begin new.compaction_rank = (new.payload->>'number')::bigint; return new; end $$;"
        "create trigger number before insert on sqlstreams.message_log_1 for each row execute function public.number()",
        "create unique index on sqlstreams.message_log_1_0 (message_key);"
        "insert into sqlstreams.message_log_1 (message_key, payload) values ('key " + CANARY + "', '{}')",
    ],
    ids=["a trigger raises", "a check", "a not-null", "a conversion", "a unique key"],
)
async def test_q1_no_payload_is_quoted_when_the_server_refuses_it(any_dsn, leaks, refusal):
    async with opened(any_dsn) as (client, stream, _group):
        await sql_async(any_dsn, refusal)
        with pytest.raises(StatementRefused) as caught:
            await stream.produce(SECRET, **WITH_SECRETS)
        leaks.raised(caught.value)
        with pytest.raises(StatementRefused) as caught:
            await stream.produce_batch([sqlstreams.Outgoing(SECRET, **WITH_SECRETS)] * 3)
        leaks.raised(caught.value)
        with pytest.raises(StatementRefused) as caught:
            async with client.transaction() as tx:
                await stream.produce(SECRET, tx=tx, **WITH_SECRETS)
        leaks.raised(caught.value)
        refused: list[BaseException] = []

        async def produce() -> None:
            try:
                await stream.produce(SECRET, **WITH_SECRETS)
            except StatementRefused as exc:
                refused.append(exc)

        async with trio.open_nursery() as nursery:  # a shared batch
            for _ in range(10):
                nursery.start_soon(produce)
        assert len(refused) == 10
        for each in refused:
            leaks.raised(each)
    leaks.check()


async def test_q1_no_payload_is_quoted_when_the_connection_is_lost(dsn, leaks):
    async with open_lossy_proxy(dsn) as proxy, opened(proxy.dsn) as (client, stream, group):
        for when in ("before", "after"):
            proxy.lose("-- insert_message:", when)
            with pytest.raises(OutcomeUnknown) as caught:
                await stream.produce(SECRET, **WITH_SECRETS)
            leaks.raised(caught.value)
        with pytest.raises(SQLStreamsError) as failed:
            async with client.transaction() as tx:
                await stream.produce(SECRET, tx=tx, **WITH_SECRETS)
                await trio.to_thread.run_sync(lambda: terminate_backends(dsn, application_name="sqlstreams"))
        leaks.raised(failed.value)
        proxy.lose("-- finish_range:", "after")
        proxy.lose("-- claim_range:", "after")
        async with consuming(group, Seen()):
            await until_done(dsn, (await stream.produce(SECRET, **WITH_SECRETS)).id)
        proxy.lose("-- read_range:", "before")
        with pytest.raises(SQLStreamsError) as failed:
            await stream.read()
        leaks.raised(failed.value)
    leaks.check()


@pytest.mark.parametrize("type_", [Card, Picky, dict[str, int], list[Card]])
async def test_q1_no_payload_is_quoted_when_it_does_not_decode(any_dsn, leaks, type_):
    async with opened(any_dsn, type_=type_) as (client, stream, group):
        raw = client.stream("s", msgspec.Raw)
        await raw.produce_batch(
            [
                sqlstreams.Outgoing(msgspec.Raw(text), **WITH_SECRETS)
                for text in (
                    b'{"number":"%b","cents":"%b"}' % (CANARY.encode(), CANARY.encode()),
                    b'{"%b":1.5}' % CANARY.encode(),
                    b'"%b"' % CANARY.encode(),
                    b'[{"%b":"%b"}]' % (CANARY.encode(), CANARY.encode()),
                    b'{"number":["%b"]}' % CANARY.encode(),
                )
            ]
        )
        async with consuming(group, Seen()):
            await until_resolved(any_dsn, 5)
        letters = await group.dead_letters()
        assert [letter.message_id for letter in letters] == [1, 2, 3, 4, 5]
        leaks.texts += [letter.error or "" for letter in letters]
        rows = await sql_async(any_dsn, "select error from sqlstreams.delivery_log_1")
        leaks.texts += [str(row[0]) for row in rows]
        with pytest.raises(PayloadInvalid) as caught:
            await stream.read()
        leaks.raised(caught.value)
    leaks.check()


async def test_q1_no_payload_is_quoted_when_a_handler_fails_times_out_or_is_cut(dsn, leaks):
    async def act(meta):
        match meta.id:
            case 1:
                raise ValueError("of the user's own making")
            case 2:
                raise sqlstreams.Terminal("given up")
            case 3:
                raise sqlstreams.Delay(timedelta(hours=1))
            case 4:
                await trio.sleep_forever()
            case 5:
                await trio.sleep_forever()

    config = sqlstreams.GroupConfig(timeout=seconds(0.2), history="all")
    async with opened(dsn, config) as (client, stream, group):
        await stream.produce_batch([sqlstreams.Outgoing(SECRET, **WITH_SECRETS)] * 4)
        seen = Seen(act)
        async with consuming(group, seen):
            await until_done(dsn, 4)
            await stream.produce(SECRET, **WITH_SECRETS)
            await seen.until(lambda: 5 in seen.ids)
            client._core.process.nodes.held.lease.lose("a test")  # cut, and handed back
            await seen.until(lambda: seen.ids.count(5) > 1)
        lag, snapshot = await group.lag(), await group.snapshot()
        leaks.texts += [repr(lag), repr(snapshot), repr(await group.get()), repr(await stream.get())]
        rows = await sql_async(
            dsn,
            "select t::text from (select last_error from sqlstreams.exception_queue_1) t"
            " union all select t::text from sqlstreams.delivery_log_1 t"
            " union all select t::text from sqlstreams.config_event t",
        )
        leaks.texts += [row[0] for row in rows]
    leaks.check()


async def test_q1_no_password_is_shown(dsn, leaks):
    place = dsn.split("@")[1]
    for url in (
        f"postgresql://postgres:{CANARY}@{place}",
        f"postgresql://nobody:{CANARY}@{place}",
        f"postgresql://postgres:{CANARY}@127.0.0.1:1/x",
        f"postgresql://postgres:{CANARY}@no.such.host.invalid/x",
        f"postgresql://postgres:{CANARY}/x@127.0.0.1:{CANARY}/x",
        f"mysql://postgres:{CANARY}@{place}",
    ):
        with pytest.raises(SQLStreamsError) as caught:
            async with sqlstreams.connect(url):
                pass
        leaks.raised(caught.value)
    leaks.check()


@pytest.mark.parametrize("field", ["message_key", "routing_key"])
async def test_q2_a_key_that_is_too_long_is_refused_with_the_limit_and_its_neighbours_land(any_dsn, field):
    async with opened(any_dsn) as (_client, stream, _group):
        told: dict[int, object] = {}

        async def produce(n: int) -> None:
            try:
                await stream.produce({"n": n}, **{field: "k" * (2_700 if n == 5 else 1_024)})
                told[n] = "landed"
            except LimitExceeded as exc:
                told[n] = exc

        async with trio.open_nursery() as nursery:
            for n in range(10):
                nursery.start_soon(produce, n)
        assert [n for n, each in told.items() if each != "landed"] == [5]
        assert "1,024" in str(told[5])
        assert "2,700" in str(told[5])
        rows = await sql_async(any_dsn, "select count(*) from sqlstreams.message_log_1")
        assert rows[0][0] == 9
        for size, fits in ((512, True), (513, False)):  # bytes count, not characters
            if fits:
                await stream.produce({}, **{field: "é" * size})
            else:
                with pytest.raises(LimitExceeded):
                    await stream.produce({}, **{field: "é" * size})


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.Raw(b"[" * 100_000 + b"]" * 100_000),
        msgspec.Raw(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        msgspec.Raw(b'{"a":1'),
        msgspec.Raw(b""),
        msgspec.Raw(b"\xff\xfe"),
        msgspec.Raw(b'"\xed\xa0\x80"'),
        msgspec.Raw(b"{'a':1}"),
        {"lone": "\ud800"},
        {"\udfff": 1},
        object(),
        {1, object()},
    ],
    ids=lambda payload: type(payload).__name__,
)
async def test_q3_what_is_not_json_is_a_coded_error_for_its_caller_only(dsn, payload):
    async with opened(dsn) as (_client, stream, group):
        told: list[object] = []

        async def produce(each: Any) -> None:
            try:
                told.append((await stream.produce(each)).id)
            except SQLStreamsError as exc:
                told.append(exc.code)

        async with trio.open_nursery() as nursery:
            for each in ({"n": 1}, payload, {"n": 2}):
                nursery.start_soon(produce, each)
        assert told.count("SQLS-PAYLOAD-INVALID") == 1
        assert sorted(each for each in told if isinstance(each, int)) == [1, 2]
        seen = Seen()
        async with consuming(group, seen):
            await until_done(dsn, 2)
        assert sorted(payload["n"] for payload in seen.payloads) == [1, 2]


async def test_q3_json_that_somebody_else_nested_deeply_is_dead_and_the_others_flow(any_dsn):
    async with opened(any_dsn) as (_client, stream, group):
        await sql_async(
            any_dsn,
            "insert into sqlstreams.message_log_1 (payload)"
            " select (repeat('[', 3000) || repeat(']', 3000))::json union all select '\"\\ud800\"'::json"
            " union all select '1e999'::json",
        )
        await stream.produce({})
        async with consuming(group, Seen()):
            await until_resolved(any_dsn, 4)
        assert [letter.message_id for letter in await group.dead_letters()] == [1, 2, 3]


async def test_q3_nesting_that_python_encodes_lands_or_is_refused_but_never_crashes(dsn):
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    async with opened(dsn) as (_client, stream, _group):
        with pytest.raises(PayloadInvalid):
            await stream.produce(nested)
        rows = await sql_async(dsn, "select count(*) from sqlstreams.message_log_1")
        assert rows[0][0] == 0
    while nested:  # taken apart level by level: the interpreter would do it by recursion
        nested = nested[0]


DURATIONS = [
    timedelta.max,
    timedelta.min,
    timedelta(0),
    timedelta(seconds=-1),
    timedelta(microseconds=1),
    5,
    None,
    "5 s",
]


@pytest.mark.parametrize("duration", DURATIONS, ids=str)
@pytest.mark.parametrize("setting", ["timeout", "initial_backoff", "base", "cap"])
async def test_q5_durations_of_groups_are_refused_or_work(dsn, setting, duration):
    zero_is_fine = setting != "timeout"
    fine = isinstance(duration, timedelta) and (
        timedelta(0) < duration <= timedelta(days=36_500) or (zero_is_fine and duration == timedelta(0))
    )
    if not fine:
        with pytest.raises(ConfigurationError, match=setting):
            sqlstreams.GroupConfig(**{setting: duration})
        return

    def act(meta):
        raise ValueError("broken")

    async with opened(dsn, sqlstreams.GroupConfig(**{setting: duration})) as (_client, stream, group):
        await stream.produce({})
        async with consuming(group, Seen(act)):
            await until_done(dsn, 1)


async def test_q5_the_longest_durations_never_overflow_in_sql(any_dsn):
    longest = timedelta(days=36_500)
    config = sqlstreams.GroupConfig(
        timeout=longest, initial_backoff=longest, base=longest, cap=longest, max_retries=9
    )

    def act(meta):
        raise sqlstreams.Delay(timedelta.max) if meta.id == 1 else ValueError("broken")

    async with opened(any_dsn, config, sqlstreams.StreamConfig(retention=longest)) as (
        _client,
        stream,
        group,
    ):
        await stream.produce_batch([{}] * 2)
        seen = Seen(act)
        async with consuming(group, seen):
            await until_done(any_dsn, 2)
            assert await exceptions(any_dsn) == {1: ("ready", 1, 1), 2: ("ready", 1, 0)}
            await sql_async(
                any_dsn,
                "update sqlstreams.exception_queue_1 set can_run_after = now(), attempts = 8, delays = 0",
            )
            await until_status(any_dsn, 2, "ready", 9, 0)
            await until_status(any_dsn, 1, "ready", 9, 1)
        assert len(seen.runs) == 4
    assert sqlstreams.GroupConfig().initial_backoff == timedelta(seconds=5)


@pytest.mark.parametrize("duration", [timedelta.max, timedelta(0), timedelta(seconds=-1)], ids=str)
async def test_q5_delays_of_a_handler_are_cut_accepted_or_a_failure(dsn, duration):
    def act(meta):
        raise sqlstreams.Delay(duration)

    async with opened(dsn) as (_client, stream, group):
        await stream.produce({})
        async with consuming(group, Seen(act)):
            await until_done(dsn, 1)
            if duration < timedelta(0):
                assert await exceptions(dsn) == {1: ("ready", 1, 0)}  # raising it failed
            elif duration > timedelta(0):
                assert await exceptions(dsn) == {1: ("ready", 1, 1)}
                rows = await sql_async(
                    dsn, "select extract(year from can_run_after)::int from sqlstreams.exception_queue_1"
                )
                assert 2100 < rows[0][0] < 2200


@pytest.mark.parametrize("duration", DURATIONS, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda each: sqlstreams.LeaseConfig(ttl=each),
        lambda each: sqlstreams.LeaseConfig(heartbeat=each),
        lambda each: sqlstreams.StreamConfig(retention=each),
        lambda each: sqlstreams.StreamConfig(history_retention=each),
        lambda each: sqlstreams.ConsumeOptions(shutdown=each),
    ],
    ids=["ttl", "heartbeat", "retention", "history_retention", "shutdown"],
)
def test_q5_other_durations_are_refused_by_name_or_accepted_before_any_io(make, duration):
    refusal: ConfigurationError | None = None
    try:
        make(duration)
    except ConfigurationError as exc:
        refusal = exc
    if refusal is None:
        assert duration is None or timedelta(0) <= duration <= timedelta(days=36_500)
    else:
        assert "." in (refusal.subject or "")


def test_q6_every_error_has_a_code_of_its_own_and_says_what_to_do():
    found = all_errors()
    classes = [SQLStreamsError]
    for cls in classes:
        classes += cls.__subclasses__()
    assert len(found) == len(classes), "two errors share a code"
    for code, cls in found.items():
        assert code.startswith("SQLS-")
        assert code == code.upper()
        assert "code" in vars(cls), f"{cls.__name__} has its parent's code"
        assert cls.what_to_do
        assert not cls.what_to_do.endswith(".")
        assert code in str(cls("what happened", subject="it"))
        assert "it: what happened" in str(cls("what happened", subject="it"))


def test_q6_the_codes_are_stable():
    """A code that is renamed breaks who looks for it: add here, never change."""
    assert set(all_errors()) >= {
        "SQLS-ALREADY-EXISTS",
        "SQLS-AUTHENTICATION",
        "SQLS-CLIENT-CLOSED",
        "SQLS-CONFIGURATION",
        "SQLS-CONTENDED",
        "SQLS-DESTROY-REFUSED",
        "SQLS-EMBEDDED",
        "SQLS-ERROR",
        "SQLS-GROUP-DAMAGED",
        "SQLS-LEASE-LOST",
        "SQLS-LIMIT-EXCEEDED",
        "SQLS-LOG-DAMAGED",
        "SQLS-NOT-BUILT-YET",
        "SQLS-NOT-FOUND",
        "SQLS-NOT-INSTALLED",
        "SQLS-OUTCOME-UNKNOWN",
        "SQLS-PARTITION-MISSING",
        "SQLS-PAYLOAD-INVALID",
        "SQLS-PERMISSION-DENIED",
        "SQLS-SCHEMA-TOO-NEW",
        "SQLS-SERVER-RUN-CHANGED",
        "SQLS-SETTLE-TIMEOUT",
        "SQLS-STATEMENT-REFUSED",
        "SQLS-STORE-UNAVAILABLE",
        "SQLS-TRANSACTION-ABORTED",
    }


def test_q6_the_package_raises_nothing_of_its_own_without_a_code():
    """Whatever `raise Name(…)` of sqlstreams/ names is one of ours, or means that the caller's program is wrong."""
    allowed = {cls.__name__ for cls in all_errors().values()} | {
        "Undecodable",  # becomes a dead letter
        "TypeError",
        "ValueError",
        "KeyError",
        "NotImplementedError",
        "AssertionError",
        "PermissionError",  # becomes EmbeddedFailed
        "SystemExit",
    }
    found = set()
    for path in (Path(sqlstreams.__file__).parent).rglob("*.py"):
        if "cli" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and isinstance(node.exc.func, ast.Name)
            ):
                name = node.exc.func.id
                if name[0].isupper() and name not in allowed and not name.startswith("_"):
                    found.add((path.name, name))
    assert found == set()


def test_q6_explain_prints_every_code_and_refuses_an_unknown_one_with_2(capsys):
    for code, cls in all_errors().items():
        assert main(["explain", code]) == 0
        shown = capsys.readouterr().out
        assert code in shown
        assert cls.what_to_do in shown
    assert main(["explain", "SQLS-NOPE"]) == 2
    assert capsys.readouterr().out == ""
