"""Coordinator and replica agree about which steps are in a Delta, in whatever order things happen.

A worker's replica is a set of steps here: those that it has made since it began. It begins anew as
``worker.executors.replicas`` says. No links and no tensors that matter; time passes when a test says so.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from tests.support.fleet import Fleet, Member, fleet

from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.updates.admission import Outcome
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import Contribution, OuterRule
from w5xde_async.wire.messages import Lease, Submit, VerdictCode

STEPS, DEPTH = 9, 2


class Stepping(Member):
    """Its replica: the steps made since it began."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made, self.anew = set[int](), True

    def due(self) -> Lease | Submit | None:
        """In order: a lease whose version has not come keeps what follows it waiting."""
        first: Any = self.work[0] if self.work else None
        return None if isinstance(first, Lease) and first.version > self.fleet.training.version else first

    def compute(self) -> None:
        item: Any = self.due()
        if self.anew:
            self.made, self.anew = set(), False
        if isinstance(item, Lease):
            self.made.add(item.step)
        else:
            self.anew = True
            DELTAS.append(frozenset(self.made))
        super().compute()


#: What is in the Deltas that were sent and are not judged yet, in the order of their judgement.
DELTAS: list[frozenset[int]] = []


class Judge:
    """Refuses some Deltas; what counted, and what the coordinator took for something else than it was."""

    def __init__(self, refused: tuple[int, ...]) -> None:
        self.refused, self.number = refused, 0
        self.counted: Counter[int] = Counter()

    def __call__(self, rule: OuterRule, given: Contribution) -> Outcome:
        (delta,) = DELTAS
        DELTAS.clear()
        assert delta == set(given.steps)
        number, self.number = self.number, self.number + 1
        if number in self.refused:
            return Outcome(verdict=VerdictCode.REJECTED, reason="so says the test", norm=1.0)
        self.counted.update(delta)
        return OFFER(rule, given)


OFFER = OuterRule.offer


async def carry_on(made: Fleet, schedule: tuple[int, ...]) -> None:
    """Who goes on, in turn; 2: time passes. Afterwards everybody goes on until the end."""
    for choice in itertools.chain(schedule, itertools.cycle((0, 1, 2))):
        if made.running.done():
            return await made.running
        made.now += 60.0 if choice == 2 else 1.0
        if choice == 2:
            made.training.tick(made.now)
        elif made.members[choice].due():
            made.members[choice].compute()
        await made.settle()
        assert made.now < 1e5, "it does not end"


@pytest.mark.parametrize("rule", ["local", "async-local"])
@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
async def test_a_delta_has_the_steps_that_its_worker_carries(
    rule: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = (0, 2)
    judge = Judge(refused)
    monkeypatch.setattr(OuterRule, "offer", lambda rule, given: judge(rule, given))
    update = UpdateConfig(rule=rule, inner_steps=1, quorum=0.5, max_staleness=99)
    for schedule in itertools.product((0, 1, 2), repeat=DEPTH):
        judge = Judge(refused)
        config = {"update": update, "pacing": PacingConfig(leases_ahead=ahead)}
        async with fleet(2, leaves=1, samples=STEPS, steps=STEPS, kind=Stepping, **config) as made:
            await carry_on(made, schedule)
        assert judge.counted == Counter(range(STEPS)), schedule
