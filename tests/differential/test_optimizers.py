"""Every optimizer of torch's own test database, through a stop and a resume in the middle: the plain loop's bits.

The model has what optimizers meet in practice: parameters in three types, tied, frozen, unused and rarely used ones, an
embedding with sparse gradients, several groups. Each of the database's settings is a job.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import reference
from tests.support.cluster import QUICK_WORKER, Commits, settings
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import JobError
from w5xde_async.job import Job
from w5xde_async.params.flat import digest, named_digest
from w5xde_async.worker.service import Worker

STEPS = 5
WORKER = dataclasses.replace(QUICK_WORKER, connect_timeout_s=60.0)

#: What does not apply, and why. ``test_what_is_excluded_is_refused_at_the_start`` fails for an entry that would run.
EXCLUDED: dict[str, str] = {
    "LBFGS": "evaluates the loss several times a step",
    "SparseAdam": "takes sparse gradients alone; a step's sum is dense",
}
#: In float16 their gradients' squares or their eps are zero, and plain PyTorch's own weights become NaN.
NOT_IN_FLOAT16 = {"Adafactor", "Adagrad", "NAdam"}
COVERED = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
]  # fmt: skip


def database() -> dict[str, Any]:
    """torch's, which takes seconds to import: here, and not while tests are collected."""
    from torch.testing._internal.common_optimizers import optim_db

    return {info.optim_cls.__name__: info for info in optim_db}


class Model(nn.Module):
    def __init__(self, narrow: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, sparse=True)
        self.first = nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.unused = nn.Linear(2, 3, bias=False)
        self.rare = nn.Parameter(torch.full((1, 8), 0.5))
        self.narrow = nn.Linear(8, 6, bias=False).to(narrow[0])
        self.wider = nn.Linear(6, 8, bias=False).to(narrow[1])
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.first(self.embed(tokens).mean(1)))) + self.frozen(self.embed(tokens[:, 0]))
        if int(tokens[0, 0]) > 8:
            x = x * self.rare
        x = self.wider(self.narrow(x.to(self.narrow.weight.dtype)).to(self.wider.weight.dtype))
        out: Tensor = self.head(x.float())
        return out


def settings_of(name: str, *, narrow: bool, whole: bool) -> Iterator[dict[str, Any]]:
    """The database's: the one that says most, or where ``whole`` all, in every way that it names."""
    dtype = torch.float16 if narrow and name not in NOT_IN_FLOAT16 else torch.float32
    given = [dict(case.kwargs) for case in database()[name].optim_inputs_func(device="cpu", dtype=dtype)]
    if not whole:
        given = [max(given, key=len)]
    for kwargs in given:
        yield kwargs
        if whole:
            for way in database()[name].supported_impls:
                if way != "differentiable":
                    yield {**kwargs, way: True}


@dataclasses.dataclass
class Made:
    """What a job's functions have made, in order."""

    models: list[nn.Module] = dataclasses.field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = dataclasses.field(default_factory=list)

    def tensors(self) -> dict[str, Tensor]:
        """The first model's, and those of the first optimizer's state."""
        states = {
            f"state {index}.{key}": torch.as_tensor(value)
            for index, state in self.optimizers[0].state_dict()["state"].items()
            for key, value in state.items()
            if value is not None
        }
        return {**self.models[0].state_dict(), **states}


def job(name: str, kwargs: dict[str, Any], made: Made, *, narrow: bool) -> Job:
    def model() -> nn.Module:
        half = torch.bfloat16 if name in NOT_IN_FLOAT16 else torch.float16
        made.models.append(Model((half, torch.bfloat16) if narrow else (torch.float32, torch.float32)))
        return made.models[-1]

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        own = {"lr": 0.02} if "lr" not in kwargs else {}
        groups = [{"params": trained[::2]}, {"params": trained[1::2], **own}]
        given = {key: value.clone() if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        made.optimizers.append(database()[name].optim_cls(groups, **given))
        return made.optimizers[-1]

    tokens = torch.randint(12, (40, 3), generator=torch.Generator().manual_seed(0))
    return Job(
        model=model, dataset=TensorDataset(tokens, tokens.sum(1) % 4), loss=F.cross_entropy, batch_size=16,
        microbatch_size=3, max_steps=STEPS, seed=2, optimizer=optimizer,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )  # fmt: skip


async def differing(name: str, kwargs: dict[str, Any], run_dir: Path, *, narrow: bool) -> list[str]:
    """Tensors that are not the plain loop's after a run that two workers begin and one ends, from a checkpoint."""
    plain, ours = Made(), Made()
    model, _ = reference.train(job(name, kwargs, plain, narrow=narrow))
    for workers, stop_after in ((2, 3), (1, None)):
        commits = Commits()
        ours = Made()
        wanted = job(name, kwargs, ours, narrow=narrow)
        config = settings(min_workers=workers, code_free=False, max_time_s=60.0, checkpoint_every=1 << 30)
        async with Coordinator(wanted, run_dir=run_dir, config=config, bus=commits.bus) as coordinator:
            running = [Worker(coordinator.address, job=job(name, kwargs, Made(), narrow=narrow), config=WORKER)
                       for _ in range(workers)]  # fmt: skip
            tasks = [asyncio.create_task(worker.run()) for worker in running]
            if stop_after is not None:
                await commits.reach(stop_after)
                coordinator.request_stop("half-way")
            result = await coordinator.wait()
            for worker in running:
                worker.drain()
            await asyncio.gather(*tasks)
    assert result.outcome == "finished"
    mine, expected = ours.tensors(), plain.tensors()
    assert mine.keys() == expected.keys()
    wrong = [
        key
        for key, value in expected.items()
        if mine[key].dtype != value.dtype or digest([mine[key]]) != digest([value])
    ]
    assert wrong or result.digest == named_digest(model)
    return wrong


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's of itself
@pytest.mark.parametrize("name", COVERED)
async def test_a_resumed_run_has_the_bits_of_the_plain_loop(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole = request.config.getoption("--all-differential")
    wrong = {}
    for narrow in (False, True) if whole else (True,):
        for number, kwargs in enumerate(settings_of(name, narrow=narrow, whole=whole)):
            found = await differing(name, kwargs, tmp_path / f"{number}-{narrow}", narrow=narrow)
            if found:
                wrong[f"{kwargs}, {'float32, float16 and bfloat16' if narrow else 'float32'}"] = found
    assert wrong == {}


def test_all_that_the_database_has_is_covered() -> None:
    assert sorted(database()) == sorted([*COVERED, *EXCLUDED])


@pytest.mark.parametrize("name", EXCLUDED)
async def test_what_is_excluded_is_refused_at_the_start(name: str) -> None:
    made = database()[name].optim_cls
    wanted = dataclasses.replace(job("SGD", {}, Made(), narrow=False), optimizer=lambda model: made(model.parameters()))
    with pytest.raises(JobError, match=name):
        async with Coordinator(wanted, config=settings(code_free=False)):
            pass
