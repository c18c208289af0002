"""The single-process reference loop that every run is compared with, to the last bit: the same leaves, the same tree.

Written from the definition (docs/architecture.md), with tensors of its own and none of the engine, reducer or flat
layout: leaf gradients by ``backward``, their sum by recursion over the tree, the job's optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tests.support.streams import in_order
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from w5xde_async.job import Job, build_model, step_function
from w5xde_async.params.flat import named_digest
from w5xde_async.plan.batching import BatchPlan
from w5xde_async.plan.sampler import Sampler, seed_for
from w5xde_async.randomness import random_state, seed_all

Sums = dict[str, Tensor | None]


def tree_sum(parts: list[Any], add: Callable[[Any, Any], Any]) -> Any:
    """sum(left half) + sum(right half) over halves of 2^k; a half that is not there contributes nothing."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    return add(tree_sum(parts[:half], add), tree_sum(parts[half:], add))


def _nothing(step: int, model: nn.Module) -> None:
    pass


def _add(left: Sums, right: Sums) -> Sums:
    def one(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None or b is None:
            return b if a is None else a
        return torch.maximum(a, b) if a.dtype == torch.int64 else a + b

    return {name: one(left[name], right[name]) for name in left}


def _add_changes(left: Sums, right: Sums) -> Sums:
    """The same for buffers, where NaN stands for an element that nobody changed."""
    total = _add(left, right)
    for name, a in left.items():
        b, both = right[name], total[name]
        if a is not None and b is not None and both is not None and both.dtype.is_floating_point:
            total[name] = torch.where(a.isnan(), b, torch.where(b.isnan(), a, both))
    return total


def train(
    job: Job,
    steps: int | None = None,
    plan: BatchPlan | None = None,
    after: Callable[[int, nn.Module], None] = _nothing,
) -> tuple[nn.Module, list[float]]:
    """Train in one process, one thread's order; returns the model and each step's loss.

    ``plan``: of a batch that grows. ``after``: told the steps done and the model, but of skipped steps.
    """
    with random_state():
        return _train(job, steps or job.max_steps or 0, plan, after)


def _fetch(job: Job, indices: list[int]) -> Any:
    return (job.collate or default_collate)([job.dataset[i] for i in indices])


def _train(
    job: Job, steps: int, batches: BatchPlan | None, after: Callable[[int, nn.Module], None]
) -> tuple[nn.Module, list[float]]:
    seed_all(job.seed)
    model = job.model().train() if not isinstance(job.model, nn.Module) else build_model(job)
    seed_all(seed_for("update", job.seed, "begin"))
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    step_of = step_function(job)
    sampler = Sampler(
        num_samples=job.num_samples or 1 << 40, batch_size=job.batch_size, leaf_samples=job.leaf_samples,
        seed=job.seed, shuffle=job.shuffle, drop_last=job.drop_last, stream=job.streamed,
    )  # fmt: skip
    persistent = set(model.state_dict())
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    homes = {
        name: [(module, leaf) for module in model.modules() for leaf, other in module._buffers.items() if other is b]
        for name, b in buffers.items()
    }  # where forward may put another tensor
    parameters = dict(model.named_parameters())
    scale, losses = 1.0, []
    if job.precision == "fp16":  # of the mean, as a plain loop's, where losses are summed
        scale = 65536.0 / 2 ** math.ceil(math.log2(job.batch_size))
    random_data, dataset = _draws(job), job.dataset
    if job.streamed:  # its indices are places in all epochs, one behind the other
        dataset = in_order(job, 1)
        dataset = in_order(job, 1 + int(sampler.plan(steps - 1).indices[-1]) // len(dataset))
    for step in range(steps):
        plan = sampler.plan(step) if batches is None else batches.plan(step)
        start = {name: b.clone() for name, b in buffers.items()}
        sums: list[Sums] = []
        changes: list[Sums] = []
        leaf_losses: list[tuple[int, float]] = []
        for leaf in range(plan.num_leaves):
            indices = plan.leaf_indices(leaf).tolist()
            if random_data:
                seed_all(seed_for("data", job.seed, step, leaf))
            whole = type(job.dataset) is TensorDataset and job.collate is None  # its rows as default_collate makes them
            samples = indices if whole else [dataset[i] for i in indices]
            _put_back(buffers, homes, start)
            for parameter in parameters.values():
                parameter.grad = None
            seed_all(seed_for(job.seed, step, leaf))
            total, rows = 0.0, dict[str, Tensor | None]()
            for at in range(0, len(indices), job.microbatch_samples):
                micro = samples[at : at + job.microbatch_samples]
                if whole:
                    batch = [tensor[torch.tensor(micro)] for tensor in job.dataset.tensors]
                else:
                    batch = (job.collate or default_collate)(micro)
                dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.precision)
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    loss, _ = step_of(model, batch)
                (loss.float() * (len(micro) * scale)).backward()
                total += float(loss.detach()) * len(micro)
                for name, parameter in parameters.items():
                    if parameter.grad is not None and parameter.grad.is_sparse:  # as the dense one: each by itself
                        known, one = rows.get(name), _dense(parameter.grad)
                        rows[name], parameter.grad = one if known is None else known + one, None
            leaf_losses.append((len(indices), total / len(indices)))
            part: Sums = {name: None if p.grad is None else p.grad.float().clone() for name, p in parameters.items()}
            part |= rows
            sums.append(part)
            left_behind = {name: module._buffers[leaf] for name, [(module, leaf), *_] in homes.items()}
            changes.append({name: _change(left_behind[name], start[name], len(indices)) for name in buffers})
        root, changed = tree_sum(sums, _add), tree_sum(changes, _add_changes)
        losses.append(sum(n * value for n, value in leaf_losses) / plan.num_samples)
        gradients = {
            name: None if root[name] is None else root[name] / (plan.num_samples * scale) for name in parameters
        }
        if not all(g is None or bool(g.isfinite().all()) for g in gradients.values()):
            if job.precision == "fp16":
                scale = scale / 2
            _put_back(buffers, homes, start)
            continue
        _put_back(buffers, homes, start)
        for name, b in buffers.items():
            result = changed[name]
            if result is not None:
                b.copy_(_merged(b, result, plan.num_samples))
        for name, parameter in parameters.items():
            gradient = gradients[name]
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        if job.gradient_clip_val is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], job.gradient_clip_val)
        rates = [group["lr"] for group in optimizer.param_groups]
        if batches is not None:
            for group in optimizer.param_groups:
                group["lr"] *= batches.rate_factor(step)
        seed_all(seed_for("update", job.seed, step))
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if scheduler is not None:
            scheduler.step()
        for name, b in buffers.items():  # what a hook of the optimizer has assigned is the buffer's value
            for module, leaf in homes[name]:
                if module._buffers[leaf] is not b:
                    b.copy_(module._buffers[leaf])
                    module._buffers[leaf] = b
        after(step + 1, model)
    return model, losses


def _dense(gradient: Tensor) -> Tensor:
    """A sparse gradient as the tree sums it: rows first; what it does not name adds nothing."""
    return torch.full(gradient.shape, -0.0) + gradient.coalesce().float()


def _put_back(buffers: dict[str, Tensor], homes: dict[str, list[Any]], start: dict[str, Tensor]) -> None:
    """Every buffer is the module's own tensor again, with the values of the step's start."""
    with torch.no_grad():
        for name, b in buffers.items():
            b.detach_().copy_(start[name])
            for module, leaf in homes[name]:
                module._buffers[leaf] = b


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))


@torch.no_grad()
def _change(value: Tensor, start: Tensor, samples: int) -> Tensor | None:
    """What a leaf makes of a buffer; None where nobody changed it: then it contributes nothing."""
    if bool(_same(value, start).all()):
        return None
    if not value.dtype.is_floating_point:
        return value.to(torch.int64).clone()
    exact = torch.float64 if value.dtype == torch.float64 else torch.float32
    difference = (value.to(exact) - start.to(exact)).float() * samples
    # Of what was not finite the new values are averaged; NaN stands for those that nobody changed.
    begun = torch.where(_same(value, start), torch.nan, value.float() * samples)
    return torch.where(start.isfinite(), difference, begun)


@torch.no_grad()
def _merged(before: Tensor, result: Tensor, samples: int) -> Tensor:
    """``result`` is a sum of changes, or a maximum."""
    if not before.dtype.is_floating_point:
        return result
    exact = torch.float64 if before.dtype == torch.float64 else torch.float32
    base = torch.where(before.isfinite(), before, torch.zeros_like(before)).to(exact)
    value = (base + result.to(exact) / samples).to(before.dtype)
    unchanged = (result == 0) & before.isfinite()
    return torch.where(unchanged | ~value.isfinite(), before, value)


def _draws(job: Job) -> bool:
    kept = torch.default_generator.get_state()
    drawn = _draws_unlocked(job)
    torch.default_generator.set_state(kept)
    return drawn


def _draws_unlocked(job: Job) -> bool:
    before = torch.default_generator.get_state()
    if job.streamed:
        return False  # those of the tests do not
    for index in range(min(len(job.dataset), 64)):
        job.dataset[index]
    return not torch.equal(before, torch.default_generator.get_state())


def digest(job: Job, steps: int | None = None) -> str:
    """The digest of the reference's final parameters and buffers."""
    return named_digest(train(job, steps)[0])
