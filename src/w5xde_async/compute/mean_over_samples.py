"""Whether a job's loss is the mean over its samples, as steps that are cut into microbatches take it to be.

Leaves are weighted by their samples. What divides by something else (class weights, the tokens that count), by nothing
(``reduction="sum"``), or compares samples with one another gives other gradients in microbatches than in whole batches,
here as in any loop that accumulates them, and every number looks well.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.utils.data import TensorDataset

from w5xde_async.compute.batch import map_tensors
from w5xde_async.job import Job, collated, first_samples, replica_of, step_function
from w5xde_async.plan.sampler import seed_for
from w5xde_async.randomness import has_drawn, random_state, seed_all
from w5xde_async.users_code import users_code

_SAMPLES = (8, 4, 2)  # looked at: as many as are quick
_MOST_FLOPS = 2 * 10**10  # forward passes of all that is looked at, which are less than a step in any case
_MOST_PARAMETERS = 50_000_000  # of a model that is copied
_MOST_READING_S = 0.3
_DRAWS = 8  # of a step that draws
_BY_FAR, _NOTABLE = 6.0, 0.05  # standard errors of such a mean; of the loss: what chance hides is not told
_ROUNDING = 1e-3  # of the loss: float32's is a hundredth of it, and class weights hardly ever so little
_ROUNDED = 4.0  # times that the coarsest number may be rounded: whole and in parts, in the model and in the loss
_NOTHING = 1e-6  # a loss of terms that cancel, as of a student that begins as its teacher, is rounding alone below it
_APART = 0.03  # of a gradient: rounding is a thirtieth of it where a step computes in bf16; less is not told
_APART_ROUNDED = 16.0  # times that the coarsest number may be rounded: in bf16 that is 1/8
_NO_GRADIENT = 1e-5  # as of that student, too: shorter ones may be rounding alone
_AS_FORWARD = 3  # such passes: what it takes to have these
_LAST = 8  # parameters whose gradients are compared: the path to them is short
_MOST_VALUES = 1 << 22  # of these gradients together, of which three are held at once


def what_is_no_mean(job: Job, model: nn.Module, step_flops: int) -> str | None:
    """What to say of a loss that is no mean over samples; None where it is, where a step is one microbatch, and where
    nothing can be said.

    ``model``: the job's, on the CPU; it is copied, not changed. ``step_flops``: of a step, where they were counted, to
    which the step was run. Only then are losses of samples compared: no step is tried before the first one otherwise.
    """
    if job.batch_size <= job.microbatch_samples:
        return None
    told = _compared(job, model, step_flops) if step_flops else None
    told = told or _said(job.loss)
    return told and (
        f"{told}: it is no mean over samples, so that steps of {job.batch_size} samples in microbatches of "
        f"{job.microbatch_samples} train otherwise than whole; microbatch_size={job.batch_size} keeps them whole"
    )


def _said(loss: Any) -> str | None:
    """What a loss of torch's says of itself."""
    if not isinstance(loss, _Loss) or loss.reduction == "none":
        return None
    if loss.reduction == "sum":
        return f"the job's {type(loss).__name__} has reduction='sum'"
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        if loss.weight is not None:
            return f"the job's {type(loss).__name__} divides by the weights of the classes"
        if loss.ignore_index >= 0:
            return f"the job's {type(loss).__name__} leaves out ignore_index={loss.ignore_index}"
    return None


def _compared(job: Job, model: nn.Module, step_flops: int) -> str | None:
    """Where the loss of some samples is not the mean of the losses of their parts; of a step that draws random numbers,
    where the means over many draws differ by far more than chance. Or where its gradient is not that of theirs: where
    every token costs alike, as to a language model that begins, no loss shows it. Nothing where the step raises, or
    that takes long. The model is in evaluation mode: samples do not meet in batch norm there, and nothing is dropped.
    """
    if sum(parameter.numel() for parameter in model.parameters()) > _MOST_PARAMETERS:
        return None
    with suppress(Exception), users_code(), random_state():
        # Forward is a third of a step, and all samples are in two passes: whole, and in parts.
        affordable = 1.5 * _MOST_FLOPS * job.batch_size / step_flops
        most = min(job.batch_size, affordable)
        samples = next((number for number in _SAMPLES if number <= most), 0)
        batch_of = _batches(job, samples) if samples else None
        if batch_of is None:
            return None
        part = 2 if samples == _SAMPLES[0] else 1
        batches = [batch_of(0, samples), *(batch_of(at, at + part) for at in range(0, samples, part))]
        model = replica_of(job, model).eval()
        (whole, mean, size), drew, coarsest = _losses(job, model, batches)
        least, draws = max(_ROUNDING, _ROUNDED * coarsest) * size, ""
        if drew:
            if (1 + _DRAWS) * samples > affordable:
                return None
            drawn = [_losses(job, model, batches, draw)[0] for draw in range(1, _DRAWS + 1)]
            whole, mean, size = (math.fsum(values) / _DRAWS for values in zip(*drawn, strict=True))
            chance = statistics.stdev(one - other for one, other, _ in drawn) / math.sqrt(_DRAWS)
            least, draws = max(_BY_FAR * chance, _NOTABLE * size), f" ({_DRAWS} draws)"
        if not math.isfinite(whole):
            return None
        found, alike = "", abs(whole - mean) <= max(least, _NOTHING)  # a part may have no loss at all, NaN
        if not alike:
            found = f"is {whole:.4g}{draws}, and {mean:.4g} is the mean of those of their parts of {part}"
        elif drew or (1 + _AS_FORWARD) * samples > affordable:
            return None
        elif apart := _apart(job, model, batches, coarsest):
            found = f"has a gradient that is {apart:.0%} off the mean of those of their parts of {part}"
        return found and (
            f"the loss of the first {samples} samples {found} (class weights, ignore_index, reduction='sum', a mean "
            "over tokens, samples compared with one another, padding that the model sees)"
        )
    return None


def _batches(job: Job, count: int) -> Callable[[int, int], Any] | None:
    """What collates some of the first samples; None where reading them takes long."""
    if type(job.dataset) is TensorDataset and job.collate is None:
        tensors, number = job.dataset.tensors, len(job.dataset)
        return lambda begin, end: tuple(tensor[torch.arange(begin, end) % number] for tensor in tensors)
    began = time.monotonic()
    first_samples(job, 1)
    if (time.monotonic() - began) * count > _MOST_READING_S:
        return None
    samples = first_samples(job, count)
    return lambda begin, end: collated(job.collate, samples, range(begin, end))


def _losses(
    job: Job, model: nn.Module, batches: list[Any], draw: int = 0
) -> tuple[tuple[float, float, float], bool, float]:
    """Of the first batch, of the others on average, and the size of either; whether the step draws random numbers; and
    the eps of the coarsest numbers, the model's or the loss's.

    ``draw``: which ones; from 1 on those of ``random`` and numpy too.
    """
    step, device, drew = step_function(job), torch.device("cpu"), False
    found: list[float] = []
    dtypes = {parameter.dtype for parameter in model.parameters()}
    with torch.no_grad():
        for place, batch in enumerate(batches):
            with random_state() as state:
                # Other numbers in each part: else what is drawn for one would be drawn for all.
                seed_all(seed_for("looked at", job.seed, draw, place if draw else 0), python=bool(draw))
                loss: Any = step(model, map_tensors(batch, torch.clone))[0]
                drew = drew or has_drawn(device) or not state.unmoved()
            found.append(float(loss))
            dtypes.add(loss.dtype)
    whole, *parts = found
    size = max(abs(whole), math.fsum(map(abs, parts)) / len(parts))
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    return (whole, math.fsum(parts) / len(parts), size), drew, coarsest


def _apart(job: Job, model: nn.Module, batches: list[Any], coarsest: float) -> float:
    """By how much of its length the first batch's gradient differs from the mean of the others'; 0 where that may be
    rounding (``coarsest``: numbers' eps), or there is none. Of a few parameters: where weights of samples are not
    alike, all tell."""
    compared, step, parts = _compared_parameters(model), step_function(job), len(batches) - 1
    apart: list[Tensor] = []  # the first one's gradient less the mean of those that have come
    size = of_parts = 0.0
    with suppress(Exception), torch.enable_grad():
        for place, batch in enumerate(batches):
            with random_state():
                seed_all(seed_for("looked at", job.seed, 0, 0))
                loss: Any = step(model, map_tensors(batch, torch.clone))[0]
                given = torch.autograd.grad(loss, compared, allow_unused=True)
            pairs = zip(given, compared, strict=True)
            found = [(torch.zeros_like(of) if one is None else one.to_dense()).float() for one, of in pairs]
            if place:
                of_parts += _length(found) / parts
                torch._foreach_sub_(apart, found, alpha=1 / parts)
            else:
                size, apart = _length(found), [one.clone() for one in found]  # a leaf's gradient may be another's too
            del loss, given, pairs, found  # before the next ones are made
        size = max(size, of_parts)
        if size < _NO_GRADIENT:
            return 0.0
        differs = _length(apart) / size
        return differs if differs > max(_APART, _APART_ROUNDED * coarsest) else 0.0
    return 0.0


def _compared_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The last ones that are trained, but for those whose gradients would take much memory, as a vocabulary's."""
    found: list[nn.Parameter] = []
    left = _MOST_VALUES
    for parameter in reversed([parameter for parameter in model.parameters() if parameter.requires_grad]):
        if parameter.numel() <= left and len(found) < _LAST:
            found.append(parameter)
            left -= parameter.numel()
    return found


def _length(tensors: list[Tensor]) -> float:
    return math.hypot(*(float(tensor.norm()) for tensor in tensors))
