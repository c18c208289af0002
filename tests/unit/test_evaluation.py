"""What ``evaluate`` draws is seeded, and nobody else draws meanwhile, whenever it begins to draw."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support import jobs
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability.evaluation import Evaluator
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.job import Job, build_model
from w5xde_async.params.flat import state_of
from w5xde_async.params.layout import Layout
from w5xde_async.randomness import _TURN, Claim


def draw() -> float:
    return float(torch.rand(())) + random.random() + float(np.random.rand())


@pytest.mark.parametrize("quiet", [0, 1, 5])
def test_an_evaluation_draws_the_same_whenever_it_begins_to(quiet: int) -> None:
    """``quiet``: evaluations before that draw nothing."""
    calls, drawn = 0, list[float]()

    def evaluate(model: nn.Module) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls > quiet:
            drawn.append(draw())
        return {"calls": calls}

    made = replace(jobs.mlp_sgd(), evaluate=evaluate)
    model = build_model(made)
    layout = Layout.of(model)
    snapshot = {
        entry.name: tensor.clone() for entry, tensor in zip(layout.entries, state_of(model, layout), strict=True)
    }
    evaluator = Evaluator(made, model, layout)
    before = torch.get_rng_state()
    for _ in range(quiet + 3):
        draw()  # somebody else's, between two of them
        evaluator.measure(snapshot)
    assert len(set(drawn)) == 1
    torch.set_rng_state(before)
    draw()
    evaluator.measure(snapshot)
    assert drawn[-1] == drawn[0]


def test_nobody_else_draws_while_an_evaluation_runs_that_has_never_drawn() -> None:
    free: list[bool] = []

    def ask() -> None:
        with Claim() as mine:
            free.append(mine)

    def evaluate(model: nn.Module) -> dict[str, float]:
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        return {"x": 1.0}

    made = replace(jobs.mlp_sgd(), evaluate=evaluate)
    model = build_model(made)
    layout = Layout.of(model)
    snapshot = dict(zip((entry.name for entry in layout.entries), state_of(model, layout), strict=True))
    evaluator = Evaluator(made, build_model(made), layout)
    for _ in range(3):
        evaluator.measure(snapshot)
    assert free == [False, False, False]


@pytest.mark.parametrize("draws", [False, True])
def test_reads_and_updates_that_draw_are_not_kept_waiting_by_one_that_has_never_drawn(draws: bool) -> None:
    free: list[bool] = []
    claimed: list[bool] = []

    def ask() -> None:
        free.append(_TURN.acquire(blocking=False))
        if free[-1]:
            _TURN.release()
        with Claim() as mine:  # who computes leaves here goes on elsewhere all the same
            claimed.append(mine)

    def evaluate(model: nn.Module) -> dict[str, float]:
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        return {"x": draw() if draws else 1.0}

    made = replace(jobs.mlp_sgd(), evaluate=evaluate)
    model = build_model(made)
    layout = Layout.of(model)
    snapshot = dict(zip((entry.name for entry in layout.entries), state_of(model, layout), strict=True))
    evaluator = Evaluator(made, build_model(made), layout)
    evaluator.beside(lambda: True)
    for _ in range(3):
        evaluator.measure(snapshot)
    assert free == [False, not draws, not draws]  # the first time shows whether it draws
    assert claimed == [False, False, False]
    with Claim() as mine:
        assert mine


def test_a_made_model_whose_hook_holds_it_is_evaluated_with_the_snapshot_alone() -> None:
    """A deep copy's hook would go on computing with the model that is trained."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.ones(1)), nn.Linear(2, 1)
            self.linear.register_forward_hook(lambda module, inputs, output: output * self.scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.linear(x)
            return made

    x = torch.ones(1, 2)
    made = Job(
        model=Net, dataset=TensorDataset(torch.ones(4, 2), torch.ones(4, 1)), loss=nn.functional.mse_loss, max_steps=1,
        batch_size=4, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        evaluate=lambda model: {"output": model(x).item()},
    )  # fmt: skip
    spec = prepare(made, CoordinatorConfig(), None, lambda: "0" * 16).spec
    layout, model = spec.layout, spec.model
    assert spec.evaluator is not None
    expected = model(x).item()
    snapshot = {entry.name: held.clone() for entry, held in zip(layout.entries, state_of(model, layout), strict=True)}
    with torch.no_grad():
        model.scale.mul_(3)  # type: ignore[operator]
    assert spec.evaluator.measure(snapshot) == {"output": expected}
