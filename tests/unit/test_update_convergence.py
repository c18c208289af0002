"""Every rule finds the minimum of a quadratic with delays and mixed speeds, and not without what makes it safe.

f(x) = 1/2 (x - c)' A (x - c), A not diagonal, eigenvalues 1 down to 0.05. Workers run on virtual time: each takes the
parameters, is busy for its number of seconds, and answers. Everything is seeded; a run takes a fraction of a second.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.support.turns import strided, taking_turns
from torch import Tensor

from w5xde_async.updates.asynchronous import AsynchronousConfig, AsynchronousRule
from w5xde_async.updates.averages import Average, CoordinateMedian, RadialDirectionalAverage, WeightedMean
from w5xde_async.updates.delayed import DelayedNesterovConfig, DelayedNesterovRule, inner_steps
from w5xde_async.updates.local import LocalStepsConfig, LocalStepsRule, nesterov_
from w5xde_async.updates.noise_scale import GradientNoiseScale, GrowthRule, GrowthRuleConfig
from w5xde_async.updates.norm_gate import NormGate
from w5xde_async.updates.quorum import Quorum
from w5xde_async.updates.streaming import StreamingReplica, StreamingRule

pytestmark = pytest.mark.slow  # hundreds of rounds each

DIM = 16
GENERATOR = torch.Generator().manual_seed(20)
BASIS = torch.linalg.qr(torch.randn(DIM, DIM, generator=GENERATOR)).Q
HESSIAN = BASIS @ torch.diag(torch.linspace(0.05, 1.0, DIM)) @ BASIS.T
CENTER = torch.randn(DIM, generator=GENERATOR)
MIXED = (1.0, 4.0, 10.0)  # work per second of three workers


def gradient(x: Tensor, center: Tensor = CENTER) -> Tensor:
    return HESSIAN @ (x - center)


def loss(x: Tensor) -> float:
    away = x - CENTER
    return float(0.5 * away @ HESSIAN @ away)


START = loss(torch.zeros(DIM))


def busy(speeds: Sequence[float], work: Callable[[int], float] = lambda worker: 1.0) -> Iterator[tuple[float, int]]:
    """(time, worker) of every answer; a worker begins its next work at once."""
    queue = [(work(worker) / speed, worker) for worker, speed in enumerate(speeds)]
    heapq.heapify(queue)
    while True:
        now, worker = queue[0]
        yield now, worker
        heapq.heapreplace(queue, (now + work(worker) / speeds[worker], worker))


def run_asynchronous(
    rule: AsynchronousRule, speeds: Sequence[float], answers: int, *, rate: float, momentum: float = 0.0,
    corrupt: Callable[[int, Tensor], Tensor] = lambda turn, result: result,
) -> tuple[Tensor, int]:  # fmt: skip
    """The parameters after so many answers, and how many were refused."""
    x = torch.nn.Parameter(torch.zeros(DIM))
    optimizer = torch.optim.SGD([x], lr=rate, momentum=momentum)
    version, refused = 0, 0
    leased = [0] * len(speeds)
    kept = [x.detach().clone() for _ in speeds]  # what each worker computes with
    for turn, (_, worker) in zip(range(answers), busy(speeds), strict=False):
        theirs = kept[worker]
        result = corrupt(turn, gradient(theirs) * 4)
        outcome = rule.offer(result, samples=4, staleness=version - leased[worker])
        refused += not outcome.accepted
        if rule.ready:
            x.grad = rule.take()
            optimizer.step()
            version += 1
        leased[worker] = version
        kept[worker] = x.detach().clone()
    return x.detach(), refused


# -- asynchronous


def test_asynchronous_with_mixed_speeds() -> None:
    x, refused = run_asynchronous(AsynchronousRule(DIM, AsynchronousConfig()), MIXED, 1500, rate=0.2)
    assert loss(x) < 1e-6 * START
    assert refused == 0


def test_staleness_weights_keep_many_workers_stable() -> None:
    """Sixteen workers: every result is 15 versions old. Delayed descent is stable below rate * curvature = pi / 62."""
    for exponent, converges in ((0.5, True), (0.0, False)):
        rule = AsynchronousRule(DIM, AsynchronousConfig(staleness_exponent=exponent))
        x, refused = run_asynchronous(rule, [1.0] * 16, 3000, rate=0.15)
        assert refused == 0 or not converges  # what overflows is refused
        assert (loss(x) < 1e-2 * START) == converges
        assert (loss(x) > 1e3 * START) == (not converges)


def test_a_buffer_of_many_keeps_many_workers_stable() -> None:
    """FedBuff: with K = 8 the same sixteen workers are one or two versions old."""
    rule = AsynchronousRule(DIM, AsynchronousConfig(results_per_step=8, staleness_exponent=0.0))
    x, _ = run_asynchronous(rule, [1.0] * 16, 3000, rate=0.15)
    assert loss(x) < 1e-2 * START


def test_the_bound_keeps_out_what_is_too_old() -> None:
    """A worker that slept through the run answers with the first version's gradient, which is large."""
    for bound, moved in ((16, False), (10**6, True)):
        rule = AsynchronousRule(DIM, AsynchronousConfig(max_staleness=bound, staleness_exponent=0.0))
        x, refused = run_asynchronous(rule, (1.0, 1.0, 1.0 / 200.0001), 401, rate=0.4)
        assert refused == (not moved)
        assert (loss(x) > 1e-3 * START) == moved


def test_momentum_over_a_half_diverges_under_delay() -> None:
    for momentum, converges in ((0.5, True), (0.9, False)):
        rule = AsynchronousRule(DIM, AsynchronousConfig())
        x, _ = run_asynchronous(rule, [1.0] * 8, 2000, rate=0.16, momentum=momentum)
        assert (loss(x) < 1e-4 * START) == converges
        assert (loss(x) > START) == (not converges)


# -- local steps


def inner(x: Tensor, steps: int, *, rate: float = 0.3, center: Tensor = CENTER) -> Tensor:
    """Where a worker gets to by ``steps`` of plain descent."""
    x = x.clone()
    for _ in range(steps):
        x -= rate * gradient(x, center)
    return x


def run_rounds(rule: LocalStepsRule, speeds: Sequence[float], rounds: int, *, steps: int) -> int:
    """Rounds that close by quorum and grace; who is in time waits for the next. Counts the late Deltas."""
    quorum, now, late = Quorum(), 0.0, 0
    work: dict[int, tuple[float, int, Tensor]] = {}  # worker -> when it is done, its version, its start
    for version in range(rounds):
        quorum.open(now, [str(worker) for worker in range(len(speeds))])
        for worker, speed in enumerate(speeds):
            work.setdefault(worker, (now + steps / speed, version, rule.parameters.clone()))
        while not (decision := quorum.decide(now)).close:
            worker = min(work, key=lambda other: work[other][0])
            done, base, start = work[worker]
            if decision.look_again is not None and decision.look_again < done:
                now = decision.look_again
                continue
            now = done
            del work[worker]
            in_time = quorum.arrived(str(worker), now)
            rule.offer(start - inner(start, steps), samples=1, staleness=version - base)
            if not in_time:
                late += 1
                quorum.joined(str(worker), now)
                work[worker] = (now + steps / speeds[worker], version, rule.parameters.clone())
        rule.close()
    return late


def test_local_steps_with_equal_and_with_mixed_speeds() -> None:
    for speeds, slow in (((1.0, 1.01, 1.02, 1.03), False), ((1.0, 4.0, 4.1, 4.2, 10.0), True)):
        rule = LocalStepsRule(torch.zeros(DIM), LocalStepsConfig(max_staleness=8))
        late = run_rounds(rule, speeds, 80, steps=10)
        assert loss(rule.parameters) < 1e-4 * START
        assert 15 < late < 25 if slow else late < 4


def test_a_delta_against_newer_parameters_takes_back_what_others_did() -> None:
    """The trap of reconnecting: a worker that went on from its old copy must keep that copy as its base."""
    losses = []
    for keeps_base in (True, False):
        rule = LocalStepsRule(torch.zeros(DIM), LocalStepsConfig(momentum=0.0, learning_rate=1.0, max_staleness=100))
        old = rule.parameters.clone()
        for _ in range(40):
            start = rule.parameters.clone()
            rule.offer(start - inner(start, 10), samples=1)
            rule.close()
        reached = inner(old, 3)
        rule.offer((old if keeps_base else rule.parameters) - reached, samples=1)
        before = rule.parameters.clone()
        rule.close()
        losses.append(float((rule.parameters - reached).norm() / (before - reached).norm()))
    assert losses[1] == pytest.approx(0.0, abs=1e-6)  # thrown back to where that worker was
    assert losses[0] > 0.5


def test_delayed_nesterov_converges_where_momentum_at_every_arrival_does_not() -> None:
    """Eight workers, Deltas seven versions old: the paper's reason for the rule."""
    rule = DelayedNesterovRule(torch.zeros(DIM), DelayedNesterovConfig(period=8))
    naive, momentum = torch.zeros(DIM), torch.zeros(DIM)

    def apply_naively(delta: Tensor) -> None:
        nesterov_(naive, momentum, delta, 0.7, 0.9)

    def apply(delta: Tensor) -> None:
        assert rule.offer(delta, samples=1, staleness=0).accepted

    for parameters, take in ((rule.parameters, apply), (naive, apply_naively)):
        copies = [parameters.clone() for _ in range(8)]
        for _, (_, worker) in zip(range(1000), busy([1.0] * 8), strict=False):
            take(copies[worker] - inner(copies[worker], 5, rate=0.1))
            copies[worker] = parameters.clone()
    assert loss(rule.parameters) < 1e-4 * START
    assert not loss(naive) < START


def test_delayed_nesterov_with_inner_steps_by_speed() -> None:
    """Speeds 1:4:10. With H by speed all workers answer about as often, and none is more than a few versions old."""
    oldest = {}
    for by_speed in (True, False):
        steps = [inner_steps(speed, max(MIXED), 20) if by_speed else 20 for speed in MIXED]
        rule = DelayedNesterovRule(torch.zeros(DIM), DelayedNesterovConfig(period=3))
        copies, versions, version, worst = [rule.parameters.clone() for _ in MIXED], [0] * 3, 0, 0
        for _, (_, worker) in zip(range(600), busy(MIXED, steps.__getitem__), strict=False):
            worst = max(worst, version - versions[worker])
            delta = copies[worker] - inner(copies[worker], steps[worker])
            rule.offer(delta, samples=steps[worker], staleness=version - versions[worker])
            version += 1
            copies[worker], versions[worker] = rule.parameters.clone(), version
        if by_speed:
            assert loss(rule.parameters) < 1e-4 * START
        oldest[by_speed] = worst
    assert oldest[True] <= 4 < 10 < oldest[False]


# -- streaming


def run_streaming(*, delay: int, mixing: float, deliver: bool = True, steps: int = 1200) -> float:
    """Three workers with minima of their own, whose mean is the minimum; four fragments, a turn every 20 steps."""
    offsets = torch.randn(2, DIM, generator=torch.Generator().manual_seed(4))
    centers = [CENTER + offsets[0], CENTER + offsets[1], CENTER - offsets.sum(0)]
    fragments = strided([(2 * index, 2 * index + 2) for index in range(8)], 4)
    turns = taking_turns(4, 20)
    rule = StreamingRule(torch.zeros(DIM), fragments)
    locals_ = [torch.zeros(DIM) for _ in centers]
    replicas = [StreamingReplica(x, fragments, delay=delay, mixing=mixing) for x in locals_]
    for step in range(1, steps + 1):
        for x, center in zip(locals_, centers, strict=True):
            x -= 0.1 * gradient(x, center)
        for fragment in next(turns):
            for replica in replicas:
                version = rule.versions[fragment]
                rule.offer(fragment, replica.send(fragment, step), samples=1, version=version)
            rule.close(fragment)
            for replica in replicas:
                values = rule.values(fragment) if deliver else fragments[fragment].gather(torch.zeros(DIM))
                replica.deliver(fragment, values.clone())
        for replica in replicas:
            replica.mix(step)
    return loss(rule.parameters)


@pytest.mark.parametrize(("delay", "mixing"), [(0, 0.0), (1, 0.0), (1, 0.5), (5, 0.5)])
def test_streaming_with_overlap_reaches_the_common_minimum(delay: int, mixing: float) -> None:
    """As far as local steps on unlike data can: the fixed point is near the mean's minimum, not at it."""
    assert run_streaming(delay=delay, mixing=mixing) < 0.02 * START


def test_streaming_without_what_others_found_does_not() -> None:
    assert not run_streaming(delay=1, mixing=0.5, deliver=False) < 0.5 * START


# -- averages


def test_the_radial_average_keeps_pace_where_the_mean_shrinks() -> None:
    """Each worker sees two of the coordinates: Deltas are orthogonal, and their mean an eighth as long."""
    found = {}
    for average in (WeightedMean(DIM), RadialDirectionalAverage(DIM, [(0, DIM)])):
        x = torch.zeros(DIM)
        rule = LocalStepsRule(x, LocalStepsConfig(learning_rate=0.7, momentum=0.0), average=average)
        for _ in range(24):
            for worker in range(8):
                mask = torch.zeros(DIM)
                mask[2 * worker : 2 * worker + 2] = 1.0
                rule.offer(0.5 * mask * (x - 1.0), samples=1)
            rule.close()
        found[average.name] = float((x - 1.0).abs().max())
    assert found["radial"] < 0.05
    assert found["mean"] > 0.3


AVERAGES: dict[str, Callable[[], Average]] = {
    "mean": lambda: WeightedMean(DIM),
    "median": lambda: CoordinateMedian(DIM, 10),
}


@pytest.mark.parametrize("attack", ["sign flip", "large", "nan"])
@pytest.mark.parametrize("name", AVERAGES)
def test_a_fifth_of_bad_workers(name: str, attack: str) -> None:
    """Two of ten always send a gradient turned round and five times as long, or 1e6, or NaN."""
    noise = torch.Generator().manual_seed(8)

    def corrupt(turn: int, result: Tensor) -> Tensor:
        if turn % 10 not in (3, 7):
            return result + 0.04 * torch.randn(DIM, generator=noise)
        return {"sign flip": -5.0 * result, "large": torch.full((DIM,), 4e6), "nan": result * float("nan")}[attack]

    rule = AsynchronousRule(
        DIM, AsynchronousConfig(results_per_step=10, staleness_exponent=0.0), average=AVERAGES[name]()
    )  # fmt: skip
    x, refused = run_asynchronous(rule, [1.0] * 10, 2000, rate=0.5, corrupt=corrupt)
    assert refused == (400 if attack == "nan" else 0)
    assert (loss(x) < 2e-3 * START) == (name != "mean" or attack == "nan")


def test_the_gate_holds_a_plain_mean_together() -> None:
    for gate, converges in ((NormGate(), True), (None, False)):
        rule = AsynchronousRule(DIM, AsynchronousConfig(), gate=gate)
        noise = torch.Generator().manual_seed(9)

        def corrupt(turn: int, result: Tensor, noise: torch.Generator = noise) -> Tensor:
            result = result + 0.4 * torch.randn(DIM, generator=noise)
            return -1e6 * result if turn > 20 and turn % 5 == 0 else result

        x, refused = run_asynchronous(rule, MIXED, 1500, rate=0.1, corrupt=corrupt)
        assert (loss(x) < 0.02 * START) == converges
        assert gate is None or refused == 295  # every bad one and no other


# -- batch size


def test_a_growing_batch_gets_further_in_as_many_steps() -> None:
    """Noise ends the progress of a small batch; the noise scale sees that and asks for more samples."""
    found: dict[bool, Any] = {}
    for grows in (True, False):
        x, rate = torch.zeros(DIM), 0.05
        growth, scale = GrowthRule(GrowthRuleConfig(batch_size=4, cap=256, patience=40)), GradientNoiseScale()
        noise = torch.Generator().manual_seed(10)
        for _ in range(1000):
            size = growth.target_batch // 4
            leaves = [gradient(x) + size**-0.5 * torch.randn(DIM, generator=noise) for _ in range(4)]
            whole = torch.stack(leaves).mean(0)
            scale.observe([float(leaf @ leaf) for leaf in leaves], [size] * 4, float(whole @ whole))
            x -= rate * whole
            if grows:
                rate *= growth.update(scale.value)
        found[grows] = (loss(x), growth.target_batch)
    assert found[True][1] == 256
    assert found[True][0] < 0.3 * found[False][0]
