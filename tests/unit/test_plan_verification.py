"""What becomes of a finished block: numbers in, decisions out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from w5xde_async.plan.audit import Deviation, HeldBlock, Why
from w5xde_async.plan.tree import Block
from w5xde_async.plan.verification import (
    Audit,
    Count,
    Decision,
    Discard,
    Measured,
    Origin,
    Quarantine,
    Recompute,
    Size,
    is_far_larger,
    is_next_to_nothing,
    when_compared,
    when_disputed,
    when_finished,
    when_impossible,
    when_nobody_else_can,
    when_not_recomputed,
    when_only_sizes_compare,
    when_recomputed,
)

USUAL = Measured(True, {"grad": Size(1.0, 2.0), "mean": Size(1.0, 2.0)})
LARGE = Measured(True, {"grad": Size(1.0, 2.0), "mean": Size(2.1, 2.0)})
FIRST = Measured(True, {"grad": Size(1.0, None)})
NOT_FINITE = Measured(False, {"grad": Size(math.inf, 2.0)})


def held(worker: str = "a", why: Why = Why.NORM, **suppliers: str) -> HeldBlock:
    named = {int(key[1:]): who for key, who in suppliers.items()} or {0: worker}
    return HeldBlock(3, Block(4, 8), worker, why, named)


def deviation(relative: float, bucket: int = 0) -> Deviation:
    return Deviation(relative, 0.0, bucket, False)


def finished(
    block: Measured, *, others: bool = True, sampled: bool = False, exact: bool = True, done_again: bool = False,
    comparable: bool = True,
) -> Decision:  # fmt: skip
    return when_finished(
        block, others=others, sampled=sampled, exact=exact, done_again=done_again, comparable=comparable
    )


def put_out(decisions: list[Count | Discard | Quarantine]) -> set[str]:
    return {one.worker for one in decisions if isinstance(one, Quarantine)}


@pytest.mark.parametrize(("block", "why"), [(LARGE, Why.NORM), (FIRST, Why.FIRST), (NOT_FINITE, Why.NOT_FINITE)])
def test_what_is_odd_is_held(block: Measured, why: Why) -> None:
    assert block.oddity is why
    assert finished(block) == Audit(why)
    assert finished(block, sampled=True) == Audit(why), "its oddity is the reason"
    assert finished(block, exact=False) == Recompute(why, why.value), "no two lossy results are alike"
    assert isinstance(finished(block, others=False), Count), "a lone worker is trusted"
    assert isinstance(finished(block, done_again=True), Count), "nobody could say what was wrong with it"


def test_what_is_usual_counts_unless_it_is_drawn() -> None:
    assert USUAL.oddity is None
    assert isinstance(finished(USUAL), Count)
    assert finished(USUAL, sampled=True) == Audit(Why.SAMPLED)
    assert finished(LARGE, sampled=True, done_again=True) == Audit(Why.SAMPLED)
    assert isinstance(finished(USUAL, sampled=True, exact=False), Count), "there is nothing to compare"
    assert isinstance(finished(USUAL, sampled=True, others=False), Count)


def test_of_what_nobody_computes_alike_only_next_to_nothing_is_looked_at_and_only_where_it_is_drawn() -> None:
    nothing = Measured(True, {"grad": Size(1e-7, 2.0), "mean": Size(0.0, 2.0)})
    assert nothing.vanishes
    assert not USUAL.vanishes
    assert not Measured(True, {"grad": Size(0.0, 2.0), "mean": Size(1.0, 2.0)}).vanishes, "a part of it is there"
    assert not Measured(True, {"grad": Size(0.0, None)}).vanishes, "nothing is known of what is usual"
    assert finished(nothing, sampled=True, comparable=False) == Recompute(Why.VANISHING, "vanishing")
    assert finished(nothing, sampled=True) == Audit(Why.SAMPLED), "the other worker's result says more"
    assert isinstance(finished(nothing, comparable=False), Count)
    assert isinstance(finished(USUAL, sampled=True, comparable=False), Count)
    assert isinstance(finished(nothing, sampled=True, comparable=False, exact=False), Count), "codecs may send nothing"


@pytest.mark.parametrize("why", Why)
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("can", [False, True])
def test_what_nobody_else_can_compute_is_recomputed_here_where_it_is_odd(why: Why, others: bool, can: bool) -> None:
    decision = when_nobody_else_can(why, others=others, can_recompute=can)
    odd = why in (Why.NORM, Why.NOT_FINITE, Why.VANISHING)
    assert isinstance(decision, Recompute if odd and others and can else Count)


def compared(why: Why, relative: float, **like: bool) -> Decision:
    return when_compared(why, deviation(relative), agreed=relative <= 0.01, **like)


def test_two_that_agree_count_and_two_that_differ_are_recomputed() -> None:
    assert isinstance(compared(Why.NORM, 0.01), Count)
    differ = compared(Why.NORM, 0.02)
    assert isinstance(differ, Recompute)
    assert "relative L2 distance 0.02" in differ.reason
    assert isinstance(compared(Why.NORM, math.nan), Recompute)


@pytest.mark.parametrize("why", Why)
@pytest.mark.parametrize("can_judge", [False, True])
def test_two_that_are_not_alike_say_nothing_where_they_differ(why: Why, can_judge: bool) -> None:
    """Only the coordinator can, where it computes alike; what is odd it looks at in any case, for its size."""
    assert isinstance(compared(why, 0.0, alike=False, can_judge=can_judge), Count)
    looked_at = can_judge or why in (Why.NORM, Why.NOT_FINITE)
    assert isinstance(compared(why, 0.5, alike=False, can_judge=can_judge), Recompute if looked_at else Count)


H100, CPU = "H100, torch 2", "cpu x86_64, torch 2"


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (Origin(H100, 0, True), Origin(H100, 0, True), True),
        (Origin(H100, 0, True), Origin(CPU, 0, True), False),
        (Origin(H100, 0, True), Origin(CPU, 0, False), True),  # one of the two does not say the truth
        (Origin(H100, 0, False), Origin(CPU, 0, False), True),
        (Origin(H100, 1, False), Origin(H100, 0, False), False),
        (Origin(H100, 2, True), Origin(H100, 2, True), True),
        (Origin("", 0, True), Origin("", 0, True), False),  # of several devices
        (Origin("", 0, False), Origin(CPU, 0, False), True),
        (Origin(CPU, -1, False), Origin(CPU, -1, False), False),
    ],
)
def test_like_is_compared_with_like(one: Origin, other: Origin, alike: bool) -> None:
    assert one.is_like(other) is other.is_like(one) is alike


@pytest.mark.parametrize(
    ("own", "other", "wrong"),
    [
        (0.0, 0.5, {"s"}),
        (0.5, 0.0, {"y"}),  # who sent the bucket that differs most, not who finished the block
        (0.5, 0.5, {"y", "s"}),
        (0.005, 0.009, set()),
        (math.inf, 0.0, {"y"}),
        (math.nan, 0.0, {"y"}),
        (0.0, math.inf, {"s"}),
    ],
)
def test_who_is_further_off_than_the_tolerance_is_wrong(own: float, other: float, wrong: set[str]) -> None:
    block = held("x", b0="x", b1="y")
    block.second = "s"
    mine, theirs = Deviation(own, 0.0, 1, False), Deviation(other, 0.0, 0, False)
    decisions = when_recomputed(block, mine, theirs, 0.01)
    assert put_out(decisions) == wrong
    assert put_out(when_recomputed(block, mine, None, 0.01)) == wrong - {"s"}
    unproven = when_recomputed(block, mine, theirs, 0.01, proven=False)
    assert put_out(unproven) == wrong - {"y"}
    assert type(unproven[0]) is type(decisions[0]), "it does not count, whoever is to blame"
    assert isinstance(decisions[0], Count if own <= 0.01 else Discard)
    assert len(decisions) == 1 + len(wrong), "the block first, then each that is wrong, once"


def test_who_finished_the_block_answers_for_what_was_said_beside_the_sums() -> None:
    """They are its words, whoever has sent the bucket that differs most by its last bits."""
    block = held("x", b0="y", b1="x")
    block.second = "s"
    said = Deviation(math.inf, 0.0, 0, False, words="losses 2 apart")
    assert put_out(when_recomputed(block, said, None, 0.01)) == {"x"}
    assert put_out(when_recomputed(block, deviation(0.0), said, 0.01)) == {"s"}
    assert (block.said_by(said), block.said_by(deviation(1.0)), block.said_by(7)) == ("x", "y", "x")


def test_who_says_that_it_computed_what_cannot_be_computed_is_wrong() -> None:
    decisions = when_impossible(held("x"), 3, "ValueError: too few")
    assert isinstance(decisions[0], Discard)
    assert put_out(decisions) == {"x"}
    assert "2^3 pieces" in decisions[1].reason
    assert "ValueError: too few" in decisions[1].reason


def test_what_nobody_can_settle_is_done_again() -> None:
    assert when_not_recomputed(None) == Discard("it is odd")
    assert when_not_recomputed(deviation(1.0)) == Discard("another worker computed something else")


@pytest.mark.parametrize(
    ("against", "of_kind", "wrong"),
    [
        ({"a": 1, "b": 1}, 2, set()),  # one word against another
        ({"a": 1, "b": 2}, 3, {"b"}),
        ({"a": 1, "b": 2}, 4, set()),
        ({"a": 1, "b": 3}, 4, {"b"}),
        ({"a": 2, "b": 3}, 5, {"b"}),  # two lie in five
        ({"a": 0, "b": 0}, 1, set()),  # both have left
    ],
)
def test_the_most_of_a_kind_decide_what_nobody_else_computes_alike(
    against: dict[str, int], of_kind: int, wrong: set[str]
) -> None:
    votes = {worker: (count, of_kind) for worker, count in against.items()}
    decisions = when_disputed(held("a"), deviation(0.5), votes)
    assert isinstance(decisions[0], Discard)
    assert put_out(decisions) == wrong


# -- lossy codecs, and other random numbers


def beside(not_finite: tuple[int, ...] = (), *, finite: bool = True, strikes: int = 0, **how: Any) -> list[Decision]:
    block = held("a", b0="a", b1="b")
    return [*when_only_sizes_compare(block, not_finite, "b", true_is_finite=finite, strikes=strikes, **how)]


def test_a_lossy_result_counts_where_training_diverges_or_it_is_of_a_fit_size() -> None:
    assert [type(one) for one in beside((1,), finite=False)] == [Count]
    assert [type(one) for one in beside()] == [Count]


def test_a_lossy_result_that_is_not_finite_puts_out_who_sent_that_bucket() -> None:
    discarded, quarantined = beside((1, 0))
    assert isinstance(discarded, Discard)
    assert isinstance(quarantined, Quarantine)
    assert quarantined.worker == "b"


def test_with_other_random_numbers_one_that_is_not_finite_is_no_proof() -> None:
    assert [type(one) for one in beside((1,), strikes=1, alike=False)] == [Discard]
    assert [type(one) for one in beside((1,), strikes=3, alike=False)] == [Discard, Quarantine]
    assert [type(one) for one in beside((1,), may_overflow=True)] == [Count]


def test_the_third_far_too_large_result_in_a_row_puts_its_worker_out() -> None:
    assert [[type(one) for one in beside(strikes=strikes)] for strikes in (1, 2, 3)] == [
        [Discard], [Discard], [Discard, Quarantine],
    ]  # fmt: skip
    assert put_out(beside(strikes=3)) == {"b"}, "who sent it, not who finished the block"


def test_the_third_that_is_next_to_nothing_of_those_looked_at_puts_its_worker_out() -> None:
    how: dict[str, Any] = {"alike": False, "size": "next to nothing beside", "in_a_row": False}
    found = [beside(strikes=strikes, **how) for strikes in (0, 1, 2, 3)]
    assert [[type(one) for one in decisions] for decisions in found] == [
        [Count], [Discard], [Discard], [Discard, Quarantine],
    ]  # fmt: skip
    assert "3 results that were looked at, the last for step 3, were next to nothing beside" in found[-1][1].reason


@pytest.mark.parametrize(
    ("norm", "true", "nothing"),
    [(0.0, 1.0, True), (1e-7, 1.0, True), (1e-5, 1.0, False), (0.0, 0.0, False), (1e-7, 1e-5, False)],
)
def test_next_to_nothing_is_beside_what_the_block_gives(norm: float, true: float, nothing: bool) -> None:
    assert is_next_to_nothing({"grad": Size(norm, 2.0)}, {"grad": true}) is nothing


@pytest.mark.parametrize(
    ("norm", "bound", "true", "larger"),
    [(99.0, 10.0, 1.0, False), (101.0, 10.0, 1.0, True), (101.0, 1.0, 11.0, False), (11.0, None, 1.0, True)],
)
def test_far_larger_is_beyond_the_gradient_and_beyond_what_is_usual(
    norm: float, bound: float | None, true: float, larger: bool
) -> None:
    assert is_far_larger({"grad": Size(norm, bound)}, {"grad": true}) is larger


def test_in_a_step_that_is_left_out_nothing_is_looked_at_for_not_being_finite() -> None:
    for exact in (True, False):
        given = {"others": True, "sampled": True, "exact": exact, "done_again": False}
        assert isinstance(when_finished(Measured(False, {}), left_out=True, **given), Count)
        assert not isinstance(when_finished(Measured(False, {}), **given), Count)
