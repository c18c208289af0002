"""What Python lacks on Windows and on macOS is taken away: docs/platforms.md says what that shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from tests.support import jobs, reference
from tests.support.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def digest() -> str:
    torch.set_num_threads(1)
    return reference.digest(jobs.mlp_sgd())


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_a_run_where_python_lacks_what_it_lacks_there(platform: str, digest: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("W5XDE_")}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.elsewhere", platform], capture_output=True, text=True, timeout=140,
        check=False, cwd=ROOT, env=environment | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert "Traceback" not in ended.stderr, ended.stderr[-6000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["modules"] > 200
    assert found["digest_32"] == digest != found["digest_10"]
    assert found["departures"] == ["FINISHED", "FINISHED"]
    assert found["code"] == 0
    if platform == "win32":
        assert found["island"].startswith("2 ")
        assert "Windows" in found["island"]
        assert found["island"].count("\n") == 1
        assert "FILE.py:NAME" in found["processes"]
