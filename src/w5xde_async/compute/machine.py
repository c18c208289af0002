"""How much memory and how many cores there are: the machine's, or less where a control group has less (a container's
limit). No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_UNKNOWN = 16 << 30


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may use at most. ``root``: where ``proc`` and ``sys`` are. Blocking."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        physical = _UNKNOWN
    return min((physical, *_memory_limits(root)))


def usable_cores(root: Path = Path("/")) -> int:
    """Cores' worth of time that this process may use, rounded up: as many threads compute at once. Blocking.

    What the scheduler lets it run on, or less where a control group has a quota: torch looks at the former alone, and
    threads beyond the quota stand still in turn while the others wait for them at every operation.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min((cores, *_quotas(root))))


def available_memory_bytes(root: Path = Path("/")) -> int:
    """What of it nobody uses now, in the whole machine and in its control groups, as far as the system says so (Linux).
    Blocking."""
    fields = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    value, _, unit = fields.get("MemAvailable", "").strip().partition(" ")
    most = min((machine_memory_bytes(root), *(limit - used for limit, used in _memory(root))))
    return max(0, min(most, int(value) * 1024) if value.isdecimal() and unit == "kB" else most)


def _memory_limits(root: Path) -> list[int]:
    return [limit for limit, _ in _memory(root)]


def _memory(root: Path) -> list[tuple[int, int]]:
    """Of each group with a limit: that, and what it uses beside files that are kept until the memory is wanted."""
    found = []
    for group, newer in _groups(root, "memory"):
        limit = _number(_read(group / ("memory.max" if newer else "memory.limit_in_bytes")))
        if limit:
            used = _number(_read(group / ("memory.current" if newer else "memory.usage_in_bytes")))
            name = "inactive_file " if newer else "total_inactive_file "
            lines = _read(group / "memory.stat").splitlines()
            kept = sum(_number(line.removeprefix(name)) for line in lines if line.startswith(name))
            found.append((limit, max(0, used - kept)))
    return found


def _number(text: str) -> int:
    """0 of what is none."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else 0


def _quotas(root: Path) -> list[int]:
    """In cores, rounded up."""
    found = []
    for group, newer in _groups(root, "cpu"):
        if newer:
            fields = _read(group / "cpu.max").split()
        else:
            fields = [_read(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        if len(fields) == 2 and all(field.isascii() and field.isdigit() and int(field) for field in fields):
            found.append(math.ceil(int(fields[0]) / int(fields[1])))
    return found


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of the process's control group and of those above it, and whether they have the second version's
    form."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        # Inside a container the path may be the host's, where nothing is: the top is then the container's own.
        inside = PurePosixPath(group.lstrip("/"))
        for part in (inside, *inside.parents):
            yield mount / part, not controllers


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
