"""How much memory and how many cores a process may use: control groups of both versions, made of files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from w5xde_async.compute.machine import available_memory_bytes, machine_memory_bytes, usable_cores
from w5xde_async.coordinator import __main__ as coordinator
from w5xde_async.openmp import keep_to
from w5xde_async.worker import __main__ as worker
from w5xde_async.worker.config import WorkerConfig

UNLIMITED = 0x7FFFFFFFFFFFF000  # as version 1 writes it


def made(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/memory.max": "67108864\n"}, 67108864),
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": "5000\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 5000),
        ("0::/gone/on/the/host\n", {"sys/fs/cgroup/memory.max": "7000\n"}, 7000),
        ("4:memory:/x\n0::/\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "6000\n"}, 6000),
        ("3:cpu,memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{UNLIMITED}\n"}, None),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, None),
        ("odd\n\n", {}, None),
    ],
)
def test_the_least_limit_counts(groups: str, files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    plain = machine_memory_bytes(tmp_path / "nothing")
    assert plain > 1 << 26
    assert machine_memory_bytes(made(tmp_path, groups, files)) == (plain if expected is None else expected)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "5000000", "memory.current": "3000000"}, 2000000),
        ("0::/\n", {"memory.max": "5000000", "memory.current": "9000", "memory.stat": "inactive_file 7000"}, 4998000),
        ("0::/\n", {"memory.max": "5000000", "memory.current": "6000000"}, 0),
        ("0::/\n", {"memory.max": "max", "memory.current": "3000000"}, 8000 << 10),
        ("0::/a\n", {"memory.max": "4000000", "memory.current": "1000000", "a/memory.max": "3500000"}, 3000000),
        (
            "4:memory:/\n",
            {
                "memory/memory.limit_in_bytes": "5000000", "memory/memory.usage_in_bytes": "3000000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            },
            2000500,
        ),
    ],
)  # fmt: skip
def test_what_a_group_has_used_is_not_available(
    groups: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    """But for files that are kept until their memory is wanted."""
    told = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    root = made(tmp_path, groups, {**told, "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"})
    assert available_memory_bytes(root) == expected


V1 = "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),  # 2.5 are more than two
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "400000 200000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/gone/on/the/host\n", {"sys/fs/cgroup/cpu.max": "700000 100000\n"}, 7),
        ("2:cpu,cpuacct:/x\n0::/\n", {f"{V1}/x/cpu.cfs_quota_us": "150000", f"{V1}/x/cpu.cfs_period_us": "50000"}, 3),
        ("2:cpu:/\n", {f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, 8),
        ("3:cpuset:/\n", {"sys/fs/cgroup/cpuset/cpu.cfs_quota_us": "1", f"{V1}/cpu.max": "1 1"}, 8),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "100000 0\n"}, 8),
        ("odd\n\n", {"sys/fs/cgroup/cpu.max": "\n"}, 8),
    ],
)
def test_the_least_quota_of_cores_counts(
    groups: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores(made(tmp_path, groups, files)) == expected


def test_torch_keeps_to_the_cores_unless_the_environment_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(3)
    keep_to(4)
    assert torch.get_num_threads() == 3
    keep_to(2)
    assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    keep_to(1)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("asked", "expected"), [(None, 2), (3, 3)])
def test_programs_keep_to_the_cores_unless_they_are_told(
    asked: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found: list[int] = []
    for program in (coordinator, worker):
        monkeypatch.setattr(program, "usable_cores", lambda: 2)
    monkeypatch.setattr(coordinator, "spare_this_thread", found.append)
    scheduled: list[str] = []
    monkeypatch.setattr(coordinator, "use_short_slices", lambda: scheduled.append("loop"))
    monkeypatch.setattr("w5xde_async.job.load_job", lambda reference: None)
    settings: Any = SimpleNamespace(threads=asked, job=None)
    torch.set_num_threads(4)
    coordinator._loaded(settings, "job.py:job")
    torch.set_num_threads(4)
    worker._work(settings, WorkerConfig(device="cpu", threads=asked), "127.0.0.1:1", None)
    # A worker sets what it is told on the thread that computes.
    assert (found, torch.get_num_threads()) == ([expected], 4 if asked else expected)
    assert scheduled == ["loop"]
