"""The examples run as they are, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.processes import programs

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(180)]


def test_the_demo_gives_the_same_bits_with_one_and_two_workers(tmp_path: Path) -> None:
    digests = set()
    for workers in ("1", "2"):
        with programs() as start:
            coordinator = start(
                "w5xde_async.coordinator", "examples/digits.py:job", "--workers", workers, "--worker-threads", "1",
                "--epochs", "4", "--run-dir", str(tmp_path / "run"), "--resume", "never", "--port", "0", "--log-format",
                "json",
            )  # fmt: skip
            assert coordinator.finish(150) == 0, "".join(coordinator.text[-20:])
            digests.add(coordinator.last("run_finished")["digest"])
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("example", "steps", "metric"),
    [
        ("examples/digits.py:job", 10, "accuracy"),
        ("examples/digits.py:cnn", 6, "accuracy"),
        ("examples/bytes_lm.py:tiny", 6, "val_loss"),
        ("examples/bytes_lm.py:bf16", 1, "val_loss"),
    ],
)
def test_an_example_trains_and_leaves_its_results(example: str, steps: int, metric: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with programs() as start:
        coordinator = start(
            "w5xde_async.coordinator", example, "--max-steps", str(steps), "--run-dir", str(run), "--port", "0",
            "--log-format", "json",
        )  # fmt: skip
        server = coordinator.wait_for("run_started")["address"]
        start("w5xde_async.worker", "--server", server, "--job", example)
        assert coordinator.finish(150) == 0, "".join(coordinator.text[-20:])
        ended = coordinator.last("run_finished")
    assert ended["outcome"] == "finished"
    assert ended["step"] == steps
    assert metric in ended["metrics"]
    for name in ("model.safetensors", "metrics.jsonl", "loss.png", "config.toml", "checkpoints"):
        assert (run / name).exists(), name
