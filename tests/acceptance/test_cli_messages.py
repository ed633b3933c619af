"""`produce` and `consume` as processes: bytes, order, bad lines, pipes, signals."""

import json
import random
import signal
import subprocess
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import trio

import sqlstreams
from tests.acceptance.program import document, ok, register, run_cli, start_cli
from tests.servers import sql, sql_value, wait_for, wait_until

ODD_PAYLOADS = [
    b'{"a": 1e300, "a":1.0,   "b":[ 1 ,2]}',
    b'"h\\u00e4\xc3\xa4"',
    b"12345678901234567890123456789.10",
    b'{"nul": "\\u0000", "pair": "\\ud83d\\ude00"}',
    b"null",
    b'" leading and trailing "',
    b'{"a":"\\r\\n\\t"}',
]


@pytest.fixture
def orders(dsn: str) -> str:
    """A database that has the stream `orders`."""
    register(dsn, "orders")
    return dsn


def test_payload_bytes_pass_unchanged_and_in_order(orders: str, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n".join(ODD_PAYLOADS))  # no line break behind the last one
    assert document(orders, "produce", "orders", "--file", str(file))["produced"] == len(ODD_PAYLOADS)
    assert ok(orders, "consume", "orders", "g", "--payload-only").splitlines() == ODD_PAYLOADS
    lines = ok(orders, "consume", "orders", "h").splitlines()
    assert [payload in line for line, payload in zip(lines, ODD_PAYLOADS, strict=True)] == [True] * len(lines)


def test_white_space_around_a_payload_passes_unchanged(orders: str) -> None:
    sent = b' {"a": 1}\t\n{"b": 2}\r\n'
    ok(orders, "produce", "orders", "-", stdin=sent)
    assert ok(orders, "consume", "orders", "g", "--payload-only") == sent


def test_a_payload_of_several_lines_is_printed_on_one(orders: str) -> None:
    sql(orders, """insert into sqlstreams.message_log_1 (payload) values (E'{\\n "a": 1\\n}')""")
    assert ok(orders, "consume", "orders", "g", "--payload-only") == b'{  "a": 1 }\n'
    (line,) = ok(orders, "consume", "orders", "h").splitlines()
    assert json.loads(line)["payload"] == {"a": 1}


def test_a_line_has_the_key_the_headers_and_the_attempts(orders: str) -> None:
    ok(orders, "produce", "orders", '{"order_id": "o-1"}', "--key-field", "order_id")
    (line,) = ok(orders, "consume", "orders", "g").splitlines()
    shown = json.loads(line)
    assert list(shown) == ["id", "key", "headers", "created_at", "attempts", "payload"]
    assert (shown["id"], shown["key"], shown["headers"], shown["attempts"]) == (1, "o-1", {}, 0)


@pytest.mark.parametrize(
    "bad", [b"nope", b"\xff", b'{"id": 7}', b"{}", b'{"id": "a\\u0000"}', b'{"id": "x"} 1']
)
def test_a_bad_line_is_named_and_the_lines_before_it_are_produced(orders: str, bad: bytes) -> None:
    lines = [b'{"id": "%d"}' % number for number in range(1, 2_003)]
    done = run_cli(
        orders,
        *("produce", "orders", "-", "--key-field", "id", "--output", "json"),
        stdin=b"\n".join([*lines, bad, *lines]),
    )
    error = json.loads(done.stderr)
    assert (done.returncode, error["code"]) == (1, "SQLS-PAYLOAD-INVALID")
    assert error["subject"] == "line 2003 of stdin"
    assert sql_value(orders, "select count(*) from sqlstreams.message_log_1") == len(lines)


def test_skip_bad_goes_on_counts_and_ends_with_1(orders: str) -> None:
    arguments = ("produce", "orders", "-", "--skip-bad", "--output", "json")
    done = run_cli(orders, *arguments, stdin=b"1\nnope\n\n2\n{\n3")
    result = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, b"")
    assert (result["produced"], result["skipped"], result["bad_lines"]) == (3, 2, [2, 5])
    assert (result["first_id"], result["last_id"], result["last_line"]) == (1, 3, 6)


def test_a_line_over_16_mib_is_a_bad_line(orders: str) -> None:
    long = b'"' + b"x" * (16 * 1024 * 1024) + b'"'
    done = run_cli(orders, "produce", "orders", "-", "--output", "json", stdin=b"1\n" + long + b"\n2\n")
    error = json.loads(done.stderr)
    assert (done.returncode, error["code"], error["subject"]) == (1, "SQLS-LIMIT-EXCEEDED", "line 2 of stdin")


def test_lines_of_a_slow_pipe_are_produced_at_once_and_sigterm_ends_with_0(orders: str) -> None:
    with start_cli(orders, "produce", "orders", "-", stdin=-1) as process:
        assert process.stdin is not None
        process.stdin.write(b"1\n2\n3")
        process.stdin.flush()
        wait_until(orders, "select count(*) from sqlstreams.message_log_1", 2)
        process.terminate()
        assert process.wait(5) == 0
        assert process.stdout is not None
        assert process.stdout.read().startswith(b"produced 2 messages")


def test_consume_registers_a_missing_group_but_no_stream(orders: str) -> None:
    ok(orders, "produce", "orders", "1")
    assert ok(orders, "consume", "orders", "late", "--start", "head") == b""
    assert [group["name"] for group in document(orders, "group", "list", "orders")] == ["late"]
    done = run_cli(orders, "consume", "nope", "g")
    assert (done.returncode, b"SQLS-NOT-FOUND" in done.stderr) == (1, True)
    assert len(document(orders, "stream", "list")) == 1


def test_consume_keeps_what_was_declared_of_a_group(orders: str) -> None:
    ok(orders, "group", "register", "orders", "g", "--max-retries", "9")
    ok(orders, "consume", "orders", "g")
    assert document(orders, "group", "get", "orders", "g")["config"]["max_retries"] == 9


def test_max_ends_after_that_many_and_the_next_one_goes_on_behind_them(orders: str) -> None:
    ok(orders, "produce", "orders", "-", stdin=b"1\n2\n3\n4\n5\n")
    assert ok(orders, "consume", "orders", "g", "--payload-only", "--max", "2") == b"1\n2\n"
    assert ok(orders, "consume", "orders", "g", "--payload-only", "--follow", "--max", "3") == b"3\n4\n5\n"


async def test_drained_does_not_wait_for_retries(orders: str) -> None:
    async def fail(payload: object) -> None:
        if payload == 2:
            raise ValueError("not now")
        scope.cancel()

    async with sqlstreams.connect(orders) as client:
        stream = client.stream("orders")
        await stream.produce_batch([2, 1])
        group = stream.consumer("g")
        await group.register(sqlstreams.GroupConfig(initial_backoff=timedelta(hours=1)))
        with trio.move_on_after(10) as scope:
            await group.consume(fail)
        await stream.produce(3)
    shown = await trio.to_thread.run_sync(ok, orders, "consume", "orders", "g", "--payload-only")
    assert shown == b"3\n"  # 1 was handled, 2 waits for an hour


def test_drained_counts_only_what_was_there_at_the_start(orders: str) -> None:
    ok(orders, "produce", "orders", "-", stdin=b"1\n2\n")
    with start_cli(orders, "produce", "orders", "-", stdin=-1) as producer:
        assert producer.stdin is not None
        with start_cli(orders, "consume", "orders", "g", "--payload-only") as consumer:
            while consumer.poll() is None:
                producer.stdin.write(b"3\n")
                producer.stdin.flush()
        assert consumer.returncode == 0
        producer.stdin.close()
        assert producer.wait(5) == 0


def test_a_closed_stdout_ends_with_1_and_what_was_not_written_comes_again(orders: str) -> None:
    text = "x" * 100_000  # longer than a pipe holds
    ok(orders, "produce", "orders", "-", stdin=b"".join(b'"%d %s"\n' % (n, text.encode()) for n in range(5)))
    with start_cli(orders, "consume", "orders", "g", "--payload-only", "--output", "json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'"0 ')
        process.stdout.close()
        error = json.loads(process.stderr.read())
    assert (process.returncode, error["code"]) == (1, "SQLS-OUTPUT-CLOSED")
    again = ok(orders, "consume", "orders", "g", "--payload-only").splitlines()
    assert sorted(line[:3] for line in again) == [b'"1 ', b'"2 ', b'"3 ', b'"4 ']
    assert document(orders, "group", "dead-letters", "orders", "g") == []


def test_a_closed_stdout_ends_an_idle_follower(orders: str) -> None:
    with start_cli(orders, "consume", "orders", "g", "--follow") as process:
        wait_until(
            orders,
            "select count(*) from pg_stat_activity where application_name = 'sqlstreams consume'",
            bool,
        )
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(5) == 1


def test_a_slow_reader_costs_no_attempt_and_no_torn_line(orders: str) -> None:
    """What it does not take is given back until it reads on; the group's timeout of 0.4 s would have failed it."""
    text = b"x" * 100_000
    ok(
        orders,
        "produce",
        "orders",
        "-",
        stdin=b"".join(b'{"n": %d, "text": "%s"}\n' % (n, text) for n in range(5)),
    )
    ok(orders, "group", "register", "orders", "g", "--timeout", "0.4", "--max-retries", "0")
    with start_cli(orders, "consume", "orders", "g") as process:
        given_back = "select bool_and(not done and node_id is null) from sqlstreams.claim_1 where high > 0"
        wait_until(orders, given_back)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, b"")
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["payload"]["n"] for line in lines} == set(range(5))
    assert {line["attempts"] for line in lines} == {0}
    assert document(orders, "group", "dead-letters", "orders", "g") == []


def test_the_first_sigterm_drains_and_ends_with_0(orders: str) -> None:
    ok(orders, "produce", "orders", "1")
    with start_cli(orders, "consume", "orders", "g", "--follow", "--payload-only") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    assert document(orders, "node", "list") == []  # it has ended its node
    assert document(orders, "group", "lag", "orders", "g")["messages"] == 0


def test_the_second_sigterm_ends_with_143(orders: str) -> None:
    ok(orders, "produce", "orders", "-", stdin=b'"%s"\n' % (b"x" * 100_000))
    with start_cli(orders, "consume", "orders", "g", "--follow") as process:
        assert process.stdout is not None
        assert (
            process.stdout.read(1) == b"{"
        )  # the line is longer than the pipe holds: its handler hangs in it
        # Two signals at once may count as one, so they are sent until it ends.
        wait_for(lambda: (process.send_signal(signal.SIGTERM), _ended_within(process, 0.2))[1], timeout=4)
        assert process.wait(5) == 143


@pytest.mark.parametrize("arguments", [("consume", "orders", "g", "--follow"), ("produce", "orders", "-")])
def test_sigint_ends_with_130(orders: str, arguments: tuple[str, ...]) -> None:
    with start_cli(orders, *arguments, stdin=-1) as process:
        name = f"sqlstreams {arguments[0]}"
        wait_until(orders, f"select count(*) from pg_stat_activity where application_name = '{name}'", bool)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_100_000_lines_into_two_groups(orders: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    file = tmp_path / "in.jsonl"
    lines = [
        json.dumps({"n": n, "x": rng.random(), "t": "häß"}, ensure_ascii=n % 2 == 0) for n in range(100_000)
    ]
    file.write_text("".join(f"{line}\n" for line in lines))
    assert document(orders, "produce", "orders", "--file", str(file))["produced"] == len(lines)
    expected = sorted(file.read_bytes().splitlines())
    for group in ("one", "two"):
        assert sorted(ok(orders, "consume", "orders", group, "--payload-only").splitlines()) == expected


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None
