"""Operators that programs may name, called as torch's own database does and then changed: refused or equal, no crash.

Here a bounded part: overloads whose kernels are known to trust their arguments. ``python -m tests.fuzz.operators`` does
all of them, as long as it is told to (``--cases``); what does not apply, and why, stands there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_calls_made_by_hand_and_changed_are_refused_or_equal(precision: str) -> None:
    places = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.operators", "--by-hand", "--cases", "6",
               "--precision", precision,
               "--only", "bicubic2d,lstm.input,gru.input,remainder.Scalar,median,scaled_dot,index.Tensor"]  # fmt: skip
    made = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    assert not re.findall(r"^(?:SIG|DIFFERENT).*", made.stdout, re.MULTILINE)
    assert " 0 deaths" in made.stdout
