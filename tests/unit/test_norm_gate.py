"""The median and the norm gate: their formulas, and what planted outliers can do to them."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from w5xde_async.store.state import pack_state, unpack_state
from w5xde_async.updates.asynchronous import AsynchronousConfig, AsynchronousRule
from w5xde_async.updates.averages import Average, CoordinateMedian, WeightedMean
from w5xde_async.updates.norm_gate import NormGate, NormGateConfig, median_and_mad

NUMEL = 6


def vectors(count: int, *, seed: int = 0, numel: int = NUMEL) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def average(made: Average, results: list[Tensor]) -> Tensor:
    for index, result in enumerate(results):
        made.add(result, samples=1 + index, weight=1.0 / (1 + index))  # ignored, on purpose
    assert made.count == len(results)
    taken = made.take()
    assert made.count == 0
    return taken


def stored(state: dict[str, Any]) -> Any:
    skeleton, tensors = pack_state(state)
    return unpack_state(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})


# -- formulas


@pytest.mark.parametrize("count", range(1, 10))
def test_the_median_is_the_median(count: int) -> None:
    results = vectors(count)
    expected = [statistics.median(float(x[i]) for x in results) for i in range(NUMEL)]
    torch.testing.assert_close(average(CoordinateMedian(NUMEL, 9), results), torch.tensor(expected))


def test_long_vectors_are_done_in_pieces_alike() -> None:
    """Over a chunk's border the value of each coordinate is what it is in a short vector."""
    numel = (1 << 12) + NUMEL
    results = vectors(5, numel=numel)
    whole = average(CoordinateMedian(numel, 5), results)
    assert torch.equal(whole[-NUMEL:], average(CoordinateMedian(NUMEL, 5), [x[-NUMEL:] for x in results]))


def test_order_of_arrival_does_not_matter_to_the_bit() -> None:
    results = vectors(8, seed=4)
    first = average(CoordinateMedian(NUMEL, 8), results).clone()
    assert torch.equal(average(CoordinateMedian(NUMEL, 8), results[::-1]), first)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CoordinateMedian(1, 0),
        lambda: NormGateConfig(warmup=9, window=8),
        lambda: NormGateConfig(deviations=0.0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        make()


def test_a_full_buffer_says_so() -> None:
    made = CoordinateMedian(NUMEL, 1)
    made.add(torch.zeros(NUMEL), samples=1, weight=1.0)
    with pytest.raises(ValueError, match="more than 1"):
        made.add(torch.zeros(NUMEL), samples=1, weight=1.0)


def test_restored_in_the_middle_of_a_buffer() -> None:
    whole, first, second = (CoordinateMedian(NUMEL, 5) for _ in range(3))
    average(whole, vectors(5, seed=7))
    average(first, vectors(5, seed=7))
    results = vectors(5, seed=8)
    for result in results[:3]:
        first.add(result, samples=1, weight=1.0)
    second.load_state_dict(stored(first.state_dict()))
    for result in results[3:]:
        second.add(result, samples=1, weight=1.0)
    assert torch.equal(second.take(), average(whole, results))
    with pytest.raises(ValueError, match="the checkpoint has"):
        WeightedMean(NUMEL).load_state_dict(stored(second.state_dict()))


def test_a_checkpoint_holds_what_has_come_and_no_empty_row() -> None:
    made, other = (CoordinateMedian(NUMEL, 64) for _ in range(2))
    results = vectors(3, seed=8)
    for result in results:
        made.add(result, samples=1, weight=1.0)
    state = stored(made.state_dict())
    assert state["rows"].shape == (3, NUMEL)
    other.load_state_dict(state)
    assert torch.equal(other.take(), average(CoordinateMedian(NUMEL, 64), results))
    empty = stored(CoordinateMedian(NUMEL, 64).state_dict())
    other.load_state_dict(empty)
    assert other.count == 0
    smaller = CoordinateMedian(NUMEL, 2)
    smaller.load_state_dict(state)
    assert smaller.full
    assert torch.equal(smaller.take(), average(CoordinateMedian(NUMEL, 64), results))
    average(smaller, results[:2])
    for result in results[:2]:
        assert not smaller.full
        smaller.add(result, samples=1, weight=1.0)
    assert smaller.full
    for other in (CoordinateMedian(NUMEL + 1, 64), CoordinateMedian(NUMEL + 1, 2)):
        with pytest.raises(ValueError, match="does not fit"):
            other.load_state_dict(state)


# -- planted outliers: 20 % of the results are bad


def attacked(kind: str) -> list[Tensor]:
    """Eight honest results near 1 in every coordinate, two bad ones, the first and the last."""
    results = [1.0 + 0.1 * noise for noise in vectors(10, seed=5)]
    for index in (0, 9):
        if kind == "sign":
            results[index].neg_()
        else:
            results[index][0] = {"nan": math.nan, "inf": math.inf, "large": 1e6}[kind]
    return results


@pytest.mark.parametrize("kind", ["nan", "inf", "large", "sign"])
@pytest.mark.parametrize("name", ["median", "mean"])
def test_a_fifth_of_bad_results(name: str, kind: str) -> None:
    """The median comes out near the honest mean. The plain mean does so only where the finite check is enough."""
    made: Average = WeightedMean(NUMEL) if name == "mean" else CoordinateMedian(NUMEL, 10)
    rule = AsynchronousRule(NUMEL, AsynchronousConfig(results_per_step=10), average=made)
    verdicts = [rule.offer(result, samples=1, staleness=0).accepted for result in attacked(kind)]
    refused = kind in ("nan", "inf")
    assert verdicts.count(False) == 2 * refused
    for extra in vectors(2, seed=6)[: 2 * refused]:  # their leaves, computed by somebody else
        assert rule.offer(1.0 + 0.1 * extra, samples=1, staleness=0).accepted
    error = float((rule.take() - 1.0).abs().max())
    assert (error < 0.2) == (name != "mean" or refused), error


@pytest.mark.parametrize("name", ["median", "mean"])
def test_without_the_finite_check_none_is_robust(name: str) -> None:
    """Why the check stands before everything: a rule without it would give NaN or be led by it."""
    made: Average = WeightedMean(NUMEL) if name == "mean" else CoordinateMedian(NUMEL, 10)
    results = [x if i else torch.full((NUMEL,), math.nan) for i, x in enumerate(vectors(10))]
    assert not bool(torch.isfinite(average(made, results)).all())


# -- norm gate


def test_median_and_mad() -> None:
    assert median_and_mad([1.0, 2.0, 4.0, 9.0, 100.0]) == (4.0, 3.0)


def test_the_gates_bound_and_clip_are_the_formula() -> None:
    config = NormGateConfig(deviations=3.0, warmup=5, window=5, least_spread=1e-9)
    gate = NormGate(config)
    assert [gate.judge(norm) for norm in (1.0, 2.0, 4.0, 9.0, 15.0)] == [1.0] * 5
    assert gate.bound() == 4.0 + 3.0 * 3.0
    assert gate.judge(13.1) == 0.0
    assert gate.judge(8.0) == 4.0 / 8.0  # accepted, clipped to the median; 1.0 falls out of the window
    assert gate.bound() == 8.0 + 3.0 * 4.0  # of 2 4 9 15 8: the norms as they came
    assert gate.judge(0.0) == 1.0


def test_equal_norms_leave_room_for_the_next() -> None:
    gate = NormGate(NormGateConfig(deviations=4.0, least_spread=0.05))
    for _ in range(20):
        assert gate.judge(2.0) == 1.0
    assert gate.bound() == pytest.approx(2.4)
    assert gate.judge(2.2) == pytest.approx(2.0 / 2.2)
    assert gate.judge(1e6) == 0.0


def test_what_is_over_the_median_is_scaled_to_it_with_its_direction_kept() -> None:
    rule = AsynchronousRule(NUMEL, AsynchronousConfig(), gate=NormGate(NormGateConfig(warmup=3, window=3)))
    for length in (2.0, 2.0, 2.0, 2.1):
        outcome = rule.offer(torch.eye(NUMEL)[1] * length, samples=1, staleness=0)
        assert outcome.norm == pytest.approx(length)  # as it came
        torch.testing.assert_close(rule.take(), torch.eye(NUMEL)[1] * 2.0)


def test_the_gate_bounds_what_one_result_moves() -> None:
    rule = AsynchronousRule(NUMEL, AsynchronousConfig(), gate=NormGate())
    refused = 0
    for turn, noise in enumerate(vectors(200, seed=11)):
        result = 1.0 + 0.1 * noise
        if turn >= 8 and turn % 5 == 0:
            result *= 1e6 if turn % 10 else -2.5
        outcome = rule.offer(result, samples=1, staleness=0)
        if outcome.accepted:
            assert float(rule.take().norm()) < 3.3
        else:
            refused += 1
            assert "over the bound" in outcome.reason
            assert turn >= 8
            assert turn % 5 == 0  # no false alarm
    assert refused == 39 - 1  # every planted one (turns 10, 15 ... 195)


def test_norms_that_grow_for_good_are_learned() -> None:
    """A gate that learns only from what it accepts would refuse for ever; without ``reopen_after`` this never ends."""
    gate = NormGate(NormGateConfig(reopen_after=16))
    for _ in range(64):
        gate.judge(1.0)
    answers = [gate.judge(50.0) for _ in range(100)]
    assert answers == [0.0] * 16 + [1.0] * 84
    assert gate.judge(1e6) == 0.0


def test_the_gate_learns_at_once_from_the_only_worker_there_is() -> None:
    """It was refused once, and came to the same when it did that step again."""
    gate = NormGate()
    for _ in range(64):
        gate.judge(1.0)
    assert gate.judge(50.0) == 0.0
    assert gate.judge(50.0, vouched=49.0) == 0.0  # it did not come to the same
    assert gate.judge(50.0, vouched=100.0) == 1 / 50  # a gradient counts scaled down, for it may still be wrong
    assert gate.judge(50.0) == gate.judge(60.0) == 1.0
    assert gate.judge(501.0) == 0.0


def test_of_several_workers_one_step_teaches_nothing() -> None:
    gate = NormGate()
    for _ in range(64):
        gate.judge(1.0, present=2)
    assert gate.judge(50.0, present=2, vouched=100.0) == 1 / 50
    assert gate.judge(50.0, present=2) == 0.0
    for _ in range(8):  # its share of the refusals
        assert gate.judge(50.0, sender="another", present=3) == 0.0
    assert gate.judge(50.0, sender="third", present=3, vouched=100.0) == 1 / 50
    assert gate.judge(50.0, sender="third", present=3) == 0.0


def test_the_first_results_are_compared_with_each_other() -> None:
    gate = NormGate()
    assert gate.judge(0.0)  # a rate that begins at zero
    assert gate.judge(1e9)  # with nothing: it is the first
    assert gate.judge(1.0)
    assert gate.judge(1e9) == gate.judge(11.0) == 0.0
    assert gate.judge(9.0)


def test_one_sender_of_two_does_not_teach_the_gate_however_often_it_is_refused() -> None:
    gate = NormGate()
    for _ in range(20):
        assert gate.judge(1.0, sender="honest", present=2)
    assert not any(gate.judge(1e9, sender="liar", present=2) for _ in range(1000))
    assert gate.judge(1.0, sender="honest", present=2)
    answers = [gate.judge(50.0, sender="honest", present=2) for _ in range(9)]
    assert answers == [0.0] * 8 + [1.0]  # half of the refusals each: it has learned what both say
    assert gate.judge(1e9, sender="liar", present=2) == 0.0


def test_a_fast_sender_is_one_voice_among_others() -> None:
    gate = NormGate()
    for _ in range(30):
        for who in ("a", "b"):
            assert gate.judge(1.0, sender=who, present=3)
        for _ in range(50):
            gate.judge(1e-9, sender="liar", present=3)  # to have the others refused
    assert gate.judge(1.1, sender="a", present=3)


def test_who_has_left_is_no_voice_of_its_own() -> None:
    gate = NormGate()
    for _ in range(20):
        assert gate.judge(1.0, sender="honest", present=2)
    for turn in range(100):  # under one new name after the other
        assert gate.judge(1e9, sender=f"liar-{turn}", present=2) == 0.0
        gate.left(f"liar-{turn}")
    for turn in range(100):
        assert gate.judge(1e-9, sender=f"liar-{turn}", present=2)
        gate.left(f"liar-{turn}")
    assert gate.judge(1.0, sender="honest", present=2)


def test_single_refusals_do_not_reopen_the_gate() -> None:
    gate = NormGate(NormGateConfig(reopen_after=3))
    for turn in range(300):
        assert (gate.judge(1e9 if turn > 20 and turn % 3 else 1.0) == 0.0) == (turn > 20 and turn % 3 != 0)


def test_a_restored_gate_judges_alike() -> None:
    norms = [1.0 + 0.3 * math.sin(turn) + 40.0 * (turn % 7 == 6) for turn in range(60)]
    whole, first, second = (NormGate(NormGateConfig(window=16)) for _ in range(3))
    expected = [whole.judge(norm) for norm in norms]
    seen = [first.judge(norm) for norm in norms[:25]]
    second.load_state_dict(stored(first.state_dict()))
    assert seen + [second.judge(norm) for norm in norms[25:]] == expected
    assert 0.0 in expected


@pytest.mark.parametrize("leave", ["bcd", "z"])
def test_a_gate_that_is_restored_before_senders_leave_judges_alike(leave: str) -> None:
    """Then it looks at more norms of those that stay. Who has sent zeros alone is a sender."""

    def judged(restored: bool) -> list[float]:
        gate, found, drawn = NormGate(), [], random.Random(1)
        for turn in range(200):
            if turn == 100 and restored:
                kept = stored(gate.state_dict())
                gate = NormGate()
                gate.load_state_dict(kept)
            if turn == 110:
                for sender in leave:
                    gate.left(sender)
            sender = drawn.choice("abcdz" if turn < 100 else "a")
            norm = 0.0 if sender == "z" else drawn.lognormvariate(0.0, 0.4) * (2.0 if sender == "a" else 1.0)
            found.append(gate.judge(norm, sender=sender, present=5))
        return found

    assert judged(restored=True) == judged(restored=False)


def test_a_short_batch_is_compared_with_what_its_noise_may_be() -> None:
    gate = NormGate()
    assert all(gate.judge(1.0, length=64) for _ in range(20))
    assert gate.judge(7.9, length=1) == pytest.approx(1.0)  # noise alone: as much longer as the root of 64
    assert gate.judge(11.0, length=1) == 0.0
    assert gate.judge(2.0, length=64) == 0.0


@pytest.mark.parametrize("zeros", [1, 8, 64, 100])
def test_zeros_say_nothing_of_what_follows(zeros: int) -> None:
    """A rate that begins at zero, for however long."""
    gate = NormGate(NormGateConfig(least_spread=0.5), pseudo_gradients=True)
    assert all(gate.judge(0.0, 0.0) for _ in range(zeros))
    assert all(gate.judge(1e-6 * step, 0.1 * step) for step in range(1, 40))
    assert gate.judge(0.0, 0.0)
    assert gate.judge(1.0, 4.0) == 0.0


def test_a_rate_that_rises_is_no_reason_to_refuse() -> None:
    """A warm-up over a thousand times the rate: as long as the norm rises no faster."""
    gate = NormGate(NormGateConfig(least_spread=0.5), pseudo_gradients=True)
    rates = [1e-6 * 2 ** (step / 2) for step in range(24)]
    assert all(gate.judge(3.0 * rate * 50, rate * 50) for rate in rates)
    assert gate.judge(3.0 * rates[-1] * 50 * 100, rates[-1] * 50) == 0.0
    assert all(gate.judge(3.0 * rate * 50, rate * 50) for rate in reversed(rates))


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_short_last_piece_of_a_worker_is_not_odd(power: float) -> None:
    """Whether steps of a worker add up (1) or turn about (0.5): ten samples after pieces of 500 and of 50 pass."""
    gate = NormGate(NormGateConfig(least_spread=0.5), pseudo_gradients=True)
    for samples in [500] * 20 + [50, 10] * 5:
        assert gate.judge((samples / 500) ** power, samples)
    assert gate.judge(100.0, 500) == gate.judge(100.0, 10) == 0.0
