"""Observations: the settled head is never ahead of what a queue of (head, writers) proves, and never behind it."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from hypothesis import event, given
from hypothesis import strategies as st

from sqlstreams.model.fence import Observations
from sqlstreams.model.values import Observation, ServerRun

STARTED = datetime(2024, 1, 1, tzinfo=UTC)
RUN = ServerRun(UUID(int=1), STARTED)
NOBODY: frozenset[str] = frozenset()


def seen(head: int, *writers: str, run: ServerRun = RUN) -> Observation:
    return Observation(head, frozenset(writers), run)


class Queue:
    """The straightforward record: every observation with its writers, crossed off when a later one misses them."""

    def __init__(self):
        self.entries: list[tuple[int, set[str]]] = []
        self.settled = 0

    def add(self, observation: Observation) -> int:
        for _, left in self.entries:
            left &= observation.writers
        self.entries.append((observation.head, set(observation.writers)))
        self.settled = max([self.settled, *(head for head, left in self.entries if not left)])
        return self.settled


writers = st.frozensets(st.sampled_from("abcde"), max_size=4)
# Heads never fall on one server run.
histories = st.lists(st.tuples(st.integers(0, 3), writers), max_size=30).map(
    lambda steps: [
        Observation(sum(more for more, _ in steps[: i + 1]), who, RUN) for i, (_, who) in enumerate(steps)
    ]
)


def test_nothing_is_known_before_the_first_observation():
    fresh = Observations()
    assert (fresh.settled, fresh.head, fresh.run) == (0, 0, None)
    assert not fresh.unsettled
    assert fresh.writers == NOBODY


def test_a1_nothing_above_an_open_id_is_settled_and_all_of_it_afterwards():
    log = Observations()
    assert log.add(seen(7)) == 7
    assert log.add(seen(9, "t1", "t2")) == 7
    assert log.add(seen(9, "t1")) == 7
    assert log.unsettled
    assert log.writers == {"t1"}
    assert log.add(seen(9)) == 9
    assert not log.unsettled
    assert log.writers == NOBODY


def test_a2_a_writer_seen_with_the_first_observation_settles_nothing_until_it_ends():
    log = Observations()
    assert log.add(seen(2, "slow")) == 0
    assert log.add(seen(3, "slow")) == 0
    assert log.add(seen(3)) == 3


def test_a6_overlapping_writers_starve_nobody():
    """Someone always writes; what was drawn before a writer came is settled when its elders are gone."""
    log = Observations()
    settled = [log.add(seen(10 * i, f"w{i}", f"w{i + 1}")) for i in range(1, 50)]
    assert settled == [0, *(10 * i for i in range(48))]


def test_a7_another_server_run_forgets_everything():
    log = Observations()
    log.add(seen(101))
    recovered = ServerRun(UUID(int=2), STARTED)
    assert log.add(seen(41, "x", run=recovered)) == 0
    assert log.run == recovered
    assert log.add(seen(45, run=recovered)) == 45
    restarted = ServerRun(UUID(int=2), STARTED + timedelta(hours=1))
    assert log.add(seen(46, "x", run=restarted)) == 0


def test_a3_a_sequence_that_was_set_back_forgets_everything():
    log = Observations()
    log.add(seen(101))
    assert log.add(seen(40, "x")) == 0
    assert log.head == 40


def test_a9_an_emptied_log_keeps_its_head():
    log = Observations()
    assert log.add(seen(1_000)) == 1_000
    assert log.add(seen(1_000)) == 1_000


def test_a_younger_observation_settles_before_the_writers_of_an_older_one_are_asked_for():
    """(5, {a}) then (8, {b}): a has ended by the second, so when b is gone both are settled."""
    log = Observations()
    log.add(seen(5, "a"))
    assert log.add(seen(8, "b")) == 5
    assert log.add(seen(9, "c")) == 8


def test_a_writer_that_was_away_for_one_observation_counts_as_new():
    log = Observations()
    log.add(seen(5, "a"))
    log.add(seen(6))
    assert log.add(seen(8, "a")) == 6
    assert log.writers == {"a"}


def test_a_writer_that_drew_nothing_blocks_nothing():
    log = Observations()
    log.add(seen(5))
    assert log.add(seen(5, "a")) == 5
    assert not log.unsettled
    assert log.writers == NOBODY


def test_a6_a_stall_of_any_length_keeps_one_number_a_writer():
    log = Observations()
    for head in range(10_000):
        log.add(seen(head, "stuck", f"w{head}"))
    assert log.settled == 0
    assert log.writers == {"stuck"}
    assert len(log._unseen_at) == 2


@given(histories)
def test_a10_settled_is_what_the_queue_of_all_observations_proves(history):
    """Never ahead of it (nothing may be lost) and never behind it (nobody waits longer than he must)."""
    log, queue = Observations(), Queue()
    for observation in history:
        assert log.add(observation) == log.settled == queue.add(observation)
        assert log.settled <= log.head == observation.head
        assert log.unsettled == (log.settled < log.head)
        assert log.writers <= observation.writers
        assert bool(log.writers) == log.unsettled
        event(f"unsettled {log.unsettled}")


@given(histories)
def test_a10_every_writer_of_a_settled_head_was_missing_from_a_later_observation(history):
    log = Observations()
    for now, observation in enumerate(history):
        settled = log.add(observation)
        proof = [
            i
            for i, earlier in enumerate(history[: now + 1])
            if earlier.head >= settled
            and all(
                any(w not in later.writers for later in history[i + 1 : now + 1]) for w in earlier.writers
            )
        ]
        assert settled == 0 or proof


@given(histories)
def test_a1_settled_never_falls_on_one_run(history):
    log = Observations()
    settled = [log.add(observation) for observation in history]
    assert settled == sorted(settled)


@given(histories, st.sets(st.integers(0, 29)))
def test_a1_missing_an_observation_only_delays(history, missed):
    """An observer that was slow knows less, never more."""
    log, slow = Observations(), Observations()
    for i, observation in enumerate(history):
        log.add(observation)
        if i not in missed:
            slow.add(observation)
            assert slow.settled <= log.settled


@given(histories.filter(bool))
def test_a6_when_the_writers_of_an_observation_are_gone_its_head_is_settled(history):
    log = Observations()
    for observation in history:
        log.add(observation)
    assert log.add(seen(history[-1].head + 5, "new")) >= history[-1].head
    assert log.add(seen(history[-1].head + 5)) == history[-1].head + 5
