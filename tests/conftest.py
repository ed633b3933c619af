"""Fixtures for everybody: real Postgres servers of two versions, a fresh database for each test, `--slow`."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from sqlstreams.embedded import PostgresServer
from sqlstreams.errors import EmbeddedFailed
from tests.servers import binaries_of, fast_server, sql

_numbers = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--slow`."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too (over 5 s each)")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker beside the option that goes with it."""
    config.addinivalue_line("markers", "slow: takes over 5 s; runs only with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests unless they are asked for."""
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    """Postgres 18, one for the session (for each xdist worker): do not stop it, nor rely on its data.

    `make matrix` asks for another version by SQLSTREAMS_TEST_POSTGRES.
    """
    with fast_server(int(os.environ.get("SQLSTREAMS_TEST_POSTGRES", "18"))) as running:
        yield running


@pytest.fixture(scope="session")
def server15() -> Iterator[PostgresServer]:
    """Postgres 15, like `server`; skips where it is not installed."""
    try:
        made = fast_server(15)
    except EmbeddedFailed as error:
        pytest.skip(f"needs Postgres 15 (apt-get install postgresql-15): {error.message}")
    with made as running:
        yield running


@pytest.fixture(scope="session", params=[18, 15], ids=["pg18", "pg15"])
def any_server(request: pytest.FixtureRequest) -> PostgresServer:
    """Each of the two versions in turn."""
    name = {18: "server", 15: "server15"}[request.param]
    found: PostgresServer = request.getfixturevalue(name)
    return found


@pytest.fixture
def dsn(server: PostgresServer) -> Iterator[str]:
    """The URL of a new, empty database on `server`, dropped afterwards."""
    yield from _fresh_database(server)


@pytest.fixture
def any_dsn(any_server: PostgresServer) -> Iterator[str]:
    """The URL of a new, empty database on each version."""
    yield from _fresh_database(any_server)


@pytest.fixture
def durable_server() -> Iterator[Callable[..., PostgresServer]]:
    """Start servers for one test that stops, restarts or crashes them: on disk, with fsync, closed after it.

    Call it with `version=18` and further Postgres settings by keyword, as often as you need servers.
    """
    with ExitStack() as running:

        def start(version: int = 18, **settings: str) -> PostgresServer:
            try:
                binaries = binaries_of(version)
            except EmbeddedFailed as error:
                if version == 18:
                    raise
                pytest.skip(f"needs Postgres {version}: {error.message}")
            server = PostgresServer(binaries=binaries.directory, settings=settings)
            return running.enter_context(server)

        yield start


def _fresh_database(server: PostgresServer) -> Iterator[str]:
    name = f"test_{next(_numbers)}"
    # template0 and file_copy are the fastest of all combinations, on both versions
    sql(server.dsn, f"create database {name} template template0 strategy file_copy")
    yield server.dsn_for(name)
    sql(server.dsn, f"drop database if exists {name} with (force)")
