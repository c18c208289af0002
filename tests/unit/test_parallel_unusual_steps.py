"""Steps and models that do what few do, each computed by every kind of island as by one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import island_jobs, islands
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from w5xde_async.compute.block import LeafSpec
from w5xde_async.job import Job
from w5xde_async.parallel.building import island_engine
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.shape import IslandShape


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


def _taught(model: nn.Module, batch: Any) -> Tensor:
    """By what the model says of other data, before and after."""
    x, y = batch
    with torch.no_grad():
        before = model(x * 0.9)
    out = model(x)
    with torch.no_grad():
        after = model(x * 0.8)
    return F.cross_entropy(out, y) + F.mse_loss(out, before) + 0.1 * F.mse_loss(out, after)


def _looks_first(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    with torch.inference_mode():
        scale = float(model(x).abs().mean())
    return F.cross_entropy(model(x) * scale, y)


def _evaluates_first(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    model.eval()
    with torch.no_grad():
        sure = model(x).softmax(-1).amax(-1)
    model.train()
    return (F.cross_entropy(model(x), y, reduction="none") * sure).mean()


def _frozen(model: nn.Module, batch: Any, *parts: str) -> Tensor:
    x, y = batch
    modules = [model.get_submodule(part) for part in parts]
    for module in modules:
        module.requires_grad_(False)
    loss = F.cross_entropy(model(x), y)
    for module in modules:
        module.requires_grad_(True)
    return loss


def _freezes_blocks(model: nn.Module, batch: Any) -> Tensor:
    return _frozen(model, batch, "first", "blocks")


def _freezes_the_last(model: nn.Module, batch: Any) -> Tensor:
    return _frozen(model, batch, "blocks.2", "head")


def _freezes_a_layer(model: nn.Module, batch: Any) -> Tensor:
    return _frozen(model, batch, "blocks.1.0")


def _alternates(model: nn.Module, batch: Any) -> Tensor:
    """Half of the microbatches train the blocks, half the rest."""
    return _frozen(model, batch, *(("first", "blocks") if float(batch[0][0, 0]) > 0 else ("blocks.1", "head")))


class Partly(Plain):
    """Frozen: a block, and beside what is trained a bias in half precision."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.randn(8, dtype=torch.float16), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.values

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].add_module("shift", self.Shift())


def _melts(model: nn.Module, batch: Any) -> Tensor:
    """Half of the microbatches melt in the end what was frozen from the first, too, which they do not train."""
    x, y = batch
    model.requires_grad_(False)
    with torch.no_grad():
        told = model(x)
    trained = [model.get_submodule(part) for part in ("first", "blocks.0", "blocks.2.0", "blocks.2.2", "head")]
    for module in trained:
        module.requires_grad_(True)
    out = model(x)
    for module in (model, *trained):
        module.requires_grad_(module is not model or float(x[0, 0]) > 0)
    return F.cross_entropy(out, y) + F.mse_loss(out, told * 0.9)


class Prompted(nn.Module):
    """Learned queries beside other parts."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.randn(1, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.values.expand(len(x), -1)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([self.Queries(), nn.Linear(8, 8), self.Queries()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        added, kept, times = (part(x) for part in self.parts)
        with torch.no_grad():
            added = added + self.parts[0](x)
        out: Tensor = self.head((torch.tanh(kept) + added) * times)
        return out


class Compiled(Prompted):
    """Each part of it by itself."""

    def __init__(self) -> None:
        super().__init__()
        for part in self.parts:
            part.compile(backend="eager")


class Unbroken(Plain):
    """Each of its blocks is compiled as one graph, in which nobody else may look at parameters."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(torch.tanh(self.up(x)))
            return out

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        for block in self.blocks:
            block.compile(backend="eager", fullgraph=True)


class Handing(nn.Module):
    """Blocks that return their tables: a row, the whole, and without a gradient."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            x = torch.tanh(self.layer(x) + self.table[2] + x @ self.table.T)
            return x, {"row": self.table[1], "all": self.table.t(), "still": [self.table.detach()]}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, told = block(x)
            x = torch.sin(x @ told["all"]) + torch.cos(told["row"]) * told["row"] + told["still"][0].sum(0)
        out: Tensor = self.head(x)
        return out


class Given(Handing):
    """Parameters themselves, to the loss."""

    class Block(Handing.Block):
        def forward(self, x: Tensor) -> Any:
            x = torch.tanh(self.layer(x))
            return x, {"row": self.layer.bias, "all": self.table, "still": [self.layer.bias.detach()[None]]}


def _measured(model: nn.Module, batch: Any) -> Any:
    """With a parameter and a view of one among its metrics."""
    x, y = batch
    told = {"bias": model.get_submodule("head").bias[0], "one": model.get_parameter("one"), "rows": len(x)}
    return F.cross_entropy(model(x) * model.get_parameter("one"), y), told


class Scaled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))


class Overwriting(nn.Module):
    """Writes into what its layers give: of a pair, each by itself, of an embedding."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc2(F.relu(self.fc1(x), inplace=True))
            out *= 0.5
            return out

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.layers, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden += 1
        rows = self.table(x[:, 0].abs().long().clamp(max=7))
        rows *= torch.tanh(hidden)
        for block in self.blocks:
            rows = rows + block(rows)
        out: Tensor = self.head(self.layers(rows))
        return out


class Sharing(nn.Module):
    """Calls none of the layers that hold its shared weight first, as T5 does; and one whose weight it uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.table = nn.Embedding(8, 8), nn.Embedding(8, 8)
        self.table.weight = self.shared.weight
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(x[:, 0].abs().long().clamp(max=7))
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(self.blocks[1](x) + x @ self.blocks[1].weight)
        return out


def _job(model: Any, step: Any = None, **changes: Any) -> Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 8, generator=generator)
    x[:, 0] = x[:, 0].abs() * torch.tensor([1.0, -1.0]).repeat_interleave(4).repeat(12)  # by the microbatch
    return Job(
        model=model, dataset=TensorDataset(x, torch.randint(3, (96,), generator=generator)), step=step,
        loss=None if step is not None else F.cross_entropy, batch_size=64, microbatch_size=4, max_steps=5,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), **changes,
    )  # fmt: skip


def _is_taught_and_freezes(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        before = model(batch[0] * 0.9)
    return _frozen(model, batch, "parts.1") * (1 + before.softmax(-1).std())


def all_at_once() -> Job:
    return _job(Prompted, _is_taught_and_freezes, precision="bf16", accumulate_grad_batches=2)


JOBS = {
    "all at once": all_at_once(),
    "a pass without gradients first": _job(Plain, _taught),
    "and in bf16": _job(Plain, _taught, precision="bf16"),
    "and in fp16": _job(Plain, _taught, precision="fp16"),
    "and in microbatches": _job(Plain, _taught, precision="bf16", accumulate_grad_batches=2),
    "looks first": _job(Plain, _looks_first),
    "evaluates first": _job(Plain, _evaluates_first, precision="bf16"),
    "freezes blocks": _job(Plain, _freezes_blocks),
    "freezes the last": _job(Plain, _freezes_the_last, precision="bf16"),
    "freezes a layer": _job(Plain, _freezes_a_layer, accumulate_grad_batches=2),
    "alternates": _job(Plain, _alternates, accumulate_grad_batches=2),
    "melts": _job(Partly, _melts),
    "melts in microbatches": _job(Partly, _melts, accumulate_grad_batches=2),
    "returns parameters": _job(Prompted),
    "and so in bf16": _job(Prompted, precision="bf16"),
    "and compiled": _job(Compiled, _taught, precision="bf16"),
    "and in one graph each": _job(Unbroken, precision="bf16"),
    "returns views": _job(Handing, accumulate_grad_batches=2),
    "and views in bf16": _job(Handing, precision="bf16"),
    "returns parameters themselves": _job(Given),
    "measures a parameter": _job(Scaled, _measured, accumulate_grad_batches=2),
    "measures one in bf16": _job(Scaled, _measured, precision="bf16"),
    "writes into outputs": _job(Overwriting, accumulate_grad_batches=2),
    "shares a weight": _job(Sharing),
}

#: Computed once more in backward, they find nothing frozen; and torch compiles no checkpoints of a kind.
ONCE = {
    "freezes blocks", "freezes the last", "freezes a layer", "alternates", "all at once", "and compiled",
    "and in one graph each", "melts", "melts in microbatches",
}  # fmt: skip


def _divided(model: nn.Module, mesh: Any) -> None:
    for unit in model.get_submodule("parts" if isinstance(model, Prompted) else "blocks").children():
        fully_shard(unit, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])


def _case(job: Job, mode: str, *, exact: bool, **options: Any) -> islands.Case:
    def run(group: Group) -> None:
        engine = island_engine(
            IslandShape(mode, group.size), job, LeafSpec.of(job), group, bucket_bytes=islands.BUCKET_BYTES, **options
        )  # fmt: skip
        both = islands.Together(engine, group), islands.Alone(replace(job, parallelize=None))
        state = islands.changed_state(job)
        both[0].load(state)
        both[1].state.copy_groups(state)
        both[1].engine.load(range(len(both[1].layout.buckets)))
        size = 4 * job.accumulate_grad_batches
        for samples in ((size, size, size), (size, size, size, size, size - 1)):
            compare = islands.same_block if exact else islands.near_block
            compare(*both, island_jobs.batches(job, samples), samples)
        engine.close()
        both[1].engine.close()

    return run


CASES: dict[str, islands.Case] = {}
for _name, _given in JOBS.items():
    CASES |= {
        f"{_name}, dp": _case(_given, "dp", exact=True),
        f"{_name}, fsdp": _case(_given, "fsdp", exact=True),
    }
    if _name not in ONCE:
        CASES[f"{_name}, fsdp and checkpoints"] = _case(_given, "fsdp", exact=True, checkpoint_activations=True)
    if _given.model is Sharing:  # outside of what fully_shard makes units of
        del CASES[f"{_name}, fsdp"], CASES[f"{_name}, fsdp and checkpoints"]
        CASES[f"{_name}, tp"] = _case(_given, "tp", exact=False)
    elif _given.step is not _measured:  # which uses parameters outside of the model
        CASES[f"{_name}, fsdp of the job"] = _case(replace(_given, parallelize=_divided), "fsdp", exact=False)
        if _given.precision == "fp32" and _given.model is not Given:  # else parts of a product are rounded
            CASES[f"{_name}, tp"] = _case(_given, "tp", exact=False)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_two_ranks(tmp_path: Path) -> None:
    islands.run("tests.unit.test_parallel_unusual_steps", 2, tmp_path, timeout_s=110)
