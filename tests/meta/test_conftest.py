"""What tests/conftest.py promises of every test."""

from __future__ import annotations

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
