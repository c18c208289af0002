"""The GPT of ``models.py`` on real text, for benches whose loss has to mean something: Python's own standard library.

A sample is 129 bytes: 128 and, for each of them, the next. They travel as bytes. Training and held-out text are
different files. AdamW is the fused one for everybody: on a CPU it takes a tenth of the time of torch's default. The
learning rate warms up over a tenth of the steps and falls to a tenth.
"""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from models import GPT, next_token_loss
from w5xde_async.job import Job

__all__ = ["LENGTH", "held_out_loss", "text_job"]

LENGTH = 128
_TRAIN_BYTES = 4_000_000
_HELD_OUT_WINDOWS = 128


class Windows(Dataset[Tensor]):
    """Windows of ``LENGTH`` + 1 bytes that overlap by one."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * LENGTH : (index + 1) * LENGTH + 1]


@lru_cache(maxsize=1)
def texts() -> tuple[Windows, Tensor]:
    """Training windows, and held-out windows spread over their text."""
    train, held_out = bytearray(), bytearray()
    for number, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        (held_out if number % 10 == 9 else train).extend(path.read_bytes())
        if len(train) >= _TRAIN_BYTES:
            break
    rest = Windows(bytes(held_out))
    every = len(rest) // _HELD_OUT_WINDOWS
    return Windows(bytes(train)), torch.stack([rest[at * every] for at in range(_HELD_OUT_WINDOWS)])


def step(model: nn.Module, batch: Tensor) -> Tensor:
    tokens = batch.long()
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


@torch.no_grad()
def held_out_loss(model: nn.Module) -> dict[str, float]:
    """Nats a byte over the held-out windows."""
    parts = texts()[1].split(16)
    return {"val_loss": sum(step(model, part).item() for part in parts) / len(parts)}


def model(width: int, layers: int) -> nn.Module:
    return GPT(vocabulary=256, length=LENGTH, width=width, layers=layers, heads=6, tied=False)


def text_job(
    *, steps: int, leaves: int = 2, microbatch: int = 4, rate: float = 1e-3, width: int = 384, layers: int = 6,
    commits: int | None = None, leaves_per_commit: int | None = None,
) -> Job:  # fmt: skip
    """``steps`` optimizer steps of ``leaves`` x ``microbatch`` windows; 10.9M parameters unless told otherwise.

    The schedule counts these steps. ``commits`` and ``leaves_per_commit`` are for rules whose commit is a round.
    """

    def factor(number: int) -> float:
        return min((number + 1) / max(1, steps // 10), 1.0) * (1 - 0.9 * min(number / steps, 1.0))

    return Job(
        model=lambda: model(width, layers),
        dataset=texts()[0],
        step=step,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), fused=True),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        batch_size=microbatch * (leaves_per_commit or leaves),
        microbatch_size=microbatch,
        max_steps=commits or steps,
        gradient_clip_val=1.0,
        evaluate=held_out_loss,
        evaluate_every=1 << 30,
    )


def collate(job: Job, indices: Any) -> Tensor:
    """One leaf's batch."""
    return torch.stack([job.dataset[int(index)] for index in indices])
