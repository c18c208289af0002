"""Pipeline islands: stages on ranks of their own give what one process gives, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import island_jobs, island_programs, islands
from tests.unit.test_atoms import Convolutions, Random, Transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from w5xde_async.compute.block import LeafSpec
from w5xde_async.compute.engine import LeafError
from w5xde_async.compute.program.atoms import Atoms
from w5xde_async.errors import UsageError
from w5xde_async.job import Job
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.pipeline import PipelineEngine
from w5xde_async.parallel.schedules import SCHEDULES, passes

Both = tuple[islands.Together, islands.Alone]


def _both(job: Job, group: Group, atoms: Atoms, **options: Any) -> Both:
    together = islands.Together(PipelineEngine(atoms, LeafSpec.of(job), group, **options), group)
    alone = islands.Alone(job)
    assert together.engine.layout.fingerprint == alone.layout.fingerprint
    _load(job, (together, alone))
    return together, alone


def _load(job: Job, both: Both, seed: int = 5) -> None:
    together, alone = both
    state = islands.changed_state(job, seed)
    together.load(state)
    alone.state.copy_groups(state)
    alone.engine.load(range(len(alone.layout.buckets)))


def _alike(job: Job, group: Group, *blocks: tuple[int, ...], start: int = 0, **options: Any) -> None:
    atoms = island_programs.atoms_of(job, group)
    for schedule in SCHEDULES:
        together, alone = _both(job, group, atoms, schedule=schedule, **options)
        for seed in (5, 6):  # two versions
            _load(job, (together, alone), seed)
            for samples in blocks:
                islands.same_block(together, alone, island_jobs.batches(job, samples), samples, start)
        together.engine.close()
        alone.engine.close()


def _job(model: Any, data: tuple[Tensor, ...], step: Any = None, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "loss": None if step else F.cross_entropy, "step": step, "batch_size": 32, "microbatch_size": 4,
        "max_steps": 4, "seed": 3, "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip
    return Job(model=model, dataset=TensorDataset(*data), **{**fields, **changes})


def _tokens() -> tuple[Tensor, Tensor]:
    text = torch.randint(32, (48, 9), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].clone(), text[:, 1:].clone()


def _digits() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(2)
    return torch.randn(48, 64, generator=made), torch.randint(10, (48,), generator=made)


def _words(model: nn.Module, batch: Any) -> Any:
    tokens, target = batch
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return loss, {"right": (logits.argmax(-1) == target).float().mean(), "length": float(tokens.shape[1])}


def _mlp(group: Group) -> None:
    job = island_jobs.mlp()
    _alike(job, group, (4, 4, 4, 4), (4, 4, 3), (2,))
    _alike(job, group, (4, 4, 4, 4), start=8)


def _transformer(group: Group) -> None:
    _alike(_job(Transformer, _tokens(), _words), group, (4, 4, 4), (4,))


def _accumulates(group: Group) -> None:
    """Dropout draws on from microbatch to microbatch, and a tied gradient is summed in each."""
    job = _job(Transformer, _tokens(), _words, accumulate_grad_batches=3)
    _alike(job, group, (12, 12, 7), (4,))


class Tables(nn.Module):
    """One whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lift, self.head = nn.Embedding(13, 16, sparse=True), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.lift(self.table((x * 7).long().clamp(0, 12)).sum(1))))
        return out


def _sparse(group: Group) -> None:
    data = torch.rand(64, 8, generator=torch.Generator().manual_seed(3)) * 2, torch.arange(64) % 3
    _alike(_job(Tables, data), group, (4, 4, 4), (4,))
    _alike(_job(Tables, data, accumulate_grad_batches=3), group, (12, 12, 7))


def _half(group: Group) -> None:
    job = _job(lambda: Transformer(2, tied=False), _tokens(), _words, precision="bf16")
    _alike(job, group, (4, 4, 4))


def _convolutions(group: Group) -> None:
    _alike(_job(Convolutions, _digits()), group, (4, 4, 4, 4), (4, 4, 3))
    _alike(_job(Convolutions, _digits(), accumulate_grad_batches=2), group, (8, 8, 4))


def _random(group: Group) -> None:
    for seed in range(3):
        _alike(_job(lambda seed=seed: Random(seed), _digits()), group, (4, 4, 3))


def _checkpoints(group: Group) -> None:
    _alike(_job(Transformer, _tokens(), _words), group, (4, 4, 4), checkpoint_activations=True)
    _alike(_job(Convolutions, _digits()), group, (4, 4, 4), checkpoint_activations=True)


class Narrow(nn.Module):
    """Frozen, unused and bfloat16 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.narrow = nn.Linear(16, 16).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.frozen(torch.relu(self.first(x)))) * self.scale
        out: Tensor = self.head(self.narrow(h.bfloat16()).float()) * self.scale
        return out


def _narrow(group: Group) -> None:
    _alike(_job(Narrow, _digits()), group, (4, 4, 4, 4), (4, 4, 3))


class Looks(nn.Module):
    """Looks up a row that is not there where it is told to, in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.table, self.head = nn.Linear(8, 16), nn.Embedding(8, 16), nn.Linear(16, 3)
        self.middle = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        h = torch.relu(self.lift(x))
        for layer in self.middle[:2]:
            h = torch.relu(layer(h))
        h = h + self.table(row)
        for layer in self.middle[2:]:
            h = torch.relu(layer(h))
        out: Tensor = self.head(h)
        return out


def _fails(group: Group) -> None:
    x, y = torch.randn(48, 8, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 3
    job = _job(Looks, (x, torch.arange(48) % 8, y))
    atoms = island_programs.atoms_of(job, group)
    for schedule in SCHEDULES:
        together, alone = both = _both(job, group, atoms, schedule=schedule)
        samples = (4, 4, 4, 4)
        good = island_jobs.batches(job, samples)
        islands.same_block(*both, good, samples)
        for bad in range(4):
            broken = [tuple(tensor.clone() for tensor in leaf) for leaf in good]
            broken[bad][1][0] = 99
            with pytest.raises(LeafError, match="index out of range") as caught:
                together.compute(broken, samples, start=8)
            assert caught.value.leaf == 8 + bad
            together.engine.release(caught.value.vectors)
            islands.same_block(*both, good, samples)
        with pytest.raises(LeafError, match="was not traced"):
            together.compute([tuple(t[:, :5] if t.dim() > 1 else t for t in leaf) for leaf in good], samples)
        islands.same_block(*both, good, samples)
        together.engine.close()
        alone.engine.close()


def _refuses(group: Group) -> None:
    job = _job(lambda: nn.Linear(64, 10), _digits(), lambda model, batch: model.weight.sum())
    atoms = island_programs.atoms_of(job, group)
    assert len(atoms) < group.size
    with pytest.raises(UsageError, match="too few for"):
        PipelineEngine(atoms, LeafSpec.of(job), group)
    with pytest.raises(UsageError, match="no schedule 'zigzag'"):
        PipelineEngine(atoms, LeafSpec.of(job), group, schedule="zigzag")


CASES: dict[str, islands.Case] = {
    "mlp": _mlp, "transformer": _transformer, "accumulation": _accumulates, "half precision": _half,
    "convolutions": _convolutions, "random nets": _random, "checkpoints": _checkpoints, "odd parameters": _narrow,
    "errors": _fails, "refusals": _refuses, "sparse": _sparse,
}  # fmt: skip


FAST = (
    "transformer",
    "accumulation",
    "convolutions",
    "checkpoints",
    "errors",
    "refusals",
    "sparse",
)  # two models to trace
SLOW = tuple(name for name in CASES if name not in FAST)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_two_ranks(tmp_path: Path) -> None:
    islands.run("tests.unit.test_parallel_pipeline", 2, tmp_path, FAST, timeout_s=110)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("size", "names"), [(2, SLOW), (4, ("transformer", "accumulation", "odd parameters"))])
def test_more_ranks(size: int, names: tuple[str, ...], tmp_path: Path) -> None:
    islands.run("tests.unit.test_parallel_pipeline", size, tmp_path, names, timeout_s=110)


# -- schedules


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("leaves", [(1,), (1, 1), (3,), (2, 2, 1), (1,) * 9])
def test_every_order_of_a_stage_fits_its_neighbours(schedule: str, stages: int, leaves: tuple[int, ...]) -> None:
    """Stages that wait only for what they need come to the end: whoever runs, in whatever order."""
    count = sum(leaves)
    orders = [list(passes(schedule, stage, stages, leaves)) for stage in range(stages)]
    done: list[set[tuple[int, bool]]] = [set() for _ in range(stages)]
    at = [0] * stages
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            if at[stage] == 2 * count:
                continue
            number, forward = orders[stage][at[stage]]
            before = stage - 1 if forward else stage + 1
            if 0 <= before < stages and (number, forward) not in done[before]:
                continue
            assert forward or (number, True) in done[stage]
            done[stage].add((number, forward))
            at[stage] += 1
            moved = True
    assert at == [2 * count] * stages
    for order in orders:
        for forward in (True, False):
            assert [number for number, way in order if way == forward] == list(range(count))


def test_1f1b_holds_no_more_than_stages_behind_it() -> None:
    for stage in range(4):
        held = most = 0
        for _, forward in passes("1f1b", stage, 4, (1,) * 20):
            held += 1 if forward else -1
            most = max(most, held)
        assert most == 4 - stage
