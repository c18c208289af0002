"""Rounds of more workers than one would think: every result counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.job import Job
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import Contribution, OuterRule, make_rule
from w5xde_async.updates.sync import SyncRule


def rule_of(**update: str) -> OuterRule:
    data = TensorDataset(torch.zeros(8, 4), torch.zeros(8))
    job = Job(
        model=lambda: nn.Linear(4, 3), dataset=data, loss=nn.functional.mse_loss, max_steps=1, batch_size=8,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    )  # fmt: skip
    model = nn.Linear(4, 3)
    layout = Layout.of(model, bucket_bytes=64 << 10)
    state = FlatState(layout)
    state.copy_from(model)
    state.adopt(model)
    sync = SyncRule.of(job, model, layout, state)
    return make_rule(UpdateConfig(**update), sync, state, min_workers=1, gate=None)  # type: ignore[arg-type]


def contribution(rule: OuterRule, step: int) -> Contribution:
    vector = ResultVector(rule.layout)
    vector.reset()
    vector.group(rule.group).fill_(1.0)
    present = [True] * len(rule.layout.result_buckets)
    return Contribution(
        steps=(step,), counted=8, samples=8, version=rule.version, fragment=0, vector=vector, present=present,
        untouched=frozenset(),
    )  # fmt: skip


@pytest.mark.parametrize("update", [{"rule": "local"}, {"rule": "streaming"}, {"rule": "local", "average": "radial"}])
def test_a_round_has_room_for_every_worker(update: dict[str, str]) -> None:
    rule = rule_of(**update)
    for step in range(200):
        assert rule.offer(contribution(rule, step)).accepted
        assert not rule.due
    assert rule.pending(0) == len(rule.done) == 200


def test_an_average_that_keeps_its_results_closes_the_round_when_it_is_full() -> None:
    rule = rule_of(rule="local", average="median")
    for step in range(200):
        assert rule.offer(contribution(rule, step)).accepted
        if rule.due:
            assert rule.pending(0) == 64
            rule.commit(0)
    assert rule.version == 3


def test_a_state_of_another_rule_is_refused() -> None:
    for mine, other in (("local", "streaming"), ("async", "local"), ("async-local", "async")):
        with pytest.raises(ValueError, match=f"the checkpoint has the rule '{other}', not '{mine}'"):
            rule_of(rule=mine).load_state_dict(rule_of(rule=other).state_dict())
