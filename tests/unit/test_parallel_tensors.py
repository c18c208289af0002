"""Tensor parallel islands: near what one process gives, and the same bits on every island of the same numerics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from tests.support import island_jobs, island_programs, islands
from tests.unit import test_parallel_pipeline as programs
from tests.unit.test_atoms import Transformer
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.engine import LeafError
from w5xde_async.compute.footprint import _Held, faked
from w5xde_async.errors import UsageError, W5xdeError
from w5xde_async.job import Job
from w5xde_async.parallel.building import island_engine, run_step
from w5xde_async.parallel.composed import ComposedEngine, _FirstDerivatives, _may_be_of_a_split
from w5xde_async.parallel.engine import LoneLeafError, Traced
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.replica import replica_of
from w5xde_async.parallel.shape import IslandShape
from w5xde_async.parallel.shard_memory import add
from w5xde_async.parallel.split_program import splittable
from w5xde_async.parallel.tensor_plan import _divides, _Like, _Pair, parallelized, plan_of
from w5xde_async.plan.numerics import EXACT

BUCKET = islands.BUCKET_BYTES


class Heads(nn.Module):
    """Attention that takes the number of heads from what it is given."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width // 2, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, width // 2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in
                   (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        repeated = q.shape[1] // k.shape[1]
        attended = F.scaled_dot_product_attention(q, k.repeat_interleave(repeated, 1), v.repeat_interleave(repeated, 1))
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Heads(width, width // 4)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.after(x)))))


class Model(nn.Module):
    """A transformer with a tied embedding, a mean that is kept, a scalar, and a layer that nobody uses."""

    def __init__(self, width: int = 32, layers: int = 2, vocabulary: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(layers))
        self.scale, self.norm = nn.Parameter(torch.tensor(1.5)), nn.BatchNorm1d(width)
        self.unused, self.frozen = nn.Linear(64, 64), nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm((self.frozen(x) * self.scale).transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.head(x)
        return out


def job(**changes: Any) -> Job:
    tokens = torch.randint(256, (96, 7), generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {
        "model": Model, "loss": island_jobs.lm_loss, "batch_size": 64, "microbatch_size": 4, "max_steps": 5, "seed": 2,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip
    return Job(dataset=TensorDataset(tokens[:, :-1], tokens[:, 1:]), **{**settings, **changes})


def _island(given: Job, group: Group, **axes: int) -> islands.Together:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        return parallelized(model, mesh, plan_of(model, group.size, partial(run_step, given, LeafSpec.of(given))))

    mesh = init_device_mesh("cpu", tuple(axes.values()) or (group.size,), mesh_dim_names=tuple(axes) or ("tp",))
    engine = ComposedEngine(replica_of(given, BUCKET), parallelize, LeafSpec.of(given), group, mesh, words="tp")
    return islands.Together(engine, group)


def _built(mode: str, given: Job, group: Group, **options: Any) -> islands.Together:
    sizes = (2,) * len(mode.split(","))
    shape = IslandShape(mode, group.size, sizes if len(sizes) > 1 else ())
    return islands.Together(
        island_engine(shape, given, LeafSpec.of(given), group, bucket_bytes=BUCKET, **options), group
    )  # fmt: skip


def _near(given: Job, together: islands.Together, *blocks: tuple[int, ...], seeds: Sequence[int] = (5, 6)) -> None:
    alone = islands.Alone(given)
    assert together.engine.layout.fingerprint == alone.layout.fingerprint
    for seed in seeds:
        state = islands.changed_state(given, seed)
        together.load(state)
        alone.state.copy_groups(state)
        alone.engine.load(range(len(alone.layout.buckets)))
        for samples in blocks:
            islands.near_block(together, alone, island_jobs.batches(given, samples), samples)
    together.engine.close()
    alone.engine.close()


def _model(group: Group) -> None:
    given = job()
    together = _island(given, group)
    assert together.engine.numerics.startswith("tp ")
    _near(given, together, (4, 4, 4), (4, 4, 3), (4,))


def _accumulates(group: Group) -> None:
    given = job(accumulate_grad_batches=3)
    _near(given, _island(given, group), (12, 12, 7))


def _however_it_is_cut(group: Group) -> None:
    """One block gives what its halves give, added by the tree; and again the same."""
    given = job()
    together = _island(given, group)
    together.load(islands.changed_state(given))
    batches = island_jobs.batches(given, (4, 4, 4, 4))
    _, whole = together.compute(batches, (4, 4, 4, 4))
    _, again = together.compute(batches, (4, 4, 4, 4))
    _, left = together.compute(batches[:2], (4, 4))
    _, right = together.compute(batches[2:], (4, 4), 2)
    for bucket, pieces in whole.items():
        for number, piece in enumerate(pieces):
            assert torch.equal(islands.bits(piece), islands.bits(again[bucket][number]))
            add(left[bucket][number], right[bucket][number])
            assert torch.equal(piece, left[bucket][number])
    together.engine.close()


def _raises(group: Group) -> None:
    given = job()
    together = _island(given, group)
    together.load(islands.changed_state(given))
    batches = island_jobs.batches(given, (4, 4))
    broken = [batches[0], (batches[1][0], batches[1][1] + 1000)]  # no such token
    for _ in range(2):
        with pytest.raises(LeafError, match="leaf 1: "):
            together.compute(broken, (4, 4))
    together.compute(batches, (4, 4))
    together.engine.close()


class Lopsided(nn.Module):
    """Norms over the heads that a rank has: their gradients are parts of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.up, self.inner, self.down = nn.Linear(32, 64), nn.LayerNorm(4), nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(self.up(self.embed(tokens)).unflatten(-1, (-1, 4))).flatten(2)
        out: Tensor = self.down(x)
        return out


def _parts_of_a_sum(group: Group) -> None:
    """A job that says what is split has to be right."""

    def parallelize(model: nn.Module, mesh: Any) -> None:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    together = _built("tp", job(model=Lopsided, parallelize=parallelize), group)
    together.load(islands.changed_state(job(model=Lopsided)))
    with pytest.raises(UsageError, match=r"'inner.weight' is not the same on ranks"):
        together.compute(island_jobs.batches(job(), (4,)), (4,))
    together.engine.close()
    _near(job(model=Lopsided), _built("tp", job(model=Lopsided), group), (4, 4))  # by itself it is not split so


def _of_the_job(group: Group) -> None:
    """A composition that the job makes itself: layers split, checkpointed and compiled away from ours."""
    made: list[str] = []

    def parallelize(model: nn.Module, mesh: Any) -> None:
        made.append(str(mesh.mesh_dim_names))
        assert isinstance(model, Model)
        for number, layer in enumerate(model.layers):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
            model.layers[number] = checkpoint_wrapper(layer)

    given = job(parallelize=parallelize)
    together = _built("tp", given, group)
    assert made == ["('tp',)"]
    assert together.engine.numerics.startswith("tp=2 of the job ")
    _near(given, together, (4, 4, 4), (4,))
    with pytest.raises(UsageError, match="checkpoints activations itself"):
        _built("tp", given, group, checkpoint_activations=True)


def _as_torchtitan_does(group: Group) -> None:
    """Four ranks: layers split, checkpointed, compiled and fully sharded."""

    def parallelize(model: nn.Module, mesh: Any) -> None:
        assert isinstance(model, Model)
        for number, layer in enumerate(model.layers):
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            wrapped = checkpoint_wrapper(layer)
            wrapped.compile(backend="eager")
            fully_shard(wrapped, mesh=mesh["fsdp"])
            model.layers[number] = wrapped
        fully_shard(model, mesh=mesh["fsdp"], ignored_params={model.scale})

    given = job(model=lambda: Model(dropout=0.0), parallelize=parallelize)
    together = _built("fsdp,tp", given, group)
    assert together.engine.numerics.startswith("fsdp=2,tp=2 of the job ")
    _near(given, together, (4, 4, 4), (4,))


def _shifting(model: nn.Module, batch: Any) -> Tensor:
    """Writes into its batch."""
    tokens, targets = batch
    tokens.add_(1).remainder_(256)
    return island_jobs.lm_loss(model(tokens), targets)


def _penalized(model: nn.Module, batch: Any) -> Tensor:
    """Uses the parameters of layers beside their calls."""
    assert isinstance(model, Model)
    whole = (cast(Any, parameter).full_tensor() for parameter in model.layers.parameters())
    penalty = sum(parameter.square().sum() for parameter in whole)
    return island_jobs.lm_loss(model(batch[0]), batch[1]) + 0.01 * penalty


def _failing(model: nn.Module, batch: Any) -> Tensor:
    """Raises between forward and backward where a target is negative."""
    out = model(batch[0])
    if batch[1].min() < 0:
        raise ValueError("a negative target")
    return island_jobs.lm_loss(out, batch[1])


def _of_the_job_fully_sharded(group: Group) -> None:
    def parallelize(model: nn.Module, mesh: Any) -> None:
        assert isinstance(model, Model)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["fsdp"])  # and nothing else: the rest is whole on every rank

    given = job(parallelize=parallelize)
    _near(given, _built("fsdp", given, group), (4, 4, 4), (4, 4, 4, 4), (4,))
    given = job(parallelize=parallelize, accumulate_grad_batches=3)
    _near(given, _built("fsdp", given, group), (12, 12, 7))
    given = job(parallelize=parallelize, accumulate_grad_batches=2, loss=None, step=_shifting)
    _near(given, _built("fsdp", given, group), (8, 3))  # the second rank computes its first microbatch twice
    given = job(parallelize=parallelize, loss=None, step=_penalized)
    together = _built("fsdp", given, group)
    with pytest.raises(UsageError, match=r"'layers.\d..*' is used outside of the module that fully_shard has made"):
        together.compute(island_jobs.batches(given, (4, 4)), (4, 4))
    together.engine.close()
    given = job(parallelize=parallelize, loss=None, step=_failing)
    together = _built("fsdp", given, group)
    bad = [(x, -y - 1) for x, y in island_jobs.batches(given, (4, 4))]
    together.load(islands.changed_state(given))
    with pytest.raises(LeafError, match=r"leaf 0: ValueError: a negative target"):
        together.compute(bad, (4, 4))
    _near(given, together, (4, 4))  # it has failed on all ranks alike, and nothing of it is left


def _forgets(group: Group) -> None:
    """Of a leaf that fails in its second microbatch, nothing is left in the next block's sums, in whatever dtype."""
    half, single = torch.bfloat16, torch.float32
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=single, output_dtype=single)

    def parallelize(model: nn.Module, mesh: Any) -> None:
        assert isinstance(model, Model)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["fsdp"], mp_policy=policy)

    given = job(parallelize=parallelize, accumulate_grad_batches=2, loss=None, step=_failing)
    together = _built("fsdp", given, group)
    together.load(islands.changed_state(given))
    batches = island_jobs.batches(given, (8, 8))
    _, clean = together.compute(batches, (8, 8))
    with pytest.raises(LeafError, match=r"leaf 0: ValueError: a negative target"):
        together.compute([(x, torch.cat((y[:4], -y[4:] - 1))) for x, y in batches], (8, 8))
    _, after = together.compute(batches, (8, 8))
    for bucket, pieces in clean.items():
        assert all(map(torch.equal, pieces, after[bucket]))
    together.engine.close()


class Skipping(Model):
    """Leaves out a layer, as its data has it."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[int(tokens[0, 0] > 127)](self.embed(tokens))
        out: Tensor = self.head(x)
        return out


def _skips(group: Group) -> None:
    """Shapes are alike: the ranks would take one layer's parameters for another's."""

    def parallelize(model: nn.Module, mesh: Any) -> None:
        assert isinstance(model, Model)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["fsdp"])

    given = job(model=Skipping, parallelize=parallelize)
    together = _built("fsdp", given, group)
    batches = island_jobs.batches(given, (4,) * group.size)
    for rank, (tokens, _) in enumerate(batches):
        tokens[0, 0] = 200 * rank
    with pytest.raises(UsageError, match=r"different parts of the model.*\('layers.0', 'layers.1'\).*use dp"):
        together.compute(batches, (4,) * group.size)
    together.engine.close()


def _layers_sharded(model: nn.Module, mesh: Any) -> None:
    assert isinstance(model, Model)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["fsdp"])


def _fails_apart(group: Group) -> None:
    """A leaf that fails on one rank alone: the other waits for it in an exchange, and is told."""
    given = job(parallelize=_layers_sharded, loss=None, step=_failing)
    together = _built("fsdp", given, group)
    batches = island_jobs.batches(given, (4, 4))
    batches[0] = (batches[0][0], -batches[0][1] - 1)
    expected = RuntimeError if group.rank else LoneLeafError
    with pytest.raises(expected, match=r"leaf 0: ValueError: a negative target|a leaf failed on another rank"):
        together.compute(batches, (4, 4))
    together.engine.close()


def _steep(model: nn.Module, batch: Any) -> Tensor:
    """With a penalty of gradients."""
    out = model(batch[0])
    loss = island_jobs.lm_loss(out, batch[1])
    (gradient,) = torch.autograd.grad(loss, out, create_graph=True)
    return loss + gradient.square().sum()


def _steep_weight(model: nn.Module, batch: Any) -> Tensor:
    assert isinstance(model, Model)
    weight = model.layers[0].up.weight
    (gradient,) = torch.autograd.grad(weight.square().sum(), weight, create_graph=True)
    return island_jobs.lm_loss(model(batch[0]), batch[1]) + gradient.sum()


def _steep_by_function(model: nn.Module, batch: Any) -> Tensor:
    assert isinstance(model, Model)
    slope = torch.func.grad(lambda x: model.layers[0](x).square().sum())(torch.ones(4, 6, 32))
    return island_jobs.lm_loss(model(batch[0]), batch[1]) + slope.square().mean()


def _gradients_of_data(model: nn.Module, batch: Any) -> Tensor:
    """By functions that always create a graph: of data, and of a parameter that is whole on every rank."""
    assert isinstance(model, Model)
    x = batch[0].float() / 256
    slope = torch.func.grad(lambda x: x.square().mean())(x) + torch.func.vjp(torch.sin, x)[1](x)[0]
    (gradient,) = torch.autograd.grad(model.scale.square(), model.scale, create_graph=True)
    return island_jobs.lm_loss(model(batch[0]), batch[1]) * (1 + slope.mean()) + gradient.square()


def _second_derivatives(group: Group) -> None:
    """What passes through a layer that is split twice would be missing."""
    given = job(loss=None, step=_steep)
    together = _built("tp", given, group)
    together.load(islands.changed_state(given))
    with pytest.raises(UsageError, match=r"gradients of gradients \(create_graph=True\)"):
        together.compute(island_jobs.batches(given, (4,)), (4,))
    together.engine.close()
    for mode, step in (("tp", _steep_weight), ("fsdp", _steep), ("fsdp", _steep_weight), ("fsdp", _steep_by_function)):
        given = job(loss=None, step=step, parallelize=_layers_sharded if mode == "fsdp" else None)
        together = _built(mode, given, group)
        together.load(islands.changed_state(given))
        samples = (4,) * (group.size if mode == "fsdp" else 1)
        with pytest.raises(UsageError, match=r"gradients of gradients \(create_graph=True\)"):
            together.compute(island_jobs.batches(given, samples), samples)
        together.engine.close()
    given = job(loss=None, step=_gradients_of_data)
    _near(given, _built("tp", given, group), (4, 4))
    loss = torch.ones((), requires_grad=True).square()
    (first,) = torch.autograd.grad(loss, loss, create_graph=True)  # nobody else is kept from it
    assert first == 1


def _what_the_job_may_not_do(group: Group) -> None:
    def shrink(model: nn.Module, mesh: Any) -> None:
        assert isinstance(model, Model)
        model.unused.weight = nn.Parameter(torch.empty(32, 64, device="meta"))

    def rename(model: nn.Module, mesh: Any) -> nn.Module:
        return nn.Sequential(model)

    def fail(model: nn.Module, mesh: Any) -> None:
        raise ValueError("no such axis")

    def number(model: nn.Module, mesh: Any) -> Any:
        return 3

    for parallelize, words in (
        (shrink, r"'unused.weight' has the shape \[32, 64\] after Job.parallelize, and \[64, 64\]"),
        (rename, "has left no parameter '"), (fail, "ValueError: no such axis"), (number, "gave int, not the model"),
    ):  # fmt: skip
        with pytest.raises(W5xdeError, match=words):
            _built("tp", job(parallelize=parallelize), group)

    def over_the_data(model: nn.Module, mesh: Any) -> None:
        assert isinstance(model, Model)
        parallelize_module(model.layers[0], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model.layers[1], mesh=mesh)

    with pytest.raises(UsageError, match=r"divides 'layers.0.up.weight' over the axis 'fsdp', whose ranks"):
        _built("fsdp", job(parallelize=over_the_data), group)


class Writing(nn.Module):
    """A block whose ``begins`` writes into what the block is given, which nobody has to keep."""

    def __init__(self, begins: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.begins = nn.Linear(32, 32), begins

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.begins(x)) * 1.5
        return out


class Between(nn.Module):
    """Blocks ``begin`` by writing into their input, or their caller does so after them: ``then``."""

    def __init__(self, begins: Callable[[Tensor], Tensor], then: Callable[[Tensor], object] = Tensor.size) -> None:
        super().__init__()
        self.embed, self.then = nn.Embedding(256, 32), then
        self.layers = nn.ModuleList(Writing(begins) for _ in range(2))
        self.head = nn.Linear(32, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * 1.5
        for layer in self.layers:
            given = x
            x = layer(given)
            self.then(given)
        out: Tensor = self.head(x)
        return out


def _checkpoints(group: Group) -> None:
    _near(job(), _built("tp", job(), group, checkpoint_activations=True), (4, 4, 4))
    given = job(model=lambda: Between(partial(F.relu, inplace=True)))  # the same whether it is done once or twice
    _near(given, _built("tp", given, group, checkpoint_activations=True), (4, 4))
    for parts in ((partial(F.silu, inplace=True),), (lambda x: x * 0.5, lambda x: x.mul_(2))):
        given = job(model=partial(Between, *parts))
        _near(given, _built("tp", given, group), (4, 4))
        together = _built("tp", given, group, checkpoint_activations=True)
        with pytest.raises(UsageError, match=r"what Writing is called with is written into in place"):
            together.compute(island_jobs.batches(given, (4,)), (4,))


def _half(group: Group) -> None:
    given = job(precision="bf16")
    together, alone, batches = _built("tp", given, group), islands.Alone(given), island_jobs.batches(given, (4, 4))
    state = islands.changed_state(given)
    together.load(state)
    alone.state.copy_groups(state)
    alone.engine.load(range(len(alone.layout.buckets)))
    expected, _ = alone.compute(islands.task(batches, (4, 4), (0, 1)))
    outcome, _ = together.compute(batches, (4, 4))
    assert not group.rank or outcome.losses == ()
    assert group.rank or outcome.losses == pytest.approx(expected.losses, rel=0.02)
    together.engine.close()
    alone.engine.close()


class Hooked(Model):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.get_parameter(name).register_hook(lambda gradient: gradient * 0.5)
        self.register_buffer("drawn", torch.randn(32), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = super().forward(tokens) + self.embed(tokens[:, :1]).mean(-1, keepdim=True) * self.drawn.mean()
        return out


def _hooked(group: Group) -> None:
    """A hook on what is whole on every rank is called; on what is split it is refused."""
    given = job(model=lambda: Hooked("norm.weight", "scale", "layers.0.before.bias"))
    _near(given, _built("tp", given, group), (4, 4))
    split = job(model=lambda: Hooked("layers.1.up.weight"))
    with pytest.raises(UsageError, match=r"'layers\.1\.up\.weight' has a hook on its gradient, and is divided"):
        _built("tp", split, group)

    def parallelize(model: nn.Module, mesh: Any) -> None:
        for layer in cast(Any, model).layers:
            fully_shard(layer, mesh=mesh["fsdp"])

    sharded = job(model=lambda: Hooked("layers.1.up.weight", "norm.weight"), parallelize=parallelize)
    _near(sharded, _built("fsdp", sharded, group), (4, 4))


def _declared(group: Group) -> None:
    class Declaring(Model):
        _tp_plan: ClassVar = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_rep"}

    class Unknown(Model):
        _tp_plan: ClassVar = {"layers.*.up": "sideways"}

    given = job(model=lambda: _untied(Declaring))
    _near(given, _built("tp", given, group), (4, 4))
    with pytest.raises(UsageError, match=r"style 'sideways' for layers.\*.up; known are colwise"):
        _built("tp", job(model=Unknown), group)


def _trespasses(group: Group) -> None:
    """Whatever else a process refuses that computes alone; from then on in every block."""
    for given, words in island_jobs.trespassing():
        together = _built("tp", given, group)
        together.load(islands.changed_state(given))
        for _ in range(2):
            with pytest.raises(LeafError, match=words):
                together.compute(island_jobs.batches(given, (8, 8)), (8, 8))


class HeadAlone(Model):
    """Its plan names one of two layers that share a weight."""

    _tp_plan: ClassVar = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_rep"}


class HeadOtherwise(HeadAlone):
    """And here the other one cannot be split so."""

    _tp_plan: ClassVar = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "embed": "colwise_rep"}


def _declared_of_two(group: Group) -> None:
    for model in (HeadAlone, HeadOtherwise):
        given = job(model=model)
        _near(given, _built("tp", given, group), (4, 4))


def test_a_declared_layer_is_split_with_what_shares_its_weight_or_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    def unknown(model: nn.Module) -> None:
        raise RuntimeError("it needs values")

    assert {"head", "embed"} <= plan_of(replica_of(job(model=HeadAlone), BUCKET).model, 2, unknown).keys()
    assert not caplog.records
    plan = plan_of(replica_of(job(model=HeadOtherwise), BUCKET).model, 2, unknown)
    assert {"layers.0.up", "layers.1.down"} <= plan.keys()
    assert {"head", "embed"}.isdisjoint(plan)
    assert "'embed' and 'head' share a weight and cannot be split alike" in caplog.text


def _programs(group: Group) -> None:
    """Without the job's code: every layer is split by itself."""

    def wide() -> nn.Module:
        return Model(64, layers=1)

    for given in (job(model=wide, accumulate_grad_batches=2), job(model=lambda: _untied(Model))):
        atoms = island_programs.atoms_of(given, group)
        traced = Traced(atoms.program, atoms.layout, 1 << 32)
        engine = island_engine(IslandShape("tp", group.size), traced, LeafSpec.of(given), group)
        assert engine.numerics.startswith(f"tp={group.size} of the program ")
        together = islands.Together(engine, group)
        assert isinstance(engine, ComposedEngine)
        held, whole = engine._local, engine.layout.entries
        split = {entry.name for index, entry in enumerate(whole) if held[index].numel() < entry.numel}
        assert {"embed.weight", "layers.0.attention.q_proj.bias", "layers.0.up.weight"} <= split
        assert not any("norm" in name or "unused" in name for name in split)
        _near(given, together, (4, 4, 4) if given.accumulate_grad_batches == 1 else (8, 8, 3))
    together = islands.Together(island_engine(IslandShape("tp", group.size), traced, LeafSpec.of(given), group), group)
    together.load(islands.changed_state(given))
    broken = island_jobs.batches(given, (4, 4))
    broken[1] = (broken[1][0] + 1000, broken[1][1])
    with pytest.raises(LeafError, match="leaf 1: IndexError"):
        together.compute(broken, (4, 4))
    together.engine.close()


class Counted(Heads):
    """Knows how many heads it has."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(*x.shape[:2], heads, self.head).transpose(1, 2) for part, heads in
                   ((self.q_proj, 4), (self.k_proj, 2), (self.v_proj, 2)))  # fmt: skip
        attended = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


def _heads_of_a_constant(group: Group) -> None:
    """Attention that cannot have fewer heads is split layer by layer."""

    def make() -> nn.Module:
        model = Model()
        for layer in model.layers:
            assert isinstance(layer, Layer)
            layer.attention = Counted(32, 8)
        return model

    _near(job(model=make), _built("tp", job(model=make), group), (4, 4))


class Inferring(Heads):
    """Takes its number of heads from a constant, and their size from what is there: with a part it runs, and computes
    something else."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(*x.shape[:2], heads, -1).transpose(1, 2) for part, heads in
                   ((self.q_proj, 4), (self.k_proj, 2), (self.v_proj, 2)))  # fmt: skip
        attended = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """``between`` two layers that have the names of a pair."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)
        self.temperature, self.between = nn.Parameter(torch.tensor(1.5)), between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.between(self.fc1(x)))
        return out


class Tempered(Block):
    """A parameter between, whose gradient would be a part of a sum on each rank."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.between(self.fc1(x) * self.temperature))
        return out


class Telling(Block):
    """Gives away what lies between."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        out: Tensor = self.fc2(self.between(hidden)) + hidden.mean()
        return out


class Centred(Block):
    """Mixes features in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        out: Tensor = self.fc2(hidden - hidden.mean(-1, keepdim=True) if self.training else hidden)
        return out


class Dropping(Block):
    """By a number that no attribute has."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.dropout(F.gelu(self.fc1(x)), 0.5, self.training))
        return out


class Choosing(Block):
    """Mixes the features of some rows, or in some calls."""

    def forward(self, x: Tensor, some: Tensor | None = None, mixed: bool = False) -> Tensor:
        hidden = F.gelu(self.fc1(x))
        if some is not None:
            hidden = torch.where(some, hidden, hidden.softmax(-1))
        out: Tensor = self.fc2(hidden.softmax(-1) if mixed else hidden)
        return out


class Noting(Block):
    """Keeps a mean over features."""

    def __init__(self) -> None:
        super().__init__(F.gelu)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.between(self.fc1(x))
        self.seen.mul_(0.9).add_(hidden.detach().mean())
        out: Tensor = self.fc2(hidden)
        return out


class Words(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(256, 32), block, nn.Linear(32, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        out: Tensor = self.head(x + self.block(x))
        return out


class Apart(Words):
    """Calls the layers of a block, and not the block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        block = self.block
        assert isinstance(block, Block)
        out: Tensor = self.head(x + block.fc2(block.fc1(x).softmax(-1)))
        return out


class Masked(Words):
    """Tells the block which rows."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        out: Tensor = self.head(x + self.block(x, x[..., :1] > 0))
        return out


class Twice(Words):
    """Calls the block in two ways."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        out: Tensor = self.head(x + self.block(self.block(x), mixed=True))
        return out


_BETWEEN: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "value by value": (lambda: Words(Block(F.gelu)), True),
    "heads by their size": (lambda: Words(Heads(32, 8)), True),
    "heads by their number": (lambda: Words(Inferring(32, 8)), False),
    "softmax": (lambda: Words(Block(partial(F.softmax, dim=-1))), False),
    "normalize": (lambda: Words(Block(partial(F.normalize, dim=-1))), False),
    "root mean square": (lambda: Words(Block(lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True)))), False),
    "halves": (lambda: Words(Block(lambda x: torch.cat((x[..., 32:], x[..., :32]), -1))), False),
    "a parameter": (lambda: Words(Tempered(F.gelu)), False),
    "given away": (lambda: Words(Telling(F.gelu)), False),
    "in training alone": (lambda: Words(Centred(F.gelu)), False),
    "dropped": (lambda: Words(Dropping(F.gelu)), True),
    "in some rows": (lambda: Masked(Choosing(F.gelu)), False),
    "in another call": (lambda: Twice(Choosing(F.gelu)), False),
    "a buffer": (lambda: Words(Noting()), False),
    "called by another": (lambda: Apart(Block(F.gelu)), False),
}


@pytest.mark.parametrize("name", _BETWEEN)
def test_a_pair_is_split_where_its_parts_compute_the_same(name: str) -> None:
    make, divides = _BETWEEN[name]
    with torch.device("meta"):
        model = make().train()
    given = job(model=make)
    plan = plan_of(model, 2, partial(run_step, given, LeafSpec.of(given)))
    row = "block.o_proj" if isinstance(model.block, Heads) else "block.fc2"
    assert isinstance(plan[row], RowwiseParallel) is divides
    unseen = plan_of(model, 2, lambda model: 1 / 0)  # as where the data is elsewhere
    assert isinstance(unseen[row], ColwiseParallel)


def _computed(compute: Any) -> nn.Module:
    """Words, where hooks compute the weights of a pair."""
    block = Block(F.gelu)
    block.fc1, block.fc2 = compute(block.fc1), compute(block.fc2)
    return Words(block)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("compute", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_layers_whose_weights_hooks_compute_stay_whole(compute: Any) -> None:
    with torch.device("meta"):
        model, tokens = _computed(compute), torch.zeros(2, 8, dtype=torch.int64)
    assert set(plan_of(model, 2, lambda model: model(tokens))) == {"embed", "head"}


class Tied(nn.Module):
    """Layers that share biases: of a pair with one beside it, of two that are split by themselves, of one with one that
    is not."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.beside = Block(F.gelu), nn.Linear(32, 64)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64)
        self.small, self.last, self.head = nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 256, bias=False)
        self.embed = nn.Embedding(256, 32)
        self.beside.bias = self.block.fc1.bias
        self.second.bias = self.first.bias
        self.last.bias = self.small.bias

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.second(torch.tanh(self.first(self.block(x)))) + self.beside(x) + self.small(x[..., :2])
        out: Tensor = self.head(torch.tanh(self.last(x)))
        return out


def test_layers_that_share_a_parameter_are_split_alike_or_stay_whole() -> None:
    with torch.device("meta"):
        model, tokens = Tied(), torch.zeros(2, 8, dtype=torch.int64)
    plan = plan_of(model, 2, lambda model: model(tokens))
    assert set(plan) == {"embed", "head", "first", "second", "block.fc1", "block.fc2", "beside"}
    assert isinstance(plan["block.fc2"], ColwiseParallel)  # each by itself


def _odd_pairs(group: Group) -> None:
    made = [_BETWEEN[name][0] for name in ("heads by their number", "softmax")]
    for make in (*made, partial(_computed, nn.utils.weight_norm), Tied):
        _near(job(model=make), _built("tp", job(model=make), group), (4, 4))


def _untied(make: Any) -> nn.Module:
    model: nn.Module = make()
    model.head = nn.Linear(32, 256, bias=False)
    return model


def _products(group: Group) -> None:
    """Four ranks. ``fsdp=2,tp=2`` and ``dp=2,tp=2`` have the bits of ``tp=2``, as far as they are theirs to have."""
    given = job(accumulate_grad_batches=2)
    _near(given, _built("fsdp,tp", given, group), (8, 8, 5), (6,))
    given = job()
    _near(given, _built("dp,tp", given, group), (4, 4, 4, 4, 4), (4,), seeds=(5,))
    wholes = []
    for mode in ("dp,tp", "fsdp,tp"):
        together = _built(mode, given, group)
        together.load(islands.changed_state(given))
        batches = island_jobs.batches(given, (4,) * 6)
        _, whole = together.compute(batches, (4,) * 6)
        parts = [together.compute(batches[a:b], (4,) * (b - a), a)[1] for a, b in ((0, 2), (2, 4), (4, 6))]
        for bucket, pieces in whole.items():
            for number, piece in enumerate(pieces):
                first, second, third = (part[bucket][number] for part in parts)
                add(first, second)
                add(first, third)
                assert torch.equal(piece, first), (mode, bucket)
        wholes.append(whole)
        together.engine.close()


class OneKey(Heads):
    """All heads have the same keys and values."""

    def __init__(self) -> None:
        super().__init__(32, 8)
        self.k_proj, self.v_proj = nn.Linear(32, 8), nn.Linear(32, 8)


class NormedHeads(Heads):
    """With a norm of each head's values."""

    def __init__(self) -> None:
        super().__init__(32, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in
                   (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        k, v = k.repeat_interleave(2, 1), self.norm(v).repeat_interleave(2, 1)
        out: Tensor = self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class OddlyHeaded(Model):
    _tp_plan: ClassVar = {
        "layers.*.attention.q_proj": "colwise", "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise", "layers.*.attention.o_proj": "rowwise",
        "layers.*.attention.norm": "replicated_with_grad_allreduce",
        "layers.*.up": "colwise", "layers.*.down": "rowwise",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.layers[1].attention, self.layers[2].attention = OneKey(), NormedHeads()


def _oddly_headed(group: Group) -> None:
    given = job(model=OddlyHeaded)
    _near(given, _built("tp", given, group), (4, 4))


class Biased(nn.Module):
    """A bias that is computed, one that is a buffer, and one that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=last) for last in (False, False, True))
        self.scale, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, self.first.weight, self.bias * self.scale))
        out: Tensor = self.head(self.third(torch.tanh(F.linear(x, self.second.weight, self.shift))))
        return out


def _biases(group: Group) -> None:
    given = replace(island_jobs.mlp(), model=Biased)
    atoms = island_programs.atoms_of(given, group)
    split = {atoms.layout.entries[entry].name for entry in splittable(atoms.program, atoms.layout, 2)}
    assert split == {"third.weight", "third.bias"}
    engine = island_engine(
        IslandShape("tp", group.size), Traced(atoms.program, atoms.layout, 1 << 32), LeafSpec.of(given), group,
        bucket_bytes=BUCKET,
    )  # fmt: skip
    _near(given, islands.Together(engine, group), (4, 4))


CASES: dict[str, islands.Case] = {
    "model": _model, "accumulation": _accumulates, "however it is cut": _however_it_is_cut,
    "raises": _raises, "parts of a sum": _parts_of_a_sum,
    "of the job": _of_the_job, "fully sharded by the job": _of_the_job_fully_sharded,
    "forgets": _forgets, "skips": _skips, "fails apart": _fails_apart, "second derivatives": _second_derivatives,
    "what a job may not do": _what_the_job_may_not_do, "checkpoints": _checkpoints, "half precision": _half,
    "declared": _declared, "declared of two": _declared_of_two, "hooks": _hooked, "trespasses": _trespasses,
    "programs": _programs, "heads of a constant": _heads_of_a_constant, "odd pairs": _odd_pairs,
    "biases": _biases, "oddly headed": _oddly_headed,
}  # fmt: skip


def _pipelines(group: Group) -> None:
    """Four ranks, ``pp=2,dp=2``: the bits of one process."""
    given = programs._job(Transformer, programs._tokens(), programs._words)
    atoms = island_programs.atoms_of(given, group)
    shape = IslandShape.parse("pp=2,dp=2")
    engine = island_engine(shape, Traced(atoms.program, atoms.layout, 1 << 32), LeafSpec.of(given), group)
    assert engine.numerics == EXACT
    both = islands.Together(engine, group), islands.Alone(given)
    programs._load(given, both)
    for samples in ((4, 4, 4), (4,), (4,) * 5):
        islands.same_block(*both, island_jobs.batches(given, samples), samples)
    broken = island_jobs.batches(given, (4, 4, 4))
    broken[2] = (broken[2][0], broken[2][1] + 1000)
    with pytest.raises(LeafError, match="leaf 2: "):
        both[0].compute(broken, (4, 4, 4))
    islands.same_block(*both, island_jobs.batches(given, (4, 4, 4)), (4, 4, 4))
    engine.close()
    both[1].engine.close()
    for text in ("dp=2,fsdp=2", "fsdp=2,pp=2", "pp=2,tp=2"):
        with pytest.raises(UsageError, match=f"--island {text}: these do not go together"):
            island_engine(IslandShape.parse(text), given, LeafSpec.of(given), group)


FOUR: dict[str, islands.Case] = {
    "as torchtitan does": _as_torchtitan_does,
    "products": _products,
    "pipelines": _pipelines,
}
FAST = tuple(CASES)
CASES |= FOUR


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_two_ranks(tmp_path: Path) -> None:
    islands.run("tests.unit.test_parallel_tensors", 2, tmp_path, FAST, timeout_s=110)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(150)
def test_four_ranks(tmp_path: Path) -> None:
    islands.run("tests.unit.test_parallel_tensors", 4, tmp_path, tuple(FOUR), timeout_s=140)


def test_who_looks_for_second_derivatives_looks_no_longer_than_a_step() -> None:
    """However the steps of two threads overlap."""
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    first, second, third = (_FirstDerivatives(()) for _ in range(3))
    first.__enter__()
    second.__enter__()
    first.__exit__()
    third.__enter__()
    second.__exit__()
    weight = nn.Parameter(torch.ones(()))
    with pytest.raises(UsageError, match="create_graph"), _FirstDerivatives([weight]):
        torch.autograd.grad(weight.square(), weight, create_graph=True)
    third.__exit__()
    assert torch.autograd._engine_run_backward is run  # type: ignore[attr-defined]


class Positions(nn.Module):
    """Uses one embedding's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(64, 64), nn.Embedding(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.tokens(x) + self.positions.weight[: x.shape[1]])
        return out


def test_a_layer_that_is_never_called_stays_whole() -> None:
    with torch.device("meta"):
        model, x = Positions(), torch.zeros(2, 8, dtype=torch.int64)

    def unknown(model: nn.Module) -> None:
        raise RuntimeError("it needs values")

    assert set(plan_of(model, 2, unknown)) == {"tokens", "positions", "head"}
    assert set(plan_of(model, 2, lambda part: copy.deepcopy(part)(x))) == {"tokens", "head"}  # as who measures, a copy


class Steps(nn.Module):
    """One layer whose weight is used beside its call, with its own input; and one of which all is used, alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        penalty = sum(parameter.square().sum() for parameter in self.second.parameters())
        out: Tensor = self.second(h) + h @ self.first.weight.to(h.dtype).t()
        return out.mean() + penalty


class Functional(nn.Module):
    """Calls no layer that could be split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.linear(x, self.first.weight, self.first.bias))
        return out


def test_a_layer_whose_weight_is_used_with_other_tensors_beside_its_calls_stays_whole() -> None:
    with torch.device("meta"):
        model, functional, x = Steps(), Functional(), torch.zeros(2, 64)
    assert set(plan_of(model, 2, lambda part: copy.deepcopy(part)(x))) == {"second"}
    with pytest.raises(UsageError, match=r"no layer of Functional can be split.*that the step calls"):
        plan_of(functional, 2, lambda part: part(x))


class OfItsKind(nn.Module):
    """Takes of the weights of its layers only what they are like; of the last one more than that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up(x.type_as(self.up.weight)).to(self.down.weight))
        h = self.down(h).expand_as(self.last.weight).reshape_as(self.last.weight)
        out: Tensor = self.last(h) + h @ self.last.weight.data.t()
        return out.mean() * torch.ones_like(self.up.weight).sum()


def test_a_layer_of_whose_weight_only_the_dtype_or_the_shape_is_taken_is_split() -> None:
    with torch.device("meta"):
        model, x = OfItsKind(), torch.zeros(32, 32, dtype=torch.float64)

    def faked_run(part: nn.Module) -> None:
        with faked(part) as (copied, _):
            copied(torch.zeros(32, 32, dtype=torch.float64))

    assert set(plan_of(model, 2, lambda part: part(x))) == {"up", "down"}
    assert set(plan_of(model, 2, faked_run)) == {"up", "down"}


def test_of_a_module_that_the_job_gives_parametrized_layers_stay_whole() -> None:
    model = Words(Block(F.gelu))
    nn.utils.parametrizations.spectral_norm(model.head)
    given = job(model=model)
    plan = plan_of(replica_of(given, BUCKET).model, 2, partial(run_step, given, LeafSpec.of(given)))
    assert set(plan) == {"embed", "block.fc1", "block.fc2"}


def test_declared_layers_that_cannot_compute_in_parts_are_split_each_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = job(model=OddlyHeaded)
    plan: Any = plan_of(replica_of(given, BUCKET).model, 2, partial(run_step, given, LeafSpec.of(given)))
    assert isinstance(plan["layers.0.attention.o_proj"], RowwiseParallel)
    assert plan["layers.0.attention.k_proj"].output_layouts[0].is_shard()
    assert isinstance(plan["layers.1.down"], RowwiseParallel)
    for number, name in product((1, 2), ("q_proj", "k_proj", "v_proj", "o_proj")):
        assert plan[f"layers.{number}.attention.{name}"].output_layouts[0].is_replicate()
    (record,) = caplog.records
    assert "the layers of layers.1.attention and 1 other modules are split each by itself" in record.getMessage()


def test_trying_a_pair_takes_its_module_once_and_a_part() -> None:
    with torch.device("meta"):
        module = Block(F.gelu)
        module.whole = nn.Linear(64, 64).requires_grad_(False)
    size = sum(4 * parameter.numel() for parameter in module.parameters())
    with _Held([]) as held:
        assert _divides(module, _Pair("", ("fc1",), "fc2"), 8, ((_Like(torch.zeros(2, 32)),), {}))
    assert held.most < 1.5 * size


def test_a_failure_is_laid_to_the_split_where_it_is_about_sizes_or_of_dtensor() -> None:
    def caught(fail: Callable[[], object]) -> BaseException:
        try:
            fail()
        except BaseException as error:
            return error
        raise AssertionError

    def of_the_job() -> None:
        raise RuntimeError("on purpose")

    def of_dtensor() -> None:
        RowwiseParallel()._apply(nn.ReLU(), cast(Any, None))

    for other in (of_the_job, lambda: [][0], lambda: (_ for _ in ()).throw(MemoryError("size"))):
        assert not _may_be_of_a_split(caught(other))
    for split in (of_dtensor, lambda: torch.zeros(6).view(4, -1), lambda: torch.zeros(2, 3) @ torch.zeros(2, 3)):
        assert _may_be_of_a_split(caught(split))
