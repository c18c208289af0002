"""The wheel and the source distribution: built from this checkout, and what is in them works by itself."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import w5xde_async

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=50)
    return folder


def test_the_wheel_runs_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, timeout=50)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = tmp_path / "env" / "bin" / "python"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
    ]
    subprocess.run(command, check=True, timeout=50)
    told = subprocess.run(
        [tmp_path / "env" / "bin" / "w5xde", "--version"], cwd=tmp_path, check=True, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin"}, timeout=50,
    )  # fmt: skip
    assert w5xde_async.__version__ in told.stdout
    where = "import w5xde_async; print(w5xde_async.__file__)"
    found = subprocess.run(
        [python, "-c", where], cwd=tmp_path, check=True, capture_output=True, text=True, env={}, timeout=50
    )
    assert str(site) in found.stdout


def test_what_is_in_them(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("uPlot.LICENSE.txt") and "licenses" in name for name in names)
    templates = {name for name in names if "/launch/templates/" in name}
    assert {"kubernetes.yaml", "slurm.sh", "ray.template"} == {name.rpartition("/")[2] for name in templates}
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"w5xde_async"}
    with tarfile.open(source) as archive:
        names = archive.getnames()
    assert not [name for name in names if "/corpus/" in name or "/results/" in name]
    assert any(name.endswith("/tests/conftest.py") for name in names)
