"""A model of Llama's shape on bytes: RMSNorm, rotary positions, grouped queries, SwiGLU. Nothing is downloaded.

    python -m w5xde_async.coordinator examples/llama.py:job --workers 2

``job`` has about a million parameters, a size for CPUs; ``tiny`` is for tests. ``b1`` and ``b8`` have the shapes of
Llama 3.2 1B and Llama 3.1 8B, vocabulary included (of which bytes are the first 256).

The text, and what comes from it, is that of bytes_lm.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bytes_lm import Windows, library, loss_of
from w5xde_async import Job


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    groups: int  # heads of keys and values
    hidden: int
    context: int
    vocabulary: int = 256
    tied: bool = False


SIZES = {
    "tiny": Size(width=32, layers=2, heads=4, groups=2, hidden=96, context=32),
    "m1": Size(width=128, layers=6, heads=8, groups=4, hidden=352, context=128),
    "b1": Size(2048, 16, 32, 8, hidden=8192, context=2048, vocabulary=128256, tied=True),
    "b8": Size(4096, 32, 32, 8, hidden=14336, context=2048, vocabulary=128256),
}


def rotations(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine for every place and every pair of a head's ``width`` numbers."""
    speeds = 500_000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device).unsqueeze(1) * speeds
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, size.groups * self.head, bias=False)
        self.value = nn.Linear(size.width, size.groups * self.head, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        queries = query.shape[1] // key.shape[1]  # that share a key
        key, value = key.repeat_interleave(queries, 1), value.repeat_interleave(queries, 1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(size.width, 1e-5), nn.RMSNorm(size.width, 1e-5)
        self.attention = Attention(size)
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), cosine, sine)
        y = self.before_mlp(x)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return x


class Llama(nn.Module):
    _tp_plan: ClassVar = {  # for --island tp=2: which layers are split, by columns (their outputs) or by rows
        "embedding": "rowwise_rep", "head": "colwise_rep",
        "layers.*.attention.query": "colwise", "layers.*.attention.key": "colwise",
        "layers.*.attention.value": "colwise", "layers.*.attention.out": "rowwise",
        "layers.*.gate": "colwise", "layers.*.up": "colwise", "layers.*.down": "rowwise",
    }  # fmt: skip

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, 1e-5)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # what adds to the stream is smaller in deeper models
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * size.layers) if last else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        cosine, sine = rotations(text.shape[1], self.head_width, text.device)
        x = self.embedding(text)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make(name: str, *, batch_size: int, microbatch_size: int, steps: int, precision: str = "fp32") -> Job:
    size = SIZES[name]
    train, held_out = library(4_000_000 if size.context > 32 else 100_000)
    windows = Windows(held_out, size.context)
    some = [windows[index] for index in range(0, len(windows), max(1, len(windows) // 64))][:64]
    texts, targets = (torch.stack(part) for part in zip(*some, strict=True))

    def evaluate(model: nn.Module) -> dict[str, float]:
        loss = loss_of(model(texts), targets).item()
        return {"val_loss": loss, "val_bits": loss / math.log(2)}

    def warm_up_then_fall(step: int) -> float:
        return min((step + 1) / 20, 1.0) * (1 - 0.9 * min(step / steps, 1.0))

    return Job(
        model=lambda: Llama(size),
        dataset=Windows(train, size.context),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_fall),
        loss=loss_of,
        batch_size=batch_size,
        microbatch_size=microbatch_size,
        max_steps=steps,
        gradient_clip_val=1.0,
        precision=precision,  # type: ignore[arg-type]
        evaluate=evaluate,
        evaluate_every=100,
    )


def job() -> Job:
    return make("m1", batch_size=32, microbatch_size=8, steps=300)


def tiny() -> Job:
    return make("tiny", batch_size=16, microbatch_size=4, steps=60)


def b1() -> Job:
    return make("b1", batch_size=64, microbatch_size=1, steps=10_000, precision="bf16")


def b8() -> Job:
    return make("b8", batch_size=64, microbatch_size=1, steps=10_000, precision="bf16")
