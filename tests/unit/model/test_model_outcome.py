"""Outcomes of handlers and the rows that record them."""

import pickle
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstreams.config import ERROR_TEXT_LIMIT_BYTES, LONGEST
from sqlstreams.model.outcome import (
    MAX_ERROR_BYTES,
    Delay,
    Delayed,
    ExceptionRow,
    Failed,
    HistoryRow,
    NextOutcome,
    Success,
    Terminal,
    TerminalOutcome,
    classify,
    clean_text,
    deferred,
    error_text,
    first_outcome,
    handed_back,
    next_outcome,
    parked,
)
from sqlstreams.model.retry import MAX_WAIT, RetryPolicy, Run, takeover

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
POLICY = RetryPolicy(3, 5 * SECOND, SECOND, timedelta(minutes=5))


def message(id_: int) -> Any:
    return SimpleNamespace(id=id_, message_key="k", schema_version=2)


def row(
    id_: int, status: str, attempts: int, delays: int, wait: timedelta | None, error: str | None
) -> ExceptionRow:
    return ExceptionRow(id_, status, attempts, delays, wait, error, "k", 2)


class Runs:
    """Plays the runs of one message and notes what each saw and waited."""

    def __init__(self, policy: RetryPolicy):
        self.policy = policy
        self.saw: list[tuple[int, int]] = []
        self.waits: list[timedelta | None] = []
        self.history: list[tuple[str, int]] = []
        self.attempts = self.delays = 0
        self.status = "ready"
        self.first = True

    def run(self, exc: BaseException | None) -> None:
        assert self.status == "ready"
        self.saw.append((self.attempts, self.delays))
        result = classify(exc, timed_out=False)
        seen = self.attempts
        if self.first:
            made, line = first_outcome(result, message(1), self.policy, 1.0)
            after = next_outcome(result, 0, 0, self.policy, 1.0)
            assert made is not None
            assert line is not None
            assert (made.status, made.attempts, made.delays, made.wait) == (
                after.status,
                after.attempts,
                after.delays,
                after.wait,
            )
            assert (line.attempt, line.status) == (0, after.history)
        else:
            after = next_outcome(result, self.attempts, self.delays, self.policy, 1.0)
        self.first = False
        self.history.append((after.history, seen))
        self.waits.append(after.wait)
        self.status, self.attempts, self.delays = after.status, after.attempts, after.delays

    def owner_dies(self) -> None:
        self.saw.append((self.attempts, self.delays))
        verdict = takeover(self.attempts, self.delays, self.policy)
        self.history.append(("expired" if isinstance(verdict, Run) else "dead", self.attempts))
        self.attempts += 1
        self.status = "ready" if isinstance(verdict, Run) else "dead"


def test_c1_rows_of_one_range():
    failed, failed_line = first_outcome(classify(ValueError("no"), timed_out=False), message(1), POLICY, 0.5)
    assert failed == row(1, "ready", 1, 0, 5 * SECOND, "ValueError: no")
    assert failed_line == HistoryRow(1, 0, "failed", "ValueError: no")
    terminal, terminal_line = first_outcome(
        classify(Terminal("enough"), timed_out=False), message(2), POLICY, 0.5
    )
    assert terminal == row(2, "dead", 0, 0, None, "enough")
    assert terminal_line == HistoryRow(2, 0, "dead", "enough")
    assert deferred(message(3)) == row(3, "deferred", 0, 0, timedelta(0), None)
    later, later_line = first_outcome(classify(Delay(HOUR), timed_out=False), message(4), POLICY, 0.5)
    assert later == row(4, "ready", 1, 1, HOUR, None)
    assert later_line == HistoryRow(4, 0, "delayed", None)
    assert first_outcome(classify(None, timed_out=False), message(5), POLICY, 0.5) == (None, None)


@pytest.mark.parametrize(
    ("kept", "success", "failure"), [("failures", False, True), ("all", True, True), ("none", False, False)]
)
def test_c1_history_is_kept_as_the_group_says(kept, success, failure):
    made, line = first_outcome(Success(), message(1), POLICY, 0.5, kept)
    assert made is None
    assert line == (HistoryRow(1, 0, "succeeded", None) if success else None)
    made, line = first_outcome(Failed("no"), message(1), POLICY, 0.5, kept)
    assert made is not None
    assert line == (HistoryRow(1, 0, "failed", "no") if failure else None)


def test_c2_always_failing_runs_four_times():
    runs = Runs(POLICY)
    for _ in range(4):
        runs.run(ValueError("no"))
    assert runs.saw == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert runs.waits == [5 * SECOND, SECOND, 2 * SECOND, None]
    assert (runs.status, runs.attempts) == ("dead", 4)
    assert runs.history[-1] == ("dead", 3)


def test_c3_one_retry_and_three_delays():
    runs = Runs(RetryPolicy(1, SECOND, SECOND, SECOND))
    for exc in (ValueError(), Delay(HOUR), Delay(HOUR), Delay(HOUR), ValueError()):
        runs.run(exc)
    assert runs.saw == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]
    assert runs.status == "dead"


def test_c3_no_retries_delays_go_on():
    runs = Runs(RetryPolicy(0, SECOND, SECOND, SECOND))
    runs.run(Delay(HOUR))
    assert (runs.attempts, runs.delays) == (1, 1)
    runs.run(Delay(HOUR))
    assert (runs.attempts, runs.delays, runs.status) == (2, 2, "ready")
    runs.run(ValueError())
    assert runs.status == "dead"
    died = Runs(RetryPolicy(0, SECOND, SECOND, SECOND))
    died.run(Delay(HOUR))
    died.owner_dies()
    assert died.status == "dead"
    first = Runs(RetryPolicy(0, SECOND, SECOND, SECOND))
    first.run(ValueError())
    assert (first.status, first.waits) == ("dead", [None])


def test_c4_delay_failures_and_deaths():
    runs = Runs(RetryPolicy(3, HOUR, SECOND, timedelta(minutes=5)))
    runs.run(Delay(SECOND))
    assert (runs.attempts, runs.delays) == (1, 1)
    runs.run(ValueError())
    assert (runs.attempts, runs.waits[-1]) == (2, HOUR)
    runs.run(ValueError())
    assert (runs.attempts, runs.waits[-1]) == (3, SECOND)
    runs.owner_dies()
    assert (runs.attempts, runs.status) == (4, "ready")
    runs.owner_dies()
    assert runs.status == "dead"
    assert runs.history == [("delayed", 0), ("failed", 1), ("failed", 2), ("expired", 3), ("dead", 4)]


def test_c5_waits_with_a_delay_before_each_failure():
    runs = Runs(RetryPolicy(6, 60 * SECOND, SECOND, 3 * SECOND))
    numbers = []
    for _ in range(5):
        runs.run(Delay(SECOND))
        runs.run(ValueError())
        numbers.append((runs.attempts, runs.delays))
    assert numbers == [(2, 1), (4, 2), (6, 3), (8, 4), (10, 5)]
    assert runs.waits[1::2] == [n * SECOND for n in (60, 1, 2, 3, 3)]


@given(
    st.lists(st.sampled_from(["success", "fail", "delay", "terminal"]), max_size=30),
    st.integers(0, 5),
    st.floats(0, 1),
)
def test_c5_numbers_count_failures_and_delays_and_nothing_else(runs, max_retries, chance):
    policy = RetryPolicy(max_retries, SECOND, SECOND, SECOND)
    attempts = delays = failures = 0
    results = {
        "success": Success(),
        "fail": Failed("x"),
        "delay": Delayed(SECOND),
        "terminal": TerminalOutcome("x"),
    }
    for kind in runs:
        after = next_outcome(results[kind], attempts, delays, policy, chance)
        failures += kind == "fail"
        attempts, delays = after.attempts, after.delays
        assert delays == runs[: failures + delays].count("delay")
        assert attempts - delays == failures
        assert (after.status == "resolved") == (kind == "success")
        assert (after.status == "dead") == (kind == "terminal" or failures > max_retries)
        assert (after.wait is None) == (after.status != "ready")
        if after.status != "ready":
            break


def test_c7_a_timeout_beats_everything_and_says_so():
    for exc in (None, Delay(HOUR), Terminal("x"), ValueError("no")):
        result = classify(exc, timed_out=True)
        assert isinstance(result, Failed)
        assert result.text.startswith("Timed out: ")
    assert "ValueError: no" in classify(ValueError("no"), timed_out=True).text
    assert len(classify(ValueError("x" * MAX_ERROR_BYTES), timed_out=True).text.encode()) <= MAX_ERROR_BYTES


def group(*members: BaseException) -> BaseExceptionGroup[Any]:
    return BaseExceptionGroup("nursery", members)


@pytest.mark.parametrize(
    ("exc", "result"),
    [
        (group(Delay(HOUR)), Delayed(HOUR)),
        (group(group(Terminal("enough"))), TerminalOutcome("enough")),
        (group(Delay(SECOND), group(Delay(HOUR)), Delay(SECOND)), Delayed(HOUR)),
        (group(Delay(HOUR), group(Terminal("first")), Terminal("second")), TerminalOutcome("first")),
        (group(group(ValueError("no"))), Failed("ValueError: no")),
        (
            group(Terminal("enough"), group(Delay(HOUR), ValueError("no"))),
            Failed("ExceptionGroup: Terminal: enough; Delay: 1:00:00; ValueError: no"),
        ),
        (
            group(Delay(HOUR), KeyboardInterrupt()),
            Failed("BaseExceptionGroup: Delay: 1:00:00; KeyboardInterrupt"),
        ),
    ],
)
def test_c9_an_exception_group_counts_as_what_it_holds(exc, result):
    assert classify(exc, timed_out=False) == result


outcomes = st.recursive(
    st.builds(Delay, st.timedeltas(timedelta(0), MAX_WAIT))
    | st.builds(Terminal, st.text())
    | st.just(ValueError("x")),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda members: ExceptionGroup("g", members)),
    max_leaves=8,
)


def flat(exc: BaseException) -> list[BaseException]:
    return (
        [leaf for each in exc.exceptions for leaf in flat(each)] if isinstance(exc, ExceptionGroup) else [exc]
    )


@given(outcomes)
def test_c9_only_what_it_holds_decides_not_how_it_is_nested(exc):
    leaves = flat(exc)
    result = classify(exc, timed_out=False)
    if any(isinstance(leaf, ValueError) for leaf in leaves):
        assert isinstance(result, Failed)
    elif any(isinstance(leaf, Terminal) for leaf in leaves):
        assert isinstance(result, TerminalOutcome)
    else:
        assert result == Delayed(max(leaf.duration for leaf in leaves))


def test_c9_deeply_nested_groups_need_no_recursion():
    exc: BaseException = Delay(HOUR)
    for _ in range(5_000):
        exc = group(exc)
    assert classify(exc, timed_out=False) == Delayed(HOUR)
    while isinstance(exc, BaseExceptionGroup):  # dropping it at once would recurse in the interpreter
        exc = exc.exceptions[0]


def test_c9_a_subclass_without_its_value_is_a_failure():
    class Careless(Terminal):
        def __init__(self):
            pass

    class Hasty(Delay):
        def __init__(self):
            pass

    assert classify(Careless(), timed_out=False) == Failed("Careless")
    assert isinstance(classify(Hasty(), timed_out=False), Failed)


def test_c10_an_undecodable_payload_is_dead_at_once():
    made, line = first_outcome(TerminalOutcome("does not decode: $.cents"), message(7), POLICY, 0.5)
    assert made == row(7, "dead", 0, 0, None, "does not decode: $.cents")
    assert line == HistoryRow(7, 0, "dead", "does not decode: $.cents")


def test_c11_an_error_text_is_cleaned():
    assert error_text(ValueError("a\x00b\ud800c")) == "ValueError: a\ufffdb\ufffdc"
    assert error_text(ValueError()) == "ValueError"
    assert classify(Terminal("a\x00"), timed_out=False) == TerminalOutcome("a\ufffd")


@pytest.mark.parametrize("character", ["x", "é", "€", "😀"])
def test_c11_a_long_error_text_is_cut_on_a_characters_border(character):
    text = error_text(ValueError(character * 1_000_000))
    assert text.startswith(f"ValueError: {character}")
    assert text.endswith(f"{character}…")
    assert MAX_ERROR_BYTES - 4 <= len(text.encode()) <= MAX_ERROR_BYTES


def test_c11_a_text_of_exactly_the_limit_is_left_alone():
    text = "x" * MAX_ERROR_BYTES
    assert clean_text(text) == text
    assert clean_text(text + "x") == "x" * (MAX_ERROR_BYTES - 3) + "…"


def test_c11_a_group_of_many_is_cut():
    text = error_text(ExceptionGroup("g", [ValueError("x" * 100)] * 1_000))
    assert text.startswith("ExceptionGroup: ValueError: x")
    assert len(text.encode()) <= MAX_ERROR_BYTES


def test_c11_members_past_the_limit_are_not_even_asked():
    asked = []

    class Counts(Exception):
        def __str__(self) -> str:
            asked.append(1)
            return "x" * 1_000

    error_text(ExceptionGroup("g", [Counts() for _ in range(1_000)]))
    assert len(asked) < 10


def test_c11_an_exception_that_cannot_be_shown_is_named():
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    class Odd(Exception):
        def __str__(self) -> str:
            return None  # type: ignore[return-value]

    assert error_text(Broken()) == "Broken: (its message cannot be shown)"
    assert error_text(Odd()) == "Odd: (its message cannot be shown)"


def test_c11_a_message_of_a_str_subclass_becomes_plain():
    class Loud(str):
        __slots__ = ()

        def __getitem__(self, key):
            raise RuntimeError("no")

        def __format__(self, spec):
            raise RuntimeError("no")

    class Talks(Exception):
        def __str__(self) -> str:
            return Loud("hello")

    assert error_text(Talks()) == "Talks: hello"


@given(
    st.text(max_size=300).map(lambda text: text * 50) | st.text(st.characters(categories=["Cs", "Lo", "Cc"]))
)
def test_c11_every_text_can_be_stored(text):
    cleaned = clean_text(text)
    assert "\x00" not in cleaned
    assert len(cleaned.encode("utf-8")) <= MAX_ERROR_BYTES
    assert clean_text(cleaned) == cleaned
    if len(text) * 4 <= MAX_ERROR_BYTES:
        assert len(cleaned) == len(text)


def test_b14_m3_handed_back_counts_nothing():
    made, line = handed_back(message(4))
    assert made == row(4, "ready", 0, 0, timedelta(0), None)
    assert line == HistoryRow(4, 0, "handed back", None)


def test_g5_a_message_of_an_unknown_version_is_parked():
    assert parked(message(4), "version 2\x00") == row(4, "parked", 0, 0, None, "version 2\ufffd")


def test_next_outcome_of_a_success_changes_no_number():
    assert next_outcome(Success(), 4, 1, POLICY, 0.5) == NextOutcome(
        "resolved", 4, 1, None, None, "succeeded"
    )


def test_next_outcome_refuses_what_is_no_result():
    with pytest.raises(AssertionError):
        next_outcome(object(), 0, 0, POLICY, 0.5)


def test_q5_delay_takes_zero_and_the_longest_and_refuses_the_rest():
    assert classify(Delay(timedelta(0)), timed_out=False) == Delayed(timedelta(0))
    assert classify(Delay(timedelta.max), timed_out=False) == Delayed(MAX_WAIT)
    with pytest.raises(ValueError, match="0 or more"):
        Delay(timedelta(microseconds=-1))
    with pytest.raises(TypeError, match="timedelta, not int"):
        Delay(5)


def test_terminal_needs_a_reason():
    with pytest.raises(TypeError, match="reason as str, not bytes"):
        Terminal(b"no")


def test_delay_and_terminal_survive_pickling():
    assert pickle.loads(pickle.dumps(Delay(HOUR))).duration == HOUR
    assert pickle.loads(pickle.dumps(Terminal("x"))).reason == "x"


def test_q5_limits_are_those_that_the_configuration_documents():
    assert MAX_ERROR_BYTES == ERROR_TEXT_LIMIT_BYTES
    assert MAX_WAIT == LONGEST
