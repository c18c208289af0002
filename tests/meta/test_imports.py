"""Imports point one way (docs/architecture.md): a room knows only the rooms below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "w5xde_async"

#: Higher numbers may import lower ones. ``__main__`` stands above everything, wherever it lies.
LEVELS = {
    "settings": 9,
    "status": 9,
    "facade": 8,
    "cluster": 8,
    "coordinator": 7,
    "worker": 7,
    "parallel": 6,
    "runtime": 6,
    "net": 5,
    "telemetry": 5,
    "updates": 5,
    "compute": 5,
    "job": 4,
    "store": 4,
    "wire": 3,
    "plan": 3,
    "params": 3,
    "codecs": 3,
    "randomness": 3,
    "errors": 1,
    "users_code": 1,
}
MAIN = 10
#: Peers of one level that may import each other, each with its reason.
SAME_LEVEL: dict[tuple[str, str], str] = {}
#: What a pure room must not touch: it decides; time, tensors and sockets are somebody else's.
IMPURE = {"asyncio", "torch", "time", "socket", "threading", "numpy.random"}
PURE = {"plan": IMPURE, "wire": IMPURE}

FILES = sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "__main__" if parts[-1] == "__main__" else parts[0]


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
            known = "__main__" if "__main__" in parts else parts[1]
            if known in LEVELS or known == "__main__":
                yield known


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return  # the public names, imported when asked for (test_exports.py)
    assert room in LEVELS or room == "__main__", f"{room} has no place among the rooms"
    own = MAIN if room == "__main__" else LEVELS[room]
    for other in rooms_imported(path):
        level = MAIN if other == "__main__" else LEVELS[other]
        allowed = level < own or other == room or (room, other) in SAME_LEVEL
        assert allowed, f"{path.relative_to(ROOT)} ({room}) imports {other}"


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_stay_pure(room: str) -> None:
    for path in sorted((ROOT / room).glob("*.py")):
        for name in imported(path):
            assert not any(name == bad or name.startswith(f"{bad}.") for bad in PURE[room]), f"{path.name}: {name}"


def test_plan_knows_nobody() -> None:
    for path in sorted((ROOT / "plan").glob("*.py")):
        assert set(rooms_imported(path)) <= {"plan", "errors"}, path


def test_the_check_sees_imports() -> None:
    """A check that finds nothing passes for ever."""
    assert {"plan", "wire", "net", "store", "updates"} <= set(rooms_imported(ROOT / "coordinator" / "training.py")) | {
        room for path in (ROOT / "coordinator").glob("*.py") for room in rooms_imported(path)
    }
    assert set(rooms_imported(ROOT / "plan" / "ledger.py")) == {"plan"}
    assert "__main__" in set(rooms_imported(ROOT / "worker" / "__main__.py"))
