"""How much memory a process may use: control groups of both versions, made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from w5xde_async.compute.machine import machine_memory_bytes

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
