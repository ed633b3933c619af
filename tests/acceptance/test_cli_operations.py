"""`sqlstreams group …`: pause, resume, seek, redrive, discard, inspect as commands."""

import json

import pytest
import trio

import sqlstreams
from tests.acceptance.program import document, ok, register, run_cli
from tests.servers import sql, sql_value, wait_until_async

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"
COMMITTED = "select committed from sqlstreams.group_cursor"


@pytest.fixture
def billing(dsn: str) -> str:
    """Six messages of `orders`, of which 2 and 5 are dead letters of `billing`."""

    async def fail(payload: int) -> None:
        if payload in (2, 5):
            raise sqlstreams.Terminal(f"card {payload} expired")

    async def work() -> None:
        async with sqlstreams.connect(dsn, listen=False) as client, trio.open_nursery() as nursery:
            stream = client.stream("orders", int)
            await stream.register()
            await stream.produce_batch([1, 2, 3, 4, 5, 6])
            group = stream.consumer("billing")
            await group.register()
            await nursery.start(group.consume, fail)
            await wait_until_async(dsn, COMMITTED, 6)
            nursery.cancel_scope.cancel()

    trio.run(work)
    return dsn


def test_pause_and_resume_say_whether_they_changed_anything(billing: str) -> None:
    ok(billing, "produce", "orders", "7")
    for changed in (True, False):
        assert document(billing, "group", "pause", "orders", "billing") == {
            "group": "billing",
            "paused": True,
            "changed": changed,
        }
    assert document(billing, "group", "get", "orders", "billing")["paused"]
    assert b"paused: yes" in ok(billing, "group", "lag", "orders", "billing")
    assert ok(billing, "group", "resume", "orders", "billing") == b"group billing is running\n"
    assert ok(billing, "group", "resume", "orders", "billing") == b"group billing is already running\n"
    assert ok(billing, "consume", "orders", "billing", "--payload-only") == b"7\n"


def test_seek_tells_first_and_moves_with_yes(billing: str) -> None:
    told = document(billing, "group", "seek", "orders", "billing", "--to-id", "4", "--dry-run")
    assert told == {"target": 3, "count": 3, "first": 4, "last": 6, "retained_above": 0, "done": False}
    assert sql_value(billing, COMMITTED) == 6
    done = document(billing, "group", "seek", "orders", "billing", "--to-id", "4", "--yes")
    assert done == told | {"done": True}
    assert ok(billing, "consume", "orders", "billing", "--payload-only") == b"4\n5\n6\n"
    assert b"would stand at 0" in ok(
        billing, "group", "seek", "orders", "billing", "--to", "beginning", "--dry-run"
    )
    shown = ok(billing, "group", "seek", "orders", "billing", "--to", "head", "--yes")
    assert shown == b"group billing stands at 6; above it there is now: nothing\n"


def test_seek_to_an_instant(billing: str) -> None:
    at = sql_value(billing, "select to_json(clock_timestamp() at time zone 'UTC')#>>'{}' || 'Z'")
    ok(billing, "produce", "orders", "7")
    ok(billing, "group", "seek", "orders", "billing", "--to-time", at, "--yes")
    assert ok(billing, "consume", "orders", "billing", "--payload-only") == b"7\n"


def test_seek_while_a_consumer_runs_wants_force(billing: str) -> None:
    sql(
        billing,
        "insert into sqlstreams.node (name, host, pid, version, ttl, expires_at, token, backend_pid)"
        " values ('n', 'h', 1, '0', interval '1 h', now() + interval '1 h', gen_random_uuid(), 1);"
        "insert into sqlstreams.worker_instance (worker_id, node_id, token, fence)"
        " select w.id, n.id, gen_random_uuid(), 1 from sqlstreams.worker w, sqlstreams.node n"
        " where w.group_id is not null and n.ended_at is null",
    )
    arguments = ("group", "seek", "orders", "billing", "--to", "beginning", "--yes", "--output", "json")
    refused = run_cli(billing, *arguments)
    assert (refused.returncode, json.loads(refused.stderr)["code"]) == (1, "SQLS-GROUP-BUSY")
    assert json.loads(ok(billing, *arguments, "--force"))["done"]


def test_redrive_by_id_by_error_and_all(billing: str) -> None:
    assert document(billing, "group", "redrive", "orders", "billing", "5") == {"redriven": 1}
    again = run_cli(billing, "group", "redrive", "orders", "billing", "2", "5", "--output", "json")
    assert (again.returncode, json.loads(again.stdout)) == (
        1,
        {"redriven": 1},
    )  # 5 is no dead letter any more
    lines = ok(billing, "consume", "orders", "billing", "--max", "2").splitlines()
    assert sorted(json.loads(line)["payload"] for line in lines) == [2, 5]
    assert ok(billing, "group", "redrive", "orders", "billing", "--all") == b"redriven: 0\n"


def test_redrive_by_error(billing: str) -> None:
    arguments = ("group", "redrive", "orders", "billing", "--error-contains", "card 2 exp")
    assert document(billing, *arguments) == {"redriven": 1}
    (left,) = document(billing, "group", "dead-letters", "orders", "billing")
    assert left["message_id"] == 5


def test_discard_wants_yes_and_leaves_the_messages(billing: str) -> None:
    assert run_cli(billing, "group", "discard", "orders", "billing", "--all", stdin=b"y\n").returncode == 2
    assert document(billing, "group", "discard", "orders", "billing", "2", "--yes") == {"discarded": 1}
    assert ok(billing, "group", "discard", "orders", "billing", "--all", "--yes") == b"discarded: 1\n"
    assert document(billing, "group", "dead-letters", "orders", "billing") == []
    assert len(document(billing, "stream", "read", "orders")) == 6


def test_inspect_shows_the_state_and_the_history(billing: str) -> None:
    found = document(billing, "group", "inspect", "orders", "billing", "2")
    assert (found["message_id"], found["state"], found["present"]) == (2, "dead", True)
    assert [(each["attempt"], each["status"]) for each in found["history"]] == [(0, "dead")]
    shown = ok(billing, "group", "inspect", "orders", "billing", "2").decode()
    assert "state: dead" in shown
    assert "card 2 expired" in shown.partition("history:")[2]
    assert "history" not in ok(billing, "group", "inspect", "orders", "billing", "1").decode()
    assert document(billing, "group", "inspect", "orders", "billing", "99")["state"] == "not drawn"


@pytest.mark.parametrize(
    "arguments",
    [
        ("seek", "--yes"),
        ("seek", "--to", "end", "--yes"),
        ("seek", "--to", "head", "--to-id", "1", "--yes"),
        ("seek", "--to-id", "0", "--yes"),
        ("seek", "--to-id", "9223372036854775808", "--yes"),
        ("seek", "--to-time", "yesterday", "--yes"),
        ("seek", "--to-time", "2026-01-31", "--yes"),
        ("seek", "--to-time", "2026-01-31T08:00:00", "--yes"),
        ("seek", "--to", "head"),
        ("redrive",),
        ("redrive", "1", "--all"),
        ("redrive", "one"),
        ("redrive", "--error-contains", ""),
        ("discard", "--yes"),
        ("discard", "1", "--error-contains", "x", "--yes"),
        ("discard", "1"),
        ("inspect",),
        ("inspect", "0"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_ends_with_2_before_any_io(arguments: tuple[str, ...]) -> None:
    verb, *others = arguments
    done = run_cli(NOWHERE, "group", verb, "orders", "billing", *others, "--output", "json")
    assert (done.returncode, json.loads(done.stderr)["code"]) == (2, "SQLS-USAGE")


def test_what_is_absent_ends_with_1(dsn: str) -> None:
    register(dsn, "orders")
    for verb in (
        ("pause",),
        ("resume",),
        ("redrive", "--all"),
        ("inspect", "1"),
        ("seek", "--to", "head", "--yes"),
    ):
        done = run_cli(dsn, "group", verb[0], "orders", "nope", *verb[1:], "--output", "json")
        assert (done.returncode, json.loads(done.stderr)["code"]) == (1, "SQLS-NOT-FOUND")
