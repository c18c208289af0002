"""Workers and coordinator killed with -9 under rules of local steps: the run goes on, and each step counts once."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from tests.support import jobs
from tests.support.processes import programs

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import OuterRule

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(180)]

STEPS = 200


@pytest.mark.parametrize("rule", ["local", "async"])
def test_killed_and_started_again(rule: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    run = tmp_path / "run"
    coordinator = (
        "w5xde_async.coordinator", "tests/support/jobs.py:mlp_sgd", "--run-dir", str(run), "--port", port,
        "--update", rule, "--codec", "int8", "--inner-steps", "5", "--max-steps", str(STEPS),
        "--checkpoint-every", "10", "--log-format", "json", "--log", "verbose",
    )  # fmt: skip
    worker = (
        "w5xde_async.worker",
        "--server",
        f"127.0.0.1:{port}",
        "--job",
        "tests/support/jobs.py:mlp_sgd",
        "--device",
        "cpu",
        "--log-format",
        "json",
    )
    with programs() as start:
        first = start(*coordinator)
        others = [start(*worker, leaf_s=0.003), start(*worker, leaf_s=0.003)]
        first.wait_for("step_committed", step=20)
        others[0].signal(signal.SIGKILL)
        others.append(start(*worker, leaf_s=0.003))
        first.wait_for("step_committed", step=60)
        first.signal(signal.SIGKILL)
        first.finish()
        second = start(*coordinator)
        assert second.finish() == 0, "".join(second.text[-6:])
        assert second.last("run_finished")["step"] == STEPS
        for one in others[1:]:
            assert one.finish() == 0
    update = UpdateConfig(rule=rule, codec="int8", inner_steps=5)
    found = prepare(jobs.mlp_sgd(), CoordinatorConfig(update=update, max_steps=STEPS), run, lambda: "0" * 16)
    assert found.spec.files is not None
    found.spec.files.directory.close()
    assert isinstance(found.strategy.rule, OuterRule)
    assert found.strategy.rule.done.state_dict() == {"floor": STEPS, "above": []}
    per_epoch = -(-len(jobs.mlp_sgd().dataset) // 200)
    whole, rest = divmod(STEPS, per_epoch)
    assert found.strategy.rule.samples == whole * len(jobs.mlp_sgd().dataset) + rest * 200
