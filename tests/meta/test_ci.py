"""What continuous integration runs is green only with a browser, or where none can be installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / ".ci" / "run"

FAILS, DEBIAN, IS_ROOT, IS_NOT = "exit 1", "exit 0", "echo 0", "echo 1000"


@pytest.mark.parametrize(
    ("tools", "code", "said"),
    [
        ({"apt-get": FAILS, "id": IS_ROOT}, 1, "chromium cannot be installed"),
        ({"apt-get": DEBIAN, "id": IS_ROOT}, 0, "chromium is installed"),
        ({"apt-get": FAILS, "id": IS_NOT}, 0, "only root can install it"),
        ({"id": IS_ROOT}, 0, "no apt-get to install it"),
        ({"chromium": FAILS}, 0, ""),
    ],
)
def test_a_browser_that_cannot_be_installed(tools: dict[str, str], code: int, said: str, tmp_path: Path) -> None:
    bash, dirname = shutil.which("bash"), shutil.which("dirname")
    if bash is None or dirname is None:
        pytest.skip("no bash")
    (tmp_path / "dirname").symlink_to(dirname)
    for name, body in ({"make": 'echo "excused: ${NO_CHROMIUM:-}"'} | tools).items():
        (tmp_path / name).write_text(f"#!{bash}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    ran = subprocess.run([bash, RUN], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=10)
    assert (ran.returncode, said in ran.stderr) == (code, True), ran.stderr
    excused = {line for line in ran.stdout.splitlines() if line.startswith("excused: ")}
    assert excused == (set() if code else {f"excused: {ran.stderr.strip() if 'is not here' in ran.stderr else ''}"})
