"""A program in parts computes the program's bits: loss, metrics, gradients, buffers, random numbers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from tests.support import programs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import autocast
from w5xde_async.compute.program.atoms import Atoms, Live, Part, cut
from w5xde_async.compute.program.form import parse
from w5xde_async.compute.program.interpreter import Seen
from w5xde_async.compute.program.program_job import ProgramStep, skeleton
from w5xde_async.compute.program.tracing import probe_batches, trace
from w5xde_async.errors import ProgramRefused
from w5xde_async.job import Job, build_model, load_job
from w5xde_async.params.flat import state_of
from w5xde_async.params.layout import Layout

CPU = torch.device("cpu")
MEMORY = 1 << 32

pytestmark = pytest.mark.timeout(90)  # tracing takes seconds where other processes compute


# -- models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down, self.drop = nn.Linear(3 * width, width), nn.Dropout(0.2)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=0.1)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.down(F.gelu(self.gate(x)) * self.up(x))


class Transformer(nn.Module):
    """Dropout, tied embedding, a learned value that every layer uses, and one that is only looked up."""

    def __init__(self, layers: int = 4, width: int = 16, *, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(32, width), nn.Embedding(8, width)
        self.bias = nn.Parameter(torch.randn(8, 8) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.place(torch.arange(length, device=tokens.device))
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        bias = self.bias.tanh().masked_fill(~mask, float("-inf"))
        for block in self.blocks:
            x = block(x, bias)
        out: Tensor = self.head(self.norm(x))
        return out


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm_a, self.norm_b = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm_a(self.a(x)), inplace=True)
        out = self.norm_b(self.b(out))
        out += x
        return F.relu(out, inplace=True)


class Convolutions(nn.Module):
    """Batch norm, writes in place, a buffer that is read as it is written, one that all blocks read, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, 6, 3), nn.ModuleList(Residual(6) for _ in range(3))
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, 10)
        self.register_buffer("level", torch.zeros(6))
        self.register_buffer("scale", torch.full((6, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.view(-1, 1, 8, 8))
        for block in self.blocks:
            x = block(x) * self.scale
        with torch.no_grad():
            self.level.lerp_(x.mean((0, 2, 3)), 0.1)
        out: Tensor = self.head(self.drop(x.mean((2, 3)) - self.level))
        return out


class Giant(nn.Module):
    """Nearly all is one product."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.giant = nn.Linear(4, 8), nn.Linear(8, 4096)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.giant(self.lift(x))
        return out


class Dot(nn.Module):
    """One call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.weight, dims=1).sum() if x.dim() > 1 else torch.dot(x, self.weight)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _job(model: Callable[[], nn.Module], data: Sequence[Tensor], step: Any, *, precision: Any = "fp32") -> Job:
    return Job(
        model=model, dataset=TensorDataset(*data), step=step, optimizer=_sgd, batch_size=8, microbatch_size=4,
        max_steps=4, seed=3, precision=precision,
    )  # fmt: skip


def _tokens() -> tuple[Tensor, Tensor]:
    text = torch.randint(32, (16, 9), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].clone(), text[:, 1:].clone()


def _words(model: nn.Module, batch: Any) -> Any:
    tokens, target = batch
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    right = (logits.argmax(-1) == target).float().mean()
    return loss, {"accuracy": right, "length": float(tokens.shape[1]), "bits": loss.detach() * 1.44}


def _classes(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def _digits() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(2)
    return torch.randn(16, 64, generator=made), torch.randint(10, (16,), generator=made)


class Random(nn.Module):
    """A net of its own for every seed: layers that use any earlier ones, some twice, some writing in place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.lift = nn.Linear(64, 12)
        self.plan: list[tuple[str, int, int]] = []
        self.layers = nn.ModuleList()
        for number in range(draw.randint(4, 9)):
            kind = draw.choice(("linear", "again", "drop", "add", "inplace", "norm", "parts", "frozen", "buffer"))
            self.plan.append((kind, draw.randrange(number + 1), draw.randrange(number + 1)))
            self.layers.append(nn.BatchNorm1d(12) if kind == "norm" else nn.Linear(12, 12))
            self.register_buffer(f"mean{number}", torch.zeros(12))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        made = [self.lift(x)]
        first: Any = self.layers[0]
        for number, ((kind, a, b), layer) in enumerate(zip(self.plan, self.layers, strict=True)):
            one, two = made[a], made[b]
            if kind == "again" and isinstance(first, nn.Linear):
                made.append(first(one).tanh() + two)
            elif kind == "drop":
                made.append(F.dropout(one, 0.3, self.training) * two)
            elif kind == "add":
                made.append(one + two)
            elif kind == "inplace":
                fresh = one * 0.5
                view = fresh[:, :6]
                made.append(fresh)
                view.mul_(two[:, 6:])
            elif kind == "parts":
                left, right = layer(one).chunk(2, 1)
                made.append(torch.cat((right.sigmoid(), left * two[:, 3:9]), 1))
            elif kind == "frozen":
                with torch.no_grad():
                    still = layer(one).abs()
                made.append(two * still)
            elif kind == "buffer":
                mean = getattr(self, f"mean{number}")
                with torch.no_grad():
                    mean.lerp_(one.mean(0), 0.3)
                made.append(layer(two) - mean)
            else:
                made.append(layer(one))
        out: Tensor = self.head(made[-1] + made[-2])
        return out


class Masked(nn.Module):
    """An additive mask in the dtype of what autocast has made: in no other would the operator take it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 4, 16)
        query, key = self.query(x), self.key(x)
        mask = torch.zeros(len(x), 4, 4).to(query.dtype)
        out: Tensor = self.head(torch.baddbmm(mask, query, key.transpose(1, 2)).tanh()).mean(1)
        return out


class Again(nn.Module):
    """One layer three times, with others between."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.same, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.between = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for layer in self.between:
            x = layer(x + self.same(x).tanh())
        out: Tensor = self.head(x)
        return out


#: Those whose calls the models here have.
ALIKE = ("mlp", "cnn", "gpt", "accumulated")
JOBS: dict[str, Callable[[], Job]] = {
    "again": lambda: _job(Again, _digits(), _classes),
    "transformer": lambda: _job(Transformer, _tokens(), _words),
    "transformer-bf16": lambda: _job(Transformer, _tokens(), _words, precision="bf16"),
    "untied-bf16": lambda: _job(lambda: Transformer(2, tied=False), _tokens(), _words, precision="bf16"),
    "masked-bf16": lambda: _job(Masked, _digits(), _classes, precision="bf16"),
    "convolutions": lambda: _job(Convolutions, _digits(), _classes),
    "giant": lambda: _job(Giant, (torch.randn(16, 4),), lambda model, batch: model(batch[0]).square().mean()),
    "dot": lambda: _job(Dot, (torch.randn(16, 6),), lambda model, batch: model(batch[0][0])),
    **{f"random{seed}": (lambda seed=seed: _job(lambda: Random(seed), _digits(), _classes)) for seed in range(7)},
    "llama": lambda: load_job("examples/llama.py:tiny"),
    **{f"traceable-{name}": made for name, made in programs.TRACEABLE.items() if name not in ALIKE},
}
SLOW = {name for name in JOBS if name.startswith("traceable-") and name != "traceable-lstm"}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in JOBS]


class Made(NamedTuple):
    job: Job
    layout: Layout
    atoms: Atoms
    batches: list[Any]


@cache
def made(name: str) -> Made:
    job = JOBS[name]()
    model = build_model(job)
    layout = Layout.of(model)
    batches = probe_batches(job, [job.microbatch_samples, job.microbatch_samples - 1, 2])
    program = parse(trace(job, model, layout, batches), layout)
    return Made(job, layout, cut(program, layout, precision=job.precision, memory_bytes=MEMORY, most=256), batches)


def anywhere(of: Made) -> Made:
    """Cut wherever it is allowed, not just where little crosses: with no least size and no width that is too much."""
    program, precision = of.atoms.program, of.job.precision
    return of._replace(atoms=cut(program, of.layout, precision=precision, memory_bytes=MEMORY, most=1 << 40))


# -- the oracle


class Outcome(NamedTuple):
    loss: Tensor
    metrics: dict[str, Any]
    gradients: list[Tensor | None]
    state: list[Tensor]
    random: Tensor


def values_of(of: Made) -> list[Tensor]:
    """The run's initial values, entry by entry; fresh tensors."""
    return [tensor.detach().clone() for tensor in state_of(build_model(of.job), of.layout)]


def uncut(of: Made, batch: Any) -> Outcome:
    model = skeleton(of.layout)
    state = list(state_of(model, of.layout))
    with torch.no_grad():
        for tensor, value in zip(state, values_of(of), strict=True):
            tensor.copy_(value)
    precision = of.job.precision
    step = ProgramStep(of.atoms.program, of.layout, CPU, memory_bytes=MEMORY, precision=precision)
    torch.manual_seed(11)
    with (autocast(precision) or nullcontext)():
        loss, metrics = step(model, batch)
    torch.autograd.backward(loss.float())
    return _outcome(loss, metrics, state)


def _outcome(loss: Tensor, metrics: dict[str, Any], state: Sequence[Tensor]) -> Outcome:
    gradients = [tensor.grad for tensor in state]
    return Outcome(loss.detach(), metrics, gradients, [t.detach() for t in state], torch.get_rng_state())


def assert_same(mine: Outcome, other: Outcome) -> None:
    assert torch.equal(mine.loss, other.loss)
    assert mine.metrics.keys() == other.metrics.keys()
    for name, value in mine.metrics.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.metrics[name])), name
    assert torch.equal(mine.random, other.random)
    for index, (a, b) in enumerate(zip(mine.gradients, other.gradients, strict=True)):
        assert (a is None) == (b is None), index
        assert a is None or b is None or torch.equal(a, b), index
    for index, (a, b) in enumerate(zip(mine.state, other.state, strict=True)):
        assert torch.equal(a, b), index


def parts_of(of: Made, runs: Sequence[range], *, lent: bool) -> list[Part]:
    """Parts with the run's initial values; an entry that several use is one tensor, or lent by the first."""
    atoms = of.atoms
    parts = []
    values = [nn.Parameter(v, requires_grad=e.role == "grad") if e.role in ("grad", "frozen") else v
              for v, e in zip(values_of(of), of.layout.entries, strict=True)]  # fmt: skip
    for run in runs:
        told: dict[str, Any] = {}
        if lent:
            told = {"lent": atoms.passed(run.start), "passed": atoms.passed(run.stop)}
        part = atoms.part(run, **told)
        part.hold({index: values[index] for index in part.entries})
        parts.append(part)
    return parts


def state_in(of: Made, parts: Sequence[Part]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for part in parts:
        tensors = dict((*part.model.named_parameters(), *part.model.named_buffers()))
        for index in part.entries:
            name = next(name for name in of.layout.entries[index].names if name in tensors)
            found.setdefault(index, tensors[name])
    for index, value in enumerate(values_of(of)):
        found.setdefault(index, value)
    return [found[index] for index in range(len(found))]


def in_sequence(of: Made, batch: Any, runs: Sequence[range], *, lent: bool = False) -> Outcome:
    """All parts in one process, one autograd graph."""
    tensors = flatten(batch)[1]
    sizes = of.atoms.sizes([(t.dtype, tuple(t.shape)) for t in tensors], precision=of.job.precision)
    parts = parts_of(of, runs, lent=lent)
    torch.manual_seed(11)
    values: tuple[Any, ...] = ()
    with (autocast(of.job.precision) or nullcontext)():
        for part in parts:
            values = part(values, only(part, tensors), sizes)
    loss, metrics = values
    torch.autograd.backward(loss.float())
    return _outcome(loss, metrics, state_in(of, parts))


def by_hand(of: Made, batch: Any, runs: Sequence[range]) -> Outcome:
    """Each part for itself: values are packed and detached, gradients handed back, the generator's state goes along."""
    tensors = flatten(batch)[1]
    sizes = of.atoms.sizes([(t.dtype, tuple(t.shape)) for t in tensors], precision=of.job.precision)
    parts = parts_of(of, runs, lent=True)
    torch.manual_seed(11)
    arriving: list[list[Tensor]] = []
    leaving: list[Sequence[Tensor]] = []
    values: list[Tensor] = []
    for part in parts:
        arriving.append(values)
        with (autocast(of.job.precision) or nullcontext)():
            out = part(values, only(part, tensors), sizes)
        if part.last:
            loss, metrics = out
            break
        leaving.append(out)
        crossing = sizes.live[part.atoms.stop]
        assert len(out) == len(crossing) + len(part.passed)
        values = [carried(live, tensor) for live, tensor in zip(crossing, out, strict=False)]
        for index, tensor in zip(part.passed, out[len(crossing) :], strict=True):
            values.append(tensor.detach().clone().requires_grad_(of.layout.entries[index].role == "grad"))
    torch.autograd.backward(loss.float())
    for number in reversed(range(len(leaving))):
        roots = [
            (out, value.grad)
            for out, value in zip(leaving[number], arriving[number + 1], strict=True)
            if value.grad is not None and out.requires_grad
        ]
        torch.autograd.backward([out for out, _ in roots], [gradient for _, gradient in roots])
    return _outcome(loss, metrics, state_in(of, parts))


def carried(live: Live, tensor: Tensor) -> Tensor:
    assert (tensor.dtype, tuple(tensor.shape)) == (live.dtype, live.shape)
    assert live.requires_grad or not tensor.requires_grad
    packed = live.pack(tensor.detach()).clone()
    assert tuple(packed.shape) == live.packed
    there = live.unpack(packed)
    assert there.stride() == tensor.stride()
    assert there.data_ptr() % 64 == tensor.data_ptr() % 64
    assert torch.equal(there, tensor)
    return there.requires_grad_(live.requires_grad)


def only(part: Part, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [tensor if index in part.tensors else None for index, tensor in enumerate(tensors)]


def every(atoms: Atoms) -> list[range]:
    return [range(number, number + 1) for number in range(len(atoms))]


# -- the same bits


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_parts_compute_the_programs_bits(name: str) -> None:
    """In one graph; detached, with gradients handed back; and, for nets of every kind, in any cut that is allowed."""
    of = made(name)
    for batch in of.batches:
        whole = uncut(of, batch)
        assert_same(in_sequence(of, batch, [range(len(of.atoms))]), whole)
        for runs in (every(of.atoms), of.atoms.stages(min(3, len(of.atoms)))):
            assert_same(in_sequence(of, batch, runs), whole)
            assert_same(in_sequence(of, batch, runs, lent=True), whole)
        for count in sorted({1, min(2, len(of.atoms)), min(4, len(of.atoms)), len(of.atoms)}):
            assert_same(by_hand(of, batch, of.atoms.stages(count)), whole)
    if name.startswith("random"):
        narrow = anywhere(of)
        assert_same(by_hand(narrow, of.batches[0], every(narrow.atoms)), uncut(of, of.batches[0]))


@pytest.mark.slow
def test_parameters_that_are_cast_again_are_named() -> None:
    JOBS["again-bf16"] = lambda: _job(Again, _digits(), _classes, precision="bf16")
    of = made("again-bf16")
    found = of.atoms.cast_again("bf16")
    assert {of.layout.entries[entry].name for entry in found} == {"same.weight", "same.bias"}
    assert not of.atoms.cast_again("fp32")
    whole = uncut(of, of.batches[0])
    assert_same(in_sequence(of, of.batches[0], every(of.atoms)), whole)  # one tensor under one autocast
    other = by_hand(of, of.batches[0], every(of.atoms))
    differing = [a is not b and not torch.equal(a, b) for a, b in zip(other.gradients, whole.gradients, strict=True)]
    assert any(differing)  # else nothing has to be named
    # An embedding is looked up as it is: only the output layer casts it.
    assert not made("transformer-bf16").atoms.cast_again("bf16")


# -- where it is cut


@pytest.mark.slow
def test_a_transformer_is_cut_between_its_layers() -> None:
    of = made("transformer")
    names = [{of.layout.entries[entry].name.split(".")[0:2][-1] for entry in atom.entries} for atom in of.atoms.atoms]
    assert len(of.atoms) >= 9  # before, between and within the four layers: after attention
    for number in range(4):
        block = {i for i, e in enumerate(of.layout.entries) if e.name.startswith(f"blocks.{number}.")}
        holders = [atom for atom in of.atoms.atoms if block & {*atom.entries}]
        assert len(holders) <= 2, names
    shapes = of.atoms.sizes([(torch.int64, (4, 8)), (torch.int64, (4, 8))])
    for crossing in shapes.live[1:-1]:  # the layers' input, and what all of them use
        assert sorted(live.shape for live in crossing) in ([(4, 8, 16)], [(4, 8, 16), (8, 8)])
        assert all(live.requires_grad for live in crossing)
    assert shapes.live[0] == shapes.live[-1] == ()


def test_what_an_atom_needs_is_told() -> None:
    of = made("transformer")
    first, last = of.atoms.atoms[0], of.atoms.atoms[-1]
    assert first.tensors == (0,)
    assert 1 in last.tensors  # labels, but for what counts sizes
    assert not first.draws
    assert any(atom.draws for atom in of.atoms.atoms)
    assert sum(atom.parameter_bytes for atom in of.atoms.atoms) == 4 * of.layout.num_parameters
    weight = next(i for i, e in enumerate(of.layout.entries) if "embed.weight" in e.names)
    assert list(of.atoms.shared) == [weight]
    assert of.atoms.shared[weight][0] == of.atoms.owner[weight]
    assert of.atoms.passed(len(of.atoms) // 2) == (weight,)
    assert of.atoms.passed(0) == of.atoms.passed(len(of.atoms)) == ()


@pytest.mark.slow
def test_an_entry_that_nothing_uses_has_an_owner() -> None:
    of = made("random3")
    assert len(of.atoms.owner) == len(of.layout.entries)
    assert set(of.atoms.owner) <= set(range(len(of.atoms)))


def test_a_giant_node_is_not_cut_and_one_node_is_one_atom() -> None:
    giant = made("giant").atoms
    assert max(atom.flops for atom in giant.atoms) > 0.8 * sum(atom.flops for atom in giant.atoms)
    dot = made("dot").atoms
    assert len(dot) == 1
    with pytest.raises(ValueError, match="cut into 1 parts at most, not 2"):
        dot.stages(2)


@pytest.mark.slow
def test_writes_in_place_stay_with_what_they_write_into() -> None:
    of = anywhere(made("convolutions"))
    for atom in of.atoms.atoms:
        nodes = of.atoms.program.graphs[0].nodes[atom.begin : atom.end]
        written = [node for node in nodes if node.operator.name in ("add_.Tensor", "relu_.default")]
        made_here = {of.atoms.program.num_entries + 2 + len(of.atoms.program.constants) + number
                     for number in range(atom.begin, atom.end)}  # fmt: skip
        buffers = {i for i, e in enumerate(of.layout.entries) if e.role in ("mean", "max")}
        for node in written:
            assert node.arguments[0].index in made_here | buffers
    level = next(i for i, e in enumerate(of.layout.entries) if e.name == "level")
    assert level not in of.atoms.shared  # written and then read: together
    scale = next(i for i, e in enumerate(of.layout.entries) if e.name == "scale")
    assert len(of.atoms.shared[scale]) >= 3


def test_what_reads_a_buffer_stays_with_what_writes_it() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.middle, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
            self.register_buffer("level", torch.zeros(32))

        def forward(self, x: Tensor) -> Tensor:
            x = self.lift(x)
            self.level.mul_(0.5)
            out: Tensor = self.head(self.middle(x.tanh()).tanh() - self.level)
            return out

    JOBS["early"] = lambda: _job(Early, _digits(), _classes)
    of = anywhere(made("early"))
    assert not of.atoms.shared
    assert len(of.atoms) >= 3  # before the write and after the last read
    assert_same(by_hand(of, of.batches[0], every(of.atoms)), uncut(of, of.batches[0]))


def test_stages_begin_at_named_modules() -> None:
    atoms = made("transformer").atoms
    assert atoms.stages_at([]) == [range(len(atoms))]
    assert atoms.stages_at(["blocks.1", "blocks.3.up", "norm"]) == [
        range(5), range(5, 10), range(10, 11), range(11, len(atoms))
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"nothing called 'block'; it has bias, embed, .*blocks\.0\.norm"):
        atoms.stages_at(["block"])
    for names in (["embed"], ["head"], ["blocks.2", "blocks.1"], ["blocks.1.norm", "blocks.1.qkv"]):
        with pytest.raises(ValueError, match=rf"can begin at '{names[-1]}'"):  # head's weight is embed's
            atoms.stages_at(names)


def test_stages_have_even_shares_of_the_operations() -> None:
    atoms = made("transformer").atoms
    total, largest = sum(atom.flops for atom in atoms.atoms), max(atom.flops for atom in atoms.atoms)
    for count in (1, 2, 3, 4):
        stages = atoms.stages(count)
        assert [number for stage in stages for number in stage] == list(range(len(atoms)))
        assert len(stages) == count
        most = max(sum(atoms.atoms[number].flops for number in stage) for stage in stages)
        assert most <= total / count + largest
    every_way = [
        max(sum(atom.flops for atom in atoms.atoms[a:b]) for a, b in pairwise((0, at, len(atoms))))
        for at in range(1, len(atoms))
    ]
    assert max(sum(atoms.atoms[n].flops for n in stage) for stage in atoms.stages(2)) == min(every_way)


def test_units_hold_at_most_so_many_bytes_and_always_some() -> None:
    atoms = made("transformer").atoms
    largest = max(atom.parameter_bytes for atom in atoms.atoms)
    for most in (1, largest, 3 * largest, 1 << 40):
        units = atoms.units(most)
        assert [number for unit in units for number in unit] == list(range(len(atoms)))
        for unit in units:
            held = [atoms.atoms[number].parameter_bytes for number in unit]
            assert sum(held)
            assert sum(held) <= most or sum(1 for nbytes in held if nbytes) == 1
    assert len(atoms.units(1 << 40)) == 1


@pytest.mark.slow
def test_every_graph_of_a_program_is_cut_alike() -> None:
    class Fixed(nn.Module):
        """The trace holds for one number of samples alone."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.head = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                x = x * 2.0
            for layer in self.layers:
                x = layer(x).tanh()
            out: Tensor = self.head(x)
            return out

    JOBS["fixed"] = lambda: _job(Fixed, _digits(), _classes)
    of = made("fixed")
    assert len(of.atoms.program.graphs) > 1
    assert len(of.atoms) >= 4
    for batch in of.batches:
        assert_same(by_hand(of, batch, every(of.atoms)), uncut(of, batch))


def test_a_batch_that_no_graph_takes_is_refused() -> None:
    with pytest.raises(ProgramRefused, match="not traced"):
        made("transformer").atoms.sizes([(torch.float32, (4, 8)), (torch.int64, (4, 8))])


def test_parts_have_no_memory_until_they_are_given_some() -> None:
    of = made("transformer")
    part = of.atoms.part(range(0, 2))
    assert all(tensor.is_meta for tensor in part.parameters())
    wrong = torch.zeros(3)
    with pytest.raises(ValueError, match="of shape"):
        part.hold({part.entries[0]: wrong})


def test_a_program_over_the_memory_is_refused() -> None:
    of = made("giant")
    with pytest.raises(ProgramRefused, match="bytes"):
        cut(of.atoms.program, of.layout, precision="fp32", memory_bytes=1000)


# -- the same everywhere

_PRINT = """
import torch
torch.set_num_threads(2)
from tests.unit import test_atoms
for name in test_atoms.ELSEWHERE:
    print(test_atoms.made(name).atoms.fingerprint.hex())
"""
ELSEWHERE = ("convolutions",)


@pytest.mark.slow
def test_another_process_cuts_alike() -> None:
    """With another order of hashes and another number of threads."""
    seed = "77" if os.environ.get("PYTHONHASHSEED") != "77" else "78"
    run = subprocess.run(
        [sys.executable, "-c", _PRINT], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True, text=True, check=True, timeout=80,
    )  # fmt: skip
    assert run.stdout.split() == [made(name).atoms.fingerprint.hex() for name in ELSEWHERE]


def test_views_travel_as_they_lie() -> None:
    base = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
    for tensor in (
        base, base.transpose(0, 2), base[:, 1:3], base[0, 0].expand(7, 5), base[1, 2, 3], base[:, :, ::2],
        base[:0], base.permute(1, 2, 0)[1:], torch.arange(4).unsqueeze(1).expand(4, 3),
    ):  # fmt: skip
        live = Live(0, tensor.dtype, tuple(tensor.shape), tensor.stride(),
                    tensor.storage_offset() % (64 // tensor.element_size()), False)  # fmt: skip
        there = live.unpack(live.pack(tensor).clone())
        assert torch.equal(there, tensor)
        assert there.stride() == tensor.stride()
        assert there.data_ptr() % 64 == tensor.data_ptr() % 64 or not tensor.numel()


def test_the_first_run_of_each_part_is_held_to_what_the_check_saw() -> None:
    of = anywhere(made("transformer"))
    tensors = flatten(of.batches[0])[1]
    sizes = of.atoms.sizes([(t.dtype, tuple(t.shape)) for t in tensors])
    part = parts_of(of, [range(0, 1), range(1, len(of.atoms))], lent=True)[0]
    seen, wrong = sizes.measured._seen, Seen("1", 0)
    number = next(number for number, one in seen.items() if type(one.form) is tuple)
    right, seen[number] = seen[number], wrong
    with pytest.raises(ProgramRefused, match="where the check saw 1") as caught:
        part([], only(part, tensors), sizes)
    assert caught.value.node == number
    seen[number] = right
    part([], only(part, tensors), sizes)
    seen[number] = wrong
    part([], only(part, tensors), sizes)  # once is enough
