"""Fused steps without torch's own ``step``, beside that (and tests/unit/test_flat_step.py, by its database)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.test_flat_step import Beside
from torch import nn

from w5xde_async.updates.fused_step import FusedStep


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer of the rule is asked for no step any more."""
    step = torch.optim.AdamW.step

    def theirs_alone(self: torch.optim.AdamW, closure: Any = None) -> Any:
        assert not self.ours  # type: ignore[attr-defined]
        return step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", theirs_alone)


def test_after_its_first_step_the_optimizer_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(fused, 2)
    beside.step()
    beside.ours.ours, beside.theirs.ours = True, False  # type: ignore[attr-defined]
    refuse(monkeypatch)
    for step in range(4):
        beside.step(rate_factor=2.0 if step == 1 else 1.0)
        beside.check()
    assert type(beside.rule._flat) is FusedStep
    with pytest.raises(AssertionError):
        beside.step(frozenset({3}))  # others have a gradient now


@pytest.mark.parametrize("clip", [None, 0.5])
def test_what_a_schedule_changes_is_read_in_every_step(clip: float | None) -> None:
    beside = Beside(fused, clip=clip)
    for step in range(8):
        for made in (beside.ours, beside.theirs):
            made.param_groups[0].update(lr=0.1 / (1 + step), weight_decay=0.01 * step, betas=(0.8 + step / 50, 0.99))
        beside.step()
        beside.check()
    assert beside.is_flat


def test_gradients_that_come_and_go() -> None:
    beside = Beside(fused, 2)
    for untouched in (set(), {3}, {3}, {3, 8}, set(), {8}, {8}, set(), set()):
        beside.step(frozenset(untouched))
        beside.check()
    assert beside.is_flat


def test_the_state_of_a_resume_is_the_one_that_is_stepped() -> None:
    beside = Beside(fused)
    for _ in range(3):
        beside.step()
        beside.step()
        assert beside.is_flat
        beside.resume()
        beside.check()
