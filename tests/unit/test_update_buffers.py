"""Buffers under every rule: what is not finite, or has counted too far, is never written."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.job import Job
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.updates.buffers import BufferState
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import Contribution, OuterRule, make_rule
from w5xde_async.updates.sync import SyncRule
from w5xde_async.wire.messages import VerdictCode

UNCHANGED = torch.iinfo(torch.int64).min
RULES = ["async", "local", "streaming", "async-local"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("seed", torch.tensor(7))


class Bench:
    def __init__(self) -> None:
        self.model = Model()
        self.layout = Layout.of(self.model, bucket_bytes=4096)
        self.state = FlatState(self.layout)
        self.state.copy_from(self.model)
        self.state.adopt(self.model)
        data = TensorDataset(torch.zeros(8, 4), torch.zeros(8))
        job = Job(
            model=Model, dataset=data, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), max_steps=5,
            batch_size=8,
        )  # fmt: skip
        self.sync = SyncRule.of(job, self.model, self.layout, self.state)

    def vector(self, **buffers: Tensor) -> ResultVector:
        """A result with a gradient of ones; ``buffers`` are changes of floating ones, values of the others."""
        made = ResultVector(self.layout)
        for group, piece in zip(self.layout.groups, made.groups, strict=True):
            if piece is not None:
                piece.fill_(UNCHANGED if group.role == "max" else 1.0 if group.role == "grad" else -0.0)
        for name, value in buffers.items():
            entry = next(e for e in self.layout.entries if e.name.rpartition(".")[2] == name)
            made.group(entry.group)[entry.offset : entry.offset + entry.numel].copy_(value.reshape(-1))
        return made

    @property
    def present(self) -> list[bool]:
        return [True] * len(self.layout.result_buckets)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38])
def test_sync_writes_no_element_that_is_not_finite(poison: float) -> None:
    bench = Bench()
    bench.model.norm.running_mean.fill_(3e38)  # so that a finite change leads out of the range too
    changes = torch.tensor([poison * 8 if poison != 3e38 else poison, -8.0, 0.0])
    applied = bench.sync.apply(bench.vector(running_mean=changes), bench.present, 1, ())
    assert not applied.skipped
    assert torch.equal(bench.model.norm.running_mean, torch.tensor([3e38, 3e38 - 8, 3e38]))
    assert bench.model.mask.tolist() == [0.0, -math.inf]  # it was so, and nobody changed it


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (1024 * 8, 1024 * 8), (1024 * 8 + 1, 0), (1 << 62, 0)])
def test_sync_counts_no_further_than_the_samples_allow(count: int, expected: int) -> None:
    bench = Bench()
    given = bench.vector(num_batches_tracked=torch.tensor(count), seed=torch.tensor(1 << 61))
    bench.sync.apply(given, bench.present, 8, ())
    assert int(bench.model.norm.num_batches_tracked) == expected
    assert int(bench.model.seed) == 1 << 61  # what is no counter may be anything


def poisoned_mean(bench: Bench) -> ResultVector:
    return bench.vector(running_mean=torch.tensor([0.0, math.nan, 0.0]))


def counted_far(bench: Bench) -> ResultVector:
    return bench.vector(num_batches_tracked=torch.tensor(1 << 62))


@pytest.mark.parametrize("make", [poisoned_mean, counted_far])
@pytest.mark.parametrize("name", RULES)
def test_other_rules_refuse_the_whole_result(name: str, make: Callable[[Bench], ResultVector]) -> None:
    bench = Bench()
    rule = make_rule(UpdateConfig(rule=name), bench.sync, bench.state, min_workers=1, gate=None)
    before = {key: tensor.clone() for key, tensor in bench.model.state_dict().items()}

    def offer(vector: ResultVector, step: int) -> VerdictCode:
        given = Contribution(
            steps=(step,), counted=8, samples=8, version=0, fragment=0, vector=vector, present=bench.present,
            untouched=frozenset(),
        )  # fmt: skip
        return rule.offer(given).verdict

    assert offer(make(bench), 0) is VerdictCode.REJECTED
    for key, tensor in bench.model.state_dict().items():
        assert torch.equal(tensor, before[key])
    change = torch.tensor([8.0, 0.0, -8.0])
    good = bench.vector(running_mean=change, num_batches_tracked=torch.tensor(1))
    assert offer(good, 1) is VerdictCode.APPLIED
    rule.commit(0)
    # Workers that step on their own send buffers as they are; others the sum of their changes.
    expected = before["norm.running_mean"] + change / 8 if name == "async" else change
    assert torch.equal(bench.model.norm.running_mean, expected)
    assert int(bench.model.norm.num_batches_tracked) == 1


def test_an_own_value_that_is_not_finite_is_no_workers_fault() -> None:
    bench = Bench()
    found = BufferState(bench.layout, bench.state)
    given = bench.vector(mask=torch.tensor([8.0, math.nan]))
    assert found.implausible(given, bench.present, 8) == ""
    bench.sync.apply(given, bench.present, 8, ())
    assert bench.model.mask.tolist() == [1.0, -math.inf]


@pytest.mark.parametrize("kept", [1, 3], ids=["each", "buffered"])
@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("staleness", [0, 1, 4, 20, 100])
def test_async_keeps_every_buffer_within_what_began_and_what_leaves_saw(
    staleness: int, momentum: float, kept: int
) -> None:
    """Changes of an old version added to a newer one led statistics out of the data's range, or into NaN."""
    bench = Bench()
    random = torch.Generator().manual_seed(staleness)
    norm, mask = bench.model.norm, bench.model.mask
    mask.fill_(0.0)
    norm.running_mean.copy_(torch.tensor([0.3, 0.4, 0.5]))
    config = UpdateConfig(rule="async", results_per_step=kept, max_staleness=1000)
    rule = make_rule(config, bench.sync, bench.state, min_workers=1, gate=None)
    names = ("running_mean", "running_var", "mask", "num_batches_tracked")

    def values() -> list[Tensor]:
        return [norm.running_mean.clone(), norm.running_var.clone(), mask.clone(), norm.num_batches_tracked.clone()]

    versions = [values()]
    least, most = [value.double() for value in versions[0][:3]], [value.double() for value in versions[0][:3]]
    for step in range(240):
        version = max(0, rule.version - int(torch.randint(0, staleness + 1, (), generator=random)))
        samples = int(torch.randint(1, 9, (), generator=random))
        begun = versions[version]
        batch = [torch.rand(3, generator=random), torch.rand(3, generator=random) / 12, torch.rand(2, generator=random)]
        ends = [begun[0].lerp(batch[0], momentum), begun[1].lerp(batch[1], momentum), begun[2].maximum(batch[2])]
        for index, seen in enumerate(batch):
            least[index], most[index] = least[index].minimum(seen), most[index].maximum(seen)
        sent = [(end - at) * samples for end, at in zip(ends, begun[:3], strict=True)]
        vector = bench.vector(**dict(zip(names, [*sent, begun[3] + 1], strict=True)))
        given = Contribution(
            steps=(step,), counted=samples, samples=samples, version=version, fragment=0, vector=vector,
            present=bench.present, untouched=frozenset(),
        )  # fmt: skip
        assert rule.offer(given).accepted
        if rule.due:
            rule.commit(0)
            versions.append(values())
            for value, low, high in zip(versions[-1][:3], least, most, strict=True):
                assert bool(((value >= low - 1e-6) & (value <= high + 1e-6)).all())
            assert int(norm.num_batches_tracked) <= rule.version
            if kept == 1 and version == rule.version - 1:  # of the newest parameters: the bits of a plain loop
                assert int(norm.num_batches_tracked) == int(begun[3]) + 1
                assert torch.equal(norm.running_mean, begun[0] + sent[0] / samples)
    if staleness * kept <= 4:  # from 1; the older results are, the fewer moves follow on each other
        assert float((norm.running_var - 1 / 24).abs().max()) < 0.05
    assert int(norm.num_batches_tracked) >= rule.version // (staleness + 1)


def test_a_value_that_a_late_result_did_not_change_stays_as_others_made_it() -> None:
    bench = Bench()
    rule = make_rule(UpdateConfig(rule="async"), bench.sync, bench.state, min_workers=1, gate=None)

    def offer(step: int, change: list[float]) -> None:
        vector = bench.vector(running_mean=torch.tensor(change))
        given = Contribution(
            steps=(step,), counted=1, samples=1, version=0, fragment=0, vector=vector, present=bench.present,
            untouched=frozenset(),
        )  # fmt: skip
        assert rule.offer(given).accepted
        rule.commit(0)

    offer(0, [1.0, 0.0, 4.0])
    offer(1, [0.0, 2.0, 2.0])
    part = 2**-0.5  # as a result one version old weighs
    assert torch.allclose(bench.model.norm.running_mean, torch.tensor([1.0, 2.0 * part, 4.0 - 2.0 * part]))
    assert bench.model.mask.tolist() == [0.0, -math.inf]


@pytest.mark.parametrize("name", ["async", "local"])
def test_buffers_of_an_open_version_go_on_over_a_stop(name: str) -> None:
    def made() -> tuple[Bench, OuterRule]:
        bench = Bench()
        config = UpdateConfig(rule=name, results_per_step=3)
        return bench, make_rule(config, bench.sync, bench.state, min_workers=1, gate=None)

    def offer(bench: Bench, rule: OuterRule, step: int, samples: int) -> None:
        vector = bench.vector(running_mean=torch.tensor([step + 1.0, 0.0, -step]) * samples)
        given = Contribution(
            steps=(step,), counted=samples, samples=samples, version=0, fragment=0, vector=vector,
            present=bench.present, untouched=frozenset(),
        )  # fmt: skip
        assert rule.offer(given).accepted

    found = []
    for stopped in ("", "now", "in the form of before"):
        bench, rule = made()
        offer(bench, rule, 0, 3)
        offer(bench, rule, 1, 5)
        if stopped:
            state = rule.state_dict()
            if stopped != "now":  # sums of changes under async, of values under local
                held = state["buffers"]
                sums = dict(held["values"])
                for index, weight in held["weights"].items():
                    mine = bench.state.bucket(bench.layout.result_buckets[index])
                    sums[index] = (sums[index] - (mine.nan_to_num() if name == "async" else 0.0)) * weight
                moved = {} if name == "async" else held["moved"]
                state["buffers"] = {"sums": sums, "samples": held["samples"], "moved": moved}
            bench, rule = made()
            rule.load_state_dict(state)
        offer(bench, rule, 2, 2)
        rule.commit(0)
        found.append(bench.model.norm.running_mean.clone())
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[2])
    if name == "async":
        assert torch.allclose(found[0], torch.tensor([1.9, 0.0, -0.9]))


def test_a_buffer_that_nobody_changes_is_kept_once_however_many_versions_are() -> None:
    """Tables of positions and masks may be as large as the model."""
    bench = Bench()
    rule = make_rule(UpdateConfig(rule="async"), bench.sync, bench.state, min_workers=1, gate=None)
    still = [
        bucket.index for bucket in rule._buffers._state.buckets if rule._buffers._state.roles[bucket.index] == "mean"
    ]

    def commit(step: int, *, with_buffers: bool) -> None:
        present = [with_buffers or index not in still for index in range(len(bench.present))]
        given = Contribution(
            steps=(step,), counted=1, samples=1, version=step, fragment=0,
            vector=bench.vector(running_mean=torch.ones(3)), present=present, untouched=frozenset(),
        )  # fmt: skip
        assert rule.offer(given).accepted
        rule.commit(0)

    for step in range(4):
        commit(step, with_buffers=False)
    before = list(rule._buffers._before)
    assert len({id(one[index]) for one in before for index in still}) == len(still)
    commit(4, with_buffers=True)
    commit(5, with_buffers=False)
    first, after = rule._buffers._before[-2], rule._buffers._before[-1]
    assert not any(torch.equal(first[index], after[index]) for index in still)
    assert all(
        torch.equal(after[b.index], bench.state.bucket(b)) for b in rule._buffers._state.buckets if b.index in still
    )
