"""The checker: from what the processes wrote down to a verdict. Pure.

A payment is lost for a group when `produce` returned its id and the group neither handled it with success nor has it as a
dead letter; and a dead letter excuses only a payment that was made to end as one.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from sqlstreams.cli.demo.journal import History, Killed, Ran
from sqlstreams.cli.demo.plan import AUDIT, Kind

__all__ = ["GroupReport", "Report", "dies", "judge"]

SHOWN = 10  # ids in a finding


class GroupReport(msgspec.Struct, frozen=True):
    """What one group did.

    Attributes:
        handled: payments with at least one successful run. retried: runs after a failure.
        dead: dead letters. undecodable, always_fails: those of them that were made to end so. redelivered: successful runs beyond a payment's first. lost: ids.
    """

    group: str
    handled: int
    retried: int
    dead: int
    undecodable: int
    always_fails: int
    redelivered: int
    lost: list[int]


class Report(msgspec.Struct, frozen=True):
    """The verdict.

    Attributes:
        takeover_seconds: from SIGKILL until another process ran a payment that the killed one had begun.
        in_hand: payments that the killed process had begun and not finished.
        findings: why it did not pass.
    """

    passed: bool
    produced: int
    groups: list[GroupReport]
    lost: int
    takeover_seconds: float | None
    in_hand: int
    findings: list[str]


def dies(group: str, kind: Kind) -> bool:
    """Say whether a payment of this kind must end as a dead letter; auditing never fails for one that can be read."""
    return kind == "undecodable" or (kind == "always fails" and group != AUDIT)


def judge(history: History) -> Report:
    """Count, and find everything that must not be."""
    findings: list[str] = []
    sent = Counter(each.id for each in history.sent)
    _find(findings, "ids that produce returned twice", [id_ for id_, count in sent.items() if count > 1])
    if len(history.sent) != history.messages or not history.messages:
        findings.append(f"{len(history.sent):,} payments were produced, {history.messages:,} were planned")
    groups = [_judge_group(history, group, findings) for group in history.groups]
    takeover, in_hand = _takeover(history, findings)
    return Report(
        not findings,
        len(sent),
        groups,
        sum(len(group.lost) for group in groups),
        takeover,
        in_hand,
        findings,
    )


def _judge_group(history: History, group: str, findings: list[str]) -> GroupReport:
    kinds = {each.id: each.kind for each in history.sent}
    ran = [each for each in history.ran if each.group == group]
    handled = Counter(each.id for each in ran if each.outcome == "handled")
    dead = {each.id for each in history.dead if each.group == group}
    mortal = {id_ for id_, kind in kinds.items() if dies(group, kind)}
    known = kinds.keys()
    lost = sorted(id_ for id_ in known if id_ not in handled and not (id_ in dead and id_ in mortal))
    _find(findings, f"{group}: lost", lost)
    _find(findings, f"{group}: ids that nobody produced", {each.id for each in ran} | dead, known)
    _find(findings, f"{group}: dead letters without a reason", dead & known, mortal)
    _find(findings, f"{group}: handled, and they cannot be", handled.keys() & mortal)
    return GroupReport(
        group,
        len(handled.keys() & known),
        sum(each.outcome == "started" and each.attempt > 0 for each in ran),
        len(dead),
        sum(kinds.get(id_) == "undecodable" for id_ in dead),
        sum(kinds.get(id_) == "always fails" for id_ in dead),
        sum(handled.values()) - len(handled),
        lost,
    )


def _takeover(history: History, findings: list[str]) -> tuple[float | None, int]:
    """Return how long the killed process' work waited for another one, and how much it had in hand."""
    if not history.killed:
        findings.append("no process was killed")
        return None, 0
    killed = history.killed[0]
    in_hand = _in_hand(history, killed)
    again = [
        each.at
        for each in history.ran
        if each.group == killed.group
        and each.process != killed.process
        and each.id in in_hand
        and each.at > killed.at
    ]
    if not in_hand:
        findings.append(f"{killed.process} had nothing in hand when it was killed")
    elif not again:
        findings.append(f"nobody took over what {killed.process} had in hand")
    return min(again) - killed.at if again else None, len(in_hand)


def _in_hand(history: History, killed: Killed) -> set[int]:
    """Return what a process had begun and not finished."""

    def ids(*outcomes: str) -> set[int]:
        return {run.id for run in _runs(history, killed.process) if run.outcome in outcomes}

    return ids("started", "stalls") - ids("handled", "failed")


def _runs(history: History, process: str) -> list[Ran]:
    return [each for each in history.ran if each.process == process]


def _find(findings: list[str], what: str, ids: object, but: object = ()) -> None:
    """Add a finding when there is an id that is not among `but`."""
    wrong = sorted(set(ids) - set(but))  # type: ignore[call-overload]
    if wrong:
        more = ", …" if len(wrong) > SHOWN else ""
        findings.append(f"{what}: {len(wrong):,} ({', '.join(map(str, wrong[:SHOWN]))}{more})")
