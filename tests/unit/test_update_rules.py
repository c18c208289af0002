"""The rules that count results: each against its formula in plain Python, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support import jobs
from torch import Tensor

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.errors import UsageError
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.store.state import pack_state, unpack_state
from w5xde_async.updates.admission import Admission, staleness_weight
from w5xde_async.updates.asynchronous import AsynchronousConfig, AsynchronousRule, delay_warning
from w5xde_async.updates.averages import CoordinateMedian, RadialDirectionalAverage, WeightedMean
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.delayed import DelayedNesterovConfig, DelayedNesterovRule, inner_steps
from w5xde_async.updates.local import LocalStepsConfig, LocalStepsRule
from w5xde_async.updates.norm_gate import NormGate, NormGateConfig
from w5xde_async.wire.messages import VerdictCode

NUMEL = 7


def vectors(count: int, *, seed: int = 0, numel: int = NUMEL) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def stored(state: dict[str, Any]) -> Any:
    """Through the checkpoint's format and back; nothing is shared with the live rule."""
    skeleton, tensors = pack_state(state)
    return unpack_state(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})


def same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    (mine, tensors), (theirs, others) = pack_state(state), pack_state(other)
    return mine == theirs and all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def near(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=2e-6, atol=1e-6)


# -- asynchronous


def test_buffered_gradients_are_the_formula() -> None:
    """g = sum (1 + tau)^-1/2 n_i g_i / sum n_i, g_i = G_i / n_i (FedBuff, weighted by samples)."""
    totals, samples, staleness = vectors(3), [4, 8, 3], [0, 2, 5]
    rule = AsynchronousRule(NUMEL, AsynchronousConfig(results_per_step=3))
    expected = [0.0] * NUMEL
    for total, n, tau in zip(totals, samples, staleness, strict=True):
        for i in range(NUMEL):
            expected[i] += (1 + tau) ** -0.5 * n * (float(total[i]) / n) / sum(samples)
    assert not rule.ready
    for total, n, tau in zip(totals, samples, staleness, strict=True):
        outcome = rule.offer(total.clone(), samples=n, staleness=tau)
        assert outcome.accepted
        assert outcome.weight == (1 + tau) ** -0.5
    assert rule.ready
    near(rule.take(), expected)
    assert not rule.ready


def test_weights_shrink_a_lone_stale_result() -> None:
    rule = AsynchronousRule(NUMEL, AsynchronousConfig())
    (total,) = vectors(1)
    rule.offer(total.clone(), samples=1, staleness=3)
    torch.testing.assert_close(rule.take(), total / 2)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_one_fresh_worker_is_the_plain_loop_to_the_bit(optimizer: type[torch.optim.Optimizer]) -> None:
    plain, ours = (torch.nn.Parameter(vectors(1, seed=9)[0]) for _ in range(2))
    a, b = optimizer([plain], lr=0.1), optimizer([ours], lr=0.1)  # type: ignore[call-arg]
    rule = AsynchronousRule(NUMEL, AsynchronousConfig())
    for total in vectors(20, seed=1):
        plain.grad = total / 3
        a.step()
        rule.offer(total.clone(), samples=3, staleness=0)
        ours.grad = rule.take()
        b.step()
    assert torch.equal(plain, ours)


def test_equal_blocks_are_averaged_to_the_bit() -> None:
    rule = AsynchronousRule(NUMEL, AsynchronousConfig(results_per_step=3))
    totals = vectors(3)
    for total in totals:
        rule.offer(total.clone(), samples=7, staleness=0)
    means = [total / 7 for total in totals]
    assert torch.equal(rule.take(), (means[0] + means[1] + means[2]) / 3)


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        ({"staleness": 5}, VerdictCode.STALE, "5 versions old"),
        ({"samples": 0}, VerdictCode.REJECTED, "0 samples"),
        ({"value": math.nan}, VerdictCode.REJECTED, "not finite"),
        ({"value": math.inf}, VerdictCode.REJECTED, "not finite"),
        ({"value": -math.inf}, VerdictCode.REJECTED, "not finite"),
        ({"value": 3e38}, VerdictCode.REJECTED, "not finite"),  # finite, its square is not
    ],
)
def test_what_is_refused_changes_nothing(change: dict[str, Any], verdict: VerdictCode, reason: str) -> None:
    """In all rules that count Deltas or gradients; at the bound itself a result still counts."""
    (vector,) = vectors(1)
    for make in (asynchronous_rule, local_rule, delayed_rule):
        rule, offer = make()
        offer(vector.clone(), samples=2, staleness=4)
        before, parameters = stored(rule.state_dict()), getattr(rule, "parameters", vector).clone()
        bad = vector.clone()
        bad[3] = change.get("value", bad[3])
        outcome = offer(bad, samples=change.get("samples", 2), staleness=change.get("staleness", 0))
        assert (outcome.verdict, outcome.weight) == (verdict, 0.0)
        assert reason in outcome.reason
        assert same(rule.state_dict(), before)
        assert torch.equal(getattr(rule, "parameters", vector), parameters)


def asynchronous_rule() -> tuple[Any, Any]:
    rule = AsynchronousRule(NUMEL, AsynchronousConfig(results_per_step=3, max_staleness=4))
    return rule, rule.offer


def local_rule() -> tuple[Any, Any]:
    rule = LocalStepsRule(torch.zeros(NUMEL), LocalStepsConfig(max_staleness=4))
    return rule, rule.offer


def delayed_rule() -> tuple[Any, Any]:
    rule = DelayedNesterovRule(torch.zeros(NUMEL), DelayedNesterovConfig(period=3, max_staleness=4))
    return rule, rule.offer


def test_faults_of_the_caller() -> None:
    rule = AsynchronousRule(NUMEL, AsynchronousConfig())
    (vector,) = vectors(1)
    with pytest.raises(ValueError, match="not flat float32"):
        rule.offer(vector.double(), samples=1, staleness=0)
    with pytest.raises(ValueError, match="6 elements, not 7"):
        rule.offer(vector[:6], samples=1, staleness=0)
    with pytest.raises(ValueError, match=r"now \+ 1"):
        rule.offer(vector, samples=1, staleness=-1)
    with pytest.raises(ValueError, match="0 of 1 results"):
        rule.take()
    rule.offer(vector, samples=1, staleness=0)
    with pytest.raises(ValueError, match="a step is due"):
        rule.offer(vector, samples=1, staleness=0)


@pytest.mark.parametrize(
    "given",
    [
        {"results_per_step": -1},
        {"max_staleness": -1},
        {"staleness_exponent": -1.0},
        {"outer_momentum": 1.0},
        {"outer_lr": 0.0},
        {"quorum": 0.0},
        {"quorum": 1.1},
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(UsageError, match=name):
        UpdateConfig(**given)


def test_memory_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="not flat float32"):
        LocalStepsRule(torch.zeros(2, 2), LocalStepsConfig())
    with pytest.raises(ValueError, match="outside the vector"):
        RadialDirectionalAverage(4, [(2, 5)])


def test_momentum_over_a_half_is_warned_of() -> None:
    assert delay_warning([{"momentum": 0.5}, {"lr": 1.0}]) is None
    assert "0.9" in str(delay_warning([{"momentum": 0.0}, {"momentum": 0.9}]))
    assert delay_warning([]) is None
    weights = [torch.zeros(1, requires_grad=True)]
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax):
        assert "first beta, 0.9, averages" in str(delay_warning(kind(weights, lr=0.1).param_groups))
        assert delay_warning(kind(weights, lr=0.1, betas=(0.5, 0.999)).param_groups) is None
    assert "Rprop lengthens" in str(delay_warning(torch.optim.Rprop(weights).param_groups))
    for quiet in (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adafactor):
        assert delay_warning(quiet(weights, lr=0.1).param_groups) is None


@pytest.mark.parametrize(
    ("rule", "max_workers", "ahead", "warns"),
    [("async", 2, 1, True), ("async", 1, 2, True), ("async", 1, 1, False), ("sync", 2, 2, False)],
)
def test_momentum_is_warned_of_where_results_may_be_late(rule: str, max_workers: int, ahead: int, warns: bool) -> None:
    pacing = PacingConfig(leases_ahead=ahead)
    config = CoordinatorConfig(update=UpdateConfig(rule=rule), max_workers=max_workers, pacing=pacing)
    notes = prepare(jobs.mlp_adamw(), config, None, lambda: "0" * 16).resume.notes
    assert any("first beta" in note for note in notes) is warns


@pytest.mark.parametrize(("average", "fewest"), [("radial", 2), ("median", 3)])
def test_an_average_has_something_to_average(average: str, fewest: int) -> None:
    for given in (0, 1, fewest - 1):
        with pytest.raises(UsageError, match=f"--results-per-step {fewest} or more"):
            UpdateConfig(rule="async", average=average, results_per_step=given)
    UpdateConfig(rule="async", average=average, results_per_step=fewest)
    UpdateConfig(rule="local", average=average)  # its rounds have the results that come


# -- local steps


def test_local_steps_are_the_formula() -> None:
    """D = sum n_i Delta_i / sum n_i; m = beta m + D; theta = theta - eta (D + beta m) (DiLoCo, algorithm 1)."""
    eta, beta, samples = 0.7, 0.9, [5, 1, 2]
    parameters = vectors(1, seed=3)[0]
    theta, m = [float(value) for value in parameters], [0.0] * NUMEL
    rule = LocalStepsRule(parameters, LocalStepsConfig(learning_rate=eta, momentum=beta))
    for turn in range(5):
        deltas = vectors(3, seed=turn)
        for i in range(NUMEL):
            d = sum(n * float(delta[i]) for n, delta in zip(samples, deltas, strict=True)) / sum(samples)
            m[i] = beta * m[i] + d
            theta[i] -= eta * (d + beta * m[i])
        for n, delta in zip(samples, deltas, strict=True):
            assert rule.offer(delta, samples=n).accepted
        assert rule.pending == 3
        assert rule.close() is not None
        near(parameters, theta)


def test_the_outer_step_is_torchs_nesterov() -> None:
    ours, theirs = vectors(1)[0], torch.nn.Parameter(vectors(1)[0])
    rule = LocalStepsRule(ours, LocalStepsConfig())
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for delta in vectors(10, seed=5):
        theirs.grad = delta.clone()
        optimizer.step()
        rule.offer(delta, samples=1)
        rule.close()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


def test_one_inner_step_rate_one_and_no_momentum_is_averaging() -> None:
    """H = 1: the mean of what the workers reached, which is plain SGD with the mean gradient."""
    start, learning_rate = vectors(1, seed=8)[0], 0.1
    gradients = vectors(4, seed=2)
    reached = [start - learning_rate * gradient for gradient in gradients]
    parameters = start.clone()
    rule = LocalStepsRule(parameters, LocalStepsConfig(learning_rate=1.0, momentum=0.0))
    for local in reached:
        rule.offer(start - local, samples=16)
    rule.close()
    torch.testing.assert_close(parameters, torch.stack(reached).mean(0))
    torch.testing.assert_close(parameters, start - learning_rate * torch.stack(gradients).mean(0))


def test_an_empty_round_changes_nothing() -> None:
    rule = LocalStepsRule(vectors(1)[0], LocalStepsConfig())
    rule.offer(vectors(1)[0], samples=1)
    rule.close()
    before, parameters = stored(rule.state_dict()), rule.parameters.clone()
    assert rule.close() is None
    assert same(rule.state_dict(), before)
    assert torch.equal(rule.parameters, parameters)


def test_a_late_delta_is_returned_or_joins_with_less_weight() -> None:
    delta = vectors(1)[0]
    rule = LocalStepsRule(torch.zeros(NUMEL), LocalStepsConfig())
    assert rule.offer(delta.clone(), samples=1, staleness=1).verdict is VerdictCode.STALE
    assert rule.close() is None
    rule = LocalStepsRule(torch.zeros(NUMEL), LocalStepsConfig(learning_rate=1.0, momentum=0.0, max_staleness=2))
    assert rule.offer(delta.clone(), samples=1, staleness=1).weight == staleness_weight(1, 0.5)
    rule.close()
    torch.testing.assert_close(rule.parameters, -delta / math.sqrt(2))


def test_the_effective_step_is_where_equal_deltas_lead() -> None:
    rule = LocalStepsRule(torch.zeros(1), LocalStepsConfig())
    moved = 0.0
    for _ in range(200):
        before = float(rule.parameters)
        rule.offer(torch.ones(1), samples=1)
        rule.close()
        moved = before - float(rule.parameters)
    assert moved == pytest.approx(0.7 * (1 + 0.9 / (1 - 0.9)), rel=1e-3)  # docs/slow-links.md


# -- delayed Nesterov


def test_delayed_nesterov_is_the_formula() -> None:
    """theta -= eta Delta / N; B += Delta; every N-th: m = beta m + B / N; theta -= eta beta m; B = 0."""
    eta, beta, period = 0.7, 0.9, 3
    parameters = vectors(1, seed=3)[0]
    theta, m, buffer = [float(value) for value in parameters], [0.0] * NUMEL, [0.0] * NUMEL
    rule = DelayedNesterovRule(parameters, DelayedNesterovConfig(period=period))
    for turn, delta in enumerate(vectors(11, seed=4), start=1):
        for i in range(NUMEL):
            theta[i] -= eta * float(delta[i]) / period
            buffer[i] += float(delta[i])
            if turn % period == 0:
                m[i] = beta * m[i] + buffer[i] / period
                theta[i] -= eta * beta * m[i]
                buffer[i] = 0.0
        assert rule.offer(delta, samples=turn, staleness=turn).accepted
        near(parameters, theta)


def test_a_full_period_of_delayed_nesterov_is_one_round_of_local_steps() -> None:
    delayed = DelayedNesterovRule(torch.zeros(NUMEL), DelayedNesterovConfig(period=4))
    local = LocalStepsRule(torch.zeros(NUMEL), LocalStepsConfig())
    for turn in range(3):
        for delta in vectors(4, seed=turn):
            delayed.offer(delta.clone(), samples=1, staleness=0)
            local.offer(delta.clone(), samples=1)
        local.close()
        torch.testing.assert_close(delayed.parameters, local.parameters)


def test_without_a_number_n_is_the_workers_that_are_there() -> None:
    """Four with N unsaid are four with N 4; when two of them leave, the mean is of the Deltas that have come."""
    said = DelayedNesterovRule(torch.zeros(NUMEL), DelayedNesterovConfig(period=4))
    unsaid = DelayedNesterovRule(torch.zeros(NUMEL), DelayedNesterovConfig())
    for delta in vectors(11, seed=5):
        said.offer(delta.clone(), samples=1, staleness=0)
        unsaid.offer(delta.clone(), samples=1, staleness=0, workers=4)
    assert torch.equal(said.parameters, unsaid.parameters)
    before, momentum = unsaid.parameters.clone(), 0.9 * unsaid._momentum
    last = vectors(4, seed=5)[3]
    momentum += (unsaid._buffer + last) / 4  # three of the four were there already
    unsaid.offer(last.clone(), samples=1, staleness=0, workers=2)
    near(unsaid.parameters, (before - 0.7 * last / 2 - 0.7 * 0.9 * momentum).tolist())


def test_inner_steps_follow_speed() -> None:
    assert [inner_steps(speed, 10.0, 50) for speed in (10.0, 4.0, 1.0, 0.01)] == [50, 20, 5, 1]
    with pytest.raises(ValueError, match="speeds"):
        inner_steps(11.0, 10.0, 50)
    with pytest.raises(ValueError, match="speeds"):
        inner_steps(0.0, 10.0, 50)


# -- radial-directional average


@pytest.mark.parametrize("least", [1e-45, 1e-39, 1e-30])
def test_a_tensor_that_is_next_to_nothing_has_no_direction_or_its_own(least: float) -> None:
    average = RadialDirectionalAverage(4, [(0, 1), (1, 4)])
    vector = torch.tensor([least, 1.0, 2.0, 2.0])
    for samples in (64, 1024):
        average.add(vector, samples=samples, weight=1.0)
    found = average.take()
    assert torch.allclose(found, vector)
    assert float(found[0]) == (pytest.approx(least) if least > 1e-35 else 0.0)


def test_the_radial_directional_average_is_the_formula() -> None:
    """Per tensor (sum w|x| / sum w) phi(sum w phi(x) / sum w), phi(x) = x / |x|; padding stays zero; twice over."""
    tensors, samples, weights = [(0, 3), (4, 7)], [3, 1, 6], [1.0, 0.5, 0.25]
    average = RadialDirectionalAverage(NUMEL, tensors)
    w = [n * weight for n, weight in zip(samples, weights, strict=True)]
    for seed in range(2):
        results = vectors(3, seed=seed)
        for result, n, weight in zip(results, samples, weights, strict=True):
            average.add(result, samples=n, weight=weight)
        expected = [0.0] * NUMEL
        for start, stop in tensors:
            lengths = [math.sqrt(sum(float(x[i]) ** 2 for i in range(start, stop))) for x in results]
            mean_length = sum(a * b for a, b in zip(w, lengths, strict=True)) / sum(w)
            direction = [
                sum(a * float(x[i]) / length for a, x, length in zip(w, results, lengths, strict=True)) / sum(w)
                for i in range(start, stop)
            ]
            norm = math.sqrt(sum(value * value for value in direction))
            expected[start:stop] = [mean_length * value / norm for value in direction]
        near(average.take(), expected)


def test_many_orthogonal_deltas_keep_their_length() -> None:
    many = 16
    mean, radial = WeightedMean(many), RadialDirectionalAverage(many, [(0, many)])
    for row in torch.eye(many):
        mean.add(row, samples=1, weight=1.0)
        radial.add(row, samples=1, weight=1.0)
    assert float(mean.take().norm()) == pytest.approx(many**-0.5)
    assert float(radial.take().norm()) == pytest.approx(1.0)


def test_cancelling_and_zero_tensors_give_zero_not_nan() -> None:
    average = RadialDirectionalAverage(4, [(0, 2), (2, 4)])
    average.add(torch.tensor([1.0, 0.0, 0.0, 0.0]), samples=1, weight=1.0)
    average.add(torch.tensor([-1.0, 0.0, 0.0, 0.0]), samples=1, weight=1.0)
    assert torch.equal(average.take(), torch.zeros(4))


def test_directions_that_cancel_but_for_rounding_give_zero() -> None:
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    average = RadialDirectionalAverage(1000, [(0, 1000)])
    for times in (1.0, -3.0):
        average.add(times * vector, samples=1, weight=1.0)
    assert torch.equal(average.take(), torch.zeros(1000))


# -- state


def rules() -> dict[str, Any]:
    gated = NormGateConfig(warmup=2, window=8)

    def asynchronous() -> AsynchronousRule:
        return AsynchronousRule(NUMEL, AsynchronousConfig(results_per_step=3), gate=NormGate(gated))

    return {
        "asynchronous": asynchronous,
        "median": lambda: AsynchronousRule(
            NUMEL, AsynchronousConfig(results_per_step=3), average=CoordinateMedian(NUMEL, 3)
        ),
        "local": lambda: LocalStepsRule(torch.ones(NUMEL), LocalStepsConfig(max_staleness=9), gate=NormGate(gated)),
        "radial": lambda: LocalStepsRule(
            torch.ones(NUMEL), LocalStepsConfig(max_staleness=9),
            average=RadialDirectionalAverage(NUMEL, [(0, 3), (3, 7)]),
        ),
        "delayed": lambda: DelayedNesterovRule(torch.ones(NUMEL), DelayedNesterovConfig(period=3)),
    }  # fmt: skip


def drive(rule: Any, turns: range) -> list[Tensor]:
    """A step or a round after every third result."""
    seen = []
    for turn in turns:
        (vector,) = vectors(1, seed=turn)
        rule.offer(vector, samples=1 + turn % 3, staleness=turn % 4)
        if isinstance(rule, AsynchronousRule) and rule.ready:
            seen.append(rule.take().clone())
        elif isinstance(rule, LocalStepsRule) and turn % 3 == 2:
            rule.close()
        if not isinstance(rule, AsynchronousRule):
            seen.append(rule.parameters.clone())
    return seen


@pytest.mark.parametrize("name", rules())
@pytest.mark.parametrize("cut", [7, 9])
def test_a_restored_rule_goes_on_with_the_same_bits(name: str, cut: int) -> None:
    whole, first, second = (rules()[name]() for _ in range(3))
    expected = drive(whole, range(20))
    seen = drive(first, range(cut))
    if name not in ("asynchronous", "median"):
        second.parameters.copy_(first.parameters)
    second.load_state_dict(stored(first.state_dict()))
    seen += drive(second, range(cut, 20))
    assert len(seen) == len(expected) > 4
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_a_state_of_another_average_or_layout_is_refused() -> None:
    made = {name: make() for name, make in rules().items()}
    pairs = [("radial", "local"), ("local", "radial"), ("median", "asynchronous"), ("asynchronous", "median")]
    for mine, other in pairs:
        with pytest.raises(ValueError, match="the checkpoint"):
            made[mine].load_state_dict(stored(made[other].state_dict()))
    shorter = LocalStepsRule(torch.zeros(NUMEL - 1), LocalStepsConfig(), gate=NormGate())
    with pytest.raises(ValueError, match="does not fit"):
        shorter.load_state_dict(stored(made["local"].state_dict()))


def test_a_gate_may_be_left_out_or_put_in_where_a_run_goes_on() -> None:
    gated, without = rules()["local"](), LocalStepsRule(torch.zeros(NUMEL), LocalStepsConfig())
    state = stored(gated.state_dict())
    without.load_state_dict(state)
    again = rules()["local"]()
    again.load_state_dict(stored(without.state_dict()))
    assert again.admission.gate is not None
    assert math.isinf(again.admission.gate.bound(1))


def test_a_delta_of_many_steps_is_not_odd_and_keeps_its_length() -> None:
    """A worker that made ten steps has gone further than those that made one; a lie a thousand times as long is out."""
    gate = NormGate(NormGateConfig(warmup=4, window=16, least_spread=0.5), pseudo_gradients=True)
    admission = Admission(max_staleness=None, exponent=0.0, gate=gate, scale=False)
    for _ in range(6):
        assert admission.judge(torch.full((4,), 0.5), samples=10, staleness=0).accepted
    long = torch.full((4,), 3.0)
    assert admission.judge(long, samples=100, staleness=0).accepted
    assert torch.equal(long, torch.full((4,), 3.0))
    assert not admission.judge(torch.full((4,), 500.0), samples=10, staleness=0).accepted
