"""The examples run as they are, shortened."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.forking import SEARCHED
from tests.support.ports import free_port
from tests.support.processes import programs
from tests.support.scripts import Script

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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
        ("examples/llama.py:job", 2, "val_loss"),
        ("examples/vision.py:job", 6, "accuracy"),
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


def test_llama_learns_with_workers_that_have_no_code(tmp_path: Path) -> None:
    with programs() as start:
        coordinator = start(
            "w5xde_async.coordinator", "examples/llama.py:tiny", "--workers", "2", "--run-dir", str(tmp_path / "run"),
            "--port", "0", "--log-format", "json",
        )  # fmt: skip
        assert coordinator.finish(150) == 0, "".join(coordinator.text[-20:])
        ended = coordinator.last("run_finished")
    assert ended["step"] == 60
    assert ended["metrics"]["val_loss"] < 0.7 * math.log(256)  # of bytes that are all as likely


def test_lora_with_a_worker_that_has_no_transformers(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ("transformers", "peft", "tokenizers"):
        (absent / f"{name}.py").write_text("raise ModuleNotFoundError(__name__)\n")
    with programs() as start:
        coordinator = start(
            "w5xde_async.coordinator", str(EXAMPLES / "finetune.py:lora"), "--max-steps", "2", "--port", "0", "--name",
            "lora", "--log-format", "json", cwd=tmp_path, code_free=True,
        )  # fmt: skip
        server = coordinator.wait_for("run_started")["address"]
        searched = f"{absent}{os.pathsep}{SEARCHED}"
        worker = "w5xde_async.worker", "--server", server, "--threads", "1"
        ended = [process.finish(150) for process in (start(*worker, fresh=True, PYTHONPATH=searched), coordinator)]
        assert ended == [0, 0], "".join(coordinator.text)
    saving = ["finetune.py", "runs/lora/best.safetensors", "adapted", "--lora"]
    with Script([str(EXAMPLES / saving[0]), *saving[1:]], tmp_path, {}) as saved:
        assert saved.finish(100) == 0, "".join(saved.lines)
    found = {
        path.relative_to(tmp_path / "adapted").as_posix() for path in (tmp_path / "adapted").rglob("*.safetensors")
    }
    assert found == {"model.safetensors", "adapter/adapter_model.safetensors"}


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """``script(example, *arguments)`` runs it in ``tmp_path``."""
    with ExitStack() as stack:
        yield lambda example, *arguments, **env: stack.enter_context(
            Script([str(EXAMPLES / example), *arguments], tmp_path, env)
        )


LOGGED = r"^step \d+.* loss ([\d.]+(?:e-\d+)?)"


def fell(found: list[re.Match[str]]) -> bool:
    return float(found[-1][1]) < 0.7 * float(found[0][1])


def test_w5xdes_server_and_nodes(script: Callable[..., Script], tmp_path: Path) -> None:
    port = str(free_port())
    server = script("w5xde/server.py", "--port", port, "--epochs", "20")  # long enough for both to come
    nodes = [script("w5xde/node.py", "--server", f"localhost:{port}") for _ in range(2)]
    assert [process.finish() for process in (server, *nodes)] == [0, 0, 0], "".join(server.lines[-30:])
    assert "finished after 300 batches" in server.lines[-1]
    assert all("MB sent" in node.lines[-1] for node in nodes)
    # Nodes take turns, and each tells of some of its batches: the first and the last that any has told of.
    found = [match for node in nodes for match in node.found(r"^Batch (\d+)_batch(\d+): loss = ([\d.]+)")]
    told = sorted((int(match[1]), int(match[2]), float(match[3])) for match in found)
    assert told[-1][2] < 0.9 * told[0][2], told
    assert (tmp_path / "checkpoints" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("example", "arguments"), [("transformer.py", ("--workers", "2", "--epochs", "6")), ("custom_model.py", ())]
)
def test_guavas_examples_on_one_machine(
    example: str, arguments: tuple[str, ...], script: Callable[..., Script], tmp_path: Path
) -> None:
    ran = script(f"guava/{example}", "--port", "0", *arguments)
    assert ran.finish(100) == 0, "".join(ran.lines[-30:])
    assert "finished after" in ran.lines[-1]
    assert fell(ran.found(LOGGED))
    assert (tmp_path / "checkpoints" / "model.safetensors").exists()


def test_guavas_example_of_several_machines(script: Callable[..., Script], tmp_path: Path) -> None:
    """With PIPELINE_PARALLEL: tests/process/test_guava_in_pieces.py, tests/seeds."""
    there = {"MASTER_PORT": str(free_port()), "NUM_WORKERS": "2"}
    orchestrator = script("guava/multi_node.py", "orchestrator", **there)
    workers = [script("guava/multi_node.py", "worker", "--gpu-id", str(number), **there) for number in range(2)]
    assert [process.finish(100) for process in (orchestrator, *workers)] == [0, 0, 0], orchestrator.lines[-30:]
    assert fell(orchestrator.found(LOGGED))
    assert (tmp_path / "checkpoints" / "model.safetensors").exists()
