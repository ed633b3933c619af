"""The command line: nouns and verbs, output for people and for programs, exit codes."""

import json
import re

import pytest

from sqlstreams import __version__
from sqlstreams.errors import all_errors
from tests.acceptance.program import document, ok, register, run_cli

RFC3339_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


def test_the_version_and_the_help_need_no_database() -> None:
    assert ok(None, "--version").decode() == f"sqlstreams {__version__}\n"
    shown = ok(None, "--help").decode()
    assert all(word in shown for word in ("demo", "produce", "consume", "stream", "group", "node", "explain"))


def test_q6_explain_tells_every_code_and_refuses_others_with_2() -> None:
    listed = {each["code"]: each for each in document(None, "explain")}
    assert listed.keys() >= all_errors().keys()
    assert document(None, "explain", "SQLS-NOT-FOUND") == listed["SQLS-NOT-FOUND"]
    assert listed["SQLS-NOT-FOUND"]["what_to_do"].encode() in ok(None, "explain", "sqls-not-found")
    unknown = run_cli(None, "explain", "SQLS-NIX", "--output", "json")
    assert unknown.returncode == 2
    assert json.loads(unknown.stderr)["code"] == "SQLS-USAGE"


def test_options_of_every_command_stand_before_or_after_the_verb(dsn: str) -> None:
    ok(None, "--database-url", dsn, "stream", "register", "orders", "--schema", "other")
    for arguments in (
        ("stream", "--output", "json", "list", "--schema", "other"),
        ("stream", "list", "--output=json", "--schema=other"),
    ):
        (row,) = json.loads(ok(dsn, *arguments))
        assert row["name"] == "orders"


def test_json_has_the_names_of_the_api_durations_in_seconds_and_instants_in_utc(dsn: str) -> None:
    ok(dsn, "stream", "register", "orders", "--retention", "30d")
    (stream,) = document(dsn, "stream", "list")
    assert stream == document(dsn, "stream", "get", "orders")
    assert stream["config"]["retention"] == 30 * 86_400.0
    assert RFC3339_UTC.fullmatch(stream["created_at"])


def test_json_of_groups(dsn: str) -> None:
    register(dsn, "orders")
    ok(dsn, "group", "register", "orders", "billing", "--timeout", "500ms", "--max-retries", "7")
    (group,) = document(dsn, "group", "list", "orders")
    assert group == document(dsn, "group", "get", "orders", "billing")
    assert (group["config"]["timeout"], group["config"]["max_retries"]) == (0.5, 7)


def test_json_of_progress(dsn: str) -> None:
    register(dsn, "orders", "billing")
    lag = document(dsn, "group", "lag", "orders", "billing")
    assert lag == {"messages": 0, "seconds": 0.0, "head": 0, "settled": 0, "committed": 0}
    assert document(dsn, "group", "dead-letters", "orders", "billing") == []
    assert document(dsn, "node", "list") == []


def test_text_is_for_people_and_has_no_escape_codes(dsn: str) -> None:
    register(dsn, "orders", "[bold]billing :smile:")
    shown = ok(dsn, "group", "list", "orders")
    assert b"[bold]billing :smile:" in shown
    assert b"\x1b" not in shown
    assert b"held_by" not in ok(dsn, "group", "lag", "orders", "[bold]billing :smile:")


def test_what_is_absent_ends_with_1_and_a_coded_error(dsn: str) -> None:
    register(dsn, "orders")
    for arguments in (
        ("stream", "get", "nope"),
        ("group", "get", "orders", "nope"),
        ("group", "list", "nope"),
    ):
        done = run_cli(dsn, *arguments, "--output", "json")
        error = json.loads(done.stderr)
        assert (done.returncode, error["code"], done.stdout) == (1, "SQLS-NOT-FOUND", b"")
        assert error.keys() == {"code", "subject", "message", "what_to_do", "may_retry"}
    assert run_cli(dsn, "stream", "get", "nope").stderr.startswith(
        b"sqlstreams: [SQLS-NOT-FOUND] stream 'nope'"
    )


def test_only_stream_register_installs_the_schema(dsn: str) -> None:
    for arguments in (("stream", "list"), ("produce", "orders", "1"), ("consume", "orders", "g")):
        done = run_cli(dsn, *arguments)
        assert done.returncode == 1, done
        assert b"SQLS-NOT-INSTALLED" in done.stderr
        assert b"stream register" in done.stderr
    ok(dsn, "stream", "register", "orders")
    assert len(document(dsn, "stream", "list")) == 1


def test_q6_destructive_verbs_want_a_terminal_or_yes(dsn: str) -> None:
    register(dsn, "orders", "billing")
    for arguments in (("group", "destroy", "orders", "billing"), ("stream", "destroy", "orders")):
        assert run_cli(dsn, *arguments, stdin=b"y\n").returncode == 2
    ok(dsn, "group", "destroy", "orders", "billing", "--yes")
    assert document(dsn, "group", "list", "orders") == []


def test_a_stream_with_messages_wants_force(dsn: str) -> None:
    register(dsn, "orders")
    ok(dsn, "produce", "orders", "1")
    refused = run_cli(dsn, "stream", "destroy", "orders", "--yes")
    assert (refused.returncode, b"SQLS-DESTROY-REFUSED" in refused.stderr) == (1, True)
    ok(dsn, "stream", "destroy", "orders", "--yes", "--force")
    assert document(dsn, "stream", "list") == []


def test_read_prints_messages_without_consuming_them(dsn: str) -> None:
    register(dsn, "orders")
    ok(dsn, "produce", "orders", "-", stdin=b'{"a": 1}\n{"a": 2}\n')
    first, second = document(dsn, "stream", "read", "orders")
    assert (first["id"], second["payload"]) == (1, {"a": 2})
    lines = ok(dsn, "stream", "read", "orders", "--after", "1").splitlines()
    assert [json.loads(line)["id"] for line in lines] == [2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("nope",),
        ("stream", "nope"),
        ("stream", "get"),
        ("stream", "list", "--nope"),
        ("consume", "orders", "g", "--max", "0"),
        ("stream", "register", "orders", "--retention", "soon"),
        ("stream", "register", "orders", "--retention", "9" * 400),
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments: tuple[str, ...]) -> None:
    done = run_cli("postgresql://nobody@127.0.0.1:1/none", *arguments, "--output", "json")
    assert (done.returncode, json.loads(done.stderr)["code"]) == (2, "SQLS-USAGE")
