"""The scripts for the first half hour on a GPU run to their end on the CPU: nobody wants to mend them there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]


def figures(tmp_path: Path, script: str, *flags: str) -> dict[str, float]:
    out = tmp_path / "figures.json"
    command = [sys.executable, f"bench/{script}", "--device", "cpu", "--quick", "--json", str(out), *flags]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, float] = json.loads(out.read_text())["figures"]
    return found


def test_stress(tmp_path: Path) -> None:
    found = figures(tmp_path, "gpu_stress.py")
    assert found["differences"] == 0
    assert found["blocks"] == 70


def test_engine(tmp_path: Path) -> None:
    found = figures(tmp_path, "gpu_engine.py", "--tiny", "--leaves", "1", "8")
    assert found["over_plain_1"] > 0.1
    assert found["over_plain_8"] > 0.1
    assert {"load_ms", "tail_ms_8", "tokens_per_s_8"} <= found.keys()


def test_edge(tmp_path: Path) -> None:
    found = figures(tmp_path, "gpu_edge.py")
    assert found["over_cpu"] == found["over_cpu_dropout"] == 0.0
    assert found["blamed"] == 1


def test_worker_beside_its_coordinator(tmp_path: Path) -> None:
    assert figures(tmp_path, "gpu.py", "--tiny")["gpu_over_plain"] > 0.1
