"""What one message costs does not grow with the number of members, and what a tick costs grows no faster than they do.

Counted in bytecodes, not timed: the figures are the same on every machine (``support.counting``)."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from tests.support.counting import operations
from tests.support.fleet import Fleet, fleet

from w5xde_async.updates.config import UpdateConfig

FEW, MANY = 16, 256
DONES = 8  # counted at each size


async def cost_of_done(run: Fleet) -> float:
    """Bytecodes for each of a few answers, with all that follows from them: the next leases, data, versions."""
    counts = []
    for member in [member for member in run.members if member.due()][:DONES]:
        with operations() as counted:
            member.compute()
            await run.settle()
        counts.append(counted.count)
    return median(counts)  # sums are added up anew once in as many answers as there are members


async def warmed(run: Fleet, answers: int = 1) -> None:
    """Something is known of everybody."""
    for _ in range(answers):
        run.now += 1.0
        for member in run.members:
            if member.due():
                member.compute()
        await run.settle(100 + 8 * len(run.members))  # each is judged, and all that is to be read ahead is


@pytest.mark.parametrize(
    ("rule", "many", "checks"),
    [
        ("sync", 256, {}),
        pytest.param("sync", 4096, {}, marks=[pytest.mark.slow, pytest.mark.timeout(200)]),
        ("sync", 256, {"norm_gate": 4.0, "audit_fraction": 0.01}),
        ("local", 256, {}),
        ("streaming", 256, {}),
        ("async", 256, {"update": UpdateConfig(rule="async", max_staleness=999)}),
        ("async-local", 256, {}),
        ("async-local", 256, {"update": UpdateConfig(rule="async-local", inner_steps=1)}),
    ],
)
async def test_a_result_costs_the_same_among_many_as_among_16(rule: str, many: int, checks: dict[str, Any]) -> None:
    costs = {}
    for num in (FEW, many):
        leaves = 4 * num if rule == "sync" else 2
        async with fleet(num, leaves=leaves, samples=16 * num, rule=rule, **checks) as run:
            await warmed(run)
            costs[num] = await cost_of_done(run)
    assert costs[many] < 1.5 * costs[FEW], costs


async def test_the_last_results_of_a_step_cost_the_same_too() -> None:
    """Everybody is without work then: who is idle, and which lease is late, is looked at with every answer."""
    costs = {}
    for num in (FEW, MANY):
        async with fleet(num, leaves=num, samples=num) as run:
            busy = [member for member in run.members if member.due()]
            run.now += 1.0
            for member in busy[: -DONES - 2]:
                member.compute()
            await run.settle()
            costs[num] = await cost_of_done(run)
            assert run.training.progress == 0
    assert costs[MANY] < 1.5 * costs[FEW], costs


@pytest.mark.slow
async def test_a_tick_and_a_commit_cost_no_more_for_each_member() -> None:
    ticks, commits = {}, {}
    for num in (FEW, MANY):
        async with fleet(num, leaves=num) as run:
            await run.step()
            with operations() as counted:
                run.training.tick(run.now)
            ticks[num] = counted.count / num
            with operations() as counted:
                await run.step()
            commits[num] = counted.count / num
    assert ticks[MANY] < ticks[FEW], ticks
    assert commits[MANY] < commits[FEW], commits


async def test_a_member_more_costs_the_same() -> None:
    costs = {}
    for num in (FEW, MANY):
        async with fleet(num, leaves=2 * num, max_workers=num + 4) as run:
            with operations() as counted:
                late = run.join()
                run.leave(late)
                run.join()
            costs[num] = counted.count
    assert costs[MANY] < 1.5 * costs[FEW], costs
