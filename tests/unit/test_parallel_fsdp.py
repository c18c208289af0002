"""Fully sharded islands: two ranks, neither with a whole model, give what one process gives, to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import island_jobs, islands
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.engine import LeafError
from w5xde_async.errors import JobError, UsageError
from w5xde_async.job import Job, build_model
from w5xde_async.parallel.engine import LoneLeafError
from w5xde_async.parallel.fsdp import FsdpEngine
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.replica import replica_of, units_of
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard, check_division

BUCKET = islands.BUCKET_BYTES


def _island(job: Job, group: Group, **options: Any) -> islands.Together:
    engine = FsdpEngine(replica_of(job, BUCKET), LeafSpec.of(job), group, **options)
    return islands.Together(engine, group)


def _alike(
    job: Job, group: Group, *blocks: tuple[int, ...], start: int = 0, checkpoint: bool = False, **changes: Any
) -> None:
    together, alone = _island(job, group, checkpoint_activations=checkpoint), islands.Alone(job)
    assert together.engine.layout.fingerprint == alone.layout.fingerprint
    for seed in (5, 6):  # two versions
        state = islands.changed_state(job, seed)
        together.load(state)
        alone.state.copy_groups(state)
        alone.engine.load(range(len(alone.layout.buckets)))
        for samples in blocks:
            islands.same_block(together, alone, island_jobs.batches(job, samples), samples, start, **changes)
    together.engine.close()
    alone.engine.close()


def _mlp(group: Group) -> None:
    _alike(island_jobs.mlp(), group, (4, 4, 4, 4), (4, 4, 4, 2))
    _alike(island_jobs.mlp(), group, (4, 4, 4, 4), start=8)


def _uneven_blocks(group: Group) -> None:
    _alike(island_jobs.mlp(), group, (4, 4, 3), (2,), (4, 4, 4, 4, 1), (4,), (4, 4), (4,) * 7)


def _normed(group: Group) -> None:
    _alike(island_jobs.normed(), group, (4, 4, 4, 4), (4, 4, 3), (4,))


def _odd(group: Group) -> None:
    _alike(island_jobs.odd(), group, (4, 4, 4, 4), (4, 4, 3))


def _transformer(group: Group) -> None:
    _alike(island_jobs.transformer(), group, (4, 4, 4), (4, 4, 4, 4, 4, 4))


def _half(group: Group) -> None:
    _alike(island_jobs.transformer(precision="bf16"), group, (4, 4, 4))
    _alike(island_jobs.mlp(precision="fp16"), group, (4, 4, 4), loss_scale=1024.0)


class Looked(nn.Module):
    """Tables whose gradients are sparse, and name rows several times."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(13, 8, sparse=True), nn.EmbeddingBag(13, 8, sparse=True, mode="sum")
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = (x * 7).long().clamp(0, 12)
        h = self.table(index).sum(1) + self.bag(index)
        for block in self.blocks:
            h = torch.tanh(block(h))
        out: Tensor = self.head(h)
        return out


def _sparse(group: Group) -> None:
    _alike(_of(Looked), group, (4, 4, 4, 4), (4, 4, 3))
    job = _of(Looked)
    object.__setattr__(job, "accumulate_grad_batches", 2)
    _alike(job, group, (8, 8, 6))


class Reused(nn.Module):
    """A layer that its unit uses twice: under autocast its weight is cast once for both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Twice() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        return out


def _of(model: Any) -> Job:
    job = island_jobs.mlp()
    return Job(
        model=model, dataset=job.dataset, loss=F.cross_entropy, optimizer=job.optimizer, batch_size=64,
        microbatch_size=4, max_steps=5,
    )  # fmt: skip


def _clipped(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


class Hooked(nn.Module):
    """Hooks change gradients: of a unit, of the root, of what is not cut; hung before a module has its parameter, and
    after."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head, self.scale = nn.Linear(8, 3), nn.Parameter(torch.tensor(1.5))
        mask = (torch.arange(8.0) < 4)[:, None]
        self.blocks[1].weight.register_hook(lambda gradient: gradient * mask)
        self.blocks[0].weight.register_post_accumulate_grad_hook(_clipped)
        taken = self.blocks[0].bias.register_hook(lambda gradient: gradient * 0)
        taken.remove()
        self.scale.register_hook(lambda gradient: gradient * 3)
        shift = nn.Parameter(torch.zeros(3))
        shift.register_hook(lambda gradient: gradient.clamp(min=0))
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(x) * self.scale + self.shift
        return out


class Stepping(Hooked):
    """An optimizer in backward."""

    def __init__(self) -> None:
        super().__init__()

        def step(parameter: Tensor) -> None:
            parameter.grad = None

        self.blocks[1].bias.register_post_accumulate_grad_hook(step)


class Holding(Hooked):
    """A hook that computes with a parameter."""

    def __init__(self, hang: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        hang(self.head)

    @staticmethod
    def by_module(layer: nn.Linear) -> None:
        layer.weight.register_hook(lambda gradient: _shrunk(gradient, layer.weight))

    @staticmethod
    def early(layer: nn.Linear) -> None:
        """Hung before the module takes the parameter."""
        weight = nn.Parameter(torch.ones(3, 8))
        weight.register_hook(lambda gradient: gradient * weight.norm())
        layer.weight = weight

    @staticmethod
    def table(layer: nn.Linear) -> None:
        table = dict(layer.named_parameters())
        layer.weight.register_hook(lambda gradient: gradient.clone().mul_(table["bias"].detach().norm()))


def _shrunk(gradient: Tensor, weight: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[weight.detach().abs() > 0.2] = 0
    return gradient


HOLDING: list[Callable[[nn.Linear], Any]] = [
    Holding.early,
    Holding.table,
    lambda layer: layer.weight.register_hook(lambda gradient, weight=layer.weight: _shrunk(gradient, weight)),
    lambda layer: layer.weight.register_hook(partial(_shrunk, weight=layer.weight)),
]


def _hooked(group: Group) -> None:
    _alike(_of(Hooked), group, (4, 4, 4, 4), (4, 4, 3))
    _alike(_of(partial(Holding, Holding.by_module)), group, (4, 4), (4, 3))
    for hang in HOLDING:
        with pytest.raises(UsageError, match=r"hook on the gradient of parameter 'head\.weight' holds a parameter"):
            _island(_of(partial(Holding, hang)), group)
    job = _of(Stepping)
    together = _island(job, group)
    together.load(islands.changed_state(job))
    with pytest.raises(LeafError, match="the step changed the model's gradients"):
        together.compute(island_jobs.batches(job, (4, 4)), (4, 4))


class Drawing(nn.Module):
    """What is drawn is used as it is: after parameters, and after initialisers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)
        nn.init.trunc_normal_(self.blocks[0].weight)
        nn.init.orthogonal_(self.blocks[1].weight)
        nn.init.sparse_(self.head.weight, 0.3)
        with torch.no_grad():
            self.head.weight[1:].normal_()
            self.head.weight.copy_(torch.rand_like(self.head.weight))
            self.head.bias.copy_(torch.randn(3, device=self.head.bias.device))
        with torch.device("meta"):  # other workers draw nothing here
            nn.init.trunc_normal_(nn.Linear(3, 3).weight)
        self.register_buffer("frequencies", torch.randn(8), persistent=False)
        self.order = torch.randperm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.frequencies)[:, self.order]
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


def _drawn(group: Group) -> None:
    _alike(_of(Drawing), group, (4, 4, 3))


def _reused_in_half(group: Group) -> None:
    job = _of(Reused)
    object.__setattr__(job, "precision", "bf16")
    _alike(job, group, (4, 4, 4))


def _accumulates(group: Group) -> None:
    _alike(island_jobs.normed(accumulate_grad_batches=3), group, (12, 12, 10, 12), (12, 12, 4), (6,))
    _alike(island_jobs.odd(accumulate_grad_batches=2), group, (8, 8, 3))


def _checkpoints(group: Group) -> None:
    for job in (island_jobs.transformer(), island_jobs.normed(), island_jobs.following()):
        _alike(job, group, (4, 4, 4), checkpoint=True)


class Mixed(nn.Module):
    """Blocks in half precision with norms in single: before, between, and last, where both return one tensor. A mask
    that does not lie in memory in the order of its axes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between, self.last = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)
            self.up, self.down = nn.Linear(8, 12).bfloat16(), nn.Linear(12, 8).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(self.between(self.before(x)).bfloat16())
            out: Tensor = self.last(x + self.down(torch.tanh(h)).float())
            return out

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed.Block() for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.register_buffer("mask", torch.arange(32.0).view(4, 8).t() / 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x * self.mask.sum(1))
        return out


def _mixes(group: Group) -> None:
    for checkpoint in (False, True):
        _alike(_of(Mixed), group, (4, 4, 3), checkpoint=checkpoint)


class Segments(nn.Module):
    """Checkpointed by itself, two layers at a time."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(list(self.blocks), 2, self.first(x), use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


def _segments(group: Group) -> None:
    for Segments.reentrant in (False, True):
        _alike(_of(Segments), group, (4, 4, 3))


def _consuming(model: nn.Module, batch: Any) -> Tensor:
    """Leaves nothing of its batch as it was."""
    x, y = batch.pop("both")
    x.mul_(0.5)
    return F.cross_entropy(model(x), y)


def _consumes(group: Group) -> None:
    """A rank whose leaf has fewer microbatches than another's computes its first one several times."""
    job = island_jobs.mlp(loss=None, step=_consuming, accumulate_grad_batches=2)
    together, alone = _island(job, group), islands.Alone(job)
    state = islands.changed_state(job)
    together.load(state)
    alone.state.copy_groups(state)
    alone.engine.load(range(len(alone.layout.buckets)))
    samples = (8, 3, 8, 8)
    batches = [{"both": [x, y]} for x, y in island_jobs.batches(job, samples)]
    islands.same_block(together, alone, batches, samples)
    together.engine.close()
    alone.engine.close()


def _metrics(group: Group) -> None:
    _alike(island_jobs.mlp(loss=None, step=island_jobs.measured), group, (4, 4, 4, 4), (4,), (3, 3, 3))


class Fragile(nn.Module):
    """Raises for the row that begins with 99: before its middle block, or in backward behind it."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        bad = float(x[0, 0]) == 99
        for number, block in enumerate(self.blocks):
            if bad and number == 1:
                if not self.late:
                    raise RuntimeError("this leaf is bad")
                x.register_hook(_refuse)
            x = torch.relu(block(x))
        out: Tensor = self.head(x)
        return out


def _refuse(_: Tensor) -> None:
    raise RuntimeError("this leaf is bad")


def _fails(group: Group) -> None:
    job = _of(Fragile)
    together, alone = _island(job, group), islands.Alone(job)
    state = islands.changed_state(job)
    together.load(state)
    alone.state.copy_groups(state)
    alone.engine.load(range(len(alone.layout.buckets)))
    samples = (4, 4, 4, 4)
    good = island_jobs.batches(job, samples)
    islands.same_block(together, alone, good, samples)
    for late in (False, True):
        Fragile.late = late
        for bad in range(4):
            broken = [(x.clone(), y) for x, y in good]
            broken[bad][0][0, 0] = 99
            with pytest.raises(LeafError, match="this leaf is bad") as caught:
                together.compute(broken, samples, start=8)
            assert caught.value.leaf == 8 + bad
            together.engine.release(caught.value.vectors)
            islands.same_block(together, alone, good, samples)
    together.engine.close()
    alone.engine.close()


def _fails_at_once(group: Group) -> None:
    """In the first round nobody knows what the others would exchange. Where all fail, nothing is exchanged."""
    job, alone = _of(Fragile), islands.Alone(_of(Fragile))
    samples = (4, 4, 4, 4)
    good = island_jobs.batches(job, samples)
    for late in (False, True):
        Fragile.late = late
        together, state = _island(job, group), islands.changed_state(job)
        together.load(state)
        broken = [(x.clone(), y) for x, y in good]
        for x, _ in broken:
            x[0, 0] = 99
        for _ in range(2):
            with pytest.raises(LeafError, match="this leaf is bad") as caught:
                together.compute(broken, samples, start=8)
            assert (caught.value.leaf, isinstance(caught.value, LoneLeafError)) == (8, False)
            together.engine.release(caught.value.vectors)
        state = islands.changed_state(job, 6)
        together.load(state)
        alone.state.copy_groups(state)
        alone.engine.load(range(len(alone.layout.buckets)))
        islands.same_block(together, alone, good, samples)
        together.engine.close()
        broken[0] = good[0]
        with pytest.raises(LoneLeafError if group.rank else RuntimeError, match=r"leaf is bad|failed on another rank"):
            _island(job, group).compute(broken, samples)
    alone.engine.close()


def _numbered(model: nn.Module, batch: Any) -> Any:
    """With a metric that is no number, for the row that begins with 99."""
    x, y = batch
    bad = (x[:, 0] == 99).any()
    return F.cross_entropy(model(x.clamp(-3, 3)), y), {"kind": "none" if bad else 1.0}


def _fails_between(group: Group) -> None:
    """After one microbatch and before the next, and after the last."""
    job = island_jobs.mlp(loss=None, step=_numbered, accumulate_grad_batches=2)
    together, alone = _island(job, group), islands.Alone(job)
    state = islands.changed_state(job)
    together.load(state)
    alone.state.copy_groups(state)
    alone.engine.load(range(len(alone.layout.buckets)))
    samples = (8, 8)
    good = island_jobs.batches(job, samples)
    for row in (0, 7):
        islands.same_block(together, alone, good, samples)
        broken = [(x.clone(), y) for x, y in good]
        broken[1][0][row, 0] = 99
        with pytest.raises(LeafError, match="metric 'kind'") as caught:
            together.compute(broken, samples)
        assert (caught.value.leaf, isinstance(caught.value, LoneLeafError)) == (1, False)
        together.engine.release(caught.value.vectors)
    islands.same_block(together, alone, good, samples)
    together.engine.close()
    alone.engine.close()


class Inverted(Fragile):
    """Half of its weights would not do: what is zero cannot be inverted."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8) + 4 * torch.eye(8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.linalg.inv(self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inverted.Block() for _ in range(3))


def _fails_alone(group: Group) -> None:
    """The leaf that fails is named, and no other fails because of it."""
    Fragile.late = False
    job = _of(Inverted)
    together = _island(job, group)
    together.load(islands.changed_state(job))
    samples = (4,) * group.size
    good = island_jobs.batches(job, samples)
    together.compute(good, samples)
    broken = [(x.clone(), y) for x, y in good]
    broken[1][0][0, 0] = 99
    with pytest.raises(LeafError, match="leaf 1: RuntimeError: this leaf is bad"):
        together.compute(broken, samples)
    together.engine.close()


def _divides(group: Group) -> None:
    for job in (island_jobs.odd(), island_jobs.transformer(), island_jobs.normed()):
        together = _island(job, group)
        shard = together.engine.shard
        packed = group.bytes_of_all(torch.tensor(shard.packed).numpy().tobytes())
        shards = [Shard.parse(shard.layout, torch.frombuffer(bytearray(p), dtype=torch.int64).tolist()) for p in packed]
        check_division(shard.layout, shards)
        together.engine.close()


class Again(nn.Module):
    """A layer that is computed twice, one time after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[1](torch.tanh(self.blocks[0](torch.tanh(self.blocks[0](x)))))[:, :3]
        return out


class Between(Again):
    """And with another one in between."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[0](torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x)))))[:, :3]
        return out


class Skipping(nn.Module):
    """Leaves a layer out, as its data has it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        skips = float(x[0, 0]) > 0
        for number, block in enumerate(self.blocks):
            if number != 1 or not skips:
                x = torch.relu(block(x))
        out: Tensor = self.head(x)
        return out


def _shares(group: Group) -> None:
    for build in (Attending, Handing, WritesFirst, Again):
        for precision in ("fp32", "bf16"):
            _alike(replace(_of(build), precision=precision), group, (4, 4, 3))


def _skips(group: Group) -> None:
    """Shapes are alike: the ranks would take one layer's parameters for another's."""
    job = _of(Skipping)
    together = _island(job, group)
    batches = island_jobs.batches(job, (4,) * group.size)
    for rank, (x, _) in enumerate(batches):
        x[0, 0] = 1 if rank else -1
    with pytest.raises(UsageError, match=r"different parts of the model.*'blocks.1', 'blocks.2'.*use dp"):
        together.compute(batches, (4,) * group.size)
    together.engine.close()


class Shortened(Skipping):
    """Fails where what it skips is not what it skipped before."""

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 1] == 99).any():
            self.blocks[0](x)
            raise RuntimeError("this leaf is bad")
        return super().forward(x)


def _fails_after_a_change(group: Group) -> None:
    """A rank whose leaf fails cannot follow what it has not seen: nobody is said to compute different parts."""
    samples = (4,) * group.size
    for skips in (True, False):
        job = _of(Shortened)
        together = _island(job, group)
        together.load(islands.changed_state(job))
        batches = island_jobs.batches(job, samples)
        for x, _ in batches:
            x[0, 0] = 1.0 if skips else -1.0
        together.compute(batches, samples)
        for x, _ in batches:
            x[0, 0] *= -1
        batches[0][0][0, 1] = 99
        with pytest.raises(RuntimeError if group.rank else LoneLeafError, match=r"leaf is bad|failed on another rank"):
            together.compute(batches, samples)


class Viewed(nn.Module):
    """A layer whose result is a view, into which its user writes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (4, 2))) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 0.5
            x = x.flatten(1)
        out: Tensor = self.head(x)
        return out


class Result:
    def __init__(self, h: Tensor) -> None:
        self.h = h


class Wrapping(nn.Module):
    """Its blocks return objects of its own."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Result:
            return Result(self.second(torch.tanh(self.first(x))))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).h
        return x[:, :3]


def _steep(model: nn.Module, batch: Any) -> Tensor:
    """With a penalty of gradients."""
    x, y = batch
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + gradient.square().mean()


class WritesFirst(nn.Module):
    """Each block begins by writing into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.SiLU(inplace=True), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x[:, :3]


class Attending(nn.Module):
    """What all blocks are called with: each uses it, and what it is given besides, several times."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value, self.mix = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, *, memory: Tensor, first: Tensor) -> Tensor:
            weights = (x @ self.key(memory).T).softmax(-1)
            out: Tensor = x + torch.tanh(self.mix(x)) + weights @ self.value(memory) + first * torch.sigmoid(first)
            return out

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.encoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.blocks = nn.ModuleList(Attending.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.first(x)
        memory = self.encoder[1](torch.tanh(self.encoder[0](x)))
        for block in self.blocks:
            x = block(x, memory=memory, first=first)
        return x[:, :3]


class Handing(Attending):
    """Its blocks return what they were called with, too; one returns nothing else that has a gradient."""

    class Block(Attending.Block):
        def forward(self, x: Tensor, *, memory: Tensor, first: Tensor) -> Any:
            return super().forward(x, memory=memory, first=first), {"memory": memory, "first": first}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Handing.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.first(x)
        handed = {"memory": self.encoder[1](torch.tanh(self.encoder[0](x))), "first": first}
        for number, block in enumerate(self.blocks):
            y, handed = block(x, **handed)
            x = x + y.detach() if number == 1 else y
        return x[:, :3]


class Boxing(nn.Module):
    """Its blocks return a parameter in an object."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x), Result(self.table.t())

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(type(self).Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, told = block(x)
            x = torch.tanh(x @ (told if isinstance(told, Tensor) else told.h))
        return x[:, :3]


class Lending(Boxing):
    """Itself, without."""

    class Block(Boxing.Block):
        def forward(self, x: Tensor) -> Any:
            return self.layer(x), self.table


class Twofold(Again):
    """A pass whose gradients nobody asks for, with them."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.blocks[1](torch.tanh(self.blocks[0](x * scale))) for scale in (0.5, 1.0)]
        return (outputs[1] + outputs[0].detach())[:, :3]


class Bypassing(nn.Module):
    """Calls its blocks' layers, and not the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Twice() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, Twice)
            x = torch.tanh(block.layer(x))
        out: Tensor = self.head(x)
        return out


def _penalized(model: nn.Module, batch: Any) -> Tensor:
    """The norms are taken of what the rank has, without a word of torch's."""
    x, y = batch
    norms = torch.stack([parameter.norm() for parameter in model.parameters()])
    return F.cross_entropy(model(x), y) + 0.01 * norms.sum()


def _watched(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, float]]:
    """The same in a metric alone."""
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    return loss, {"norm": float(sum(parameter.detach().square().sum() for parameter in model.parameters()))}


def _looked_at(model: nn.Module, batch: Any) -> Tensor:
    """What a parameter is may be asked for."""
    x, y = batch
    (first, *_) = model.parameters()
    assert (first.shape, first.numel(), first.requires_grad, first.is_leaf) == ((40, 8), 320, True, True)
    assert first.new_zeros(3).tolist() == [0.0] * 3
    assert torch.zeros_like(first).shape == torch.empty_like(first, dtype=torch.int64).shape == (40, 8)
    assert set(model.state_dict()) >= {name for name, _ in model.named_parameters()}
    return F.cross_entropy(model(x.to(first).to(first.device, first.dtype)), y)


def _channels_last() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(4, 3)
    ).to(memory_format=torch.channels_last)  # fmt: skip


def _normalized() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 3))


def _trespasses(group: Group) -> None:
    """Whatever else a process refuses that computes alone; from then on in every block."""
    for job, words in island_jobs.trespassing():
        together = _island(job, group)
        together.load(islands.changed_state(job))
        for _ in range(2):
            with pytest.raises(LeafError, match=words):
                together.compute(island_jobs.batches(job, (8, 8)), (8, 8))


def _cannot_be_built(group: Group) -> None:
    with pytest.raises(UsageError, match=r"parameter '1\.weight' does not lie in memory .*channels_last.*or use dp"):
        _island(_of(_channels_last), group)
    with pytest.raises(UsageError, match=r"buffer '0.*_u' is computed from parameters.*Job\(model=make\(\)\)"):
        _island(_of(_normalized), group)
    with pytest.raises(UsageError, match=r"'0' is compiled by torch\.jit"):
        _island(_of(_scripted), group)
    _alike(_of(_normalized()), group, (4, 4, 3))


class Remembering(nn.Module):
    """Blocks hand on an object that counts them."""

    class Counts:
        calls = 0

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, counts: Remembering.Counts) -> Tensor:
            counts.calls += 1
            return torch.tanh(self.layer(x) * counts.calls)

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(self.Block() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        counts = self.Counts()
        for block in self.blocks:
            x = block(x, counts)
        out: Tensor = self.head(x)
        return out


class Caching(Remembering):
    """They find there what they have made, as decoders with a cache: the same, but nothing that backward needs."""

    class Block(Remembering.Block):
        def forward(self, x: Tensor, counts: Any) -> Tensor:
            if self not in vars(counts):
                vars(counts)[self] = self.layer(x)
            return torch.tanh(vars(counts)[self])


def _salient(model: nn.Module, batch: Any) -> Tensor:
    """Gradients of the input, before the loss."""
    x, y = batch
    out = model(x.requires_grad_())
    (found,) = torch.autograd.grad(out.logsumexp(-1).sum(), x, retain_graph=True)
    return F.cross_entropy(out, y) + (out * found.mean()).mean()


def _copying(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(copy.deepcopy(model)(batch[0]) + model(batch[0]), batch[1])


def _scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 3))


def _refuses(group: Group) -> None:
    for job, place in (
        (_of(Bypassing), "'blocks.0.layer.weight' is used outside of 'blocks.0'"),
        (island_jobs.mlp(loss=None, step=_penalized), "'0.weight' is used outside of '0'"),
        (island_jobs.mlp(loss=None, step=_watched), "'0.weight' is used outside of '0'"),
    ):
        with pytest.raises(UsageError, match=f"parameter {place}, .*or use dp"):
            _island(job, group).compute(island_jobs.batches(job, (4, 4)), (4, 4))
    _alike(island_jobs.mlp(loss=None, step=_looked_at), group, (4, 4))
    for job, words in (
        (_of(Viewed), "writes in place into a view"), (_of(Wrapping), "returns its tensors in an object"),
        (island_jobs.mlp(loss=None, step=_steep), r"gradients of gradients \(create_graph=True\)"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            _island(job, group).compute(island_jobs.batches(job, (4, 4)), (4, 4))
    for job, words in (
        (island_jobs.mlp(loss=None, step=_salient), r"runs backward itself \(torch.autograd.grad"),
        (island_jobs.mlp(loss=None, step=_copying), r"copies the model \(copy.deepcopy\)"),
        (_of(Boxing), r"'blocks\.0' returns its parameter 'blocks\.0\.table', .*in an object \(Result\).*clone"),
        (replace(_of(Lending), precision="bf16"), r"'blocks\.0' returns its parameter 'blocks\.0\.table', .*cast"),
        (replace(_of(Twofold), precision="bf16"), r"gradient of 'blocks\.1\.weight' came after .*'blocks\.1'.*no_grad"),
    ):
        with pytest.raises(UsageError, match=words):
            _island(job, group).compute(island_jobs.batches(job, (4, 4)), (4, 4))
    _alike(_of(Twofold), group, (4, 4, 3))
    _alike(_of(Lending), group, (4, 4, 3))
    for model in (Remembering, Caching):
        job = _of(model)
        with pytest.raises(UsageError, match="Block does not compute the same a second time"):
            _island(job, group, checkpoint_activations=True).compute(island_jobs.batches(job, (4, 4)), (4, 4))
    job = _of(Between)
    with pytest.raises(UsageError, match=r"'blocks\.0' runs more than once"):
        _island(job, group).compute(island_jobs.batches(job, (4, 4)), (4, 4))


CASES: dict[str, islands.Case] = {
    "mlp": _mlp, "uneven blocks": _uneven_blocks, "batch norm": _normed, "odd parameters": _odd,
    "transformer": _transformer, "half precision": _half, "reused in half precision": _reused_in_half,
    "accumulation": _accumulates, "checkpoints": _checkpoints, "metrics": _metrics, "sparse": _sparse, "errors": _fails,
    "shards": _divides, "refusals": _refuses, "skips": _skips, "shares": _shares, "consumes": _consumes,
    "mixes": _mixes, "segments": _segments,
    "hooks": _hooked, "trespasses": _trespasses, "draws": _drawn,
    "errors at once": _fails_at_once, "cannot be built": _cannot_be_built, "errors between": _fails_between,
    "errors alone": _fails_alone, "errors after a change": _fails_after_a_change,
}  # fmt: skip

#: Where it matters how many ranks there are: what is wrong with a job, and its precision, are each rank's own.
OWN = {
    "draws", "trespasses", "half precision", "reused in half precision", "sparse", "errors", "errors at once",
    "refusals", "cannot be built", "errors between", "errors alone", "errors after a change",
}  # fmt: skip
SUMS = tuple(name for name in CASES if name not in OWN)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_two_ranks(tmp_path: Path) -> None:
    islands.run("tests.unit.test_parallel_fsdp", 2, tmp_path, timeout_s=110)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("size", "names"), [(3, SUMS), (4, ("uneven blocks", "odd parameters", "shards"))])
def test_more_ranks(size: int, names: tuple[str, ...], tmp_path: Path) -> None:
    islands.run("tests.unit.test_parallel_fsdp", size, tmp_path, names, timeout_s=110)


# -- replicas without memory


class Tied(nn.Module):
    """One parameter object, registered twice by hand; a table that only memory has."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(6, 4))
        self.one, self.two = nn.Module(), nn.Module()
        self.one.weight = weight
        self.two.weight = weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_a_replica_has_no_memory_for_parameters() -> None:
    for make in (Tied, lambda: nn.Linear(4, 4).to(torch.bfloat16)):
        job = _of(make)
        replica = replica_of(job, BUCKET)
        assert all(parameter.is_meta for parameter in replica.model.parameters())
        assert replica.layout.fingerprint == Layout.of(make(), bucket_bytes=BUCKET).fingerprint
    replica = replica_of(_of(Tied), BUCKET)
    table = dict(replica.model.named_buffers())["table"]
    assert torch.equal(table, torch.arange(4.0))


def test_what_a_constructor_draws_has_the_values_of_other_workers() -> None:
    made, replica = build_model(_of(Drawing)), replica_of(_of(Drawing), BUCKET).model
    assert torch.equal(replica.frequencies, made.frequencies)
    assert torch.equal(replica.order, made.order)
    assert all(parameter.is_meta for parameter in replica.parameters())


class DryRun(nn.Module):
    """Finds a width by computing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(self.body(torch.zeros(1, 8)).shape[1], 3)


def _lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))
    model(torch.zeros(2, 8))
    return model


def _orthogonal() -> nn.Module:
    """Which goes on where what it needs is not implemented."""
    return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)))


def _scaled() -> nn.Module:
    """Which goes on where a value cannot be had."""
    model = nn.Linear(8, 3)
    with suppress(Exception):
        model.scale = float(model.weight.detach().std())
    return model


@pytest.mark.parametrize("make", [DryRun, _lazy, _orthogonal, _scaled])
def test_a_function_that_computes_with_parameters_is_refused_by_name(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(
        JobError, match=r"computes with parameters.*give the job the model itself, Job\(model=make\(\)\)"
    ):
        replica_of(_of(make), BUCKET)
    layout = replica_of(_of(make()), BUCKET).layout
    assert layout.fingerprint == Layout.of(make(), bucket_bytes=BUCKET).fingerprint


@pytest.mark.parametrize("error", [RuntimeError("no metadata here"), OSError("/a/meta.json"), KeyError("meta")])
def test_a_function_that_fails_otherwise_is_told_of_as_everywhere(error: Exception) -> None:
    def make() -> nn.Module:
        raise error

    with pytest.raises(
        JobError, match=rf"the function raised {type(error).__name__}: .*meta.*\(test_parallel_fsdp.py:"
    ):
        replica_of(_of(make), BUCKET)


def test_where_a_function_that_computes_with_parameters_fails_is_told() -> None:
    with pytest.raises(JobError, match=r"computes with parameters.*the function raised \w+: .*test_parallel_fsdp.py:"):
        replica_of(_of(DryRun), BUCKET)


def test_a_function_may_try_what_this_torch_cannot() -> None:
    def make() -> nn.Module:
        with suppress(NotImplementedError):
            torch.randn(2, dtype=torch.float8_e4m3fn)
        return nn.Linear(8, 3)

    assert replica_of(_of(make), BUCKET).layout.fingerprint == Layout.of(make(), bucket_bytes=BUCKET).fingerprint


def test_a_module_given_as_such_is_left_alone() -> None:
    given = Tied()
    replica = replica_of(_of(given), BUCKET)
    assert all(parameter.is_meta for parameter in replica.model.parameters())
    assert not any(parameter.is_meta for parameter in given.parameters())
    assert replica.layout.fingerprint == Layout.of(given, bucket_bytes=BUCKET).fingerprint


def test_units_are_children_of_the_outermost_lists() -> None:
    model = island_jobs.Normed()
    assert [dict(model.named_modules())[f"blocks.{i}"] for i in range(3)] == list(units_of(model))


def test_what_is_tied_to_the_rest_is_no_unit() -> None:
    model = island_jobs.Blocks()
    model.blocks[1].up.weight = model.blocks[2].up.weight
    assert units_of(model) == (model.blocks[0],)
