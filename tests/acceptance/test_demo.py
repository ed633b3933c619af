"""The demo: its checker, shown to fail, and the whole of it as a process."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from sqlstreams.cli.demo.journal import Dead, History, Killed, Ran, Sent
from sqlstreams.cli.demo.plan import AUDIT, CHARGE, Plan
from sqlstreams.cli.demo.report import judge
from tests.acceptance.program import run_cli


def good() -> History:
    """Four payments: a good one that is redelivered, one that fails twice, one that always fails, an undecodable one."""

    def charge(process: str, id_: int, attempt: int, outcome: str, at: float) -> list[Ran]:
        return [Ran(process, CHARGE, id_, attempt, each, at) for each in ("started", outcome)]

    return History(
        messages=5,
        groups=(CHARGE, AUDIT),
        sent=[
            *(Sent(1, "good"), Sent(2, "fails twice"), Sent(3, "always fails"), Sent(4, "undecodable")),
            Sent(5, "good"),
        ],
        ran=[
            *charge("c1", 1, 0, "handled", 1.0),
            Ran("c1", CHARGE, 5, 0, "started", 1.5),
            *charge("c2", 1, 0, "handled", 4.5),
            *charge("c2", 5, 0, "handled", 4.75),
            *(ran for attempt in (0, 1) for ran in charge("c2", 2, attempt, "failed", 5.0)),
            *charge("c2", 2, 2, "handled", 6.0),
            *(ran for attempt in (0, 1, 2, 3) for ran in charge("c2", 3, attempt, "failed", 5.0)),
            *(Ran("a1", AUDIT, id_, 0, each, 1.0) for id_ in (1, 2, 3, 5) for each in ("started", "handled")),
        ],
        dead=[Dead(CHARGE, 3), Dead(CHARGE, 4), Dead(AUDIT, 4)],
        killed=[Killed("c1", CHARGE, 2.0)],
    )


def test_the_checker_counts_and_passes_when_nothing_is_missing() -> None:
    report = judge(good())
    charge, audit = report.groups
    assert (report.passed, report.findings, report.lost, report.produced) == (True, [], 0, 5)
    assert (charge.handled, charge.retried, charge.dead, charge.redelivered) == (3, 5, 2, 1)
    assert (audit.handled, audit.retried, audit.dead, audit.redelivered) == (4, 0, 1, 0)
    assert (report.in_hand, report.takeover_seconds) == (1, 2.75)


def without(field: str, unwanted: Callable[[object], bool]) -> Callable[[History], None]:
    """Take the records away for which `unwanted` holds."""

    def change(history: History) -> None:
        setattr(history, field, [each for each in getattr(history, field) if not unwanted(each)])

    return change


def adding(field: str, record: object) -> Callable[[History], None]:
    def change(history: History) -> None:
        setattr(history, field, [*getattr(history, field), record])

    return change


SABOTAGE: dict[str, tuple[Callable[[History], None], str]] = {
    "never handled": (
        without("ran", lambda ran: ran.group == AUDIT and ran.id == 2),
        f"{AUDIT}: lost: 1 (2)",
    ),
    "handled line removed": (
        without("ran", lambda ran: ran.outcome == "handled" and ran.group == CHARGE and ran.id == 2),
        f"{CHARGE}: lost: 1 (2)",
    ),
    "dead letter missing": (without("dead", lambda dead: dead.id == 3), f"{CHARGE}: lost: 1 (3)"),
    "undecodable and no dead letter": (
        without("dead", lambda dead: dead.group == AUDIT),
        f"{AUDIT}: lost: 1 (4)",
    ),
    "good one is dead": (
        lambda history: (
            adding("dead", Dead(AUDIT, 1))(history),
            without("ran", lambda ran: ran.group == AUDIT and ran.id == 1)(history),
        )[0],
        f"{AUDIT}: lost: 1 (1)",
    ),
    "dead letter without a reason": (
        adding("dead", Dead(AUDIT, 1)),
        f"{AUDIT}: dead letters without a reason: 1 (1)",
    ),
    "handled though undecodable": (
        adding("ran", Ran("a1", AUDIT, 4, 0, "handled", 1.0)),
        f"{AUDIT}: handled, and they cannot be: 1 (4)",
    ),
    "handled and never produced": (
        adding("ran", Ran("a1", AUDIT, 99, 0, "handled", 1.0)),
        f"{AUDIT}: ids that nobody produced: 1 (99)",
    ),
    "dead and never produced": (
        adding("dead", Dead(CHARGE, 99)),
        f"{CHARGE}: ids that nobody produced: 1 (99)",
    ),
    "an id returned twice": (adding("sent", Sent(1, "good")), "ids that produce returned twice: 1 (1)"),
    "too few produced": (
        without("sent", lambda sent: sent.id == 5),
        "4 payments were produced, 5 were planned",
    ),
    "nobody was killed": (without("killed", lambda killed: True), "no process was killed"),
    "killed with nothing in hand": (
        without("ran", lambda ran: ran.process == "c1" and ran.id == 5),
        "c1 had nothing in hand when it was killed",
    ),
    "not taken over": (
        without("ran", lambda ran: ran.process == "c2" and ran.id == 5),
        "nobody took over what c1 had in hand",
    ),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_the_checker_finds(name: str) -> None:
    change, finding = SABOTAGE[name]
    history = good()
    change(history)
    report = judge(history)
    assert not report.passed
    assert finding in report.findings


def test_nothing_written_down_does_not_pass() -> None:
    assert not judge(History(0, ())).passed


def test_the_plan_has_what_the_demo_promises_and_is_the_same_for_a_seed() -> None:
    kinds = Plan(messages=20_000, rate=1, seed=1).kinds()
    counts = {kind: kinds.count(kind) for kind in set(kinds)}
    assert counts == {"good": 19_730, "undecodable": 50, "fails twice": 200, "always fails": 20}
    assert kinds == Plan(messages=20_000, rate=1, seed=1).kinds()
    assert kinds != Plan(messages=20_000, rate=1, seed=2).kinds()


@pytest.mark.slow
def test_the_demo_loses_nothing_and_says_so_when_a_line_is_removed(dsn: str, tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    arguments = ("demo", "--messages", "2000", "--rate", "1000", "--keep", str(keep), "--database-url", dsn)
    done = run_cli(None, *arguments)
    assert done.returncode == 0, done
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"SIGKILL for charge-cards 1" in done.stdout
    *_, dead, _, lost, check = (line.strip() for line in done.stdout.decode().splitlines())
    assert dead == "dead: 5 cannot be decoded, 2 always fail (charge-cards), as planned"
    assert (lost, check) == ("lost 0", f"count again: sqlstreams demo --check {keep}")
    assert run_cli(dsn, "stream", "list").stdout == b"no stream is registered\n"

    journal = keep / f"{AUDIT}-1.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    at = next(at for at, line in enumerate(lines) if msgspec.json.decode(line)["outcome"] == "handled")
    removed = msgspec.json.decode(lines.pop(at))["id"]
    journal.write_bytes(b"".join(lines))
    again = run_cli(None, "demo", "--check", str(keep), "--output", "json")
    report = json.loads(again.stdout)
    assert again.returncode == 1
    assert (report["lost"], report["findings"]) == (1, [f"{AUDIT}: lost: 1 ({removed})"])


@pytest.mark.slow
def test_the_demo_brings_its_own_postgres_and_ends_within_a_minute() -> None:
    done = run_cli(None, "demo", "--output", "json", deadline=60)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done
    assert (report["passed"], report["produced"], report["lost"]) == (True, 20_000, 0)
    charge, audit = report["groups"]
    assert (charge["handled"], charge["dead"], audit["handled"], audit["dead"]) == (19_930, 70, 19_950, 50)
    assert charge["redelivered"] > 0
    assert report["takeover_seconds"] < 5


def test_the_demo_does_not_touch_a_stream_that_is_there(dsn: str, tmp_path: Path) -> None:
    run_cli(dsn, "stream", "register", "payments.requested")
    done = run_cli(None, "demo", "--database-url", dsn, "--output", "json")
    error = json.loads(done.stderr)
    assert (done.returncode, error["code"]) == (1, "SQLS-ALREADY-EXISTS")
    assert run_cli(dsn, "stream", "get", "payments.requested").returncode == 0
