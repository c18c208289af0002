"""One replica on one device: block sums equal the naive sum of leaf gradients in tree order, to the last bit."""

from __future__ import annotations

import gc
import math
import os
import random
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.reference import tree_sum
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from w5xde_async.compute import first_gradients
from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import ComputedBlock, Task
from w5xde_async.compute.engine import Engine, LeafError, choose_device
from w5xde_async.job import Job, build_model, step_function
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.plan.sampler import seed_for
from w5xde_async.randomness import random_state, seed_all
from w5xde_async.segments import Opened, Segment, unsupported

LEAF = 4
STEP = 3


class Net(nn.Module):
    """Dropout, batch norm, tied and unused weights, a bfloat16 layer, a parameter that few leaves touch."""

    def __init__(self, narrow: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.again = nn.Linear(8, 16)
        self.again.weight = self.first.weight
        self.unused = nn.Linear(4, 4)
        self.rare = nn.Parameter(torch.ones(40))
        self.empty = nn.Parameter(torch.zeros(0))
        self.narrow = nn.Linear(16, 16).to(torch.bfloat16) if narrow else nn.Identity()
        self.head = nn.Linear(16, 3)
        self.register_buffer("mark", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(F.relu(self.first(x) + self.again(x))), 0.3)
        if isinstance(self.narrow, nn.Linear):
            h = self.narrow(h.bfloat16()).float()
        if float(x[0, 0]) > 0:
            h = h * self.rare[:16]
            self.mark += int(x[0, 1] * 100)
        out: Tensor = self.head(h) + self.empty.sum()
        return out


def plain_net() -> nn.Module:
    return Net(narrow=False)


def job(**changes: Any) -> Job:
    data = TensorDataset(torch.zeros(64, 8), torch.zeros(64, dtype=torch.int64))
    defaults: dict[str, Any] = {
        "model": Net, "dataset": data, "loss": nn.CrossEntropyLoss(), "batch_size": 64, "microbatch_size": LEAF,
        "max_steps": 5, "seed": 2, "optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    }  # fmt: skip
    return Job(**{**defaults, **changes})


def leaves(samples: tuple[int, ...], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 8, generator=generator), torch.randint(3, (n,), generator=generator)) for n in samples
    ]  # fmt: skip


def task(batches: list[Any], samples: tuple[int, ...], *, packed: bool = True, **changes: Any) -> Task:
    structure = flatten(batches[0])[0]
    flat = [flatten(batch)[1] for batch in batches]
    if packed:
        tensors = [torch.cat(column) for column in zip(*flat, strict=True)]
    else:
        tensors = [tensor for leaf in flat for tensor in leaf]
    fields = {"step": STEP, "start": 0, "samples": samples, "loss_scale": 1.0, **changes}
    return Task(structure=structure, packed=packed, tensors=tensors, **fields)


class Run:
    """One engine's blocks: what was emitted, in order, and what came with it."""

    def __init__(self, job: Job, *, bucket_bytes: int = 512, **kwargs: Any) -> None:
        self.engine = Engine(job, bucket_bytes=bucket_bytes, **kwargs)
        self.emitted: list[int] = []
        self.copies: dict[int, Tensor] = {}

    def compute(self, wanted: Task) -> ComputedBlock:
        self.emitted, self.copies = [], {}

        def emit(bucket: int, vector: ResultVector) -> None:
            self.emitted.append(bucket)
            self.copies[bucket] = vector.buckets[bucket].clone()

        outcome = self.engine.compute(wanted, emit)
        for vector in outcome.vectors:
            self.engine.release(vector)
        return outcome

    def sums(self, outcome: ComputedBlock) -> dict[str, Tensor | None]:
        """What was sent, by name; None for what nobody touched."""
        layout, found = self.engine.layout, ResultVector(self.engine.layout)
        found.reset()
        for bucket, piece in self.copies.items():
            found.buckets[bucket].copy_(piece)
        result: dict[str, Tensor | None] = {}
        for index, entry in enumerate(layout.entries):
            if entry.role != "frozen":
                flat = found.group(entry.group)[entry.offset : entry.offset + entry.numel]
                result[entry.name] = None if index in outcome.untouched else flat.view(entry.shape)
        return result


def naive(job: Job, batches: list[Any], samples: tuple[int, ...], start: int = 0, scale: float = 1.0) -> dict[str, Any]:
    """Every leaf by itself on a plain model, summed by recursion."""
    model, step = build_model(job), step_function(job)
    buffers = dict(model.named_buffers())
    origin = {name: buffer.clone() for name, buffer in buffers.items()}

    def leaf(number: int) -> dict[str, Tensor | None]:
        for parameter in model.parameters():
            parameter.grad = None
        for name, buffer in buffers.items():
            buffer.copy_(origin[name])
        seed_all(seed_for(job.seed, STEP, start + number))
        count, batch = samples[number], batches[number]
        for at in range(0, count, job.microbatch_samples):
            micro = tuple(tensor[at : at + job.microbatch_samples].clone() for tensor in batch)
            loss, _ = step(model, micro)
            (loss * (len(micro[0]) * scale)).backward()  # type: ignore[no-untyped-call]
        part = {n: None if p.grad is None else p.grad.float().clone() for n, p in model.named_parameters()}
        for name, buffer in buffers.items():
            if torch.equal(buffer, origin[name]):
                part[name] = None
            elif buffer.dtype.is_floating_point:
                part[name] = (buffer - origin[name]) * count
            else:
                part[name] = buffer.clone()
        return part

    def add(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        def one(a: Tensor | None, b: Tensor | None) -> Tensor | None:
            if a is None or b is None:
                return b if a is None else a
            return torch.maximum(a, b) if a.dtype == torch.int64 else a + b

        return {name: one(left[name], right[name]) for name in left}

    with random_state(), torch.no_grad():
        with torch.enable_grad():
            parts = [leaf(number) for number in range(len(samples))]
        result: dict[str, Any] = tree_sum(parts, add)
        return result


def same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, value in found.items():
        wanted = expected[name]
        if wanted is None:
            neutral = torch.iinfo(torch.int64).min if value is not None and value.dtype == torch.int64 else 0
            assert value is None or bool((value == neutral).all()), name
        else:
            assert value is not None, name
            assert value.numpy().tobytes() == wanted.contiguous().numpy().tobytes(), name


@pytest.fixture(params=[first_gradients._LARGE, 0, 20], ids=["added", "copied", "some copied"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of how many values a parameter is more than, whose first gradient is copied to where it belongs."""
    monkeypatch.setattr(first_gradients, "_LARGE", request.param)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("num_leaves", range(1, 10))
@pytest.mark.parametrize("model", [Net, plain_net])
@pytest.mark.parametrize("bucket_bytes", [512, 4 << 20])
def test_block_sums_are_the_naive_sums(bucket_bytes: int, model: Any, num_leaves: int, packed: bool) -> None:
    run = Run(job(model=model), bucket_bytes=bucket_bytes)
    for first, start in ((True, 0), (False, 16)):  # the second block overlaps sending with backward
        samples = (LEAF,) * (num_leaves - 1) + (3,)
        batches = leaves(samples, seed=num_leaves)
        outcome = run.compute(task(batches, samples, packed=packed, start=start))
        same(run.sums(outcome), naive(job(model=model), batches, samples, start))
        assert len(outcome.losses) == num_leaves
        assert sorted([*run.emitted, *outcome.absent]) == list(range(len(run.engine.layout.result_buckets))), first


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("num_leaves", [1, 2, 5])
@pytest.mark.parametrize("model", [Net, plain_net])
def test_accumulated_leaves(model: Any, num_leaves: int) -> None:
    wanted = job(model=model, accumulate_grad_batches=3)
    samples = (12,) * (num_leaves - 1) + (7,)
    batches = leaves(samples)
    run = Run(wanted)
    for _ in range(2):
        outcome = run.compute(task(batches, samples))
        same(run.sums(outcome), naive(wanted, batches, samples))
    assert outcome.splits == 0


def test_the_loss_scale_multiplies_gradients_but_not_losses() -> None:
    run, batches = Run(job(model=plain_net)), leaves((4, 4))
    plain = run.compute(task(batches, (4, 4)))
    scaled = run.compute(task(batches, (4, 4), loss_scale=1024.0))
    same(run.sums(scaled), naive(job(model=plain_net), batches, (4, 4), scale=1024.0))
    assert plain.losses == scaled.losses


@pytest.mark.usefixtures("large")
def test_untouched_and_absent_are_named() -> None:
    run = Run(job())
    batches = leaves((4, 4))
    for x, _ in batches:
        x[0, 0] = -1.0  # nobody uses ``rare``
    outcome = run.compute(task(batches, (4, 4)))
    names = {run.engine.layout.entries[index].name for index in outcome.untouched}
    assert names == {"unused.weight", "unused.bias", "rare"}
    marks = [b.index for b in run.engine.layout.result_buckets if run.engine.layout.groups[b.group].role == "max"]
    assert not set(outcome.absent) & set(marks)  # batch norm counts in the same bucket as ``mark``
    batches[1][0][0, 0] = 1.0
    outcome = run.compute(task(batches, (4, 4)))
    assert "rare" not in {run.engine.layout.entries[index].name for index in outcome.untouched}
    same(run.sums(outcome), naive(job(), batches, (4, 4)))


class Watched(nn.Module):
    """Notes when backward comes by its first layer, which is the last to get its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.at_start: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.layers[0](x)
        if first.requires_grad:
            first.register_hook(self.note)
        for layer in list(self.layers)[1:]:
            first = F.relu(layer(first))
        return first[:, :3]

    def note(self, _: Tensor) -> None:
        self.at_start.append(len(RUNNING[0].emitted))


RUNNING: list[Run] = []


@pytest.mark.usefixtures("large")
def test_buckets_leave_while_backward_goes_on() -> None:
    run = Run(job(model=Watched))
    RUNNING[:] = [run]
    module = run.engine.model
    assert isinstance(module, Watched)
    batches = leaves((4, 4))
    outcome = run.compute(task(batches, (4, 4)))
    assert max(module.at_start) == 0  # the first block learns whether each gradient comes once
    module.at_start.clear()
    outcome = run.compute(task(batches, (4, 4)))
    assert module.at_start[0] == 0  # not in the first leaf
    assert module.at_start[1] >= 3  # but in the last
    assert len(run.emitted) == len(set(run.emitted)) == len(run.engine.layout.result_buckets)
    same(run.sums(outcome), naive(job(model=Watched), batches, (4, 4)))


class Shared(nn.Module):
    """One layer in two segments of a reentrant checkpoint: its gradient comes twice a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.twice = True

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.others[0](x)
        for _ in range(2):
            h = checkpoint(self.layer, h, use_reentrant=True) if self.twice else self.layer(h)
        return h[:, :3]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("bucket_bytes", [512, 4 << 20])
def test_gradients_that_come_twice_are_summed_before_they_leave(bucket_bytes: int) -> None:
    run, batches = Run(job(model=Shared), bucket_bytes=bucket_bytes), leaves((4, 4))
    for _ in range(3):
        outcome = run.compute(task(batches, (4, 4)))
        same(run.sums(outcome), naive(job(model=Shared), batches, (4, 4)))


@pytest.mark.usefixtures("large")
def test_gradients_of_one_bucket_that_come_twice_all_of_a_sudden_are_summed() -> None:
    run, batches = Run(job(model=Shared), bucket_bytes=4 << 20), leaves((4, 4))
    module = run.engine.model
    assert isinstance(module, Shared)
    module.twice = False
    run.compute(task(batches, (4, 4)))
    module.twice = True
    outcome = run.compute(task(batches, (4, 4)))  # nothing of it leaves early
    same(run.sums(outcome), naive(job(model=Shared), batches, (4, 4)))


def test_after_its_first_block_a_small_model_has_no_hooks_left() -> None:
    """They are called in every backward pass, which for a small model takes a tenth of a leaf."""
    run, batches = Run(job(model=Shared), bucket_bytes=4 << 20), leaves((4, 4))
    run.compute(task(batches, (4, 4)))
    parameters: list[Any] = list(run.engine.model.parameters())
    used = [parameter for parameter in parameters if parameter._backward_hooks is None]
    assert len(used) == 4  # of the six, two layers are in use
    assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters)


@pytest.mark.usefixtures("large")
def test_gradients_that_come_twice_all_of_a_sudden_are_an_error_with_advice() -> None:
    run, batches = Run(job(model=Shared)), leaves((4, 4))
    module = run.engine.model
    assert isinstance(module, Shared)
    module.twice = False
    run.compute(task(batches, (4, 4)))
    module.twice = True
    with pytest.raises(LeafError, match="use_reentrant=False") as caught:
        run.compute(task(batches[:1], (4,)))  # buckets leave already
    assert "'layer." in caught.value.error
    outcome = run.compute(task(batches, (4, 4)))  # seen in a leaf before any leaves: computed again, otherwise
    same(run.sums(outcome), naive(job(model=Shared), batches, (4, 4)))


# -- lack of memory


class Hungry(nn.Module):
    """Runs out of memory for more than ``most`` rows; ``late``: only in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.most = 2
        self.late = False
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        h: Tensor = self.layer(x)
        if len(x) > self.most:
            if not self.late:
                raise torch.OutOfMemoryError("out of memory")
            h.register_hook(self.fail)
        return h[:, :3]

    def fail(self, _: Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_out_of_memory_is_tried_again_in_smaller_pieces(most: int, late: bool) -> None:
    run = Run(job(model=Hungry))
    module = run.engine.model
    assert isinstance(module, Hungry)
    module.most, module.late = most, late
    samples = (4, 4, 1)  # a short last leaf says nothing of the others
    batches = leaves(samples)
    outcome = run.compute(task(batches, samples))
    assert outcome.splits == {1: 2, 2: 1, 3: 1}[most]
    same(run.sums(outcome), naive_pieces(batches, 4 >> outcome.splits))
    again = run.compute(task(batches, samples))  # what was learnt stays
    assert (again.splits, again.losses) == (outcome.splits, outcome.losses)
    assert run.engine._pool.num_out == 0


def naive_pieces(batches: list[Any], size: int) -> dict[str, Any]:
    wanted = job(model=Hungry, microbatch_size=size, accumulate_grad_batches=4 // size)
    model, step = build_model(wanted), step_function(wanted)
    assert isinstance(model, Hungry)
    model.most = 100
    parts = []
    for x, y in batches:
        for parameter in model.parameters():
            parameter.grad = None
        for at in range(0, len(x), size):
            loss, _ = step(model, (x[at : at + size].clone(), y[at : at + size].clone()))
            (loss * len(x[at : at + size])).backward()  # type: ignore[no-untyped-call]
        parts.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    result: dict[str, Any] = tree_sum(parts, lambda a, b: {name: a[name] + b[name] for name in a})
    return result


def test_a_sample_that_never_fits_is_the_leafs_error() -> None:
    run = Run(job(model=Hungry))
    module = run.engine.model
    assert isinstance(module, Hungry)
    module.most = 0
    with pytest.raises(LeafError, match="OutOfMemoryError: out of memory") as caught:
        run.compute(task(leaves((4, 4)), (4, 4), start=8))
    assert (caught.value.leaf, module.rows) == (8, [4, 2, 1])
    assert run.engine._pool.num_out == 0


# -- the job's own errors


def failing(module: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    if bool((x == 7).any()):
        raise ZeroDivisionError("a bad row")
    return F.cross_entropy(module(x), y)


@pytest.mark.usefixtures("large")
def test_an_error_names_its_leaf_and_where_it_was_raised() -> None:
    run = Run(job(loss=None, step=failing, model=plain_net))
    batches = leaves((4, 4, 4, 4))
    batches[2][0][1, 1] = 7
    for _ in range(2):
        with pytest.raises(LeafError, match="leaf 10: ZeroDivisionError: a bad row") as caught:
            run.compute(task(batches, (4, 4, 4, 4), start=8))
        assert caught.value.leaf == 10
        assert 'raise ZeroDivisionError("a bad row")' in caught.value.traceback
        assert run.engine._pool.num_out == 0
    good = leaves((4, 4))
    outcome = run.compute(task(good, (4, 4)))  # nothing of the failed block is left
    same(run.sums(outcome), naive(job(model=plain_net), good, (4, 4)))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            lambda module, batch: module(batch[0]),
            r"a tensor of shape \[4, 3\] as loss, .*: take its mean, or give the loss",
        ),
        (lambda module, batch: 3.0, r"float as loss, .*: a number has no gradient; return the tensor, without .item"),
        (lambda module, batch: np.float32(3.0), "float32 as loss, .*: a number has no gradient"),
        (lambda module, batch: {"loss": module(batch[0]).sum()}, r"dict as loss, .*: return the tensor that"),
        (lambda module, batch: [module(batch[0]).sum()] * 2, "list as loss, .*: return one tensor, such as their sum"),
        (lambda module, batch: None, "NoneType as loss, not a tensor with one element: it has no return"),
        (lambda module, batch: torch.ones(()), "grad|depend"),
        (
            lambda module, batch: module(batch[0]).sum() * 1j,
            r"a tensor of shape \[\] and torch.complex64 as loss, .*: take its real part",
        ),
        (
            lambda module, batch: (module(batch[0]).sum(), {1: 2.0}),
            "name of metric 1 is of type int; it must be a str",
        ),
        (lambda module, batch: (module(batch[0]).sum(), {str(n): 0.0 for n in range(65)}), "at most 64 metrics"),
        (lambda module, batch: (module(batch[0]).sum(), {"name": "text"}), "metric 'name' is str; it must be a number"),
        (lambda module, batch: (module(batch[0]).sum(), {"name": "0.5"}), "metric 'name' is str; it must be a number"),
        (
            lambda module, batch: (module(batch[0]).sum(), {"rows": torch.ones(3)}),
            r"metric 'rows' is a tensor of shape \[3\]; it must be a number or a tensor with one element",
        ),
        (lambda module, batch: (module(batch[0]).sum(), {"none": None}), "metric 'none' is NoneType"),
        (lambda module, batch: (module(batch[0]).sum(), 0.5), r"not \(loss, float\)"),
        (lambda module, batch: (module(batch[0]).sum(), 0.5, 1.0), "the step returned a tuple of 3"),
    ],
)
def test_what_a_step_may_not_return(step: Any, words: str) -> None:
    run = Run(job(loss=None, step=step, model=plain_net))
    with pytest.raises(LeafError, match=words):
        run.compute(task(leaves((4,)), (4,)))


def test_batch_norm_over_one_sample_says_what_to_set() -> None:
    run = Run(job())
    with pytest.raises(LeafError, match=r"1 value per channel.*; leaf 5 has 1 sample: leave none alone"):
        run.compute(task(leaves((4, 1)), (4, 1), start=4))


def cleared(part: str, to_none: bool, late: bool, module: nn.Module, batch: Any) -> Tensor:
    out = module(batch[0]) if late else None
    module.get_submodule(part).zero_grad(set_to_none=to_none)
    return F.cross_entropy(module(batch[0]) if out is None else out, batch[1])


def backward_twice(module: nn.Module, batch: Any) -> Tensor:
    loss = F.cross_entropy(module(batch[0]), batch[1])
    torch.autograd.backward(loss, retain_graph=True)
    return loss


def clipping(module: nn.Module, batch: Any) -> Tensor:
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    return F.cross_entropy(module(batch[0]), batch[1])


CLEARING = [partial(cleared, "", to_none, late) for to_none in (True, False) for late in (True, False)]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("step", [*CLEARING, backward_twice, clipping])
@pytest.mark.parametrize("model", [Net, plain_net, lambda: nn.Linear(8, 3)])
def test_a_step_that_changes_gradients_is_told_so(model: Any, step: Any, overlapping: bool) -> None:
    """Whatever it does to them: zeros in place would lose what the leaf before has left there."""
    told = []

    def chosen(module: nn.Module, batch: Any) -> Any:
        return (step if told else loss_of)(module, batch)

    run = Run(job(loss=None, step=chosen, model=model))
    if overlapping:
        run.compute(task(leaves((4, 4)), (4, 4)))
    told.append(1)
    with pytest.raises(LeafError, match="leave zero_grad and the optimizer out"):
        run.compute(task(leaves((4, 4)), (4, 4)))
    assert not run.emitted


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("part", ["head", "narrow", "norm"])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_that_clears_the_gradients_of_one_layer_is_told_so(part: str, to_none: bool) -> None:
    run = Run(job(loss=None, step=partial(cleared, part, to_none, True)))
    with pytest.raises(LeafError, match="leave zero_grad and the optimizer out"):
        run.compute(task(leaves((4, 4)), (4, 4)))


def loss_of(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


# -- what a closed engine leaves behind


def tensor_bytes() -> int:
    """Of all memory that tensors hold."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.layout is torch.strided:  # other tests' ones have none
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = F.pad(x, (0, 248))
        for layer in self.layers:
            h = layer(h)
        return h[:, :3]


@pytest.mark.usefixtures("large")
@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [1 << 18, 4 << 20])
@pytest.mark.parametrize("blocks", [0, 3])
def test_a_closed_engine_is_freed_to_the_last_byte(bucket_bytes: int, blocks: int) -> None:
    wanted, given = job(model=Sized), task(leaves((4, 4)), (4, 4))
    before = tensor_bytes()
    engine = Engine(wanted, bucket_bytes=bucket_bytes)
    for _ in range(blocks):
        engine.release(engine.compute(given, lambda *_: None).vectors[0])
    gone, model = weakref.ref(engine), weakref.ref(engine.model)
    assert tensor_bytes() > before + (1 << 20)
    engine.close()
    del engine
    gc.collect()
    assert (gone(), model()) == (None, None)
    assert tensor_bytes() <= before


# -- copies that take their time


class SlowCopies:
    """Buckets that leave wait for ``wait``, as those on a device do for their copies."""

    def __init__(self, run: Run) -> None:
        self._waiting: list[Any] = []
        transfer: Any = run.engine._transfer
        transfer.send, transfer.wait = self._send, self._wait

    def _send(self, vector: ResultVector, host: ResultVector, bucket: int, emit: Any) -> None:
        self._waiting.append(partial(emit, bucket, host))

    def _wait(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("error", [ZeroDivisionError(), torch.OutOfMemoryError("out of memory"), KeyboardInterrupt()])
def test_however_a_block_ends_nothing_is_emitted_after_it(error: BaseException) -> None:
    run = Run(job(model=Watched))
    RUNNING[:] = [run]
    module = run.engine.model
    assert isinstance(module, Watched)
    given = task(leaves((4, 4)), (4, 4))
    run.compute(given)
    copies, calls = SlowCopies(run), []

    def fail(_: Tensor) -> None:
        calls.append(1)
        if len(calls) >= 2:  # in the last leaf, and whenever it is tried again
            raise error

    module.note = fail  # type: ignore[method-assign]
    with pytest.raises((KeyboardInterrupt, LeafError)):
        run.compute(given)
    assert len(run.emitted) >= 3
    assert not copies._waiting


# -- metrics and losses


def counting(module: nn.Module, batch: Any) -> Any:
    x, y = batch
    out = module(x)
    return F.cross_entropy(out, y), {"mean": x.mean(), "rows": len(x), "first": x[:1, 0]}


def test_metrics_come_leaf_by_leaf_as_means_over_samples() -> None:
    wanted = job(loss=None, step=counting, model=plain_net, accumulate_grad_batches=2)
    run, batches = Run(wanted), leaves((8, 7))
    outcome = run.compute(task(batches, (8, 7)))
    assert outcome.metric_names == ("mean", "rows", "first")
    means = [outcome.metrics[0], outcome.metrics[3]]
    assert means == pytest.approx([float(x.mean()) for x, _ in batches], rel=1e-5)
    assert [outcome.metrics[1], outcome.metrics[4]] == pytest.approx([4.0, (4 * 4 + 3 * 3) / 7])


def returning(metrics: Iterator[Any], module: nn.Module, batch: Any) -> Any:
    return module(batch[0]).sum(), next(metrics)


def test_metrics_that_come_and_go_are_means_over_those_that_returned_them() -> None:
    """The second leaf is of two microbatches, of 4 and 3 samples."""
    supply: Iterator[Any] = iter([{"a": 1.0}, None, {"b": 2.0, "a": 3.0}, {"b": 9.0}])
    step = partial(returning, supply)
    run = Run(job(loss=None, step=step, model=plain_net, accumulate_grad_batches=2))
    outcome = run.compute(task(leaves((8, 7)), (8, 7)))
    assert outcome.metric_names == ("a", "b")
    assert outcome.metrics == pytest.approx([1.0, math.nan, 3.0, (4 * 2 + 3 * 9) / 7], nan_ok=True)


def test_names_of_metrics_are_bounded_whatever_the_steps_return(caplog: pytest.LogCaptureFixture) -> None:
    step = partial(returning, ({f"at {number}": 1.0} for number in range(99)))
    run = Run(job(loss=None, step=step, model=plain_net))
    outcome = run.compute(task(leaves((4,) * 66), (4,) * 66))
    assert outcome.metric_names == tuple(f"at {n}" for n in range(64))
    assert [record.args[0] for record in caplog.records if record.args] == ["at 64"]  # once


def test_a_loss_with_one_element_will_do() -> None:
    run = Run(job(loss=None, step=lambda module, batch: module(batch[0]).sum().double().reshape(1, 1), model=plain_net))
    assert len(run.compute(task(leaves((4,)), (4,))).losses) == 1


# -- random numbers


def drawing(module: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    noise = random.gauss(0, 1) + float(np.random.rand()) + float(torch.rand(()))
    return F.cross_entropy(module(x) * noise, y)


def test_the_callers_random_state_is_untouched_and_draws_are_seeded() -> None:
    wanted = job(loss=None, step=drawing, model=plain_net)
    batches = leaves((4, 4, 3))
    run = Run(wanted)
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        outcome = run.compute(task(batches, (4, 4, 3)))
        found = float(torch.rand(())), random.gauss(0, 1), float(np.random.rand())
        same(run.sums(outcome), naive(wanted, batches, (4, 4, 3)))
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        assert found == (float(torch.rand(())), random.gauss(0, 1), float(np.random.rand()))


def sometimes_drawing(module: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(F.dropout(module(x), 0.3 if float(x[0, 0]) > 0 else 0.0), y)


@pytest.mark.parametrize("model", [plain_net, lambda: nn.Linear(8, 3)])
@pytest.mark.parametrize("drawing_leaf", [0, 1, 2])
def test_a_block_says_whether_torch_drew(model: Any, drawing_leaf: int) -> None:
    wanted = job(loss=None, step=sometimes_drawing, model=model)
    batches = leaves((4, 4, 4))
    for number, (x, _) in enumerate(batches):
        x[0, 0] = 1.0 if number == drawing_leaf else -1.0
    dropping = model is plain_net  # the model itself drops out
    run = Run(wanted)
    assert run.compute(task(batches[:1] if drawing_leaf else batches[1:2], (4,))).drew is dropping
    assert Run(wanted).compute(task(batches, (4, 4, 4))).drew  # in whichever leaf of an engine's first block
    run.compute(task(batches[: drawing_leaf + 1], (4,) * (drawing_leaf + 1)))
    assert run.compute(task(batches[1:2] if drawing_leaf != 1 else batches[:1], (4,))).drew, "from now on"


def test_a_step_of_a_small_model_that_draws_from_python_alone() -> None:
    """One gradient bucket: nothing leaves before the block's end."""
    wanted = job(loss=None, step=drawing, model=lambda: nn.Linear(8, 3))
    engine, batches = Engine(wanted), leaves((4, 4))
    for start in (0, 2):
        outcome = engine.compute(task(batches, (4, 4), start=start), lambda *_: None)
        expected = naive(wanted, batches, (4, 4), start)
        assert torch.equal(outcome.vectors[0].buckets[0][:24].view(3, 8), expected["weight"])
        engine.release(outcome.vectors[0])


def writing(module: nn.Module, batch: Any) -> Tensor:
    batch[0].mul_(1.5).add_(random.random())
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("packed", [True, False])
def test_a_block_that_is_computed_again_begins_with_the_batch_as_it_came(packed: bool) -> None:
    """The first draw from ``random`` has it computed again, when the step has written into its batch."""
    wanted = job(loss=None, step=writing, model=lambda: nn.Linear(8, 3))
    given = task(leaves((4, 4)), (4, 4), packed=packed)
    before = [tensor.clone() for tensor in given.tensors]
    outcome = Engine(wanted).compute(given, lambda *_: None)
    expected = naive(wanted, leaves((4, 4)), (4, 4))
    assert torch.equal(outcome.vectors[0].buckets[0][:24].view(3, 8), expected["weight"])
    assert all(map(torch.equal, given.tensors, before))


@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_too_large_to_be_copied_is_asked_for_again(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than computed again from what the step has written: the next attempt, with fresh data, is right."""
    monkeypatch.setattr("w5xde_async.compute.engine._COPIED_BYTES", 0)
    wanted = job(loss=None, step=writing, model=lambda: nn.Linear(8, 3))
    engine = Engine(wanted)
    with pytest.raises(LeafError, match=r"wrote into its batch .*batch\.clone"):
        engine.compute(task(leaves((4, 4)), (4, 4), packed=packed), lambda *_: None)
    outcome = engine.compute(task(leaves((4, 4)), (4, 4), packed=packed), lambda *_: None)
    expected = naive(wanted, leaves((4, 4)), (4, 4))
    assert torch.equal(outcome.vectors[0].buckets[0][:24].view(3, 8), expected["weight"])


def test_a_batch_that_nobody_else_reads_is_not_copied() -> None:
    """What the step writes into it is there afterwards; to be computed again it is asked for again."""
    wanted = job(loss=None, step=writing, model=lambda: nn.Linear(8, 3))
    engine = Engine(wanted)
    with pytest.raises(LeafError, match=r"wrote into its batch"):
        engine.compute(replace(task(leaves((4, 4)), (4, 4), packed=True), own=True), lambda *_: None)
    given = replace(task(leaves((4, 4)), (4, 4), packed=True), own=True)
    before = [tensor.clone() for tensor in given.tensors]
    outcome = engine.compute(given, lambda *_: None)
    expected = naive(wanted, leaves((4, 4)), (4, 4))
    assert torch.equal(outcome.vectors[0].buckets[0][:24].view(3, 8), expected["weight"])
    assert not torch.equal(given.tensors[0], before[0])


def test_blocks_on_two_threads_take_turns_with_the_random_state() -> None:
    wanted, batches = job(loss=None, step=drawing, model=plain_net), leaves((4,) * 8)
    expected = naive(wanted, batches, (4,) * 8)
    runs = [Run(wanted) for _ in range(3)]
    outcomes: dict[int, ComputedBlock] = {}

    def work(number: int) -> None:
        outcomes[number] = runs[number].compute(task(batches, (4,) * 8))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, run in enumerate(runs):
        same(run.sums(outcomes[number]), expected)


# -- new versions


@pytest.mark.usefixtures("large")
def test_new_parameters_and_buffers_are_computed_with() -> None:
    run, batches = Run(job(model=plain_net)), leaves((4, 4))
    before = run.compute(task(batches, (4, 4)))
    layout, incoming = run.engine.layout, run.engine.incoming
    index = [entry.name for entry in layout.entries].index("norm.running_mean")
    for bucket in layout.buckets:
        if index in bucket.entries:
            incoming.views[index].fill_(5.0)
            run.engine.load([bucket.index])
    run.compute(task(batches, (4, 4)))
    live = dict(run.engine.model.named_buffers())["norm.running_mean"]
    assert bool((live > 3).all())  # moved a tenth of the way from 5
    head = [entry.name for entry in layout.entries].index("head.weight")
    incoming.views[head].fill_(0.25)
    after = run.compute(task(batches, (4, 4)))
    assert before.losses != after.losses


class Switching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_what_a_step_switches_to_evaluation_lasts_until_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the process has computed before."""
    switching = [False]

    def step(model: nn.Module, batch: Any) -> Tensor:
        if switching[0]:
            model.eval()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    made = job(model=Switching, loss=None, step=step)
    run, batches = Run(made), leaves((LEAF,) * 4)
    wanted = task(batches, (LEAF,) * 4)
    first = run.sums(run.compute(wanted))
    switching[0] = True
    for _ in range(2):
        switched = run.sums(run.compute(wanted))
        with pytest.raises(AssertionError):
            same(switched, first)
    assert not caplog.messages  # it may do so in every step, and that would be well
    switching[0] = False
    for _ in range(2):
        same(run.sums(run.compute(wanted)), first)
    (message,) = caplog.messages
    assert "switched the model to evaluation" in message


def test_devices_that_are_not_there_are_named() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(ValueError, match="cuda:99 is not on this machine"):
        choose_device("cuda:99")


# -- a job's code that changes more than values


class Growing(nn.Module):
    """Makes a layer, or replaces a parameter, in the ``at``-th call of its forward."""

    def __init__(self, kind: str, at: int) -> None:
        super().__init__()
        self.body, self.head, self.extra = nn.Linear(8, 8), nn.Linear(8, 3), nn.Module()
        self.kind, self.at, self.calls = kind, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            if self.kind == "made":
                self.extra.late = nn.Linear(8, 8)
            else:
                self.body.weight = nn.Parameter(self.body.weight.detach().clamp(-0.2, 0.2))
        x = self.body(x)
        return self.head(self.extra.late(x) if hasattr(self.extra, "late") else x)


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize("at", [1, 3, 9])
@pytest.mark.parametrize(("kind", "name"), [("made", "extra.late.weight"), ("replaced", "body.weight")])
def test_parameters_that_nobody_would_train_are_refused_by_name(kind: str, name: str, at: int, bucket_bytes: int):
    run = Run(job(model=partial(Growing, kind, at)), bucket_bytes=bucket_bytes)
    done: list[ComputedBlock] = []

    def on() -> None:
        while len(done) < 40:
            done.append(run.compute(task(leaves((4,)), (4,))))

    with pytest.raises(LeafError, match=f"parameter '{name}' is another one than when the run began") as caught:
        on()
    assert at - 1 <= len(done) < 2 * at
    for vector in caught.value.vectors:
        run.engine.release(vector)
    assert run.engine._pool.num_out == 0
    for _ in range(3):  # however often it is tried
        with pytest.raises(LeafError, match=f"parameter '{name}' is another one than when the run began"):
            on()


@pytest.mark.parametrize("bucket_bytes", [512, 1 << 20])
def test_a_step_that_freezes_a_parameter_is_refused_by_name(bucket_bytes: int) -> None:
    """It would be frozen in this process alone. For a part of the step it may be."""
    given = step_function(job())

    def step(module: Any, batch: Any) -> Any:
        module.head.requires_grad_(False)
        module.first.requires_grad_(float(batch[0][0, 0]) < 100)
        loss = given(module, batch)[0]
        module.head.requires_grad_(True)
        return loss + given(module, batch)[0]

    run = Run(job(step=step, loss=None, model=plain_net), bucket_bytes=bucket_bytes)
    batches = leaves((4, 4))
    for _ in range(3):
        run.compute(task(batches, (4, 4)))
    batches[1][0][0, 0] = 200
    with pytest.raises(
        LeafError, match=r"parameter 'first\.weight' was trainable when the run began and is frozen now"
    ):
        run.compute(task(batches, (4, 4)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize(
    ("ends", "code"),
    [(lambda: sys.exit(0), 0), (lambda: sys.exit(3), 3), (lambda: sys.exit("no"), 1), (sys.exit, 0), (failing, 1),
     (lambda: None, 1)],
    ids=["0", "3", "text", "none", "raises", "returns"],
)  # fmt: skip
def test_a_process_that_a_step_has_forked_ends_where_the_step_ends(ends: Any, code: int) -> None:
    """It has its parent's connections and files, and would go on as another of it."""
    children: list[int] = []

    def step(module: nn.Module, batch: Any) -> Tensor:
        if not children:
            children.append(os.fork())
            if not children[0]:
                ends()
        return F.cross_entropy(module(batch[0]), batch[1])

    run = Run(job(loss=None, step=step, model=plain_net))
    batches, parent = leaves((4, 4)), os.getpid()
    outcome = run.compute(task(batches, (4, 4)))
    assert os.getpid() == parent
    _, status = os.waitpid(children[0], 0)
    assert os.waitstatus_to_exitcode(status) == code
    same(run.sums(outcome), naive(job(model=plain_net), batches, (4, 4)))


@pytest.mark.skipif(unsupported() != "", reason=unsupported())
@pytest.mark.parametrize("who", ["the step", "the owner", "nobody"])
def test_a_parameter_in_shared_memory_that_changes_meanwhile(who: str) -> None:
    """What the step writes there is this process's alone, and refused. What the coordinator writes is another version:
    it has what it needs of this block, and nobody is to blame."""
    state = FlatState(Layout.of(Net(), bucket_bytes=512))
    size = FlatState.nbytes(state.layout)

    def step(module: nn.Module, batch: Any) -> Tensor:
        if who == "the step":
            with torch.no_grad():
                next(module.parameters()).mul_(0.5)
        elif who == "the owner":
            owned.groups[0].add_(1.0)
        loss: Tensor = nn.functional.cross_entropy(module(batch[0]), batch[1])
        return loss

    with closing(Segment("test", size, b"secret")) as segment:
        owned = FlatState(state.layout, memory=segment.payload)
        owned.copy_from(Net())
        run = Run(job(step=step, loss=None))
        with closing(Opened(segment.told, size)) as opened:
            run.engine.share(opened)
            run.engine.load(range(len(run.engine.layout.buckets)))
            wanted = task(leaves((4,)), (4,))
            if who == "the step":
                with pytest.raises(LeafError, match="the step changes parameter"):
                    run.compute(wanted)
            else:
                run.compute(wanted)
        run.engine.close()


def test_a_step_that_only_moves_a_parameters_values_is_refused() -> None:
    def step(module: nn.Module, batch: Any) -> Tensor:
        largest = max(module.parameters(), key=Tensor.numel)
        with torch.no_grad():
            largest.copy_(largest.flip(0))
        loss: Tensor = nn.functional.cross_entropy(module(batch[0]), batch[1])
        return loss

    run = Run(job(step=step, loss=None))
    with pytest.raises(LeafError, match="the step changes parameter"):
        run.compute(task(leaves((4,)), (4,)))


def test_a_parameter_with_other_memory_of_the_same_values_is_refused() -> None:
    """The next version would not reach it."""

    def step(module: nn.Module, batch: Any) -> Tensor:
        first = next(module.parameters())
        first.data = first.data.clone()
        loss: Tensor = nn.functional.cross_entropy(module(batch[0]), batch[1])
        return loss

    run = Run(job(step=step, loss=None))
    with pytest.raises(LeafError, match="the step changes parameter"):
        run.compute(task(leaves((4,)), (4,)))


@pytest.mark.parametrize("undone", [False, True])
def test_once_a_parameter_was_written_into_every_block_is_looked_at(undone: bool) -> None:
    """Other blocks are looked at seldom. What is undone before the block ends is nobody's loss."""
    blocks = 0

    def step(module: nn.Module, batch: Any) -> Tensor:
        first = next(module.parameters())
        with torch.no_grad():
            kept = first.clone()
            if blocks >= 5:
                first.mul_(0.5)
        loss: Tensor = nn.functional.cross_entropy(module(batch[0]), batch[1])
        if undone:
            with torch.no_grad():
                first.copy_(kept)
        return loss

    run, wanted = Run(job(step=step, loss=None)), task(leaves((4,)), (4,))
    for number in range(1, 6):
        blocks = number
        run.compute(wanted)
    blocks = 6
    if undone:
        run.compute(wanted)
    else:
        with pytest.raises(LeafError, match="the step changes parameter"):
            run.compute(wanted)


def test_parameters_that_were_made_in_inference_mode_fail_their_leaf_as_in_a_plain_loop() -> None:
    class Inference(Net):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode():
                self.before = nn.Linear(8, 8)
            self.before.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.before(x))

    run = Run(job(model=Inference))
    with pytest.raises(LeafError, match=r"[Ii]nference tensor"):
        run.compute(task(leaves((4,)), (4,)))
