"""Streaming fragments: their cut, and both sides of the exchange; ``test_turns`` has their turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.turns import strided, taking_turns
from torch import Tensor, nn

from w5xde_async.params.layout import Layout
from w5xde_async.store.state import pack_state, unpack_state
from w5xde_async.updates.averages import CoordinateMedian
from w5xde_async.updates.fragments import Fragment
from w5xde_async.updates.local import LocalStepsConfig, LocalStepsRule
from w5xde_async.updates.norm_gate import NormGate
from w5xde_async.updates.outer import bucket_fragments
from w5xde_async.updates.streaming import StreamingReplica, StreamingRule
from w5xde_async.wire.messages import VerdictCode

NUMEL = 12
LAYERS = [(0, 3), (3, 4), (4, 9), (9, 12)]
FRAGMENTS = strided(LAYERS, 2)


def vectors(count: int, *, seed: int = 0, numel: int = NUMEL) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def stored(state: dict[str, Any]) -> Any:
    skeleton, tensors = pack_state(state)
    return unpack_state(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})


# -- fragments


def test_gather_and_scatter_are_inverse_and_leave_the_rest() -> None:
    assert [fragment.numel for fragment in FRAGMENTS] == [8, 4]
    vector, other = torch.arange(float(NUMEL)), torch.full((NUMEL,), -1.0)
    taken = FRAGMENTS[1].gather(vector)
    assert taken.tolist() == [3.0, 9.0, 10.0, 11.0]
    FRAGMENTS[1].scatter_(other, taken)
    assert other.tolist() == [-1.0] * 3 + [3.0] + [-1.0] * 5 + [9.0, 10.0, 11.0]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
        self.norm = nn.BatchNorm1d(8)


def test_every_bucket_is_in_one_fragment_and_each_has_early_and_late_ones() -> None:
    layout = Layout.of(Small(), bucket_bytes=256)
    trained = [b.index for b in layout.result_buckets if layout.groups[b.group].role == "grad"]
    others = [b.index for b in layout.result_buckets if b.index not in trained]
    assert len(trained) > 3
    assert others
    first, second, third = bucket_fragments(layout, 3)
    assert (first, second, third) == ((*trained[::3], *others), tuple(trained[1::3]), tuple(trained[2::3]))
    assert bucket_fragments(layout, 1) == ((*trained, *others),)
    assert len(bucket_fragments(layout, 99)) == len(trained)  # no fragment is empty


# -- the coordinator's side


def test_each_fragment_is_a_round_of_local_steps_of_its_own() -> None:
    """eta 0.4, beta 0.9; fragments step at different times, and each as ``LocalStepsRule`` would alone."""
    parameters = vectors(1, seed=1)[0]
    alone = [LocalStepsRule(fragment.gather(parameters), LocalStepsConfig(learning_rate=0.4)) for fragment in FRAGMENTS]
    rule = StreamingRule(parameters, FRAGMENTS)
    for turn in range(7):
        fragment = 0 if turn % 3 else 1
        for samples, delta in enumerate(vectors(3, seed=turn, numel=FRAGMENTS[fragment].numel), start=1):
            rule.offer(fragment, delta.clone(), samples=samples, version=rule.versions[fragment])
            alone[fragment].offer(delta.clone(), samples=samples)
        assert rule.pending(fragment) == 3
        assert rule.close(fragment) == alone[fragment].close()
        for index, piece in enumerate(FRAGMENTS):
            assert torch.equal(piece.gather(parameters), alone[index].parameters)
            assert torch.equal(rule.values(index), alone[index].parameters)
    assert rule.versions == [4, 3]


def test_an_empty_turn_is_no_version_and_an_old_delta_is_stale() -> None:
    rule = StreamingRule(torch.zeros(NUMEL), FRAGMENTS)
    assert rule.close(0) is None
    assert rule.versions == [0, 0]
    rule.offer(0, torch.ones(8), samples=1, version=0)
    rule.close(0)
    outcome = rule.offer(0, torch.ones(8), samples=1, version=0)
    assert outcome.verdict is VerdictCode.STALE
    assert rule.offer(1, torch.ones(4), samples=1, version=0).accepted  # the other fragment's version is its own
    bad = torch.ones(8)
    bad[7] = float("nan")
    assert rule.offer(0, bad, samples=1, version=1).verdict is VerdictCode.REJECTED


@pytest.mark.parametrize("fragments", [FRAGMENTS[:1], (*FRAGMENTS, Fragment(((0, 3),))), strided(LAYERS[:3], 2)])
def test_fragments_must_be_the_whole_vector_once(fragments: tuple[Fragment, ...]) -> None:
    with pytest.raises(ValueError, match="not the whole vector"):
        StreamingRule(torch.zeros(NUMEL), fragments)


def test_averages_and_gates_are_each_fragments_own() -> None:
    rule = StreamingRule(
        torch.zeros(NUMEL), FRAGMENTS, LocalStepsConfig(learning_rate=1.0, momentum=0.0),
        average=lambda fragment: CoordinateMedian(fragment.numel, 3), gate=NormGate,
    )  # fmt: skip
    for value in (1.0, 2.0, 9.0):
        rule.offer(0, torch.full((8,), value), samples=1, version=0)
    assert rule.pending(1) == 0
    rule.close(0)
    assert torch.equal(rule.values(0), torch.full((8,), -2.0))


# -- the worker's side


def test_the_exchange_is_the_formula() -> None:
    """Delta_p = base_p - local_p at t; at t + tau local_p = alpha local_p + (1 - alpha) outer_p, base_p = outer_p."""
    tau, alpha = 2, 0.25
    start, outer = vectors(2, seed=3)
    local, base = [float(x) for x in start], [float(x) for x in start]
    mine = start.clone()
    replica = StreamingReplica(mine, FRAGMENTS, delay=tau, mixing=alpha)
    indices = [i for a, b in FRAGMENTS[0].ranges for i in range(a, b)]
    for step, inner in enumerate(vectors(10, seed=4), start=1):
        mine -= 0.1 * inner
        local = [x - 0.1 * float(g) for x, g in zip(local, inner, strict=True)]
        if step in (3, 7):
            delta = replica.send(0, step)
            torch.testing.assert_close(delta, torch.tensor([base[i] - local[i] for i in indices]))
            replica.deliver(0, FRAGMENTS[0].gather(outer * step))
        mixed = replica.mix(step)
        assert mixed == ((0,) if step in (5, 9) else ())
        if mixed:
            for i in indices:
                base[i] = float(outer[i]) * (step - tau)
                local[i] = alpha * local[i] + (1 - alpha) * base[i]
        torch.testing.assert_close(mine, torch.tensor(local))


def test_no_delay_and_no_mixing_is_a_plain_round() -> None:
    """One fragment, tau 0, alpha 0: the worker stands at the outer parameters, as after a round of ``local``."""
    whole = strided(LAYERS, 1)
    parameters = vectors(1)[0]
    plain = LocalStepsRule(parameters.clone(), LocalStepsConfig(learning_rate=0.4))
    rule = StreamingRule(parameters, whole)
    local = parameters.clone()
    replica = StreamingReplica(local, whole, delay=0, mixing=0.0)
    for step, inner in enumerate(vectors(6), start=1):
        local -= inner
        plain.offer(plain.parameters - local, samples=1)
        plain.close()
        rule.offer(0, replica.send(0, step), samples=1, version=rule.versions[0])
        rule.close(0)
        replica.deliver(0, rule.values(0).clone())
        assert replica.mix(step) == (0,)
        assert torch.equal(local, plain.parameters)


def test_what_is_under_way_is_known() -> None:
    replica = StreamingReplica(torch.zeros(NUMEL), FRAGMENTS, delay=1)
    with pytest.raises(ValueError, match="was not sent"):
        replica.deliver(0, torch.zeros(8))
    replica.send(0, 5)
    with pytest.raises(ValueError, match="sent at step 5"):
        replica.send(0, 6)
    assert replica.mix(6) == ()  # it has not come
    replica.deliver(0, torch.ones(8))
    assert replica.mix(5) == ()
    assert replica.mix(9) == (0,)  # late is as good as in time
    replica.send(0, 10)


def test_both_sides_restored_in_the_middle_go_on_with_the_same_bits() -> None:
    def run(restore: bool) -> tuple[Tensor, Tensor]:
        parameters = vectors(1, seed=6)[0]
        local = parameters.clone()
        rule = StreamingRule(parameters, FRAGMENTS)
        replica = StreamingReplica(local, FRAGMENTS, delay=2)
        turns = taking_turns(2, 6)
        for step, inner in enumerate(vectors(30, seed=7), start=1):
            local -= 0.1 * inner
            for fragment in next(turns):
                version = rule.versions[fragment]
                rule.offer(fragment, replica.send(fragment, step), samples=2, version=version)
                if restore and step == 12:  # a Delta in the sums, not yet closed; nothing delivered
                    kept_parameters, other = parameters.clone(), rule
                    parameters = torch.zeros(NUMEL)
                    rule = StreamingRule(parameters, FRAGMENTS)
                    parameters.copy_(kept_parameters)
                    rule.load_state_dict(stored(other.state_dict()))
                rule.close(fragment)
                replica.deliver(fragment, rule.values(fragment).clone())
            replica.mix(step)
        return parameters, local

    for whole, restored in zip(run(False), run(True), strict=True):
        assert torch.equal(whole, restored)


def test_a_state_that_does_not_fit_is_refused() -> None:
    rule = StreamingRule(torch.zeros(NUMEL), FRAGMENTS)
    with pytest.raises(ValueError, match="4 fragments, not 2"):
        rule.load_state_dict(StreamingRule(torch.zeros(NUMEL), strided(LAYERS, 4)).state_dict())
