"""What a step's arithmetic is said to be, beside what torch's own counter finds when backward runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from w5xde_async.compute.flops import count_step


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 32), nn.Linear(32, 4)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.layer(self.embed(tokens)).mean(1))


class _Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it, behind a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(16, 64), nn.Linear(64, 64)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.frozen(x) + self.up(self.down(x))


def _frozen_backbone() -> nn.Module:
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten())
    return nn.Sequential(backbone.requires_grad_(False), nn.Linear(16 * 4 * 4, 4))


_TOKENS = torch.arange(24).view(2, 12) % 10


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)), torch.ones(2, 16)),
        (lambda: nn.Sequential(nn.Linear(16, 64, bias=False), nn.Linear(64, 4)), torch.ones(2, 5, 16)),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)), torch.ones(2, 3, 8, 8)),
        (_frozen_backbone, torch.ones(2, 3, 8, 8)),
        (_Adapted, torch.ones(2, 16)),
        (lambda: nn.RNNCell(8, 16), torch.ones(2, 8)),
        (_Attends, _TOKENS),
    ],
    ids=["dense", "rows", "convolutions", "frozen", "adapted", "recurrent", "attention"],
)
def test_arithmetic_is_what_torch_counts_with_backward(make: Callable[[], nn.Module], given: Tensor) -> None:
    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        return (out[0] if isinstance(out, tuple) else out).sum()

    with FlopCounterMode(display=False) as oracle:
        forward(make(), given).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():  # whatever counts there has gradients recorded
        found = count_step(lambda: forward(make(), given))
        with torch.device("meta"):
            without_memory = make()
        again = count_step(lambda: forward(without_memory, given.to("meta")))
    assert found == pytest.approx(oracle.get_total_flops(), rel=0.02)
    assert again == pytest.approx(found, rel=0.1)  # attention has several ways to be computed
