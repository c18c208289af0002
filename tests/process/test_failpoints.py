"""The coordinator dies of ``kill -9`` at every place that has a name, is started again, and nothing is lost.

One run for each durability, and one worker that survives all the deaths. After each death what lies on the disk is
taken up as the next start will, and must be the reference's parameters at that step; at the end the digest is the
reference's and metrics.jsonl has each step once. ``--all-failpoints`` takes all places, several times each.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import jobs, reference
from tests.support.ports import free_port
from tests.support.processes import programs
from torch import nn

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run.spec import Prepared
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.params.flat import named_digest
from w5xde_async.store.failpoints import FAILPOINTS

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(600)]

STEPS_EACH = 12  # room for one death: its step, the checkpoints that it waits for
JOURNAL_ONLY = ("journal.", "segment.", "replay.")


def places(durability: str, *, everything: bool) -> list[tuple[str, int]]:
    """The deaths, each a place and the passing that kills; their order is seeded."""
    known = [name for name in FAILPOINTS if durability == "journal" or not name.startswith(JOURNAL_ONLY)]
    known = [name for name in known if not name.startswith("shared.")]  # see test_shared_memory.py
    draw = random.Random(f"deaths {durability}")
    deaths = []
    for _ in range(3 if everything else 1):
        round_ = [(name, draw.randint(1, 3) if _per_step(name) else 1) for name in known]
        draw.shuffle(round_)
        deaths += round_
    return deaths


def _per_step(name: str) -> bool:
    return name.startswith(("apply", "publish", "journal.append", "journal.sync", "commit"))


@cache
def expected(steps: int) -> list[str]:
    """The reference's digest after each step; [0] is the start."""
    digests: list[str] = []
    job = jobs.mlp_adamw()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = job.optimizer(model)
        digests.append(named_digest(model))
        made.register_step_post_hook(lambda *_: digests.append(named_digest(model)))
        return made

    reference.train(replace(job, optimizer=optimizer), steps)
    return digests


def taken_up(run: Path, copy: Path, durability: str) -> Prepared:
    """What the next start will begin with; found out on a copy."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    found = prepare(jobs.mlp_adamw(), CoordinatorConfig(durability=durability), copy, lambda: "0" * 16)
    assert found.spec.files is not None
    found.spec.files.directory.close()
    if found.spec.files.journal is not None:
        found.spec.files.journal.close()
    return found


def told(run: Path) -> list[dict[str, Any]]:
    """The steps that metrics.jsonl has; a last line that is torn is none."""
    path = run / "metrics.jsonl"
    whole = (
        [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    )
    records = [json.loads(line) for line in whole]
    return [record for record in records if record["event"] == "step_committed"]


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
def test_it_dies_everywhere_and_nothing_is_lost(
    tmp_path: Path, durability: str, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    torch.set_num_threads(1)
    deaths = places(durability, everything=request.config.getoption("--all-failpoints"))
    steps = STEPS_EACH * len(deaths)
    digests, run, port = expected(steps), tmp_path / "run", free_port()
    command = [
        "w5xde_async.coordinator", "tests/support/jobs.py:mlp_adamw", "--run-dir", str(run), "--port", str(port),
        "--threads", "1", "--max-steps", str(steps), "--durability", durability, "--checkpoint-every", "3",
        "--keep-checkpoints", "2", "--log-format", "json", "--log", "verbose",
    ]  # fmt: skip
    with programs() as start:
        worker = start(
            "w5xde_async.worker", "--server", f"127.0.0.1:{port}", "--job", "tests/support/jobs.py:mlp_adamw",
            "--threads", "1", "--connect-timeout", "120",
        )  # fmt: skip
        fired = []
        for name, passing in deaths:
            dying = start(*command, W5XDE_FAILPOINTS=f"{name}=kill@{passing}")
            code, said = dying.finish(), "".join(dying.text)
            dying.close()
            assert code == -signal.SIGKILL, f"{name}@{passing}: exit code {code}\n{said[-3000:]}"
            assert f"failpoint {name}: kill" in said
            committed = [event["step"] for event in dying.events if event["event"] == "step_committed"]
            found = taken_up(run, tmp_path / "copy", durability)
            assert found.spec.state.digest() == digests[found.resume.step], f"{name}@{passing}"
            assert found.resume.samples == sum(_samples(found, step) for step in range(found.resume.step))
            if durability == "journal":  # what was told is never taken back
                assert found.resume.step >= max(committed, default=0), f"{name}@{passing}"
                assert found.resume.step >= max((line["step"] for line in told(run)), default=0)
            fired.append((name, passing, found.resume.step))
        last = start(*command)
        assert last.finish() == 0, "".join(last.text[-30:])
        ended = last.last("run_finished")
        assert worker.finish() == 0
    record_property("deaths", [f"{name}@{passing} at step {step}" for name, passing, step in fired])
    assert len(fired) == len(deaths)
    assert fired[-1][2] > len(deaths) / 4  # it has come a long way in between
    assert ended["digest"] == digests[steps]
    lines = told(run)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert ended["samples"] == sum(line["samples"] for line in lines)


def _samples(found: Prepared, step: int) -> int:
    return found.spec.sampler.plan(step).num_samples
