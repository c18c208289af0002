"""How many samples a microbatch has where the job does not say: as follows from its model.

A leaf is a forward and a backward pass of its own, and what these cost beside their arithmetic (a call for each
operator, a sum, a share of a lease) is paid once a leaf. So a step is cut into as many leaves as have enough to
compute: two at least, with which two workers can share it, and eight at most. A step that is over sooner than a second
worker could be told of its half is one leaf; so is one that does little with many parameters (a large embedding, an
expert for each sample): every leaf has a gradient of them all, which is cleared, written, added and sent.
The arithmetic is counted by the shapes of operators, on tensors without memory: the same on every machine.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import TensorDataset

from w5xde_async.compute.batch import map_tensors
from w5xde_async.compute.flops import count_step
from w5xde_async.job import (
    Job,
    build_model,
    collated,
    copied_model,
    first_samples,
    may_change_samples,
    replica_of,
    step_function,
)
from w5xde_async.randomness import random_state, seed_all
from w5xde_async.users_code import users_code

#: Operations that are worth a leaf: 20 to 60 ms on a core. A leaf of a small transformer costs 5 ms beside them.
WORTH_FLOPS = 2 * 10**9
#: A step of fewer operations takes a core less than a millisecond. To share it with a second worker costs more.
WORTH_SHARING_FLOPS = 10**7
#: Operations for each parameter of which a leaf has at least so many: as of a dense layer that 30 rows go through. With
#: fewer its gradient takes longer than its arithmetic.
WORTH_FLOPS_A_PARAMETER = 30 * 6
_FEWEST, _MOST = 2, 8
_PROBED = 2  # samples: batch norm refuses one
_TRIED_PARAMETERS = 20_000_000  # of a model whose step is run in earnest where it must be, for two samples


class Sized(NamedTuple):
    """A job with its ``microbatch_size``; where that had to be chosen, by what, in words, and the operations of a step
    (0: not counted)."""

    job: Job
    by: str = ""
    step_flops: int = 0


def with_leaf_size(job: Job, model: nn.Module, *, grows: bool = False) -> Sized:
    """Choose the size of a microbatch where the job leaves it open.

    ``model``: the job's, on any device; it is not changed. The result is the same without memory (on ``meta``), for
    which a small model is made where its values are needed. ``grows``: the batch will, by what the halves of a step
    differ: it is two leaves at least, all of one size, where there is such a size.
    """
    if job.microbatch_size is not None:
        return Sized(job)
    counted, step, accumulated = _counted(job, model), 0, job.accumulate_grad_batches
    if counted is None:
        leaves, reason = _MOST, "operations of the model could not be counted"
    else:
        step = counted * job.batch_size // _PROBED
        leaves = min(_MOST, max(_FEWEST, step // WORTH_FLOPS)) if step >= WORTH_SHARING_FLOPS else 1
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        leaves = min(leaves, max(1, step // max(1, WORTH_FLOPS_A_PARAMETER * trained)))
        reason = f"a step is {step / 1e9:.3g} GFLOP"
    if grows and leaves < _FEWEST:
        leaves, reason = _FEWEST, f"{reason}, and a batch grows by its halves"
    size = min(-(-job.batch_size // (leaves * accumulated)), job.batch_size // accumulated)
    if grows:
        size = next((whole for whole in range(size, 0, -1) if not job.batch_size % (whole * accumulated)), size)
    return Sized(replace(job, microbatch_size=size), reason, step)


def _counted(job: Job, model: nn.Module) -> int | None:
    """Of ``_PROBED`` samples; None where the step runs neither on tensors without memory nor, for a small model, on a
    copy with its values (a step that looks at these does there), and where what it does there cannot be counted."""
    with suppress(Exception), users_code(), random_state():
        batch = _probe(job)
        with suppress(Exception):
            copied = copied_model(model, _without_memory(model))
            return count_step(lambda: step_function(job)(copied, map_tensors(batch, _emptied)))
        if sum(parameter.numel() for parameter in model.parameters()) <= _TRIED_PARAMETERS:
            for kept in (saved_tensors_hooks(_nothing, _gone), nullcontext()):  # a step may go back within itself
                with suppress(Exception), kept:
                    seed_all(job.seed)
                    return count_step(lambda: step_function(job)(_with_values(job, model), batch))
    return None


def _with_values(job: Job, model: nn.Module) -> nn.Module:
    empty = any(parameter.is_meta for parameter in model.parameters())
    return build_model(job, replica=True) if empty else replica_of(job, model)


def _nothing(saved: Tensor) -> None:
    """What backward would need of it, which need not run: activations of large samples are more than many have."""


def _gone(_: None) -> Tensor:
    raise RuntimeError("it was not kept")


def _probe(job: Job) -> Any:
    """A batch of the dataset's first sample, as often as is needed: reading may be slow, and a second tells no more but
    what all samples have, of which no copies are needed."""
    if type(job.dataset) is TensorDataset and job.collate is None:
        return tuple(torch.cat([tensor[:1]] * _PROBED) for tensor in job.dataset.tensors)
    return collated(job.collate, first_samples(job, 1 + may_change_samples(job.collate)), [0] * _PROBED)


def _without_memory(model: nn.Module) -> dict[int, Any]:
    """Tensors that stand for the model's in a copy of it."""
    stands: dict[int, Any] = {}
    for parameter in model.parameters():
        stands[id(parameter)] = nn.Parameter(_emptied(parameter.detach()), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        stands[id(buffer)] = _emptied(buffer)
    return stands


def _emptied(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")
