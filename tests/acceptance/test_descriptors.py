"""Closed, full and broken descriptors, and a person at a terminal: one line with a code, and no message is lost."""

import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.acceptance.program import COMMAND, document, environment, ok, register, run_cli, start_cli
from tests.servers import sql, wait_until

CANARY = "c4n4ry"


@pytest.fixture
def orders(dsn: str) -> str:
    """A database that has the stream `orders` with three messages and the group `g`."""
    register(dsn, "orders", "g")
    ok(dsn, "produce", "orders", "-", stdin=b"1\n2\n3\n")
    return dsn


def shell(
    dsn: str, script: str, *, stdin: int | None = subprocess.DEVNULL
) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash, where `$CLI` is the command."""
    env = environment(dsn) | {"CLI": " ".join(COMMAND)}
    return subprocess.run(
        ("bash", "-c", script), stdin=stdin, capture_output=True, env=env, timeout=30, check=False
    )


def one_line(stderr: bytes, code: str) -> None:
    """There is exactly one line, and it has the code."""
    (line,) = stderr.decode().splitlines()
    assert line.startswith(f"sqlstreams: [{code}] "), line


@pytest.mark.parametrize("closed", ["<&- >&-", ">&-", "<&- >&- 2>&-"])
def test_q7_consume_with_closed_descriptors_takes_nothing(orders: str, closed: str) -> None:
    done = shell(orders, f"$CLI consume orders g --payload-only {closed}")
    assert done.returncode == 1
    if "2>&-" not in closed:
        one_line(done.stderr, "SQLS-OUTPUT-CLOSED")
    assert document(orders, "group", "lag", "orders", "g")["messages"] == 3
    assert ok(orders, "consume", "orders", "g", "--payload-only") == b"1\n2\n3\n"


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_consume_prints_where_only_the_others_are_closed(orders: str, closed: str) -> None:
    done = shell(orders, f"$CLI consume orders g --payload-only {closed}")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"1\n2\n3\n", b"")


@pytest.mark.parametrize("output", [">&-", ">/dev/full", "--output json >&-", "--output json >/dev/full"])
@pytest.mark.parametrize("command", ["stream list", "stream get orders", "group lag orders g", "explain"])
def test_an_output_that_takes_nothing_is_one_line(orders: str, command: str, output: str) -> None:
    done = shell(orders, f"$CLI {command} {output}")
    assert done.returncode == 1
    if "json" in output:
        assert json.loads(done.stderr)["code"] == "SQLS-OUTPUT-CLOSED"
    else:
        one_line(done.stderr, "SQLS-OUTPUT-CLOSED")


def test_what_click_prints_fails_in_one_line_too(dsn: str) -> None:
    done = shell(dsn, "$CLI --help >/dev/full")
    assert done.returncode == 1
    one_line(done.stderr, "SQLS-SYSTEM")


@pytest.mark.parametrize(
    "command", ["stream read orders", "stream list", "group lag orders g", "stream list --output json"]
)
def test_q7_a_reader_that_left_is_one_line(orders: str, command: str) -> None:
    done = shell(orders, f"$CLI {command} | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 1
    one_line(done.stderr, "SQLS-OUTPUT-CLOSED") if "json" not in command else json.loads(done.stderr)


def test_a_reader_that_takes_the_first_line_is_no_traceback(orders: str) -> None:
    sql(
        orders,
        "insert into sqlstreams.message_log_1 (payload) select to_json(repeat('x', 100000)) from generate_series(1, 9)",
    )
    done = shell(orders, "$CLI stream read orders | head -1; exit ${PIPESTATUS[0]}")
    assert (done.returncode, json.loads(done.stdout)["payload"]) == (1, 1)
    one_line(done.stderr, "SQLS-OUTPUT-CLOSED")


@pytest.mark.parametrize("source", ["- <&-", "--file - <&-", "--file /proc/self/mem"])
def test_an_input_that_cannot_be_read_is_one_line(orders: str, source: str) -> None:
    done = shell(orders, f"$CLI produce orders {source}")
    assert (done.returncode, done.stdout) == (1, b"")
    one_line(done.stderr, "SQLS-INPUT-FAILED")


def test_a_closed_stderr_hides_the_error_and_keeps_the_code(dsn: str) -> None:
    assert shell(dsn, "$CLI consume nope g 2>&-").returncode == 1
    assert shell(dsn, "$CLI consume nope g 2>/dev/full").returncode == 1


def start_stuck(dsn: str) -> None:
    """Lines that are longer than a pipe holds, and a group whose patience is short."""
    register(dsn, "orders")
    ok(dsn, "produce", "orders", "-", stdin=b"".join(b'"%d%s"\n' % (n, b"x" * 100_000) for n in range(3)))
    ok(dsn, "group", "register", "orders", "g", "--timeout", "0.6")


GIVEN_BACK = "select bool_and(not done and node_id is null) from sqlstreams.claim_1 where high > 0"


def test_a_line_that_was_cut_ends_whole_when_its_reader_comes_back_after_sigterm(dsn: str) -> None:
    start_stuck(dsn)
    with start_cli(dsn, "consume", "orders", "g", "--payload-only") as process:
        wait_until(dsn, GIVEN_BACK)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # because the reader comes back while the process waits for it
        out, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, b"")
    assert out.endswith(b'"\n')
    assert [len(json.loads(line)) for line in out.splitlines()] == [100_001] * out.count(b"\n")
    again = ok(dsn, "consume", "orders", "g", "--payload-only")
    assert {line[:2] for line in (out + again).splitlines()} == {b'"0', b'"1', b'"2'}


def test_a_line_that_stays_cut_is_said_and_comes_again(dsn: str) -> None:
    start_stuck(dsn)
    with start_cli(dsn, "consume", "orders", "g", "--payload-only") as process:
        wait_until(dsn, GIVEN_BACK)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 1
        assert process.stderr is not None
        one_line(process.stderr.read(), "SQLS-OUTPUT-CLOSED")
    assert len(ok(dsn, "consume", "orders", "g", "--payload-only").splitlines()) == 3


def advice(dsn: str | None, *arguments: str, stdin: bytes = b"") -> str:
    """What a command that fails says is to be done."""
    done = run_cli(dsn, *arguments, "--output", "json", stdin=stdin)
    assert done.returncode in (1, 2)
    return str(json.loads(done.stderr)["what_to_do"])


def test_advice_speaks_of_the_shell(dsn: str, tmp_path: Path) -> None:
    assert advice(dsn, "stream", "list").startswith("Run `sqlstreams stream register NAME`")
    ok(dsn, "stream", "register", "orders")
    ok(dsn, "produce", "orders", "1")
    assert advice(dsn, "stream", "destroy", "orders", "--yes").startswith("Give --force")
    assert advice(None, "stream", "list") == "Give --database-url or set SQLSTREAMS_DATABASE_URL"
    assert advice(dsn, "stream", "get", "nope").startswith("`sqlstreams stream register NAME` declares it")
    assert advice(dsn, "consume", "nope", "g").startswith("`sqlstreams stream register NAME` declares it")
    missing = str(tmp_path / "nope")
    assert advice(dsn, "produce", "orders", "--file", missing) == "Check the path and its permissions"
    assert advice(dsn, "produce", "orders", "-", stdin=b"[") == "Correct the line, or pass --skip-bad"
    keyed = advice(dsn, "produce", "orders", "-", "--key-field", "id", stdin=b"{}")
    assert keyed == "Correct the line, leave --key-field out, or pass --skip-bad"


@pytest.mark.parametrize(
    "bad",
    [f'{{"{CANARY}', f"{CANARY}", f'{{"a": {CANARY}}}', f'["{CANARY}" 1]', f'1 "{CANARY}"', f'"\\{CANARY}"'],
)
def test_a_bad_line_says_where_and_quotes_nothing(orders: str, bad: str) -> None:
    done = run_cli(orders, "produce", "orders", "-", stdin=bad.encode())
    one_line(done.stderr, "SQLS-PAYLOAD-INVALID")
    assert b"(byte " in done.stderr or b"truncated" in done.stderr
    assert CANARY.encode() not in done.stderr


def at_terminal(dsn: str, answer: bytes, *arguments: str) -> tuple[int, str]:
    """Run a command whose stdin is a terminal; return its exit code and stderr."""
    master, slave = pty.openpty()
    try:
        os.write(master, answer)
        done = subprocess.run(
            (*COMMAND, *arguments),
            stdin=slave,
            capture_output=True,
            env=environment(dsn),
            timeout=30,
            check=False,
        )
    finally:
        os.close(master)
        os.close(slave)
    return done.returncode, done.stderr.decode()


def test_destroy_looks_before_it_asks_and_says_what_would_go(orders: str) -> None:
    code, said = at_terminal(orders, b"y\n", "stream", "destroy", "orders")
    assert (code, "SQLS-DESTROY-REFUSED" in said, "?" in said) == (1, True, False)
    code, said = at_terminal(orders, b"n\n", "stream", "destroy", "orders", "--force")
    assert code == 1
    assert said.startswith("Drop stream orders with 3 messages and 1 group? [y/N]:")
    code, said = at_terminal(orders, b"y\n", "group", "destroy", "orders", "nope")
    assert (code, "SQLS-NOT-FOUND" in said, "?" in said) == (1, True, False)
    assert at_terminal(orders, b"y\n", "group", "destroy", "orders", "g")[0] == 0
    assert at_terminal(orders, b"y\n", "stream", "destroy", "orders", "--force")[0] == 0
    assert document(orders, "stream", "list") == []


def test_what_is_printed_once_and_what_is_not_there(orders: str) -> None:
    shown = ok(orders, "stream", "get", "orders").decode()
    assert shown.count("partition_size") == 1
    assert "retention: keep\n" in shown
    assert all(node["lease_left"] is None for node in document(orders, "node", "list", "--all"))
