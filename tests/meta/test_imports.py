"""Imports point one way (docs/architecture.md): a room knows only the rooms below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "w5xde_async"

#: Higher numbers may import lower ones. ``__main__`` stands above everything, wherever it lies. Of a room with rooms
#: inside, the plain name stands for the files beside those.
LEVELS = {
    "predict": 24,
    "tune": 24,
    "launch": 24,
    "status": 24,
    "memory": 24,
    "process": 23,
    "settings": 22,
    "facade": 21,
    "cluster": 20,
    "coordinator.service": 19,
    "coordinator.run": 18,
    "coordinator.sync": 17,
    "coordinator.outer": 17,
    "coordinator": 16,
    "coordinator.parameters": 15,
    "coordinator.durability": 15,
    "coordinator.monitoring": 15,
    "doctor": 16,
    "worker": 15,
    "coordinator.training": 14,
    "coordinator.verification_config": 10,
    "parallel": 14,
    "hub.members": 13,
    "hub.work": 12,
    "hub": 11,
    "data": 11,
    "runtime": 10,
    "net": 9,
    "telemetry": 9,
    "hf": 9,
    "lightning": 9,
    "updates": 9,
    "compute": 9,
    "job": 8,
    "pinning": 8,
    "store": 8,
    "wire": 7,
    "plan": 7,
    "params": 7,
    "codecs": 7,
    "randomness": 7,
    "segments": 7,
    "config": 2,
    "errors": 1,
    "openmp": 1,
    "threads": 1,
    "users_code": 1,
}
MAIN = 30
#: Arrows that point up and are still to be cut.
OWED: set[tuple[str, str]] = set()
#: What a pure room must not touch: it decides; time, tensors and sockets are somebody else's.
IMPURE = {"asyncio", "torch", "time", "socket", "threading", "numpy.random"}
PURE = {"plan": IMPURE, "wire": IMPURE}

FILES = sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "__main__" if parts[-1] == "__main__" else _room(parts)


def _room(parts: Sequence[str]) -> str:
    """The innermost room of a dotted name."""
    inner = ".".join(parts[:2])
    return inner if inner in LEVELS else parts[0]


def imported(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(path: Path) -> Iterator[str]:
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "w5xde_async" and len(parts) > 1:
            known = "__main__" if "__main__" in parts else _room(parts[1:])
            if known in LEVELS or known == "__main__":
                yield known


def test_imports_point_downwards() -> None:
    for path in FILES:
        room = room_of(path)
        if (path.name == "__init__.py" and room not in LEVELS) or room == "__init__":
            continue  # the public names, imported when asked for (test_exports.py)
        assert room in LEVELS or room == "__main__", f"{room} has no place among the rooms"
        own = MAIN if room == "__main__" else LEVELS[room]
        for other in rooms_imported(path):
            level = MAIN if other == "__main__" else LEVELS[other]
            allowed = level < own or other == room or (room, other) in OWED
            assert allowed, f"{path.relative_to(ROOT)} ({room}) imports {other}"


def test_pure_rooms_stay_pure() -> None:
    for room, forbidden in PURE.items():
        for path in sorted((ROOT / room).glob("*.py")):
            for name in imported(path):
                assert not any(name == bad or name.startswith(f"{bad}.") for bad in forbidden), f"{path.name}: {name}"


def test_plan_knows_nobody() -> None:
    for path in sorted((ROOT / "plan").glob("*.py")):
        assert set(rooms_imported(path)) <= {"plan", "config", "errors"}, path


def test_the_check_sees_imports() -> None:
    """A check that finds nothing passes for ever."""
    assert {"plan", "wire", "hub.members", "hub.work"} <= set(
        rooms_imported(ROOT / "coordinator" / "sync" / "training.py")
    )
    assert set(rooms_imported(ROOT / "plan" / "ledger.py")) == {"plan"}
    assert "__main__" in set(rooms_imported(ROOT / "__main__.py"))


def test_what_is_owed_is_still_owed() -> None:
    """An arrow that was cut is taken off the list, so that nobody draws it again."""
    drawn = {(room_of(path), other) for path in FILES if room_of(path) in LEVELS for other in rooms_imported(path)}
    assert drawn >= OWED
