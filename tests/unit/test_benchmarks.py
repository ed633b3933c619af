"""The benchmarks' arguments, statistics and checker. Nothing is timed here."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks import cli
from benchmarks.checks import Verdict, check
from benchmarks.figures import backlog_seconds, done_at, highest_rate, percentile, ratio_of, sustained
from benchmarks.report import Bar, Report, as_json, as_text, table
from benchmarks.settings import Settings
from benchmarks.variants.load import Load, Maker, Message

ROOT = Path(__file__).parents[2]

# Arguments.


def test_the_arguments_are_read():
    name, settings, path = cli.arguments(
        ["memory", "--seconds", "2.5", "--rounds", "4", "--full", "--json", "a.json"]
    )
    assert (name, path) == ("memory", Path("a.json"))
    assert settings == Settings(seconds=2.5, rounds=4, full=True)
    assert cli.arguments(["throughput"]) == ("throughput", Settings(), None)


def test_an_unknown_case_ends_with_2_and_the_list(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["thruput"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "thruput" in told
    assert all(name in told for name in cli.CASES)


def test_no_case_ends_with_2_and_the_list(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert all(name in told for name in cli.CASES)


@pytest.mark.parametrize(
    "args",
    [["--seconds", "0"], ["--seconds", "nan"], ["--seconds", "x"], ["--rounds", "0"], ["--rounds", "1.5"]],
)
def test_a_size_that_makes_no_sense_ends_with_2(args, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["memory", *args])
    assert ended.value.code == 2
    assert args[0] in capsys.readouterr().err


def report(**changes):
    return Report(
        "title", "about", {"server": "Postgres"}, ["what", "figure"], [["rate", "1,000"]], **changes
    )


@pytest.mark.parametrize(("found", "code"), [({}, 0), ({"checks": ["baseline: 1 lost"]}, 1)])
def test_a_run_writes_json_and_fails_when_something_was_lost(tmp_path, monkeypatch, capsys, found, code):
    async def case(settings):
        assert settings.rounds == 2
        return report(measurements=3, bars=[Bar("ratio", 0.7, 0.6)], **found)

    monkeypatch.setitem(cli.CASES, "fake", (case, "for this test"))
    path = tmp_path / "found.json"
    assert cli.main(["fake", "--rounds", "2", "--json", str(path)]) == code
    written = msgspec.json.decode(path.read_bytes())
    assert written["sound"] is (code == 0)
    assert written["bars"][0]["met"] is True
    assert written["surroundings"] == {"server": "Postgres"}
    assert "title" in capsys.readouterr().out


# What is shown.


def test_a_table_is_aligned():
    assert table(["a", "figure"], [["long name", "1"], ["b", "1,000"]]) == [
        "a          figure",
        "---------  ------",
        "long name       1",
        "b           1,000",
    ]


@pytest.mark.parametrize(
    ("bar", "met"),
    [
        (Bar("a", 0.6, 0.6), True),
        (Bar("a", 0.59, 0.6), False),
        (Bar("a", 10.0, 10.0, at_least=False), True),
        (Bar("a", 10.1, 10.0, at_least=False), False),
    ],
)
def test_a_bar_says_whether_it_is_met(bar, met):
    assert bar.met is met
    assert ("MISSED" in bar.text()) is not met


def test_a_report_without_measurements_is_not_sound():
    assert not report().sound
    assert "nothing was measured" in as_text(report())
    assert msgspec.json.decode(as_json(report()))["sound"] is False


def test_a_report_names_what_was_lost():
    found = report()
    found.note("product, round 1", True, "fine")
    assert found.sound
    found.note("product, round 2", False, "7 produced, 1 lost")
    assert not found.sound
    assert "product, round 2: 7 produced, 1 lost" in as_text(found)


# The checker.


def test_once_each_is_sound():
    verdict = check(bytearray(b"\1\1\1\0\0"), 3)
    assert verdict == Verdict(3, lost=0, twice=0, strange=0)
    assert verdict.sound


SABOTAGE = {
    "lost": (b"\1\0\1", 3, Verdict(3, lost=1, twice=0, strange=0)),
    "twice": (b"\1\2\1", 3, Verdict(3, lost=0, twice=1, strange=0)),
    "one lost, one twice: the sum is right": (b"\1\2\0", 3, Verdict(3, lost=1, twice=1, strange=0)),
    "never produced": (b"\1\1\0\1", 3, Verdict(3, lost=1, twice=0, strange=1)),
    "more produced than counted": (b"\1\1", 3, Verdict(3, lost=1, twice=0, strange=0)),
    "nothing happened": (b"\0\0", 0, Verdict(0, lost=0, twice=0, strange=0)),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_the_checker_refuses(name):
    counts, produced, expected = SABOTAGE[name]
    verdict = check(counts, produced)
    assert verdict == expected
    assert not verdict.sound


# Statistics.


def test_a_ratio_is_taken_round_by_round():
    ratio = ratio_of([50.0, 120.0, 90.0], [100.0, 200.0, 100.0])
    assert (ratio.median, ratio.low, ratio.high) == (0.6, 0.5, 0.9)
    assert ratio.text() == "0.60 (0.50 to 0.90)"


@pytest.mark.parametrize(("product", "baseline"), [([1.0], [1.0, 2.0]), ([], [])])
def test_a_ratio_needs_as_many_rounds_of_each(product, baseline):
    with pytest.raises(ValueError, match=r"."):
        ratio_of(product, baseline)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([4.0, 3.0, 1.0, 2.0], 0.5, 2.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([float(n) for n in range(1, 101)], 1.0, 100.0),
        ([7.0], 0.01, 7.0),
    ],
)
def test_percentile(values, share, expected):
    assert percentile(values, share) == expected


def test_a_percentile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="share"):
        percentile([1.0], 0.0)


@pytest.mark.parametrize(
    ("when", "expected"), [(9.0, 0.0), (10.0, 0.0), (11.0, 50.0), (12.0, 100.0), (12.5, 100.0), (99.0, 110.0)]
)
def test_progress_between_two_samples_is_interpolated(when, expected):
    assert done_at([(10.0, 0), (12.0, 100), (13.0, 100), (14.0, 110)], when) == expected


def test_nothing_was_handled_before_there_was_a_sample():
    assert done_at([], 5.0) == 0.0


def test_a_backlog_is_in_seconds_of_production_and_never_negative():
    assert backlog_seconds(1_000, 900.0, 200.0) == 0.5
    assert backlog_seconds(1_000, 1_000.5, 200.0) == 0.0


@pytest.mark.parametrize(
    ("sent", "backlog", "expected"),
    [(1_000, 0.1, True), (1_000, 0.5, False), (900, 0.0, False), (985, 0.49, True)],
)
def test_a_rate_lasts_when_the_pace_was_kept_and_little_is_left(sent, backlog, expected):
    assert sustained(rate=100.0, sent=sent, seconds=10.0, backlog=backlog) is expected


@pytest.mark.parametrize("first", [10.0, 900.0, 1_000.0, 1_100.0, 30_000.0])
async def test_the_search_ends_just_below_the_limit_from_any_guess(first):
    tried = []

    async def lasts(rate):
        tried.append(rate)
        return rate <= 1_000.0

    found = await highest_rate(lasts, first, 0.02)
    assert 980.0 <= found <= 1_000.0
    assert len(tried) < 30
    assert found in tried


async def test_the_search_gives_up_when_nothing_lasts():
    async def lasts(_rate):
        return False

    with pytest.raises(ValueError, match="no rate"):
        await highest_rate(lasts, 1_000.0, 0.02)


# Variants.


def test_messages_are_numbered_have_the_size_and_end_at_the_capacity():
    maker = Maker(Load(dsn="", seconds=1.0, capacity=600, payload=1_000))
    taken = [maker.take(250, 5.0) for _ in range(4)]
    assert [len(each) for each in taken] == [250, 250, 100, 0]
    assert [message.n for each in taken for message in each] == list(range(600))
    assert all(abs(len(msgspec.json.encode(each[0])) - 1_000) < 25 for each in taken if each)


def test_random_padding_differs_from_message_to_message():
    first, second = Maker(Load(dsn="", seconds=1.0, capacity=2, payload=100, random=True)).take(2, 5.0)
    assert isinstance(first, Message)
    assert first.pad != second.pad


LIBRARIES = {
    "baseline_producer": {"trio", "trio_asyncio", "sqlstreams", "actors"},
    "baseline_consumer": {"sqlstreams", "actors"},
}
"""Variant -> what it must not import: a baseline that carries the library's weight would flatter it."""


@pytest.mark.parametrize("variant", LIBRARIES)
def test_a_baseline_knows_nothing_of_the_library(variant):
    script = f"import benchmarks.variants.{variant}, sys; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert LIBRARIES[variant] & set(ran.stdout.split()) == set()
