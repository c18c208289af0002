"""What a step's arithmetic is said to be, beside what torch's own counter finds when backward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode

from w5xde_async.compute.flops import count_step, counting_flops


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


class _Given(nn.Module):
    """A function of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = function


def _attention(x: Tensor) -> Tensor:
    q = x.unflatten(2, (4, 16)).transpose(1, 2).contiguous()
    return nn.functional.scaled_dot_product_attention(q, q, q)


def _experts(x: Tensor) -> Tensor:
    ends = torch.tensor([8, 16], dtype=torch.int32, device=x.device)
    return torch._grouped_mm(x, x.new_ones(2, 32, 32), offs=ends)


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

    with torch.device("meta"):
        without_memory = make()
    with FlopCounterMode(display=False) as oracle:  # there, where attention is products that it knows
        forward(without_memory, given.to("meta")).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():  # whatever counts there has gradients recorded
        found = count_step(lambda: forward(make(), given))
        again = count_step(lambda: forward(without_memory, given.to("meta")))
    assert found == pytest.approx(oracle.get_total_flops(), rel=0.02)
    assert again == pytest.approx(found, rel=0.02)


def _as_is(data: Any) -> Any:
    return data


def _packed(data: Tensor) -> PackedSequence:
    """All of one length: on the CPU torch computes them by another kernel than others."""
    rows, steps = data.shape[:2]
    return PackedSequence(data.transpose(0, 1).flatten(0, 1), torch.tensor([rows] * steps))


def _mixed(data: Tensor) -> PackedSequence:
    return PackedSequence(data.flatten(0, 1)[:12], torch.tensor([2, 2, 2, 2, 2, 1, 1]))


_SERIES = torch.ones(2, 7, 48)
_LSTM = 2 * 4 * 16 * (48 + 16) + 2 * 4 * 16 * (16 + 16)  # of a row, in two layers


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("make", "given", "shaped", "expected"),
    [
        (lambda: nn.LSTM(48, 16, 2, batch_first=True), _SERIES, _as_is, 14 * _LSTM),
        (lambda: nn.LSTM(48, 16, 2), _SERIES, _packed, 14 * _LSTM),
        (lambda: nn.LSTM(48, 16, 2), _SERIES, _mixed, 12 * _LSTM),
        (lambda: nn.LSTM(48, 16, bidirectional=True), _SERIES, _as_is, 2 * 14 * 2 * 4 * 16 * (48 + 16)),
        (lambda: nn.LSTM(48, 16, proj_size=8), _SERIES, _packed, 14 * 2 * (4 * 16 * (48 + 8) + 16 * 8)),
        (lambda: nn.GRU(48, 16, batch_first=True), _SERIES, _as_is, 14 * 2 * 3 * 16 * (48 + 16)),
        (lambda: nn.GRU(48, 16), _SERIES, _packed, 14 * 2 * 3 * 16 * (48 + 16)),
        (lambda: nn.RNN(48, 16), _SERIES, _packed, 14 * 2 * 16 * (48 + 16)),
        (lambda: nn.RNN(48, 16, nonlinearity="relu"), _SERIES, _mixed, 12 * 2 * 16 * (48 + 16)),
        (lambda: nn.LSTMCell(48, 16), _SERIES[0], _as_is, 7 * 2 * 4 * 16 * (48 + 16)),
        (lambda: _Given(_attention), torch.ones(2, 9, 64), _as_is, 2 * 4 * (2 * 9 * 9 * 16) * 2),
        (lambda: nn.Bilinear(7, 5, 3), (torch.ones(2, 7), torch.ones(2, 5)), _as_is, 2 * 2 * 7 * 5 * 3),
        (lambda: nn.ConvTranspose1d(7, 4, 3), _SERIES[:, :, :8], _as_is, 2 * 2 * 7 * 4 * 3 * 8),
        (lambda: _Given(lambda x: x[0] @ x[0, 0]), torch.ones(1, 5, 6), _as_is, 2 * 5 * 6),
        (lambda: _Given(lambda x: torch.addbmm(x[0], x, x)), torch.ones(3, 5, 5), _as_is, 2 * 3 * 5**3),
        (lambda: _Given(lambda x: torch.cdist(x, x + 1)), torch.ones(30, 6), _as_is, 2 * 30 * 30 * 6),
        (lambda: _Given(_experts), torch.ones(16, 32, dtype=torch.bfloat16), _as_is, 2 * 16 * 32 * 32),
        (lambda: _Given(torch.linalg.inv), torch.eye(8).expand(3, 8, 8), _as_is, 3 * 2 * 8**3),
        (lambda: _Given(lambda x: torch.linalg.svd(x)[1]), torch.ones(9, 4), _as_is, 2 * 9 * 4 * 4),
    ],
)
def test_operators_that_torchs_counter_does_not_know_are_counted(
    make: Callable[[], nn.Module], given: Any, shaped: Callable[[Any], Any], expected: int, device: str
) -> None:
    """Where the job says nothing else, how many leaves a step has follows from it. ``expected``: forward alone."""
    with torch.device(device):
        module = make()
    moved = [one.to(device) for one in (given if isinstance(given, tuple) else (given,))]
    batch = [shaped(one) for one in moved]
    with torch.no_grad():
        _, found = counting_flops(lambda: module(*batch))
    assert found == pytest.approx(expected, rel=0.02)
    whole = count_step(lambda: module(*batch))
    assert whole is not None
    assert isinstance(module, _Given) or 2 * found <= whole <= 3 * found


def test_attention_is_counted_backwards_too() -> None:
    x = torch.ones(2, 9, 64, requires_grad=True)
    _, forward = counting_flops(lambda: _attention(x.detach()))
    _, both = counting_flops(lambda: _attention(x).sum().backward())
    assert both == pytest.approx(3.5 * forward)  # forward is done again


@pytest.mark.parametrize("shaped", [_as_is, _packed])
def test_a_recurrence_is_counted_backwards_too(shaped: Callable[[Tensor], Any]) -> None:
    module = nn.LSTM(16, 16)
    rows = _SERIES[:, :, :16].clone().requires_grad_()

    def both() -> None:
        out = module(shaped(rows))[0]
        (out.data if isinstance(out, PackedSequence) else out).sum().backward()

    assert counting_flops(both)[1] == pytest.approx(3 * 14 * 2 * 4 * 16 * 32, rel=0.02)
    assert count_step(lambda: module(shaped(rows))) == pytest.approx(3 * 14 * 2 * 4 * 16 * 32, rel=0.02)


def test_somebodys_own_operator_with_weights_cannot_be_counted() -> None:
    """What it does with them only it knows."""
    with torch.library._scoped_library("test_flops", "FRAGMENT") as library:
        library.define("times(Tensor x, Tensor weight) -> Tensor")
        library.impl("times", lambda x, weight: x @ weight, "CompositeExplicitAutograd")
        times, weight = torch.ops.test_flops.times, nn.Parameter(torch.ones(4, 4))
        with torch.no_grad():
            assert count_step(lambda: times(torch.ones(2, 4), weight)) is None
            assert count_step(lambda: times(torch.ones(2, 4), torch.ones(4, 4)) @ weight) == 2 * 2 * 2 * 4 * 4
