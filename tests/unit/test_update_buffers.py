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
from w5xde_async.updates.outer import Contribution, make_rule
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
