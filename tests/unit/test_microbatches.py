"""Epochs of whole microbatches, held against a DataLoader that drops its last batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from w5xde_async.errors import JobError
from w5xde_async.job import Job, of_whole_microbatches
from w5xde_async.plan.sampler import Sampler


class Counted(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


@pytest.mark.parametrize("accumulated", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatch", [1, 3, 4])
def test_steps_have_the_batches_of_a_dataloader(microbatch: int, accumulated: int) -> None:
    for count in range(microbatch, 40):
        batch_size = microbatch * accumulated
        dataset, drop_last = of_whole_microbatches(numbers(count), microbatch, batch_size, option="drop_last")
        job = Job(
            model=torch.nn.Linear(1, 1), dataset=dataset, optimizer=lambda model: torch.optim.SGD(model.parameters()),
            batch_size=batch_size, microbatch_size=microbatch, drop_last=drop_last, epochs=1,
        )  # fmt: skip
        sampler = Sampler(
            num_samples=len(dataset), batch_size=batch_size, leaf_samples=job.leaf_samples, seed=0, shuffle=False,
            drop_last=drop_last,
        )  # fmt: skip
        plans = [sampler.plan(step) for step in range(sampler.total_steps(1))]
        leaves = [plan.leaf_indices(leaf).tolist() for plan in plans for leaf in range(plan.num_leaves)]
        batches = [batch.tolist() for (batch,) in DataLoader(numbers(count), batch_size=microbatch, drop_last=True)]
        assert leaves == batches
        assert len(plans) == -(-len(batches) // accumulated)


def test_what_cannot_be_cut_is_refused_and_what_needs_no_cut_is_not() -> None:
    with pytest.raises(JobError, match="drop_last leaves nothing to train on: 3 samples, 4 a batch; leave it out"):
        of_whole_microbatches(numbers(3), 4, 8, option="drop_last")
    with pytest.raises(JobError, match=r"drops the last 2 samples of an epoch.* make it a stream of 12 samples"):
        of_whole_microbatches(Counted(14), 4, 8, option="drop_last")
    for count, dropped in ((12, False), (16, False), (17, True)):
        stream = Counted(count)
        assert of_whole_microbatches(stream, 4, 8, option="drop_last") == (stream, dropped)
