"""A worker's replica under rules of local steps: what it says of itself, and what becomes of it by the verdict."""

from __future__ import annotations

import math

import msgpack
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import ComputedBlock, Task
from w5xde_async.compute.engine import Engine
from w5xde_async.compute.inner import describe_inner
from w5xde_async.job import Job
from w5xde_async.updates.outer import bucket_fragments
from w5xde_async.wire.messages import VerdictCode
from w5xde_async.worker.executors.published import Published
from w5xde_async.worker.executors.replicas import SteppingReplica

APPLIED, STALE, REJECTED = VerdictCode.APPLIED, VerdictCode.STALE, VerdictCode.REJECTED
RATE = 0.5


class Constant(nn.Module):
    """Its gradient is 1 for every weight, or what the data says, so that a Delta tells how many steps are in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(128))
        self.second = nn.Parameter(torch.zeros(128))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first.sum() + self.second.sum()) * x.mean()


class Normed(nn.Module):
    """Two buckets of means."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(100), nn.BatchNorm1d(100)])

    def forward(self, x: Tensor) -> Tensor:
        return sum((norm(x[:, :1].expand(-1, 100)) for norm in self.norms), torch.zeros(())).sum()


def given(output: Tensor, target: Tensor) -> Tensor:
    return output


class Made:
    """A replica and the coordinator's side of its link."""

    def __init__(self, model: type[nn.Module], *, streaming: list[object] | None) -> None:
        torch.set_num_threads(1)
        data = TensorDataset(torch.zeros(8, 4), torch.zeros(8))

        def sgd(module: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(module.parameters(), lr=RATE)

        self.job = Job(
            model=model, dataset=data, loss=given, batch_size=4, microbatch_size=4, max_steps=4, optimizer=sgd
        )  # fmt: skip
        self.engine = Engine(self.job, bucket_bytes=512)
        self.layout = self.engine.layout
        self.published = Published(self.layout)
        self.published.version = 0
        for mine, theirs in zip(self.published.state.groups, self.engine.live.groups, strict=True):
            mine.copy_(theirs)
        inner = describe_inner(sgd(self.engine.model), self.layout, self.engine.model)
        packed = msgpack.packb({**inner, "clip": None, "streaming": streaming})
        self.replica = SteppingReplica(self.engine, self.published, packed)
        self.fragments = bucket_fragments(self.layout, 2)
        self.lease = 0

    def step(self, value: float = 1.0) -> ComputedBlock:
        structure, tensors = flatten((torch.full((4, 4), value), torch.zeros(4)))
        task = Task(step=0, start=0, samples=(4,), loss_scale=1.0, structure=structure, packed=True, tensors=tensors)
        return self.replica.compute(task, (RATE,), lambda bucket, vector: None)

    def submit(self, fragment: int) -> float:
        """How many steps the Delta is long."""
        self.lease += 1
        vector, _ = self.replica.submission(self.lease, self.fragments[fragment])
        (steps,) = {float(x) / RATE for number in self.fragments[fragment] for x in vector.buckets[number]}
        return steps

    def weight(self, fragment: int) -> float:
        """What the replica computes with."""
        return float(self.engine.live.bucket(self.layout.buckets[self.fragments[fragment][0]])[0])

    def settle(self, code: VerdictCode) -> None:
        self.replica.settle([self.lease], code)

    def commit(self, fragment: int, value: float) -> None:
        self.published.version += 1
        for number in self.fragments[fragment]:
            self.published.state.bucket(self.layout.buckets[number]).fill_(value)
            self.published.newest[number] = self.published.version


@pytest.fixture
def made() -> Made:
    return Made(Constant, streaming=[2, 1, 0.0])


def test_what_counted_is_in_no_delta_again(made: Made) -> None:
    """It is asked again before the round has closed, or before the new values have come over a slow link."""
    made.step()
    assert made.submit(0) == 1
    made.settle(APPLIED)
    made.step()
    made.step()
    assert made.submit(0) == 2
    made.settle(APPLIED)
    made.commit(0, -9.0)
    made.step()
    made.step()
    assert made.submit(0) == 1  # the step before the values came was forgotten with them (mixing 0)
    assert made.submit(1) == 5  # the other fragment has never been asked for


@pytest.mark.parametrize("commits", [0, 1])
@pytest.mark.parametrize("code", [None, APPLIED, REJECTED])
def test_a_whole_delta_has_the_steps_since_the_one_before(code: VerdictCode | None, commits: int) -> None:
    """Whatever versions and verdicts come in between, or none."""
    made = Made(Constant, streaming=None)
    made.fragments = bucket_fragments(made.layout, 1)
    for steps in (1, 2, 3):
        for _ in range(steps):
            made.step()
            for _ in range(commits):
                made.commit(0, -9.0)
        assert made.submit(0) == steps
        if code is not None:
            made.settle(code)


@pytest.mark.parametrize("mixing", [0.0, 0.5, 0.9999])
def test_what_is_under_way_is_in_no_delta_again(mixing: float) -> None:
    """The round closed without it: it is judged into the next one. What others made is neither lost nor sent back."""
    made = Made(Constant, streaming=[2, 1, mixing])
    made.step()
    assert made.submit(0) == 1
    made.commit(0, -9.0)
    made.step()
    assert made.weight(0) == -9.0 - 2 * RATE
    made.settle(APPLIED)
    made.step()
    assert made.submit(0) == 2
    made.settle(APPLIED)
    made.commit(0, -9.0 - 3 * RATE)  # both are in it
    made.step()  # of which as much is forgotten as the mixing says
    assert made.submit(0) == pytest.approx(mixing, abs=1e-5)


def test_what_came_before_the_verdict_was_made_without_the_delta() -> None:
    """Nothing was computed between the commit, the verdict and the next commit."""
    made = Made(Constant, streaming=[2, 0, 0.5])
    made.step()
    assert made.submit(0) == 1
    made.commit(0, -9.0)
    made.settle(APPLIED)
    assert made.weight(0) == -9.0 - RATE
    made.commit(0, -9.0 - RATE)
    made.step()
    assert made.weight(0) == -9.0 - 1.5 * RATE  # half of the step since is kept
    assert made.submit(0) == 0.5


@pytest.mark.parametrize("code", [STALE, REJECTED])
@pytest.mark.parametrize("comes", ["never", "after", "before"])
def test_what_was_refused_is_in_the_next_delta_once(made: Made, code: VerdictCode, comes: str) -> None:
    made.step()
    assert made.submit(0) == 1
    if comes == "before":  # the round closed while it was on its way
        made.commit(0, -9.0)
        made.step()
        assert made.submit(1) == 2
    made.replica.settle([1], code)
    if comes == "after":
        made.commit(0, -9.0)
    made.step()
    made.step()
    # Before the verdict nothing is mixed in; after it the step that was made meanwhile is forgotten (mixing 0).
    assert made.submit(0) == (4 if comes == "before" else 3)


def test_refused_twice_it_is_left_to_the_mixing(made: Made) -> None:
    made.step()
    for _ in range(2):
        made.submit(0)
        made.settle(REJECTED)
    made.commit(0, -9.0)
    made.step()
    made.step()
    assert made.submit(0) == 1


def test_a_replica_that_is_not_finite_begins_anew(made: Made) -> None:
    made.step(math.inf)
    assert made.submit(0) == 0  # the step was skipped
    made.settle(APPLIED)
    made.engine.live.groups[0].fill_(math.nan)
    made.replica.submission(7, made.fragments[1])
    made.replica.settle([7], REJECTED)
    made.commit(1, -9.0)
    made.step()
    assert made.submit(1) == 1
    assert float(made.engine.live.bucket(made.layout.buckets[made.fragments[1][0]])[0]) == -9.0 - RATE


def test_a_step_that_was_skipped_has_no_result(made: Made) -> None:
    assert made.step().absent == ()
    skipped = made.step(math.nan)
    assert skipped.absent == tuple(range(len(made.layout.result_buckets)))


@pytest.mark.parametrize("streaming", [None, [2, 1, 0.0]])
def test_every_bucket_of_buffers_tells_how_far_it_went(streaming: list[object] | None) -> None:
    made = Made(Normed, streaming=streaming)
    made.step()
    means = [b for b in made.layout.result_buckets if made.layout.groups[b.group].role == "mean"]
    assert len(means) > 1

    def told() -> list[float]:
        made.lease += 1
        buckets = made.fragments[0] if streaming else tuple(b.index for b in made.layout.result_buckets)
        vector, _ = made.replica.submission(made.lease, buckets)
        return [float(vector.buckets[bucket.index].abs().sum()) for bucket in means]

    before = told()
    assert all(before)
    made.settle(STALE)
    if streaming:
        assert told() == before  # what was refused is told again
