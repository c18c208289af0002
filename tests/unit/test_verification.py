"""How far two results of a block are apart, and which norms are unusual."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from w5xde_async.coordinator.sync import deviation
from w5xde_async.coordinator.sync.verification import Machine, Verification, _Seen
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.plan.audit import Deviation
from w5xde_async.updates.norm_gate import BlockGate, NormGateConfig

LAYOUT = Layout.of(nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40)), bucket_bytes=4096)
ROLES = [LAYOUT.groups[bucket.group].role for bucket in LAYOUT.result_buckets]
EVERY = frozenset(range(len(ROLES)))
GRADS = [index for index, role in enumerate(ROLES) if role == "grad"]
MEAN, MAX = ROLES.index("mean"), ROLES.index("max")


def vector(seed: int = 0) -> ResultVector:
    made = ResultVector(LAYOUT)
    generator = torch.Generator().manual_seed(seed)
    for bucket, role in zip(made.buckets, ROLES, strict=True):
        if role == "max":
            bucket.fill_(3)
        else:
            bucket.copy_(torch.randn(bucket.shape, generator=generator))
    return made


def changed(change: Callable[[ResultVector], object]) -> ResultVector:
    made = vector()
    change(made)
    return made


def compare(
    mine: ResultVector, mine_present: frozenset[int], theirs: ResultVector, theirs_present: frozenset[int], **how: bool
) -> Deviation:
    return deviation.compare(LAYOUT, mine.buckets, mine_present, theirs.buckets, theirs_present, **how)


def test_the_layout_has_every_role_and_several_buckets() -> None:
    assert len(GRADS) > 1
    assert {MEAN, MAX} <= EVERY


def test_equal_ones() -> None:
    found = compare(vector(), EVERY, vector(), EVERY)
    assert found.same_bits
    assert found.relative == 0
    assert found.cosine == pytest.approx(1.0)


def test_what_differs_in_bits_alone_is_not_called_a_distance() -> None:
    """Of 0."""

    def filled(value: float) -> ResultVector:
        return changed(lambda one: [one.buckets[number].fill_(value) for number in GRADS])

    for mine, theirs in ((0.0, -0.0), (math.nan, -math.inf)):
        found = compare(filled(mine), EVERY, filled(theirs), EVERY)
        assert (found.relative, found.same_bits) == (0.0, False)
        assert str(found) == "equal but for the sign of zeros, or neither is finite"


def test_what_differs_beside_the_sums_is_said() -> None:
    found = compare(vector(), EVERY, vector(), EVERY)
    same = deviation.with_words(found, [1.0, 2.0], [3], [1.0, 2.0], [3])
    assert str(same) == str(found) == "relative L2 distance 0, cosine 1.000"
    losses = deviation.with_words(found, [1.0, 2.0], [3], [1.0, 3.0], [3])
    assert losses.relative == pytest.approx(1 / 3)
    assert str(losses) == "sums: relative L2 distance 0, cosine 1.000; but losses 0.33 apart, relatively"
    untouched = deviation.with_words(found, [1.0, 2.0], [3], [1.0, 2.0], [3, 4])
    assert math.isinf(untouched.relative)
    assert "but one says that 1 parameter(s) had no gradient and the other does not" in str(untouched)


def test_numbers_are_compared_beside_the_largest_of_their_own() -> None:
    def said(losses: tuple[float, ...], **metrics: tuple[float, ...]) -> Any:
        values = tuple(value for leaf in zip(*metrics.values(), strict=True) for value in leaf)
        return SimpleNamespace(losses=losses, metric_names=tuple(metrics), metrics=values)

    def apart(mine: Any, theirs: Any) -> list[str]:
        return list(deviation.numbers_apart(mine, theirs, 0.01))

    one = said((0.02, 1e-9), right=(0.5, math.nan), most=(math.inf, 3.0))
    assert apart(one, one) == apart(one, said((0.02, 1e-8), most=(math.inf, 3.0), right=(0.5, math.nan))) == []
    assert apart(one, said((0.01, 0.0), right=(0.5, math.nan), most=(3.0, 3.0))) == ["loss", "metric 'most'"]
    assert apart(one, said((0.02, 0.0), right=(0.5, 0.5), most=(math.inf, 3.0), none=(math.nan,) * 2)) == [
        "metric 'right'"
    ]
    assert deviation.numbers_apart(one, said((0.02, 0.0)), 0.01)["metric 'right'"][0] == 0.5


def test_a_sign_flip_and_one_bit() -> None:
    flipped = compare(changed(lambda v: [v.buckets[b].neg_() for b in GRADS]), EVERY, vector(), EVERY)
    assert flipped.relative == pytest.approx(2.0, rel=1e-4)
    assert flipped.cosine == pytest.approx(-1.0)
    one = compare(changed(lambda v: v.buckets[GRADS[1]][5].nextafter_(torch.tensor(9.0))), EVERY, vector(), EVERY)
    assert not one.same_bits
    assert one.relative < 1e-6
    assert one.bucket == GRADS[1]


def test_buffers_are_measured_by_themselves() -> None:
    small = changed(lambda v: v.buckets[MEAN].mul_(1e-3))
    found = compare(changed(lambda v: v.buckets[MEAN].mul_(2e-3)), EVERY, small, EVERY)
    assert found.relative == pytest.approx(1.0, rel=1e-4)
    assert found.bucket == MEAN
    counted = compare(changed(lambda v: v.buckets[MAX].fill_(1 << 40)), EVERY, vector(), EVERY)
    assert math.isinf(counted.relative)
    assert counted.bucket == MAX


def test_the_bucket_that_differs_most_is_of_the_kind_of_sums_that_does() -> None:
    """Large buffers differ by more in their last bits than a whole small gradient."""
    usual = changed(lambda v: v.buckets[MEAN].mul_(1e8))
    lie = changed(lambda v: [v.buckets[MEAN].mul_(1.00001e8), v.buckets[GRADS[1]].neg_()])
    found = compare(lie, EVERY, usual, EVERY)
    assert found.relative > 0.5
    assert found.bucket == GRADS[1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(value: float) -> None:
    odd = changed(lambda v: v.buckets[GRADS[1]].select(0, 3).fill_(value))
    found = compare(odd, EVERY, vector(), EVERY)
    assert math.isinf(found.relative)
    assert found.bucket == GRADS[1]
    assert math.isinf(compare(vector(), EVERY, odd, EVERY).relative)
    assert compare(odd, EVERY, odd, EVERY).relative == 0  # training diverges, nobody lies


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_buffer_that_is_not_finite_hides_no_lie(value: float) -> None:
    """With such a gradient the step is skipped; such a buffer keeps its values, and the gradients count."""

    def honest() -> ResultVector:
        return changed(lambda v: v.buckets[MEAN].select(0, 3).fill_(value))

    def lie(change: Callable[[Tensor], object], numbers: list[int]) -> Deviation:
        made = honest()
        for number in numbers:
            change(made.buckets[number])
        return compare(made, EVERY, honest(), EVERY)

    chance = torch.Generator().manual_seed(4)
    lies: list[Callable[[Tensor], object]] = [
        lambda t: t.mul_(1e6), lambda t: t.neg_(), lambda t: t.zero_(), lambda t: t.mul_(1.05), lambda t: t.mul_(1e37),
        lambda t: t.copy_(torch.randn(t.shape, generator=chance)), lambda t: t[7].fill_(math.nan),
        lambda t: t[-1].fill_(-math.inf), lambda t: t.copy_(t.roll(1)), lambda t: t[3].fill_(9.0),
    ]  # fmt: skip
    found = compare(honest(), EVERY, honest(), EVERY)
    assert (found.relative, found.same_bits) == (0.0, True)
    for number, change in enumerate(lies):
        for role, numbers in ({"grad": GRADS, "mean": [MEAN], "both": [*GRADS, MEAN]}).items():
            found = lie(change, numbers)
            assert found.relative > 0.01, (number, role)
            assert found.bucket in numbers, (number, role)
    other = changed(lambda v: v.buckets[MEAN].select(0, 3).fill_(math.nan))
    assert compare(other, EVERY, honest(), EVERY).relative == 0, "it is not finite in another way"


def test_the_largest_finite_gradients_are_compared() -> None:
    """Whose squares float32 does not have."""
    large = changed(lambda v: [v.buckets[number].mul_(3e18) for number in GRADS])
    turned = changed(lambda v: [v.buckets[number].mul_(-3e18) for number in GRADS])
    found = compare(turned, EVERY, large, EVERY)
    assert found.relative == pytest.approx(2.0)
    assert found.cosine == pytest.approx(-1.0)
    assert compare(large, EVERY, large, EVERY).relative == 0
    largest = torch.full((5,), torch.finfo(torch.float32).max)
    for role in ("grad", "mean"):
        norm, odd = deviation.weighed(largest, role)
        assert norm == pytest.approx(math.sqrt(5) * float(largest[0]))
        assert odd is None


def test_the_norm_of_buffers_is_of_what_is_finite_in_them() -> None:
    piece = torch.tensor([3.0, math.nan, 4.0, -math.inf])
    for role, expected in (("mean", 5.0), ("grad", math.inf)):
        norm, odd = deviation.weighed(piece, role)
        assert norm == expected
        assert odd is not None
        assert odd.tolist() == [False, True, False, True]
    assert deviation.weighed(piece[::2].contiguous(), "grad") == (5.0, None)


def test_who_is_blamed_is_who_sent_what_cannot_be() -> None:
    """Not who sent what differs in its last bits, as honest results of unlike machines do."""
    for number, change in ((MAX, lambda t: t.fill_(9)), (MEAN, lambda t: t[3].fill_(math.inf))):
        odd = changed(lambda v, number=number, change=change: change(v.buckets[number]))  # type: ignore[misc]
        for bucket in GRADS:
            odd.buckets[bucket].mul_(1.0 + 1e-5)
        found = compare(odd, EVERY, vector(), EVERY)
        assert math.isinf(found.relative)
        assert found.bucket == number


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_of_two_unlike_machines_may_overflow(value: float) -> None:
    """In its gradient, loss or buffers: what is finite in both still agrees."""
    odd = changed(lambda v: v.buckets[GRADS[1]].select(0, 3).fill_(value))
    buffer = changed(lambda v: v.buckets[MEAN].select(0, 3).fill_(value))
    for mine, theirs in ((odd, vector()), (vector(), odd), (buffer, vector()), (vector(), buffer)):
        assert math.isinf(compare(mine, EVERY, theirs, EVERY).relative)
        assert compare(mine, EVERY, theirs, EVERY, may_overflow=True).relative == 0
    wrong = changed(lambda v: [v.buckets[number].mul_(1e6) for number in GRADS])
    assert compare(wrong, EVERY, buffer, EVERY, may_overflow=True).relative > 1
    assert compare(wrong, EVERY, vector(), EVERY, may_overflow=True).relative > 1
    found = compare(odd, EVERY, vector(), EVERY, may_overflow=True)
    lost = [1.0, value], [3], [1.0, 2.0], [3]
    assert math.isinf(deviation.with_words(found, *lost).relative)
    assert deviation.with_words(found, *lost, may_overflow=True).relative == 0
    assert deviation.with_words(found, [1.0, 3.0], [3], [1.0, 2.0], [3], may_overflow=True).relative > 0.1


def test_what_is_absent_is_zero() -> None:
    without = EVERY - {GRADS[0]}
    assert compare(vector(), without, vector(1), without).relative > 0
    assert compare(vector(), without, vector(), EVERY).relative > 0.1
    zero = changed(lambda v: v.buckets[GRADS[0]].zero_())
    found = compare(zero, EVERY, vector(), without)
    assert found.relative == 0
    assert not found.same_bits
    nothing: frozenset[int] = frozenset()
    assert compare(vector(), nothing, vector(), nothing).relative == 0
    assert math.isinf(compare(vector(), EVERY, vector(), nothing).relative)


# -- the gate


def warm(spread: float = 1.3, count: int = 100) -> BlockGate:
    gate, chance = BlockGate(), random.Random(1)
    for _ in range(count):
        gate.learn(spread ** chance.gauss(0, 1), 8)
    return gate


def test_a_cold_gate_lets_nothing_pass_then_ten_times_what_it_knows() -> None:
    gate = BlockGate()
    assert gate.cold
    assert gate.bound(8) == 0
    gate.learn(2.0, 8)
    assert gate.bound(8) == pytest.approx(20.0)


def test_a_warm_gate_knows_the_spread() -> None:
    assert 3.9 < warm(1.01).bound(8) < 4.2  # at least four times the median
    assert warm(3.0).bound(8) > 20
    assert warm(3.0).bound(8) < 1000


def test_small_blocks_may_be_noisier() -> None:
    gate = warm()
    assert gate.bound(2) == pytest.approx(2 * gate.bound(8))
    assert gate.bound(800) == gate.bound(8)


def test_honest_norms_hardly_ever_pass_the_bound() -> None:
    for spread in (1.05, 2.0, 5.0):
        gate, chance, over = BlockGate(NormGateConfig()), random.Random(2), 0
        for _ in range(5000):
            norm = spread ** chance.gauss(0, 1)
            over += not gate.cold and norm > gate.bound(8)
            gate.learn(norm, 8)
        assert over <= 25, spread


def test_a_minority_of_tiny_norms_does_not_pull_the_bound_down() -> None:
    gate = warm()
    before = gate.bound(8)
    for _ in range(100):
        for norm in (1.0, 1.1, 0.9, 1e-9):
            gate.learn(norm, 8)
    assert gate.bound(8) > before / 3


def test_zeros_are_learned_without_harm() -> None:
    gate = BlockGate()
    for _ in range(40):
        gate.learn(0.0, 8)
    assert gate.bound(8) >= 0.0
    assert not gate.cold


def test_what_a_codec_may_have_left_out_is_remembered_for_a_while() -> None:
    """Of gradients that the coordinator has computed itself, not of what a worker says."""
    seen = {name: _Seen("", "host", Machine("cpu", "cpu", 1, "2")) for name in "ab"}
    lossy, exact = (cast(Any, SimpleNamespace(_exact=exact, _seen=seen)) for exact in (False, True))
    assert Verification._with_carried(lossy, "a", {"grad": 100.0}) == {"grad": 100.0}
    assert Verification._with_carried(exact, "a", {"grad": 1.0}) == {"grad": 1.0}
    assert Verification._with_carried(lossy, "b", {"grad": 1.0}) == {"grad": 1.0}
    assert Verification._with_carried(lossy, "gone", {"grad": 1.0}) == {"grad": 1.0}
    sizes = [Verification._with_carried(lossy, "a", {"grad": 1.0, "mean": 2.0}) for _ in range(300)]
    assert sizes[0] == {"grad": pytest.approx(98.0), "mean": 2.0}
    assert sizes[100]["grad"] < sizes[10]["grad"] < sizes[0]["grad"]
    assert sizes[-1] == {"grad": 1.0, "mean": 2.0}
