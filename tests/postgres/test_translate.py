"""Each error of the driver, the socket and the server becomes one of ours, and none of them carries a value."""

import asyncio
import errno
import re
import socket
import ssl
import traceback
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from sqlstreams.errors import (
    AuthenticationFailed,
    ConfigurationError,
    Contended,
    GroupDamaged,
    LeaseLost,
    LogDamaged,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    ServerRunChanged,
    SQLStreamsError,
    StatementRefused,
    StoreUnavailable,
)
from sqlstreams.postgres.bridge import open_bridge
from sqlstreams.postgres.connect import Connection
from sqlstreams.postgres.pinned import Pinned
from sqlstreams.postgres.pool import Pool, open_pool
from sqlstreams.postgres.settings import PoolSettings
from sqlstreams.postgres.translate import address, is_database_error, refused, translate
from tests.postgres.rig import opened, settings_for
from tests.servers import sql_async

SECRET = "hunter2-secret"


def server_error(state: str, message: str = "something about it") -> asyncpg.PostgresError:
    """Make what the driver makes of an ErrorResponse."""
    fields = {
        "C": state,
        "S": "ERROR",
        "V": "ERROR",
        "M": message,
        "D": f"Key (n)=({SECRET}) exists.",
        "H": SECRET,
        "W": f"SQL statement {SECRET}",
        "n": "a_constraint",
        "t": "a_table",
    }
    error: asyncpg.PostgresError = asyncpg.PostgresError.new(fields, query=f"select '{SECRET}'")
    return error


BY_SQLSTATE = {
    "08006": StoreUnavailable,
    "08P01": StoreUnavailable,
    "22001": StatementRefused,
    "23505": StatementRefused,
    "25006": StoreUnavailable,
    "25P02": StatementRefused,
    "25P03": StoreUnavailable,
    "28000": AuthenticationFailed,
    "28P01": AuthenticationFailed,
    "3D000": AuthenticationFailed,
    "40001": Contended,
    "40P01": Contended,
    "42501": PermissionDenied,
    "42P01": StatementRefused,
    "53100": StoreUnavailable,
    "53300": StoreUnavailable,
    "55P03": Contended,
    "57014": StatementRefused,
    "57P01": StoreUnavailable,
    "57P03": StoreUnavailable,
    "P0001": StatementRefused,
    "SQ001": ConfigurationError,
    "SQ002": LeaseLost,
    "SQ003": GroupDamaged,
    "SQ004": LogDamaged,
    "SQ005": NotFound,
    "SQ006": ServerRunChanged,
    "SQ010": LeaseLost,
    "XX000": StatementRefused,
}


@pytest.mark.parametrize(("state", "kind"), BY_SQLSTATE.items())
def test_an_sqlstate_has_its_error(state, kind):
    ours = translate(server_error(state), subject="stream 1")
    assert type(ours) is kind
    assert ours.subject == "stream 1"
    assert SECRET not in str(ours)
    if kind is StatementRefused:
        assert ours.sqlstate == state
        assert state in ours.message


@pytest.mark.parametrize("state", BY_SQLSTATE)
def test_under_the_last_statement_only_a_refusal_is_certain(state):
    error = server_error(state)
    unknown = state.startswith(("08", "57P"))
    assert refused(error) is not unknown
    assert isinstance(translate(error, sent_last=True), OutcomeUnknown) is unknown


@pytest.mark.parametrize(
    ("error", "kind", "last", "says"),
    [
        (TimeoutError(), StoreUnavailable, OutcomeUnknown, "no answer in time"),
        (ConnectionResetError(errno.ECONNRESET, "x"), StoreUnavailable, OutcomeUnknown, "reset by peer"),
        (
            OSError(f"Multiple exceptions: [Errno 111] {SECRET}, [Errno 111]"),
            StoreUnavailable,
            OutcomeUnknown,
            "refused",
        ),
        (OSError(SECRET), StoreUnavailable, OutcomeUnknown, "the connection was lost"),
        (
            socket.gaierror(-2, "Name or service not known"),
            StoreUnavailable,
            OutcomeUnknown,
            "cannot be resolved",
        ),
        (ssl.SSLError(SECRET), StoreUnavailable, OutcomeUnknown, "TLS failed"),
        (
            asyncpg.ConnectionDoesNotExistError(SECRET),
            StoreUnavailable,
            OutcomeUnknown,
            "the connection was lost",
        ),
        (
            asyncpg.InterfaceError("connection is closed"),
            StoreUnavailable,
            StoreUnavailable,
            "before the statement",
        ),
        (asyncpg.InternalClientError(SECRET), StoreUnavailable, OutcomeUnknown, "InternalClientError"),
        (
            asyncpg.InternalClientError("cannot switch to state 1"),
            StoreUnavailable,
            StoreUnavailable,
            "before",
        ),
        (asyncpg.DataError(SECRET), StatementRefused, StatementRefused, "nothing was sent"),
        (
            asyncpg.InterfaceError("the server expects 1 argument for this query, 0 were passed"),
            StatementRefused,
            StatementRefused,
            "expects 1 argument",
        ),
        (
            asyncpg.InterfaceError("cannot perform operation: another operation is in progress"),
            ConfigurationError,
            ConfigurationError,
            "two tasks",
        ),
        (
            asyncpg.exceptions.ClientConfigurationError(SECRET),
            ConfigurationError,
            ConfigurationError,
            "not valid",
        ),
        (
            asyncpg.exceptions.TargetServerAttributeNotMatched(SECRET),
            StoreUnavailable,
            OutcomeUnknown,
            "target_session_attrs",
        ),
    ],
    ids=repr,
)
def test_errors_of_driver_and_socket(error, kind, last, says):
    assert is_database_error(error)
    ours = translate(error)
    assert type(ours) is kind
    assert says in ours.message
    assert SECRET not in str(ours)
    unknown = translate(error, sent_last=True)
    assert type(unknown) is last
    assert SECRET not in str(unknown)


def test_our_own_errors_come_back_as_they_are_and_others_are_none_of_the_database():
    ours = LeaseLost("gone")
    assert translate(ours, subject="x", sent_last=True) is ours
    for error in (ValueError(), KeyError(), RuntimeError(), asyncio.CancelledError()):
        assert not is_database_error(error)


@pytest.mark.parametrize(
    ("state", "message", "quoted"),
    [
        ("42P01", 'relation "a" does not exist', True),
        ("53300", "sorry, too many clients already", True),
        ("SQ005", "stream 7 is not there", True),
        ("22P02", f'invalid input syntax for type integer: "{SECRET}"', False),
        ("42601", f'syntax error at or near "{SECRET}"', False),
        ("P0001", f"a trigger says {SECRET}", False),
        ("23505", f"not quoted: {SECRET}", False),
    ],
)
def test_messages_are_quoted_only_where_they_hold_no_values(state, message, quoted):
    text = str(translate(server_error(state, message)))
    assert (message in text) is quoted
    assert SECRET not in text


def test_a_refusal_names_the_objects():
    ours = translate(server_error("23505"))
    assert ours.message == "SQLSTATE 23505 (unique violation, constraint a_constraint, table a_table)"


@pytest.mark.parametrize(
    ("dsn", "found"),
    [
        ("postgresql://user:pass@db1:5432/app", "db1:5432"),
        ("postgres://user@db1/app?sslmode=require", "db1"),
        ("postgresql://user:p@ss@db1:5432,db2:5433/app", "db1:5432,db2:5433"),
        ("postgresql://[::1]:5432/app", "[::1]:5432"),
        ("postgresql://user:12/34@db1/app", None),
        ("postgresql:///app", None),
        ("host=db1 password=x", None),
        ("mysql://user:pass@db1/app", None),
        ("", None),
    ],
)
def test_the_address_is_told_where_it_cannot_be_a_password(dsn, found):
    assert address(dsn) == found


# Privacy, on a real server.


def everything_about(exc: BaseException) -> str:
    """Print an error with all it drags along, also what Python would not show."""
    texts = ["".join(traceback.format_exception(exc))]
    seen: set[int] = set()
    todo: list[BaseException | None] = [exc]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            texts += [repr(one), str(one), repr(vars(one))]
            todo += [one.__cause__, one.__context__]
    source = re.compile(r'^    .*$|File ".*', re.MULTILINE)  # the lines of this file name the secret
    return source.sub("", "\n".join(texts))


async def unique_violation(conn: Connection) -> None:
    for _ in range(2):
        await conn.execute("insert into secrets (id) values ($1)", SECRET)


async def check_violation(conn: Connection) -> None:
    await conn.execute("insert into secrets (id, n) values ($1, -1)", SECRET)


async def bad_json(conn: Connection) -> None:
    await conn.execute("select $1::json", f'{{"a": {SECRET}'.encode())


async def bad_cast(conn: Connection) -> None:
    await conn.execute("select $1::text::int", SECRET)


async def bad_argument(conn: Connection) -> None:
    await conn.execute("select $1::int", SECRET)


async def str_for_json(conn: Connection) -> None:
    await conn.execute("select $1::json", SECRET)


async def raised_by_a_trigger(conn: Connection) -> None:
    await conn.execute(
        f"do $do$ begin raise exception 'no: %', '{SECRET}' using detail = '{SECRET}'; end $do$"
    )


async def syntax_error(conn: Connection) -> None:
    await conn.execute(f"select '{SECRET}' '{SECRET}' \"{SECRET}")


LEAKS = [
    unique_violation,
    check_violation,
    bad_json,
    bad_cast,
    bad_argument,
    str_for_json,
    raised_by_a_trigger,
    syntax_error,
]


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
async def test_no_payload_gets_into_an_error_its_causes_or_its_traceback(dsn, leak):
    await sql_async(dsn, "create table secrets (id text primary key, n int check (n > 0))")

    async def in_transaction(pool: Pool) -> None:
        async with pool.transaction() as tx:
            await tx.run(leak)

    async with opened(dsn) as (bridge, pool):
        pinned = Pinned(bridge, pool.settings, name="test")
        ways: list[Callable[[], Awaitable[Any]]] = [
            lambda: pool.unit_of_work(leak),
            lambda: pool.read(leak),
            lambda: pool.autocommit(leak),
            lambda: pinned.read(leak),
            lambda: pinned.autocommit(leak),
            lambda: in_transaction(pool),
        ]
        for way in ways:
            with pytest.raises(StatementRefused) as caught:
                await way()
            assert SECRET not in everything_about(caught.value)
            await sql_async(dsn, "truncate secrets")
        await pinned.close()


def test_sabotage_the_drivers_own_error_has_the_payload():
    assert SECRET in everything_about(server_error("23505"))


def with_password(dsn: str, password: str) -> str:
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"{parts.username}:{password}@{parts.hostname}:{parts.port}"))


async def error_of_connecting(dsn: str, **settings: Any) -> SQLStreamsError:
    with pytest.raises(SQLStreamsError) as caught:
        async with open_bridge() as bridge, open_pool(bridge, settings_for(dsn, **settings)):
            pytest.fail("connected")
    with pytest.raises(SQLStreamsError) as of_pinned:
        async with open_bridge() as bridge:
            pinned = Pinned(bridge, settings_for(dsn, **settings), name="test")
            await pinned.read(unique_violation)
    assert type(of_pinned.value) is type(caught.value)
    for exc in (caught.value, of_pinned.value):
        assert SECRET not in everything_about(exc)
        assert "12345" not in everything_about(exc)
    return caught.value


async def test_a_wrong_password_is_not_repeated(dsn):
    error = await error_of_connecting(with_password(dsn, SECRET))
    assert isinstance(error, AuthenticationFailed)
    assert "28P01" in error.message
    assert error.subject is not None
    assert f"{urlsplit(dsn).hostname}:{urlsplit(dsn).port}" in error.subject


async def test_a_database_that_is_not_there(dsn):
    error = await error_of_connecting(urlunsplit(urlsplit(dsn)._replace(path="/gone")))
    assert isinstance(error, AuthenticationFailed)
    assert "does not exist" in error.message


async def test_a_server_that_is_not_there():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        error = await error_of_connecting(f"postgresql://u:{SECRET}@127.0.0.1:{unused.getsockname()[1]}/x")
    assert isinstance(error, StoreUnavailable)
    assert "Connection refused" in error.message


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://u:{SECRET}@localhost:abc/x",
        f"postgresql://u:{SECRET}@localhost:99999999/x",
        f"postgresql://u:{SECRET}@[localhost/x",
        f"mysql://u:{SECRET}@localhost/x",
        f"host=localhost password={SECRET}",
        f"postgresql://u:{SECRET}@localhost/x?sslmode=nonsense",
        f"postgresql://u:{SECRET}@localhost/x?target_session_attrs={SECRET}",
        f"postgresql://u:{SECRET}#12345@localhost/x",
        f"{SECRET}",
        "",
    ],
)
async def test_a_malformed_url_is_a_configuration_error_and_not_repeated(dsn):
    error = await error_of_connecting(dsn, connect_timeout=2.0)
    assert isinstance(error, ConfigurationError)


def test_settings_do_not_show_the_url():
    assert SECRET not in repr(PoolSettings(dsn=f"postgresql://u:{SECRET}@localhost/x"))
