"""Bad input: each is refused with its code, and nothing is written."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import msgspec
import pytest
import trio

import sqlstreams
from sqlstreams.errors import ConfigurationError, NotFound, PayloadInvalid
from tests.acceptance.program import register, run_cli
from tests.servers import sql, sql_value

PASSWORD = "s3cret-never-shown"


def with_login(dsn: str, user: str, password: str) -> str:
    """The same database as another user."""
    url = urlsplit(dsn)
    return urlunsplit(url._replace(netloc=f"{user}:{password}@{url.hostname}:{url.port}"))


def wrong_password(dsn: str) -> str:
    return with_login(dsn, "postgres", PASSWORD)


def unreachable(dsn: str) -> str:
    return f"postgresql://postgres:{PASSWORD}@127.0.0.1:1/nowhere"


def guest(dsn: str) -> str:
    """A role that may connect and nothing else; the fixture `guests` drops it."""
    return with_login(dsn, f"guest_of_{urlsplit(dsn).path[1:]}", PASSWORD)


def owner(dsn: str) -> str:
    return dsn


@pytest.fixture
def guests(dsn: str) -> Iterator[None]:
    name = f"guest_of_{urlsplit(dsn).path[1:]}"
    sql(dsn, f"create role {name} login password '{PASSWORD}'")
    yield
    sql(dsn, f"drop role {name}")


class Case(NamedTuple):
    """Arguments of the command, the code of the error, the exit code, and who calls."""

    arguments: tuple[str, ...]
    code: str
    exit_code: int
    login: Callable[[str], str] = owner
    stdin: bytes = b""
    stored: int = 0  # messages that are there afterwards


CASES = {
    "database unreachable": Case(("stream", "list"), "SQLS-STORE-UNAVAILABLE", 1, unreachable),
    "wrong password": Case(("stream", "list"), "SQLS-AUTHENTICATION", 1, wrong_password),
    "no right to read": Case(("stream", "list"), "SQLS-PERMISSION-DENIED", 1, guest),
    "no right to produce": Case(("produce", "orders", "1"), "SQLS-PERMISSION-DENIED", 1, guest),
    "no right to declare": Case(("stream", "register", "more"), "SQLS-PERMISSION-DENIED", 1, guest),
    "no database named": Case(("stream", "list"), "SQLS-CONFIGURATION", 2, lambda dsn: ""),
    "another kind of database": Case(
        ("stream", "list"), "SQLS-CONFIGURATION", 2, lambda dsn: f"mysql://u:{PASSWORD}@h/d"
    ),
    "unknown stream, produce": Case(("produce", "nope", "1"), "SQLS-NOT-FOUND", 1),
    "unknown stream, lines": Case(("produce", "nope", "-"), "SQLS-NOT-FOUND", 1, stdin=b"1\n"),
    "unknown stream, consume": Case(("consume", "nope", "g"), "SQLS-NOT-FOUND", 1),
    "unknown stream, group": Case(("group", "register", "nope", "g"), "SQLS-NOT-FOUND", 1),
    "unknown group": Case(("group", "lag", "orders", "nope"), "SQLS-NOT-FOUND", 1),
    "payload is no JSON": Case(("produce", "orders", f"{{{PASSWORD}"), "SQLS-PAYLOAD-INVALID", 1),
    "payload without the key": Case(
        ("produce", "orders", "{}", "--key-field", "id"), "SQLS-PAYLOAD-INVALID", 1
    ),
    "key too long": Case(
        ("produce", "orders", json.dumps({"id": "x" * 1_025}), "--key-field", "id"), "SQLS-LIMIT-EXCEEDED", 1
    ),
    "payload too deep": Case(("produce", "orders", "-"), "SQLS-PAYLOAD-INVALID", 1, stdin=b"[" * 100_000),
    "bad line in a file": Case(
        ("produce", "orders", "-"), "SQLS-PAYLOAD-INVALID", 1, stdin=b'1\n2\n{"a":\n4\n', stored=2
    ),
    "missing file": Case(("produce", "orders", "--file", "no/such/file"), "SQLS-USAGE", 2),
    "payload and file": Case(("produce", "orders", "1", "--file", "-"), "SQLS-USAGE", 2),
    "negative duration": Case(
        ("group", "register", "orders", "g", "--timeout", "-5"), "SQLS-CONFIGURATION", 2
    ),
    "negative backoff": Case(("group", "register", "orders", "g", "--cap", "-1s"), "SQLS-CONFIGURATION", 2),
    "zero duration": Case(("stream", "register", "more", "--retention", "0"), "SQLS-CONFIGURATION", 2),
    "endless duration": Case(
        ("stream", "register", "more", "--retention", "40000d"), "SQLS-CONFIGURATION", 2
    ),
    "no duration": Case(("stream", "register", "more", "--retention", "soon"), "SQLS-USAGE", 2),
    "negative retries": Case(
        ("group", "register", "orders", "g", "--max-retries", "-1"), "SQLS-CONFIGURATION", 2
    ),
    "empty name": Case(("stream", "register", ""), "SQLS-CONFIGURATION", 2),
    "name with a line break": Case(("stream", "register", "a\nb"), "SQLS-CONFIGURATION", 2),
    "name that begins with a space": Case(("group", "register", "orders", " g"), "SQLS-CONFIGURATION", 2),
    "name that is reserved": Case(("stream", "register", "__system.mine"), "SQLS-CONFIGURATION", 2),
    "name too long": Case(("consume", "orders", "g" * 201), "SQLS-CONFIGURATION", 2),
    "name that is no UTF-8": Case(("stream", "register", "a\udcff"), "SQLS-CONFIGURATION", 2),
    "odd schema": Case(("stream", "register", "more", "--schema", 'x"; drop'), "SQLS-CONFIGURATION", 2),
    "schema of Postgres": Case(
        ("stream", "register", "more", "--schema", "pg_catalog"), "SQLS-CONFIGURATION", 2
    ),
}


def written(dsn: str) -> tuple[Any, ...]:
    """What is declared and stored."""
    names = sql(
        dsn,
        "select s.name, g.name from sqlstreams.stream s left join sqlstreams.consumer_group g on g.stream_id = s.id",
    )
    schemas = sql_value(dsn, "select count(*) from pg_namespace")
    return schemas, sorted(map(tuple, names)), sql_value(dsn, "select count(*) from sqlstreams.config_event")


@pytest.mark.usefixtures("guests")
@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_with_its_code_and_nothing_is_written(dsn: str, name: str) -> None:
    case = CASES[name]
    register(dsn, "orders")
    before = written(dsn)
    login = case.login(dsn)
    where = ("--database-url", login) if login else ()
    done = run_cli(None, *case.arguments, *where, "--output", "json", stdin=case.stdin)
    error = json.loads(done.stderr)
    assert (error["code"], done.returncode, done.stdout) == (case.code, case.exit_code, b""), error
    assert error["what_to_do"]
    assert PASSWORD.encode() not in done.stderr
    assert written(dsn) == before
    assert sql_value(dsn, "select count(*) from sqlstreams.message_log_1") == case.stored


@pytest.mark.parametrize("login", [wrong_password, unreachable], ids=lambda login: login.__name__)
def test_a_password_is_not_printed_in_text_either(dsn: str, login: Callable[[str], str]) -> None:
    done = run_cli(login(dsn), "stream", "list")
    assert done.returncode == 1
    assert done.stderr.startswith(b"sqlstreams: [SQLS-")
    assert PASSWORD.encode() not in done.stderr
    assert b"Traceback" not in done.stderr


def test_the_number_of_a_bad_line_and_its_file_are_named(dsn: str, tmp_path: Path) -> None:
    register(dsn, "orders")
    file = tmp_path / "payments.jsonl"
    file.write_bytes(b"1\n2\nnope\n")
    done = run_cli(dsn, "produce", "orders", "--file", str(file))
    assert f"line 3 of {file}".encode() in done.stderr
    assert b"the 2 messages before it are produced" in done.stderr


# What only a program can get wrong.


class Order(msgspec.Struct):
    number: int


async def not_reached(message: object) -> None:
    raise AssertionError


async def negative_timeout(client: sqlstreams.Client) -> None:
    sqlstreams.GroupConfig(timeout=timedelta(seconds=-1))


async def negative_backoff(client: sqlstreams.Client) -> None:
    sqlstreams.GroupConfig(initial_backoff=timedelta(microseconds=-1))


async def negative_retention(client: sqlstreams.Client) -> None:
    sqlstreams.StreamConfig(retention=timedelta.min)


async def negative_shutdown(client: sqlstreams.Client) -> None:
    sqlstreams.ConsumeOptions(shutdown=timedelta(seconds=-1))


async def handler_not_callable(client: sqlstreams.Client) -> None:
    await client.stream("orders").consumer("g").consume("print")  # type: ignore[arg-type]


async def handler_without_parameters(client: sqlstreams.Client) -> None:
    await client.stream("orders").consumer("g").consume(lambda: None)


async def payload_does_not_encode(client: sqlstreams.Client) -> None:
    await client.stream("orders").produce(object())


async def one_of_a_batch_does_not_encode(client: sqlstreams.Client) -> None:
    await client.stream("orders").produce_batch([1, 2, "\ud800"])


async def raw_is_no_json(client: sqlstreams.Client) -> None:
    await client.stream("orders").produce(msgspec.Raw(b"nope"))


async def name_is_no_text(client: sqlstreams.Client) -> None:
    client.stream(7)  # type: ignore[call-overload]


async def group_of_an_unknown_stream(client: sqlstreams.Client) -> None:
    await client.stream("nope").consumer("g").register()


async def unknown_group(client: sqlstreams.Client) -> None:
    await client.stream("orders").consumer("nope").consume(not_reached)


PROGRAMS: dict[Callable[[sqlstreams.Client], Any], type[sqlstreams.SQLStreamsError]] = {
    negative_timeout: ConfigurationError,
    negative_backoff: ConfigurationError,
    negative_retention: ConfigurationError,
    negative_shutdown: ConfigurationError,
    handler_not_callable: ConfigurationError,
    handler_without_parameters: ConfigurationError,
    payload_does_not_encode: PayloadInvalid,
    one_of_a_batch_does_not_encode: PayloadInvalid,
    raw_is_no_json: PayloadInvalid,
    name_is_no_text: ConfigurationError,
    group_of_an_unknown_stream: NotFound,
    unknown_group: NotFound,
}


async def test_q3_q5_bad_calls_are_refused_with_their_error_and_nothing_is_written(dsn: str) -> None:
    async with sqlstreams.connect(dsn, listen=False) as client:
        await client.stream("orders").register()
        await client.stream("orders").consumer("g").register()
        before = await trio.to_thread.run_sync(written, dsn)
        for call, error in PROGRAMS.items():
            with pytest.raises(error) as caught:
                await call(client)
            assert type(caught.value) is error, call.__name__
        assert await client.stream("orders").read() == []
        assert await trio.to_thread.run_sync(written, dsn) == before


async def test_a_payload_that_does_not_decode_is_a_dead_letter_and_the_others_flow(dsn: str) -> None:
    handled: list[int] = []

    async def handle(order: Order) -> None:
        handled.append(order.number)
        if order.number == 3:
            scope.cancel()

    async with sqlstreams.connect(dsn, listen=False) as client:
        await client.stream("orders").register()
        await client.stream("orders").produce_batch(
            [Order(1), {"number": PASSWORD}, "neither", Order(2), {}, Order(3)]
        )
        group = client.stream("orders", Order).consumer("g")
        await group.register()
        with trio.move_on_after(5) as scope:
            await group.consume(handle)
        dead = await group.dead_letters()
    assert handled == [1, 2, 3]
    assert [letter.message_id for letter in dead] == [2, 3, 5]
    assert all(PASSWORD not in (letter.error or "") for letter in dead)
    assert bytes(dead[1].payload or b"") == b'"neither"'
