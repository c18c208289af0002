"""Rounds of more workers than one would think: every result counts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.job import Job
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import Contribution, OuterRule, make_rule
from w5xde_async.updates.sync import SchedulerFailed, SyncRule


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def rule_of(
    scheduler: Any = None, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = plain_sgd,
    made: Callable[[], nn.Module] = linear, **update: Any,
) -> OuterRule:  # fmt: skip
    data = TensorDataset(torch.zeros(8, 4), torch.zeros(8))
    job = Job(
        model=made, dataset=data, loss=nn.functional.mse_loss, max_steps=1, batch_size=8,
        optimizer=optimizer, scheduler=scheduler,
    )  # fmt: skip
    model = made()
    layout = Layout.of(model, bucket_bytes=64 << 10)
    state = FlatState(layout)
    state.copy_from(model)
    state.adopt(model)
    sync = SyncRule.of(job, model, layout, state)
    return make_rule(UpdateConfig(**update), sync, state, min_workers=1, gate=None)


def contribution(rule: OuterRule, step: int, untouched: Collection[int] = ()) -> Contribution:
    vector = ResultVector(rule.layout)
    vector.reset()
    vector.group(rule.group).fill_(1.0)
    present = [True] * len(rule.layout.result_buckets)
    return Contribution(
        steps=(step,), counted=8, samples=8, version=rule.version, fragment=0, vector=vector, present=present,
        untouched=frozenset(untouched),
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


@pytest.mark.parametrize("rule", ["async", "local"])
@pytest.mark.parametrize("average", ["mean", "median"])
@pytest.mark.parametrize("results", [3, 6, 12])
def test_a_round_that_a_kill_has_left_open_may_be_of_fewer_results_now(rule: str, average: str, results: int) -> None:
    before = rule_of(rule=rule, average=average, results_per_step=8)
    for step in range(6):
        assert before.offer(contribution(before, step)).accepted
    after = rule_of(rule=rule, average=average, results_per_step=results)
    after.load_state_dict(before.state_dict())
    assert after.pending(0) == 6
    if rule == "async" or average == "median":
        assert after.due == (results <= 6)
    after.commit(0)
    for step in range(6, 6 + results):
        assert not after.due
        assert after.offer(contribution(after, step)).accepted
    assert after.due or (rule == "local" and average == "mean")


def test_a_state_of_another_rule_is_refused() -> None:
    for mine, other in (("local", "streaming"), ("async", "local"), ("async-local", "async")):
        with pytest.raises(ValueError, match=f"the checkpoint has the rule '{other}', not '{mine}'"):
            rule_of(rule=mine).load_state_dict(rule_of(rule=other).state_dict())


@pytest.mark.parametrize("stops", [(), (1,), (1, 2, 6, 7, 11), tuple(range(0, 24, 3))])
def test_a_schedule_counts_results_however_often_a_run_has_stopped(stops: tuple[int, ...]) -> None:
    """A stop makes a version of what is in the buffer: more of them than a schedule for the whole run has steps."""

    def made(results_per_step: int = 4) -> OuterRule:
        return rule_of(
            lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=7),
            rule="async", results_per_step=results_per_step,
        )  # fmt: skip

    def steps_of(rule: OuterRule) -> int:
        return int(rule.scheduler.state_dict()["last_epoch"])

    rule, versions = made(), 0
    for step in range(24):
        assert rule.offer(contribution(rule, step)).accepted
        if rule.due or step in stops or step == 23:
            rule.commit(0)
            versions += 1
            assert steps_of(rule) == (step + 1) // 4
        if step in stops:
            state, rule = rule.state_dict(), made()
            rule.load_state_dict(state)
    assert steps_of(rule) == 6
    assert versions >= 6 + bool(stops)
    again = made(results_per_step=1)  # it goes on with other versions: as many steps as it makes
    again.load_state_dict(rule.state_dict())
    assert again.offer(contribution(again, 24)).accepted
    again.commit(0)
    assert steps_of(again) == 7


def test_steps_of_which_no_result_counts_do_not_step_the_schedule() -> None:
    """A stop after them makes a version of what is in the buffer, and has the scheduler go no faster."""

    def made() -> OuterRule:
        return rule_of(
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), rule="async", results_per_step=4
        )

    rule, results = made(), 0
    for step in range(24):
        if step % 3 == 2:
            rule.skip([step], 8)
            continue
        assert rule.offer(contribution(rule, step)).accepted
        results += 1
        if rule.due or step % 3 == 1:
            rule.commit(0)
            assert rule.scheduler.state_dict()["last_epoch"] == results // 4
            state, rule = rule.state_dict(), made()
            rule.load_state_dict(state)
    assert results == 16


def test_results_stay_when_the_step_of_them_is_refused() -> None:
    """A hook of the optimizer's has frozen a parameter: once that is mended, the result counts."""
    models: list[nn.Module] = []

    def freezing(model: nn.Module) -> torch.optim.Optimizer:
        models.append(model)
        made = plain_sgd(model)

        def freeze(*_: Any) -> None:
            model.get_parameter("bias").requires_grad_(False)

        made.register_step_post_hook(freeze)
        return made

    rule = rule_of(optimizer=freezing, rule="async")
    assert rule.offer(contribution(rule, 0)).accepted
    rule.commit(0)
    before = rule.parameters.clone()
    assert rule.offer(contribution(rule, 1)).accepted
    with pytest.raises(SchedulerFailed):
        rule.commit(0)
    assert torch.equal(rule.parameters, before)
    assert rule.pending(0) == 1
    models[0].get_parameter("bias").requires_grad_(True)
    rule.commit(0)
    assert rule.pending(0) == 0
    assert not torch.equal(rule.parameters, before)


class Tracked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("copied", torch.zeros(4))


def test_a_hook_of_the_optimizer_sees_the_merged_buffers_and_what_it_writes_stays() -> None:
    def clamping(model: nn.Module) -> torch.optim.Optimizer:
        made = plain_sgd(model)

        @torch.no_grad()
        def clamp(*_: Any) -> None:
            model.get_buffer("mean").clamp_(max=1.5)
            model.get_buffer("copied").copy_(model.get_buffer("mean"))

        made.register_step_post_hook(clamp)
        return made

    def offer(step: int, change: float, version: int) -> None:
        given = replace(contribution(rule, step), version=version)
        for index, entry in enumerate(rule.layout.entries):
            if entry.name == "mean":
                given.vector.entry(index).fill_(8 * change)
        assert rule.offer(given).accepted
        applied = rule.commit(0)
        assert applied is not None
        assert set(applied.changed) == {bucket.index for bucket in rule.layout.buckets}

    rule = rule_of(optimizer=clamping, made=Tracked, rule="async")
    (mean, copied) = [
        view for view, entry in zip(rule.state.views, rule.layout.entries, strict=True) if entry.role != "grad"
    ]
    for step, value in enumerate((1.0, 1.5, 1.5)):
        offer(step, 1.0, step)
        assert mean.eq(value).all()
        assert torch.equal(mean, copied)
    offer(3, -0.5, 2)  # it began with what the hook had written, and counts for less
    torch.testing.assert_close(mean, torch.full((4,), 1.5 - 0.5 * 2**-0.5))
    assert torch.equal(mean, copied)


def test_what_a_hook_alone_has_changed_is_known_to_later_results() -> None:
    def counting(model: nn.Module) -> torch.optim.Optimizer:
        made = plain_sgd(model)
        made.register_step_post_hook(lambda *_: model.get_buffer("mean").add_(1.0))
        return made

    rule = rule_of(optimizer=counting, made=Tracked, rule="async")
    (index,) = [index for index, entry in enumerate(rule.layout.entries) if entry.name == "mean"]
    for step in range(3):
        given = contribution(rule, step)
        present = [bucket.group == rule.group for bucket in rule.layout.result_buckets]
        assert rule.offer(replace(given, present=present)).accepted
        rule.commit(0)
    late = replace(contribution(rule, 3), version=2)
    late.vector.entry(index).fill_(8 * 0.25)
    assert rule.offer(late).accepted
    rule.commit(0)
    torch.testing.assert_close(rule.state.views[index], torch.full((4,), 3.0 + 2**-0.5 * (2.25 - 3.0) + 1.0))


def test_what_got_no_gradient_is_not_stepped_after_a_restart_either() -> None:
    def decaying(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    rule = rule_of(optimizer=decaying, rule="async", results_per_step=2)
    (bias,) = [index for index, entry in enumerate(rule.layout.entries) if entry.name == "bias"]
    assert rule.offer(contribution(rule, 0, {bias})).accepted
    again = rule_of(optimizer=decaying, rule="async", results_per_step=2)
    again.load_state_dict(rule.state_dict())
    before = again.parameters.clone()
    again.commit(0)
    entry = again.layout.entries[bias]
    where = slice(entry.offset, entry.offset + entry.numel)
    assert torch.equal(again.parameters[where], before[where])
    assert not torch.equal(again.parameters, before)
