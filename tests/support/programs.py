"""Jobs whose steps can be traced, and programs made by hand to be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.support import jobs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from w5xde_async.job import Job


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


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def gpt() -> Job:
    return Job(
        model=GPT, dataset=jobs.Text(), loss=jobs.lm_loss, optimizer=_sgd, batch_size=21, microbatch_size=4,
        max_steps=12, seed=7,
    )  # fmt: skip


def lstm() -> Job:
    return Job(
        model=LSTM, dataset=jobs.Text(), loss=jobs.lm_loss, optimizer=_sgd, batch_size=20, microbatch_size=6,
        max_steps=8, seed=1,
    )  # fmt: skip


def attention() -> Job:
    x, y = jobs._digits()

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
    "bf16": bf16,
    "fp16": jobs.fp16,
}
