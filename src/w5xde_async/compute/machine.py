"""How much memory there is: the machine's, or less where a control group has less (a container's limit). No torch."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

_UNKNOWN = 16 << 30


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may use at most. ``root``: where ``proc`` and ``sys`` are. Blocking."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        physical = _UNKNOWN
    return min((physical, *_limits(root)))


def available_memory_bytes(root: Path = Path("/")) -> int:
    """What of it nobody uses now, as far as the system says so (Linux). Blocking."""
    fields = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    value, _, unit = fields.get("MemAvailable", "").strip().partition(" ")
    most = machine_memory_bytes(root)
    return min(most, int(value) * 1024) if value.isdecimal() and unit == "kB" else most


def _limits(root: Path) -> list[int]:
    """Of the process's control group and of those above it, in either version's form."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's, where nothing is: the top is then the container's own.
        inside = PurePosixPath(group.lstrip("/"))
        for part in (inside, *inside.parents):
            text = _read(mount / part / name).strip()
            if text.isascii() and text.isdigit() and int(text):
                found.append(int(text))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
