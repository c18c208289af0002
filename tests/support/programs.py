"""Jobs whose steps can be traced, and programs made by hand to be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from tests.support import jobs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.program.form import FORM, Document, parse
from w5xde_async.compute.program.program_job import ProgramStep
from w5xde_async.job import Job
from w5xde_async.params.layout import Layout


class GPT(jobs.GPT):
    """The tests' GPT; ``is_causal`` is said, since finding it out reads the mask's values."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        out: Tensor = self.head(self.norm(self.blocks(x, mask=self.mask, is_causal=True)))
        return out


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return out


class Attention(nn.Module):
    """Rows of a digit attend to each other; a table that is no checkpoint's, a statistic kept under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 16)
        self.attend = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10)
        self.register_buffer("place", torch.linspace(-1, 1, 8).unsqueeze(1).repeat(1, 16), persistent=False)
        self.register_buffer("level", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x.view(-1, 8, 8)) + self.place
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        with torch.no_grad():
            self.level.lerp_(x.mean((0, 1)), 0.1)
        out: Tensor = self.head(x.mean(1))
        return out


class Rows(nn.Module):
    """Takes 2 tensors and gives 2; a part of it is a region in the region, a part is under no_grad."""

    def __init__(self, *, reentrant: bool, nested: bool) -> None:
        super().__init__()
        self.lift, self.drop = nn.Linear(64, 64), nn.Dropout(0.2)
        self.lower = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64))
        self.norm = nn.Identity() if reentrant else nn.BatchNorm1d(8)  # its statistics are written twice a step
        self._nested = nested

    def forward(self, x: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            scale = 1 + x.mean() ** 2
        y = self.norm(self.lift(x).view(-1, 8, 8)).flatten(1)
        y = self.drop(torch.relu(y) / scale)
        y = checkpoint(self.lower, y, use_reentrant=False) if self._nested else self.lower(y)
        return x + y.view(x.shape[0], 64), carried + y.detach()


class Checkpointed(nn.Module):
    """Gradient checkpointing of three layers; the last one's weights are the first one's."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        rows = [Rows(reentrant=reentrant, nested=number == 1) for number in range(2)]
        self.rows = nn.ModuleList([*rows, rows[0]])
        self.enter, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        carried = torch.zeros_like(x)
        for rows in self.rows:
            x, carried = checkpoint(rows, x, carried, use_reentrant=self._reentrant)
        with torch.no_grad():
            level = checkpoint(torch.mean, carried, use_reentrant=False)
        out: Tensor = self.head(x) / (1 + level**2)
        return out


class Padded(nn.Module):
    """Its trace holds for texts of one length: an LSTM's loop over positions is unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=0)
        self.lstm, self.out = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, texts: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(self.embed(texts))[0][:, -1])
        return out


class Filled(nn.Module):
    """Takes memory and fills it: by drawing, as stochastic depth and Gumbel's softmax do, and part by part. What it
    fills it with comes from patches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.choose, self.second = nn.Linear(64, 16), nn.Linear(64, 4), nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x.reshape(-1, 1, 8, 8), 3, padding=1, stride=2)
        x = F.fold(patches, (8, 8), 3, padding=1, stride=2).flatten(1)
        path = self.first(x).relu()
        kept = path * path.new_empty((len(x), 1)).bernoulli_(0.8).div_(0.8)
        chosen = F.gumbel_softmax(self.choose(x), tau=0.7, hard=True)
        parts = torch.empty(len(x), 20, device=x.device, memory_format=torch.contiguous_format)
        parts[:, :16] = kept
        parts[:, 16:] = chosen
        out: Tensor = self.second(parts + 0.01 * torch.empty_like(parts).uniform_(-1, 1))
        return out


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def gpt() -> Job:
    return Job(
        model=GPT, dataset=jobs.Text(), loss=jobs.lm_loss, optimizer=_sgd, batch_size=21, microbatch_size=4,
        max_steps=12, seed=7,
    )  # fmt: skip


def lstm() -> Job:
    return Job(
        model=LSTM, dataset=jobs.Text(context=6), loss=jobs.lm_loss, optimizer=_sgd, batch_size=20, microbatch_size=6,
        max_steps=8, seed=1,
    )  # fmt: skip


def attention() -> Job:
    x, y = jobs.digits()

    def step(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        out = model(x)
        with torch.no_grad():
            right = (out.argmax(1) == y).float().mean()
        return F.cross_entropy(out, y), {"accuracy": right, "rows": float(len(x))}

    return Job(
        model=Attention, dataset=TensorDataset(x, y), step=step, optimizer=_sgd, batch_size=100, microbatch_size=16,
        max_steps=8, seed=4,
    )  # fmt: skip


def _padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    texts, labels = zip(*samples, strict=True)
    return pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


def padded() -> Job:
    """Texts of many lengths, padded to the longest of each microbatch; the last batch is smaller."""
    texts = [(torch.arange(3 + number % 4) % 8 + 1, number % 2) for number in range(14)]
    return Job(
        model=Padded, dataset=texts, collate=_padded, loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), batch_size=8, microbatch_size=2, epochs=2,
    )  # fmt: skip


def checkpointed(*, reentrant: bool = False) -> Job:
    x, y = jobs.digits()
    return Job(
        model=lambda: Checkpointed(reentrant=reentrant), dataset=TensorDataset(x, y), loss=F.cross_entropy,
        optimizer=_sgd, batch_size=100, microbatch_size=16, max_steps=8, seed=5,
    )  # fmt: skip


def filled() -> Job:
    x, y = jobs.digits()
    return Job(
        model=Filled, dataset=TensorDataset(x, y), loss=F.cross_entropy, optimizer=_sgd, batch_size=100,
        microbatch_size=16, max_steps=8, seed=6,
    )  # fmt: skip


def reentrant() -> Job:
    return checkpointed(reentrant=True)


def bf16() -> Job:
    return jobs.half_precision("bf16")


#: Every one of them must come to the same bits with and without its code.
TRACEABLE: dict[str, Callable[[], Job]] = {
    "mlp": jobs.mlp_adamw,
    "cnn": jobs.cnn_sgd,
    "gpt": gpt,
    "lstm": lstm,
    "attention": attention,
    "accumulated": jobs.accumulated,
    "words": jobs.words,
    "metrics": jobs.metrics,
    "checkpointed": checkpointed,
    "reentrant": reentrant,
    "filled": filled,
    "bf16": bf16,
    "fp16": jobs.fp16,
}

#: The same names for ``parametrize``: what takes seconds to trace is for the slow tests.
QUICK_AND_SLOW = [
    pytest.param(name, marks=pytest.mark.slow) if name not in ("mlp", "words") else name for name in TRACEABLE
]


# -- programs made by hand

#: Values of the tiny program: the entries W, B, FROZEN and SEEN, the batch x (n, 4) and y (n), a constant (3); nodes.
FIRST_NODE = 7


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.still = nn.Parameter(torch.zeros(3), requires_grad=False)


def tiny_layout() -> Layout:
    return Layout.of(Tiny())


def entry(name: str) -> int:
    """The number of an entry in the layout."""
    return next(index for index, found in enumerate(tiny_layout().entries) if found.name == name)


W, B, FROZEN, SEEN = (entry(name) for name in ("head.weight", "head.bias", "still", "seen"))
X, Y, CONSTANT = 4, 5, 6


def v(index: int) -> list[Any]:
    """A reference."""
    return [0, index]


def listed(*items: Any) -> list[Any]:
    return [5, list(items)]


Call = tuple[str, list[Any]] | tuple[str, list[Any], list[Any]]


def tree(*calls: Call, loss: int | None = None, **parts: Any) -> list[Any]:
    """A program's parts: ``calls`` (operator, arguments, named) come first, then linear and cross entropy."""
    at = FIRST_NODE + len(calls)
    every: list[Call] = [
        *calls, ("linear.default", [v(X), v(W), v(B)]), ("cross_entropy_loss.default", [v(at), v(Y)]),
    ]  # fmt: skip
    names = list(dict.fromkeys(call[0] for call in every))
    nodes = [[names.index(call[0]), call[1], call[2] if len(call) == 3 else []] for call in every]
    inputs = [["float32", [[0, 2, 1 << 30, 8], 4]], ["int64", [[0, 2, 1 << 30, 8]]]]
    made = {
        "form": FORM, "fingerprint": tiny_layout().fingerprint, "structure": flatten((torch.zeros(1),) * 2)[0],
        "metrics": [], "statistics": [], "operators": names, "constants": [["float32", [3]]],
        "graphs": [[inputs, nodes, [at + 1 if loss is None else loss, []]]], "said": [],
    } | parts  # fmt: skip
    return list(made.values())


def document(*calls: Call, **parts: Any) -> Document:
    return Document(msgpack.packb(tree(*calls, **parts)), (torch.ones(3),))


def load(found: Document, *, memory_bytes: int = 1 << 30) -> ProgramStep:
    """What a worker does with a program before it computes with it. Raises ProgramRefused."""
    layout = tiny_layout()
    return ProgramStep(parse(found, layout), layout, torch.device("cpu"), memory_bytes=memory_bytes)
