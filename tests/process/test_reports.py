"""Failures that others reported which need processes to be shown; the others are in tests/cluster/test_reports.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support import forking, jobs, reference
from tests.support.chaos import Stage
from tests.support.ports import free_port
from tests.support.processes import ROOT, programs

from w5xde_async.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(120)]


def test_a_start_that_fails_says_what_and_what_to_do_rl_swarm_64(tmp_path: Path) -> None:
    """Not "Daemon failed to start": the address, the reason and the fix, and an exit code of its own."""
    port = free_port()
    env = {key: value for key, value in os.environ.items() if not key.startswith("W5XDE_")}
    command = [
        sys.executable, "-m", "w5xde_async.worker", "--server", f"127.0.0.1:{port}", "--job",
        "tests/support/jobs.py:mlp_sgd", "--connect-timeout", "1",
    ]  # fmt: skip
    ended = subprocess.run(
        command,
        env=env | {"PYTHONPATH": forking.SEARCHED},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == ExitCode.UNREACHABLE
    last = ended.stderr.splitlines()[-1]
    assert f"127.0.0.1:{port}" in last
    assert "Connection refused" in last
    assert "check the address" in last
    assert "Traceback" not in ended.stderr


def test_two_coordinators_pick_their_ports_at_once_pytorch_91940(tmp_path: Path) -> None:
    with programs() as start:
        both = [
            start(
                "w5xde_async.coordinator", "tests/support/jobs.py:mlp_sgd", "--port", "0", "--run-dir",
                str(tmp_path / name), "--log-format", "json", "--workers", "1", "--worker-threads", "1",
                "--threads", "1",
            )
            for name in ("a", "b")
        ]  # fmt: skip
        addresses = {program.wait_for("run_started")["address"] for program in both}
        assert len(addresses) == 2
        assert [program.finish() for program in both] == [0, 0]


def test_a_newcomer_cut_off_again_and_again_prime_diloco_156(tmp_path: Path) -> None:
    """A worker whose link is reset each time it has just joined gets in at last, and nobody waits for it."""
    torch.set_num_threads(1)
    with Stage(
        "tests/support/jobs.py:gpt_adamw", tmp_path / "run", workers=2, proxied=1, leaf_s=0.03,
        flags=("--min-workers", "2"),
    ) as stage:  # fmt: skip
        stage.until(lambda: stage.step >= 3, "3 steps")
        name, proxy = stage.workers[0].name, stage.proxies[0]
        for number in range(3):
            assert proxy.call(lambda one: one.reset()) == 1
            stage.until(lambda number=number: len(stage.kept("worker_left", name)) > number, "it is missed")
            stage.until(lambda: 0 in stage.joined, "it is back")
        record = stage.play()
        stage.finish()
        assert record.digest == reference.digest(jobs.gpt_adamw())
        assert proxy.fired["reset"] == 3
