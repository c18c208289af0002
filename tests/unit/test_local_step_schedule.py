"""Whose turn it is under rules of local steps: no worker twice in one round, what is refused stays with its worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.turns import taking_turns

from w5xde_async.coordinator.outer.local_step_schedule import LocalStepSchedule
from w5xde_async.coordinator.outer.step_scheduler import StepScheduler
from w5xde_async.plan.leases import Grant
from w5xde_async.plan.pacing import Pacing, PacingConfig
from w5xde_async.updates.quorum import QuorumConfig


def turns(*workers: str) -> LocalStepSchedule:
    made = LocalStepSchedule(
        num_fragments=2, inner_steps=2, pacing=Pacing(PacingConfig()), quorum=QuorumConfig(part=1.0)
    )
    for worker in workers:
        made.join(worker, 0)
        made.granted(worker, 0.0)
        made.carried(worker, 10, 0.1)
    return made


def submit(made: LocalStepSchedule, worker: str, lease: int, fragment: int) -> int:
    made.asked(worker, lease, fragment)
    return made.take(worker, fragment)[0]


def test_a_worker_has_had_its_turn_until_the_round_closes() -> None:
    made = turns("a", "b")
    submit(made, "a", 1, 0)
    assert not made.had_its_turn("a", 0)  # not judged yet
    made.answered("a", 1, 1.0)
    assert made.had_its_turn("a", 0)
    assert not made.had_its_turn("a", 1)
    assert not made.had_its_turn("b", 0)
    assert made.closing(1.0) == (None, None)
    made.idle("b", 0)  # it has nothing for this fragment; the other one goes on waiting for it
    assert made.closing(1.0) == (0, None)
    made.closed(0, 1.0, ["a", "b"])
    assert not made.had_its_turn("a", 0)
    assert made.closing(1.0) == (None, None)


def test_who_answers_late_is_not_waited_for_in_the_round_that_has_its_answer() -> None:
    """What it was leased since needs the version that this round makes: the round would wait for ever."""
    made = turns("a", "b")
    submit(made, "a", 1, 0)
    submit(made, "b", 2, 0)
    made.answered("b", 2, 1.0)
    made.closed(0, 1.0, ["a"])  # without a, which is the only one that goes on
    made.answered("a", 1, 2.0)
    made.granted("a", 2.0)
    assert made.closing(2.0) == (0, None)


def test_what_is_refused_stays_with_its_worker_once() -> None:
    made = turns("a")
    owed = []
    for lease, kept in enumerate((10, 10, 10, 0), start=1):
        samples = submit(made, "a", lease, 0)
        made.answered("a", lease, 1.0, kept=kept and samples)
        owed.append((samples, made.owes("a", 0)))
        made.carried("a", 5, 0.1)
    # The second refusal in a row is the last of it; an accepted one clears the slate.
    assert owed == [(10, True), (15, False), (5, True), (10, False)]
    made.answered("a", 99, 1.0, kept=7)  # of a link that has ended
    assert made.take("a", 0) == (5, 0.5)


@pytest.mark.parametrize(("num_fragments", "period"), [(1, 5), (2, 4), (3, 10), (4, 3), (8, 30)])
def test_every_fragment_has_its_turn_once_a_period(num_fragments: int, period: int) -> None:
    """Fragment p first after p H / P inner steps (0: after H), then every H; no more at once than there must be."""
    first = [period, *(max(1, p * period // num_fragments) for p in range(1, num_fragments))]
    for step, due in zip(range(1, 4 * period), taking_turns(num_fragments, period), strict=False):
        assert due == [p for p, at in enumerate(first) if step >= at and (step - at) % period == 0]
        assert len(due) <= -(-num_fragments // period)


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, False),
        ({"has_taken": lambda lease: lease != 7}, True),
        ({"is_receiving": lambda lease: lease == 7}, True),
        ({"is_receiving": lambda lease: lease != 7}, False),
    ],
    ids=["it is at it", "its request is on the line", "it comes", "another comes"],
)
def test_when_the_time_of_a_submission_begins(changes: dict[str, Any], waits: bool) -> None:
    given = {"has_taken": lambda lease: True, "is_receiving": lambda lease: False} | changes
    scheduler = SimpleNamespace(_roster=SimpleNamespace(sessions={"a": SimpleNamespace(**given)}))
    assert StepScheduler.waits(cast(Any, scheduler), Grant(7, -1, "a", 0.0, 5.0)) is waits
