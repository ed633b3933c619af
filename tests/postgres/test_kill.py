"""kill -9 of a consumer at random phases under load: nothing is lost, little comes twice, others take over in time.

One server, one stream, one group and one survivor for all rounds; only the victim is started again. SQLSTREAMS_ROUNDS sets
how many rounds there are. Every process writes what it did to an append-only file, and the verdict comes from these files.
"""

import os
import random
import signal
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

import sqlstreams
from tests.postgres.scenario_rig import BUSY, Program, log_lines, opened, program
from tests.servers import sql_async, wait_until_async

ROUNDS = int(os.environ.get("SQLSTREAMS_ROUNDS", "30"))
RATE = 1_000  # messages a second
TAKE = 0.001  # seconds a handler takes: two consumers of one task each are busy most of the time
VICTIM_TAKES = 0.002  # so that it mostly holds a range
SEED = 7
SLACK = 2.0  # of a takeover, over the time to live
HOLDS = (
    "select exists (select from sqlstreams.claim_1 c join sqlstreams.node n on n.id = c.node_id"
    " where n.name = '{name}' and not c.done)"
)


class Rounds:
    """What happened in the rounds.

    Attributes:
        open_ids: ids that a victim held when it died and had not recorded as resolved: these may come twice.
        takeovers: seconds from each kill to when the last of what the victim held was somebody else's, or done.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.open_ids: set[int] = set()
        self.takeovers: list[float] = []
        self.holding = 0

    async def kill(self, victim: Program, name: str, at_most: float) -> None:
        """Kill a victim, note what it held, and wait until others have taken it over."""
        killed = trio.current_time()
        victim.signal(signal.SIGKILL)
        await victim.ended(5)
        await wait_until_async(  # what it had sent has been done or not
            self._dsn,
            f"select count(*) from pg_stat_activity where application_name || ' ' like '{name} %'"
            " and datname = current_database()",
            0,
        )
        node = f"(select id from sqlstreams.node where name = '{name}' order by id desc limit 1)"
        held = await sql_async(
            self._dsn,
            "select greatest(low, coalesce(done_through, low)), high from sqlstreams.claim_1"
            f" where group_id = 1 and not done and node_id = {node}"
            " union all select message_id - 1, message_id from sqlstreams.exception_queue_1"
            f" where status = 'inflight' and node_id = {node}",
        )
        for low, high in held:
            self.open_ids |= set(range(low + 1, high + 1))
        if not held:
            return
        self.holding += 1
        await wait_until_async(
            self._dsn,
            f"select (select count(*) from sqlstreams.claim_1 where not done and node_id = {node})"
            f" + (select count(*) from sqlstreams.exception_queue_1 where status = 'inflight' and node_id = {node})",
            0,
            timeout=at_most + BUSY,
        )
        self.takeovers.append(trio.current_time() - killed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ttl", "rounds"), [(3.0, ROUNDS), (None, 1)], ids=["leases of 3 s", "the default leases, once"]
)
async def test_b5_a_consumer_that_is_killed_at_a_random_phase_costs_nothing_but_its_open_range(
    dsn, tmp_path, ttl, rounds
):
    chance = random.Random(SEED)
    lasts = 15.0 if ttl is None else ttl
    with ExitStack() as processes, trio.fail_after(60 + rounds * (lasts + 10)):

        def start(name: str, take: float = VICTIM_TAKES) -> Program:
            return processes.enter_context(
                program(
                    "consume",
                    dsn=dsn,
                    stream="s",
                    group="g",
                    name=name,
                    ttl=ttl,
                    take=take,
                    log=str(tmp_path / name),
                )
            )

        # retries are far away, so that every second run of a message is a redelivery
        async with opened(dsn, sqlstreams.GroupConfig(initial_backoff=sqlstreams.LeaseConfig().ttl)) as (
            _c,
            _s,
            group,
        ):
            survivor = start("survivor", TAKE)
            producer = processes.enter_context(
                program("produce", dsn=dsn, stream="s", rate=RATE, log=str(tmp_path / "produced"))
            )
            await survivor.ready()
            await producer.ready()
            began = trio.current_time()
            done = Rounds(dsn)
            victim = start("victim-0")
            for turn in range(rounds):
                await victim.ready()
                await trio.sleep(chance.uniform(0.05, 1.0))  # because it dies at a random phase
                next_one = start(f"victim-{turn + 1}")
                if rounds == 1:  # then it is to show something
                    await wait_until_async(dsn, HOLDS.format(name=f"victim-{turn}"))
                await done.kill(victim, f"victim-{turn}", lasts + SLACK)
                victim = next_one
            await victim.ready()
            took = trio.current_time() - began
            producer.signal(signal.SIGTERM)
            assert await producer.ended(10) == 0
            with trio.fail_after(60 + took):
                while (await group.lag()).messages:
                    await trio.sleep(0.1)  # because only asking tells
            for each in (survivor, victim):
                each.signal(signal.SIGTERM)
                assert await each.ended(10) == 0
        judge(tmp_path, done, rounds, took, lasts)


def judge(logs: Path, done: Rounds, rounds: int, took: float, ttl: float) -> None:
    """Compare what was produced with what was handled, from the files of the processes alone."""
    produced = [int(line[0]) for line in log_lines([logs / "produced"])]
    lines = log_lines(sorted(path for path in logs.iterdir() if path.name != "produced"))
    handled = Counter(int(line[1]) for line in lines if line[0] == "ended")
    began = Counter(int(line[1]) for line in lines if line[0] == "began")
    again = {id_ for id_, runs in began.items() if runs > 1}
    rate = len(produced) / took
    slowest = max(done.takeovers, default=0.0)
    print(
        f"{rounds} rounds in {took:.0f} s; {len(produced)} messages, {rate:.0f} a second; {len(handled)} handled,"
        f" {sum(began.values()) - len(began)} runs again of {len(done.open_ids)} open ids;"
        f" {done.holding} victims held a range; takeover at most {slowest:.1f} s",
        file=sys.stderr,
    )
    assert len(produced) == len(set(produced))
    assert set(produced) - set(handled) == set(), "lost"
    assert set(handled) == set(produced), "handled what produce never returned"
    assert again - done.open_ids == set(), "came again, and no victim held it"
    assert slowest <= ttl + SLACK
    assert done.holding > rounds / 2 or 1 < rounds < 10  # a few may miss by chance
    assert rate > RATE * 0.8
