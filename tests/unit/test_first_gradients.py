"""The first gradient of a sum is copied, those that follow are added: to the bit what adding all of them gives.

The engine's own tests hold for both ways (``tests/unit/test_engine.py``); here are gradients and hooks of odd kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.test_engine import LEAF, Run, job, leaves, task
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from w5xde_async.compute import first_gradients
from w5xde_async.compute.engine import LeafError
from w5xde_async.job import Job


class Odd(nn.Module):
    """Layers by kind of gradient. ``hooked``: what is done to the first parameter when the model is made."""

    def __init__(self, kind: str, hooked: Callable[[nn.Parameter], object] = lambda parameter: None) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.table = nn.EmbeddingBag(5, 6, sparse=kind in ("sparse", "sparse at times"), mode="sum")
        self.loose = nn.Parameter(torch.linspace(-1, 1, 12).reshape(4, 3).t())
        self.whole = nn.Parameter(torch.linspace(-1, 1, 7))
        self.rare = nn.Parameter(torch.ones(9))
        hooked(self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "in parts":
            h = checkpoint(lambda y: self.first(y) * 0.5, x.requires_grad_(), use_reentrant=True) + h
        if self.kind in ("sparse", "dense") or (self.kind == "sparse at times" and float(x[0, 0]) > 0):
            h = h + self.table((x[:, :3].abs() * 10).long() % 5)
        elif self.kind == "sparse at times":
            h = h + self.table.weight.sum(0)
        out: Tensor = self.last(h.relu())
        if self.kind == "transposed":
            out = out + x[:, :4] @ self.loose.t()
        if self.kind == "expanded":  # its gradient is one value, seen seven times
            out = out + self.whole.sum()
        if self.kind == "rare" and float(x[0, 1]) > 0:
            out = out * self.rare.prod()
        return out


def sums(made: Job, copied: bool, monkeypatch: pytest.MonkeyPatch, *, bucket_bytes: int) -> list[Any]:
    """Of blocks of several sizes: all that has left, to the bit; and whether gradients were seen to come in parts."""
    monkeypatch.setattr(first_gradients, "_LARGE", 0 if copied else 1 << 40)
    run, found = Run(made, bucket_bytes=bucket_bytes), []
    for number, count in enumerate((1, 3, 2, 5)):
        samples = (LEAF,) * count
        outcome = run.compute(task(leaves(samples, seed=number), samples, start=8 * number))
        found.append((
            outcome.losses, outcome.untouched, outcome.absent,
            {bucket: piece.numpy().tobytes() for bucket, piece in sorted(run.copies.items())},
        ))  # fmt: skip
    return [found, run.engine._in_parts]


@pytest.mark.parametrize("bucket_bytes", [64, 4 << 20])
@pytest.mark.parametrize("parts", ["leaves", "accumulated"])
@pytest.mark.parametrize(
    "kind", ["plain", "sparse", "dense", "sparse at times", "transposed", "expanded", "rare", "in parts"]
)
def test_what_lands_is_the_same_to_the_bit(
    kind: str, parts: str, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(model=lambda: Odd(kind))
    if parts == "accumulated":
        made = replace(made, microbatch_size=LEAF // 2, accumulate_grad_batches=2)
    added, copied = (sums(made, way, monkeypatch, bucket_bytes=bucket_bytes) for way in (False, True))
    assert copied == added


def scales(parameter: nn.Parameter) -> None:
    def hook(landed: Tensor) -> None:
        assert landed.grad is not None
        landed.grad.mul_(0.5)

    parameter.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("bucket_bytes", [64, 4 << 20])
@pytest.mark.parametrize(
    "hooked", [scales, lambda parameter: parameter.register_hook(lambda gradient: gradient * 0.5)],
    ids=["of what has landed", "of what comes"],
)  # fmt: skip
def test_hooks_of_the_models_own_see_what_they_saw(
    hooked: Callable[[nn.Parameter], object], bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(model=lambda: Odd("plain", hooked))
    added, copied = (sums(made, way, monkeypatch, bucket_bytes=bucket_bytes) for way in (False, True))
    assert copied == added


@pytest.mark.parametrize("large", [0, 1 << 40])
def test_a_hook_that_puts_another_gradient_there_is_told_so_in_a_block_of_one_leaf_too(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaces(parameter: nn.Parameter) -> None:
        def hook(landed: Tensor) -> None:
            assert landed.grad is not None
            landed.grad = landed.grad * 0.5

        parameter.register_post_accumulate_grad_hook(hook)

    monkeypatch.setattr(first_gradients, "_LARGE", large)
    run = Run(job(model=lambda: Odd("plain", replaces)))
    with pytest.raises(LeafError, match="changed the model's gradients"):
        run.compute(task(leaves((LEAF,)), (LEAF,)))


def test_after_a_pass_that_was_broken_off_the_next_block_is_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two gradients: some have landed, some parameters have none."""
    monkeypatch.setattr(first_gradients, "_LARGE", 0)
    broken = [False]

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            if broken[0]:
                raise KeyboardInterrupt
            return gradient

    class Breaking(Odd):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(Breaks.apply(self.first(x)))
            return out

    run, samples = Run(job(model=lambda: Breaking("plain"))), (LEAF, LEAF)
    blocks = [task(leaves(samples, seed=seed), samples) for seed in (1, 2)]
    expected = []
    for block in blocks:
        run.compute(block)
        expected.append(run.copies)
    broken[0] = True
    with pytest.raises((KeyboardInterrupt, LeafError)):
        run.compute(blocks[0])
    broken[0] = False
    for block, told in zip(blocks, expected, strict=True):
        run.compute(block)
        assert run.copies.keys() == told.keys()
        assert all(torch.equal(run.copies[bucket], told[bucket]) for bucket in told)


def test_small_parameters_have_no_hook_and_large_ones_one() -> None:
    """Whose calls take longer than adding to what is in the cache."""
    large = first_gradients._LARGE // 8 + 1
    run = Run(job(model=lambda: nn.Sequential(nn.Linear(8, large), nn.Linear(large, 3))), bucket_bytes=64 << 20)
    hooks = {name: len(one._post_accumulate_grad_hooks or ()) for name, one in run.engine.model.named_parameters()}  # type: ignore[attr-defined]
    assert hooks == {"0.weight": 1, "0.bias": 0, "1.weight": 0, "1.bias": 0}
    run.engine.close()
    assert not run.engine.model[0].weight._post_accumulate_grad_hooks  # type: ignore[index, union-attr]
