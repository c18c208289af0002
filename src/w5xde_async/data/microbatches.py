"""Epochs of whole microbatches: what transformers and Lightning mean by ``drop_last``, while a Job's drops a step."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset, Subset

from w5xde_async.errors import JobError


def of_whole_microbatches(dataset: Any, microbatch: int, batch_size: int, *, option: str) -> tuple[Any, bool]:
    """What to give a Job as ``dataset`` and ``drop_last`` so that of an epoch its short microbatch alone is dropped.

    ``microbatch`` and ``batch_size``: samples of a microbatch and of a step; ``option``: what asked for it, for errors.
    Where whole microbatches are left at an epoch's end they are a step of its own, and the dataset is cut to a Subset:
    then the last samples are of no epoch. Raises JobError where nothing is left, and for a stream that had to be cut.
    """
    if not hasattr(dataset, "__len__"):
        return dataset, False  # it has no epochs
    samples = len(dataset)
    over = samples % microbatch
    if samples == over:
        reason = f"{option} leaves nothing to train on: {samples} samples, {microbatch} a batch"
        raise JobError("dataset", reason, "leave it out")
    if over == 0:
        return dataset, False
    if samples % batch_size == over:  # whole steps are left, and which samples are not depends on the epoch
        return dataset, True
    if isinstance(dataset, IterableDataset):
        reason = f"{option} drops the last {over} samples of an epoch, and a stream's end cannot be cut"
        raise JobError("dataset", reason, f"leave it out, or make it a stream of {samples - over} samples")
    return Subset(dataset, range(samples - over)), False
