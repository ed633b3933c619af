"""Faults: a seeded plan of slow calls, lost requests, lost answers and silence, for stores in simulations.

Guarantee   what a caller gets fits what was done: a failure did nothing, a lost answer did everything, and a caller
            that is cancelled before the call began did nothing.
"""

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Literal, TypeVar, assert_never

import trio

T = TypeVar("T")

Fault = Literal["none", "failed", "lost", "hung"]
"""none: it works. failed: nothing was done. lost: done, but the answer is lost. hung: no answer, nothing done."""


class FaultPlan:
    """Decides for each call of a simulated store how long it takes and whether it goes wrong."""

    def __init__(
        self,
        random: Random,
        *,
        failure: Callable[[str], Exception],
        lost: Callable[[str], Exception],
        delay: tuple[float, float] = (0.0, 0.0),
        fail: float = 0.0,
        lose: float = 0.0,
        hang: float = 0.0,
    ) -> None:
        """Plan faults.

        Args:
            random: Where all chance comes from.
            failure: Makes the error of a call that did nothing, from the call's name.
            lost: Makes the error of a call that was done but whose answer is lost.
            delay: The least and the most seconds a request takes to arrive, and again the answer.
            fail: The chance that a call fails; with `lose` and `hang` at most 1.
            lose: The chance that an answer is lost.
            hang: The chance that a call gets no answer until its caller is cancelled.
        """
        if min(fail, lose, hang) < 0 or fail + lose + hang > 1:
            raise ValueError(
                f"the chances {fail}, {lose} and {hang} must be 0 or more and at most 1 together"
            )
        if not 0 <= delay[0] <= delay[1]:
            raise ValueError(f"delay is {delay} s, must be a range from 0 or more")
        self._random = random
        self._failure = failure
        self._lost = lost
        self._delay = delay
        self._chances: tuple[tuple[Fault, float], ...] = (("failed", fail), ("lost", lose), ("hung", hang))
        self._planned: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self._outage: Fault | None = None

    def next(self, name: str, *faults: Fault) -> None:
        """Fix what happens to the next calls of `name`, one fault a call, before chance decides again."""
        self._planned[name].extend(faults)

    @contextmanager
    def outage(self, fault: Fault = "failed") -> Iterator[None]:
        """During the block every call meets `fault`, unless `next` has said otherwise."""
        before, self._outage = self._outage, fault
        try:
            yield
        finally:
            self._outage = before

    async def call(self, name: str, fn: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run `fn(*args)` as the plan has it.

        Cancelled: before the request arrived nothing was done; inside `fn` it is fn's guarantee. Afterwards the
        answer still comes, as from a store that settles: it returned, or its answer was lost.
        Raises: what `failure` or `lost` make of the name; what `fn` raises.
        """
        fault = self._fault(name)
        await trio.sleep(self._random.uniform(*self._delay))
        match fault:
            case "hung":
                await trio.sleep_forever()
            case "failed":
                raise self._failure(name)
            case "none" | "lost":
                result = await fn(*args)
            case _:
                assert_never(fault)
        with trio.CancelScope(shield=True):  # bounded: the plan's longest delay
            await trio.sleep(self._random.uniform(*self._delay))
        if fault == "lost":
            raise self._lost(name)
        return result

    def _fault(self, name: str) -> Fault:
        chance = self._random.random()  # drawn always, so that fixing one call leaves the others as they were
        if self._planned[name]:
            return self._planned[name].popleft()
        if self._outage is not None:
            return self._outage
        for fault, share in self._chances:
            if chance < share:
                return fault
            chance -= share
        return "none"
