"""The job of a scenario. Its model says by value how often each sample was applied.

``applied`` has one element for each sample; a step of n samples moves those of its samples by lr / n, and lr is the
batch size: after one epoch of full batches each is 1, one that was lost 0, one that was applied twice 2. Everything
else in the model has the habits that the scenario names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tests.generated.scenario import Scenario
from tests.simulator.loop import HOST, ComputeExecutor
from tests.support.streams import in_order, stream
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from w5xde_async.job import Job
from w5xde_async.plan.sampler import Sampler

__all__ = ["Model", "expected_applications", "job_of", "sampler_of"]

_WIDTH = 6


class Model(nn.Module):
    """One of every habit that is asked for."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.habits, self.wanted = scenario.habits, scenario.buffers
        dtype = getattr(torch, scenario.parameters) if scenario.parameters != "mixed" else torch.float32
        self.applied = nn.Parameter(torch.zeros(scenario.samples))
        self.first = nn.Linear(scenario.columns, _WIDTH).to(dtype)
        self.second = nn.Linear(_WIDTH, _WIDTH, bias=False).to(dtype)
        if scenario.parameters == "mixed":
            self.second.to(torch.bfloat16)
        if "tied" in self.habits:
            self.third = nn.Linear(_WIDTH, _WIDTH).to(self.second.weight.dtype)
            self.third.weight = self.second.weight
        if "frozen" in self.habits:
            self.still = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
        self.follows = scenario.follows
        if self.follows:
            self.target = copy.deepcopy(self.first).requires_grad_(False)
            self.register_buffer("trail", torch.zeros(_WIDTH))
        if "unused" in self.habits:
            self.unused = nn.Linear(3, 3)
        if "rare" in self.habits:
            self.rare = nn.Parameter(torch.ones(_WIDTH))
        if "sparse" in self.habits:
            self.table = nn.Embedding(16, _WIDTH, sparse=True)
        if "loud" in self.habits:
            self.loud = nn.Parameter(torch.zeros(1))
        self.more = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(scenario.tensors))
        for name in scenario.buffers:
            self.register_buffer(_attribute(name), _first_value(name))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        h = self.first(x.to(self.first.weight.dtype))
        if self.follows:
            h = h + self.target(x.to(self.first.weight.dtype)) - self.trail.to(h.dtype)
        if "dropout" in self.habits:
            h = nn.functional.dropout(h, 0.25, self.training)
        h = torch.tanh(self.second(h.to(self.second.weight.dtype)))
        if "tied" in self.habits:
            h = self.third(h.to(self.third.weight.dtype))
        h = h.float()
        if "frozen" in self.habits:
            h = self.still(h).float()
        if "rare" in self.habits and int(ids[0]) % 5 == 0:
            h = h * self.rare
        if "sparse" in self.habits:
            h = h + self.table(ids % 16).float()
        with torch.no_grad():
            for name in self.wanted:
                self._move(name, h.detach().float())
        return h

    @torch.no_grad()
    def follow(self) -> None:
        """With the update, as a target network does."""
        for mine, theirs in zip(self.target.parameters(), self.first.parameters(), strict=True):
            if self.follows == "in place":
                mine.lerp_(theirs, 0.25)
            elif self.follows == "other memory":
                mine.data = 0.75 * mine.data + 0.25 * theirs.data
        if self.follows == "buffer":
            self.trail = 0.5 * self.trail + 0.5 * self.first.bias.detach().float()

    def _move(self, name: str, h: Tensor) -> None:
        attribute = _attribute(name)
        value = getattr(self, attribute)
        if name in ("in place", "narrow"):
            value.lerp_(h.mean(0).to(value.dtype), 0.25)
        elif name == "assigned":
            setattr(self, attribute, 0.75 * value + 0.25 * h.mean(0))
        elif name == "integer":
            value += 1
        elif name == "assigned integer":
            setattr(self, attribute, value + len(h))
        elif name == "bool":
            value[len(h) % 4] = True
        elif name == "from inf":
            torch.minimum(value, h.amin(0), out=value)


def _attribute(name: str) -> str:
    return name.replace(" ", "_")


def _first_value(name: str) -> Tensor:
    return {
        "in place": torch.zeros(_WIDTH), "assigned": torch.zeros(_WIDTH),
        "integer": torch.zeros((), dtype=torch.int64), "assigned integer": torch.zeros(2, dtype=torch.int64),
        "bool": torch.zeros(4, dtype=torch.bool), "float64": torch.full((3,), 1 / 3, dtype=torch.float64),
        "narrow": torch.zeros(_WIDTH, dtype=torch.bfloat16), "constant inf": torch.full((2, 2), -torch.inf).triu(1),
        "from inf": torch.full((_WIDTH,), torch.inf),
    }[name]  # fmt: skip


def _tensors(scenario: Scenario) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(scenario.seed)
    ids = torch.arange(scenario.samples)
    x = torch.randn(scenario.samples, scenario.columns, generator=generator)
    dtype = getattr(torch, scenario.inputs)
    if not dtype.is_floating_point:
        x = (x * 2).abs().floor()
    return ids, x.to(dtype), torch.randn(scenario.samples, generator=generator)


class _Rows(Dataset[Any]):
    """Samples one by one, in any of the shapes that a dataset may give them."""

    def __init__(self, scenario: Scenario) -> None:
        self.kind = scenario.data
        self.ids, self.x, self.y = _tensors(scenario)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        row = (self.ids[index], self.x[index], self.y[index])
        if self.kind == "dict":
            return {"ids": row[0], "x": row[1], "labels": row[2], "note": f"sample {index}"}
        if self.kind == "nested":
            return [row[0], {"x": row[1], "more": (row[2], index)}]
        return row


class _Gathered(_Rows):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


class _Damaged(Dataset[Any]):
    """A copy of which every third sample can be read once, as when it is looked at for its fingerprint."""

    def __init__(self, whole: Any) -> None:
        self.whole, self.read = whole, set[int]()

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> Any:
        if index % 3 == 1 and index in self.read:
            raise FileNotFoundError(f"sample {index}")
        self.read.add(index)
        return self.whole[index]


def _collate(samples: list[Any]) -> Any:
    ids, x, y = default_collate(samples)
    return {"all": (ids, x), "labels": y}


def _parts(scenario: Scenario, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    if scenario.data == "dict":
        return batch["ids"], batch["x"], batch["labels"]
    if scenario.data == "nested":
        return batch[0], batch[1]["x"], batch[1]["more"][0]
    if scenario.data == "collate":
        return (*batch["all"], batch["labels"])
    ids, x, y = batch
    return ids, x, y


def _spend(scenario: Scenario) -> None:
    """On a worker, this took its time, or for ever."""
    host, executor = HOST.get(), ComputeExecutor.current()
    if host is None or executor is None:
        return  # the coordinator's referee, or the plain loop
    slow = 10.0 if host.slow_until > host.loop.now else 1.0
    executor.debt_s += host.leaf_s * slow
    if host.failing_leaf:
        host.failing_leaf = False
        raise RuntimeError("planted")


def job_of(scenario: Scenario, built: Callable[[nn.Module], None] = lambda model: None) -> Job:
    """``built`` is shown each model that is made."""

    def model() -> nn.Module:
        made = Model(scenario)
        built(made)
        return made

    def step(model: nn.Module, batch: Any) -> Tensor:
        _spend(scenario)
        ids, x, y = _parts(scenario, batch)
        output = model(ids, x)
        applied: Tensor = model.applied[ids].sum() / len(ids)  # type: ignore[index]
        if "loud" in scenario.habits and int(ids.sum()) % 8 == 0:  # a length that the norm gate has not seen
            applied = applied + model.loud.sum() * 1e4
        host = HOST.get()
        if host is not None and host.broken:
            applied = applied * float("nan")
            if (called := host.when_broken) is not None:
                host.when_broken = None
                called()
        return (output.mean(1) - y).square().mean() * 0.05 - applied

    def optimizer(model: Any) -> torch.optim.Optimizer:
        made = stepping(model)
        if scenario.follows:
            made.register_step_post_hook(lambda *_: model.follow())
        return made

    def stepping(model: nn.Module) -> torch.optim.Optimizer:
        rest = [p for name, p in model.named_parameters() if name != "applied" and p.requires_grad]
        groups = [{"params": [model.applied], "lr": float(scenario.batch), "momentum": 0.0}, {"params": rest}]
        if scenario.optimizer in ("sgd", "momentum"):
            return torch.optim.SGD(groups, lr=0.01, momentum=0.5 if scenario.optimizer == "momentum" else 0.0)
        kinds: dict[str, Any] = {
            "adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam, "rmsprop": torch.optim.RMSprop,
            "adagrad": torch.optim.Adagrad,
        }  # fmt: skip
        made: torch.optim.Optimizer = kinds[scenario.optimizer]([*rest, model.applied], lr=0.01)
        return made

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    if scenario.stream:
        data: Any = stream(scenario.stream, _Rows(scenario), scenario.samples)
    elif scenario.data == "tensors":
        data = TensorDataset(*_tensors(scenario))
    else:
        data = (_Gathered if scenario.data == "getitems" else _Rows)(scenario)
    return Job(
        model=model, dataset=data, optimizer=optimizer, step=step, scheduler=scheduler if scenario.scheduled else None,
        collate=_collate if scenario.data == "collate" else None, batch_size=scenario.batch,
        microbatch_size=scenario.microbatch, accumulate_grad_batches=scenario.accumulate, epochs=scenario.epochs,
        max_steps=scenario.total_steps if scenario.endless else scenario.max_steps or None,
        gradient_clip_val=0.5 if scenario.clipped else None,
        precision=scenario.precision,  # type: ignore[arg-type]
        seed=scenario.seed, shuffle=scenario.shuffle, drop_last=scenario.drop_last,
        shuffle_buffer=scenario.shuffle_buffer,
        local_data=None if scenario.stream else lambda where: _Damaged(data) if scenario.own == "damaged" else data,
    )  # fmt: skip


def sampler_of(scenario: Scenario) -> Sampler:
    return Sampler(
        num_samples=1 << 40 if scenario.endless else scenario.samples, batch_size=scenario.batch,
        leaf_samples=scenario.leaf_samples, seed=scenario.seed, shuffle=scenario.shuffle, drop_last=scenario.drop_last,
        stream=bool(scenario.stream),
    )  # fmt: skip


def expected_applications(scenario: Scenario, *, weighted: bool = True) -> Tensor:
    """What ``applied`` is when each sample of each step was applied once; or how often each is in a step at all."""
    sampler, expected = sampler_of(scenario), torch.zeros(scenario.samples, dtype=torch.float64)
    plans = [sampler.plan(step) for step in range(scenario.total_steps)]
    ids = list(range(scenario.samples))
    if scenario.stream:
        counted = replace(job_of(scenario), dataset=stream(scenario.stream, ids, scenario.samples))
        ids = in_order(counted, 1 + int(plans[-1].indices[-1]) // scenario.samples)
    for plan in plans:
        for index in plan.indices.tolist():
            expected[ids[index]] += scenario.batch / plan.num_samples if weighted else 1
    return expected
