"""A small GPT on bytes: it learns Python from the source of Python's own standard library. Nothing is downloaded.

    python -m w5xde_async.coordinator examples/bytes_lm.py:job --workers 2
    python -m w5xde_async.coordinator examples/bytes_lm.py:bf16 --workers 2 --name bytes-bf16

``job`` has about a million parameters, a size for CPUs; ``tiny`` is for tests. Embedding and output layer share
their weights. Training and held-out text come from different files.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from w5xde_async import Job

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Size:
    width: int
    heads: int
    layers: int
    context: int


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Every window of ``context`` bytes, without overlap, and the bytes that follow each of its bytes."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(self.before_mlp(x))
        return x


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.layers = nn.Sequential(*(Layer(size) for _ in range(size.layers)), nn.LayerNorm(size.width))
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # one tensor: trained, sent and stored once
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        logits: Tensor = self.head(self.layers(self.embedding(text) + self.position(places)))
        return logits


def library(num_bytes: int) -> tuple[bytes, bytes]:
    """Training text of about ``num_bytes`` and held-out text: whole files, in the order of their names."""
    train, held_out = bytearray(), bytearray()
    for number, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        text = path.read_bytes()
        if number % 10 == 9:
            held_out += text
        else:
            train += text
        if len(train) >= num_bytes:
            break
    return bytes(train), bytes(held_out)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def make(size: Size, *, num_bytes: int, batch_size: int, steps: int, precision: str = "fp32") -> Job:
    train, held_out = library(num_bytes)
    windows = Windows(held_out, size.context)
    some = [windows[index] for index in range(0, len(windows), max(1, len(windows) // 64))][:64]
    texts, targets = (torch.stack(part) for part in zip(*some, strict=True))

    def evaluate(model: nn.Module) -> dict[str, float]:
        loss = loss_of(model(texts), targets).item()
        return {"val_loss": loss, "val_bits": loss / math.log(2)}

    def warm_up_then_fall(step: int) -> float:
        return min((step + 1) / 20, 1.0) * (1 - 0.9 * min(step / steps, 1.0))

    return Job(
        model=lambda: GPT(size),
        dataset=Windows(train, size.context),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), fused=True),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_fall),
        loss=loss_of,
        batch_size=batch_size,
        microbatch_size=batch_size // 4,
        max_steps=steps,
        gradient_clip_val=1.0,
        precision=precision,  # type: ignore[arg-type]
        evaluate=evaluate,
        evaluate_every=100,
    )


def job() -> Job:
    return make(Size(width=144, heads=4, layers=4, context=128), num_bytes=4_000_000, batch_size=32, steps=300)


def bf16() -> Job:
    return make(
        Size(width=144, heads=4, layers=4, context=128),
        num_bytes=4_000_000,
        batch_size=32,
        steps=300,
        precision="bf16",
    )


def tiny() -> Job:
    return make(Size(width=32, heads=2, layers=2, context=32), num_bytes=100_000, batch_size=16, steps=60)
