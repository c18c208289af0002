"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import w5xde_async

PUBLIC = [
    "Bus", "Coordinator", "CoordinatorConfig", "Job", "LocalCluster", "RunResult", "ShardedStream", "UpdateConfig",
    "W5xdeError", "Worker", "WorkerConfig", "__version__",
]  # fmt: skip
ROOT = Path(w5xde_async.__file__).parent


def test_the_public_names_are_frozen() -> None:
    assert w5xde_async.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(w5xde_async, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        w5xde_async.Nothing  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, w5xde_async; assert w5xde_async.__version__; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_no_parts_of_torch_are_imported_that_take_seconds() -> None:
    slow = "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy"
    code = (
        "import importlib, sys, torch\n"
        "for module in 'coordinator.service', 'worker.service', 'facade.w5xde', 'facade.guava':\n"
        "    before = {*sys.modules}\n"
        "    importlib.import_module(f'w5xde_async.{module}')\n"
        f"    print(module, *({{*sys.modules}} - before) & {{*{slow}}})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=50)
    assert done.stdout.splitlines() == ["coordinator.service", "worker.service", "facade.w5xde", "facade.guava"]


def test_every_error_is_of_one_tree() -> None:
    from w5xde_async import errors

    ours = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    wrong = [kind for kind in ours if issubclass(kind, Exception) and not issubclass(kind, errors.W5xdeError)]
    assert len(ours) > 10
    assert not wrong
