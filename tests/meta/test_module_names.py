"""Modules whose names and first lines say what is in them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src").rglob("*.py"))


def test_there_are_files() -> None:
    assert len(FILES) > 50


def test_no_module_is_named_after_nothing() -> None:
    for path in FILES:
        parts = {part.lower() for part in path.relative_to(ROOT).with_suffix("").parts}
        assert not parts & {"utils", "util", "helpers", "helper", "common", "manager", "misc"}, path


def test_every_module_says_what_it_is_for() -> None:
    for path in FILES:
        assert path.read_text().lstrip().startswith(('"""', 'r"""')), path
