"""What tests/conftest.py promises of every test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ENDLESS = """
import asyncio, pytest

@pytest.mark.timeout(0.5)
async def test_that_starts_again_whatever_ends():
    async def busy():
        while True:
            await asyncio.sleep(0)

    while True:
        await asyncio.wait([asyncio.create_task(busy())])

def test_the_next():
    pass
"""


@pytest.mark.slow
def test_time_that_runs_out_in_a_task_ends_the_test(tmp_path: Path) -> None:
    """And not the task alone, nor the session."""
    test = tmp_path / "test_endless.py"
    test.write_text(ENDLESS)
    arguments = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments, test], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr


HOST_OF_GPUS = """
import os, pytest, torch
from w5xde_async.compute.engine import choose_device

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.current_device = lambda: 1
torch.cuda.init = lambda: None

import tests.conftest
tests.conftest._use_cuda = lambda: None

def test_it_takes_the_cpu():
    assert choose_device("auto").type == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""

@pytest.mark.gpu
def test_it_takes_the_gpu():
    assert choose_device("auto") == torch.device("cuda", 1)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != ""
"""


@pytest.mark.slow
def test_on_a_host_of_gpus_tests_compute_on_the_cpu_unless_they_are_for_gpus(tmp_path: Path) -> None:
    test = tmp_path / "test_devices.py"
    test.write_text(HOST_OF_GPUS)
    arguments = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments, test], cwd=ROOT, capture_output=True, text=True, timeout=50,
        env={name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
    )  # fmt: skip
    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr
