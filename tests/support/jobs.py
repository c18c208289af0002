"""Small jobs that together use everything a job may have. Named on command lines as tests/support/jobs.py:NAME."""

from __future__ import annotations

import gzip
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from w5xde_async.job import Job


@cache
def digits() -> tuple[Tensor, Tensor]:
    """The pictures of sklearn.datasets.load_digits, each as 64 numbers from 0 to 1, and what they show."""
    package = find_spec("sklearn")  # its file is read here: importing it takes seconds, in many processes
    assert package is not None
    assert package.origin is not None
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        rows = torch.tensor([[float(number) for number in line.split(",")] for line in file])
    return rows[:, :-1] / 16, rows[:, -1].long()


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x.view(-1, 1, 8, 8)))), 2)
        out: Tensor = self.head(self.drop(x.flatten(1)))
        return out


class GPT(nn.Module):
    """Two blocks, tied embedding, dropout, a constant causal mask as a persistent buffer."""

    def __init__(self, width: int = 32, context: int = 16, vocabulary: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        mask = torch.full((context, context), -math.inf).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        out: Tensor = self.head(self.norm(self.blocks(x, mask=self.mask)))
        return out


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows over a fixed text."""

    def __init__(self, context: int = 16) -> None:
        text = (__doc__ or "") * 12
        self.data = torch.tensor([ord(c) % 96 for c in text])
        self.context = context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        at = index * self.context
        return self.data[at : at + self.context], self.data[at + 1 : at + 1 + self.context]


def delayed(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The same loss; every leaf takes longer where the environment says so, so that faults fall into a run: until
    there is a file of the name in W5XDE_TEST_HURRY, by which a test says that it has seen what it waited for."""
    leaf_s = float(os.environ.get("W5XDE_TEST_LEAF_S", "0"))
    hurry = os.environ.get("W5XDE_TEST_HURRY", "")

    def slow(output: Any, target: Any) -> Tensor:
        until = time.monotonic() + leaf_s
        while (left := until - time.monotonic()) > 0 and not (hurry and os.path.exists(hurry)):
            time.sleep(min(left, 0.05) if hurry else left)
        return loss(output, target)

    return slow if leaf_s else loss


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 2e-3}], lr=1e-3
    )


def _cosine(optimizer: torch.optim.Optimizer) -> Any:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    then = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, then], [5])


def _sgd_kwargs() -> dict[str, Any]:
    return {"optimizer": _sgd}


def _adamw_kwargs() -> dict[str, Any]:
    return {"optimizer": _adamw, "scheduler": _cosine, "gradient_clip_val": 0.5}


def lm_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _mlp(**kwargs: Any) -> Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))

    x, y = digits()
    return Job(
        model=model, dataset=TensorDataset(x, y), loss=delayed(nn.CrossEntropyLoss()), batch_size=200,
        microbatch_size=24, max_steps=32, seed=3, **kwargs,
    )  # fmt: skip


def _cnn(**kwargs: Any) -> Job:
    x, y = digits()
    return Job(
        model=CNN, dataset=TensorDataset(x, y), loss=delayed(nn.CrossEntropyLoss()), batch_size=112, microbatch_size=16,
        max_steps=32, seed=5, **kwargs,
    )  # fmt: skip


def _gpt(**kwargs: Any) -> Job:
    return Job(
        model=GPT, dataset=Text(), loss=delayed(lm_loss), batch_size=20, microbatch_size=4, max_steps=32, seed=7,
        **kwargs,
    )  # fmt: skip


def mlp_sgd() -> Job:
    return _mlp(**_sgd_kwargs())


def mlp_adamw() -> Job:
    return _mlp(**_adamw_kwargs())


def wide() -> Job:
    """Large enough that a worker on the coordinator's machine shares memory with it; several buckets."""
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10)
    )
    return replace(mlp_adamw(), model=model, batch_size=32, microbatch_size=8, drop_last=True)


def cnn_sgd() -> Job:
    return _cnn(**_sgd_kwargs())


def cnn_adamw() -> Job:
    return _cnn(**_adamw_kwargs())


def gpt_sgd() -> Job:
    return _gpt(**_sgd_kwargs())


def gpt_adamw() -> Job:
    return _gpt(**_adamw_kwargs())


class Odd(nn.Module):
    """Frozen, unused, sometimes unused, bfloat16 and scalar parameters; integer, bool and constant buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.rare = nn.Parameter(torch.ones(16))
        self.narrow = nn.Linear(16, 8).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("table", torch.randn(7, 5))
        self.register_buffer("running", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.frozen(self.first(x)))
        if x[0, 0] > 0:  # depends on the data: some leaves touch it, some do not
            h = h * self.rare
        with torch.no_grad():
            self.seen += 1
            self.flags[int(x.shape[0]) % 4] = True
            self.running.lerp_(h.mean(0), 0.1)
        h = self.narrow(h.to(torch.bfloat16)).float() * self.scale
        out: Tensor = self.head(h)
        return out


def _points(count: int = 150) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 10, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


def odd() -> Job:
    return Job(
        model=Odd, dataset=_points(), loss=nn.CrossEntropyLoss(), optimizer=_adamw, batch_size=40, microbatch_size=8,
        max_steps=12, seed=11, gradient_clip_val=1.0,
    )  # fmt: skip


def accumulated() -> Job:
    """Leaves of three microbatches, the last leaf and its last microbatch shorter; drops the rest of the epoch."""
    return Job(
        model=CNN, dataset=TensorDataset(*digits()), loss=nn.CrossEntropyLoss(), optimizer=_sgd, batch_size=130,
        microbatch_size=10, accumulate_grad_batches=3, max_steps=14, seed=2, drop_last=True,
    )  # fmt: skip


class Words(Dataset[dict[str, Any]]):
    """Dict samples of different lengths, padded by ``pad``; half of them change at random, as augmentation does."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 3 + index % 6
        ids = (torch.arange(length) * (index + 1)) % 96
        if index % 2:
            ids = ids.roll(int(torch.randint(length, ()).item()))
        return {"input_ids": ids, "labels": index % 4, "name": f"sample {index}"}


def pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.stack([F.pad(sample["input_ids"], (0, longest - len(sample["input_ids"]))) for sample in samples])
    return {"input_ids": ids, "attention_mask": ids != 0, "labels": torch.tensor([s["labels"] for s in samples])}


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        mask = attention_mask.unsqueeze(-1).float()
        pooled = (self.embed(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return {"logits": self.head(pooled)}


def words() -> Job:
    return Job(
        model=Bag, dataset=Words(), collate=pad, loss=nn.CrossEntropyLoss(), optimizer=_sgd, batch_size=24,
        microbatch_size=6, epochs=4, seed=9,
    )  # fmt: skip


def metrics() -> Job:
    """A general step with metrics, not shuffled."""

    def step(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        out = model(x)
        return F.cross_entropy(out, y), {"accuracy": (out.argmax(1) == y).float().mean(), "rows": float(len(x))}

    return Job(
        model=lambda: nn.Linear(10, 4), dataset=_points(), step=step, optimizer=_sgd, batch_size=50, microbatch_size=7,
        max_steps=9, shuffle=False,
    )  # fmt: skip


def half_precision(precision: Any = "bf16") -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4)), dataset=_points(),
        loss=nn.CrossEntropyLoss(), optimizer=_sgd, batch_size=48, microbatch_size=8, max_steps=12, precision=precision,
    )  # fmt: skip


def fp16() -> Job:
    return half_precision("fp16")


class Noisy(torch.optim.SGD):
    """SGD with noise of every kind of generator (Langevin dynamics: Welling & Teh 2011), which keeps its last gradients
    in a place of its own and averages them in."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.02)
        self.last: deque[list[Tensor]] = deque(maxlen=3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        self.last.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)])
        super().step()
        for index, parameter in enumerate(parameters):
            noise = torch.randn_like(parameter) + random.gauss(0, 1) + float(np.random.standard_normal())
            parameter.add_(noise, alpha=1e-3)
            for before in self.last:
                parameter.sub_(before[index], alpha=1e-3)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last": [list(gradients) for gradients in self.last]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = deque(state["last"], maxlen=3)
        super().load_state_dict({name: value for name, value in state.items() if name != "last"})


class Jitter(torch.optim.lr_scheduler.LRScheduler):
    """A learning rate that is drawn anew for each step."""

    def get_lr(self) -> list[float]:
        return [rate * (0.5 + random.random()) for rate in self.base_lrs]


def noisy() -> Job:
    """An optimizer and a scheduler that draw."""
    return replace(mlp_sgd(), optimizer=lambda model: Noisy(model.parameters()), scheduler=Jitter)


class SometimesSparse(nn.Module):
    """A matrix whose gradient names rows, several times each, in one leaf and is dense in another, by its data."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, rows: Tensor, looks_up: Tensor) -> Tensor:
        if bool(looks_up.all()):
            hidden = F.embedding(rows, self.table, sparse=True).cumsum(1)[:, -1]
        else:
            hidden = F.one_hot(rows, 5).float().sum(1) @ self.table
        out: Tensor = self.head(hidden)
        return out


def sometimes_sparse() -> Job:
    generator = torch.Generator().manual_seed(0)
    rows, labels = torch.randint(0, 5, (256, 40), generator=generator), torch.randint(0, 4, (256,), generator=generator)
    looks_up = torch.randint(0, 2, (32, 1), generator=generator).repeat_interleave(8, 0)

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    return Job(
        model=SometimesSparse, dataset=TensorDataset(rows, looks_up, labels), step=step, batch_size=64,
        microbatch_size=8, shuffle=False, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
        max_steps=12,
    )  # fmt: skip


ALL: dict[str, Callable[[], Job]] = {
    job.__name__: job
    for job in (mlp_sgd, mlp_adamw, cnn_sgd, cnn_adamw, gpt_sgd, gpt_adamw, odd, accumulated, words, metrics,
                half_precision, fp16, noisy, sometimes_sparse)
}  # fmt: skip
