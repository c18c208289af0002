"""The same bits (G3) whatever is killed: real processes, faults at seeded steps, the digest of an undisturbed run.

These are the short forms; ``make chaos`` plays long ones. Every test says which faults really fired.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from tests.support import jobs, reference
from tests.support.chaos import Stage, at_steps, show

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(200)]

#: A stopped worker is silent for longer than this.
SILENCE = ("--heartbeat", "500ms", "--silence", "2s")
STOPPED_S = 3.5


@cache
def expected(name: str) -> str:
    torch.set_num_threads(1)
    return reference.digest(jobs.ALL[name]())


def job(name: str) -> str:
    return f"tests/support/jobs.py:{name}"


def test_five_workers_killed_and_replaced_and_two_stopped(tmp_path: Path) -> None:
    """At least half of the workers a minute are killed; two are stopped until they count as gone, and come back."""
    faults = at_steps(1, {"kill": 3, "stop": 2}, 2, 22, seconds=STOPPED_S)
    flags = ("--min-workers", "5", *SILENCE)
    with Stage(job("cnn_adamw"), tmp_path / "run", workers=5, leaf_s=0.1, seed=1, flags=flags) as stage:
        record = stage.play(faults)
        assert record.digest == expected("cnn_adamw")
        stage.finish()
    assert record.fired == {"kill": 3, "stop": 2}
    assert 3 / 5 * 60 / record.span_s >= 0.5
    show(f"3 of 5 workers killed in {record.span_s:.1f} s, longest gap {record.longest_gap_s:.2f} s")
    left = [event for event in record.kept if event["event"] == "worker_left" and not event["clean"]]
    assert len([event for event in left if "silent" in event["reason"]]) == 2, left
    assert len([event for event in left if event["leases_returned"]]) >= 3
    assert [commit.step for commit in record.commits] == list(range(1, 33))


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
def test_coordinator_killed_three_times(durability: str, tmp_path: Path) -> None:
    name = {"checkpoint": "cnn_sgd", "journal": "gpt_adamw"}[durability]
    flags = ["--checkpoint-every", "4", "--min-workers", "2", "--durability", durability]
    faults = at_steps(2, {"crash": 3}, 2, 28)
    with Stage(job(name), tmp_path / "run", workers=2, leaf_s=0.02, seed=2, flags=flags) as stage:
        record = stage.play(faults)
        assert record.digest == expected(name)
        first = dict(stage.workers)
        stage.finish()
        assert [place for place, worker in stage.workers.items() if worker is not first[place]] == []
    assert record.fired == {"crash": 3}
    show(f"{durability}: crashed at {[step for _, step in record.crashed_at]}, {record.steps_recomputed} steps again")
    assert [start["term"] for start in record.starts] == [1, 2, 3, 4]
    resumed = [start["resumed_step"] for start in record.starts[1:]]
    for (_, seen), step in zip(record.crashed_at, resumed, strict=True):
        assert step >= seen if durability == "journal" else step >= seen - 4 - 1, (record.crashed_at, resumed)
    assert record.surviving_steps == list(range(1, 33))
