"""docs/troubleshooting.md quotes what the programs say; docs/questions.md computes with what the codecs write."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from w5xde_async.codecs.registry import codec

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (.+?) \|")
_SIZES = re.compile(
    r"^\| ([\d.]+) (million|billion) \| ([\d.]+) GB \| ([\d.]+) ([MG])B \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \|"
)


def _said() -> list[str]:
    """Every text in the package, cut where something is put in."""
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        texts += [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    return texts


@pytest.mark.slow
def test_every_message_is_one_that_the_programs_say() -> None:
    said, quoted = _said(), []
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines():
        if found := _ROW.match(line):
            quoted += re.findall(r"`([^`]+)`", found[1])
    assert len(quoted) > 25
    for message in quoted:
        for part in filter(None, (part.strip(" ():;'") for part in message.split("..."))):
            assert any(part in text for text in said), f"nobody says {part!r}"


def test_the_row_of_memory_that_is_not_shared_names_every_reason_of_the_coordinators() -> None:
    (said,) = [text for text in _said() if text.startswith("the coordinator offers none: ")]
    rows = (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith("| `--link shm")]
    assert said.endswith("or the model is small")
    for reason in ("another container or machine", "the model is small"):
        assert reason in row


def test_the_table_of_sizes_is_computed() -> None:
    rows = [
        found for line in (ROOT / "docs" / "questions.md").read_text().splitlines() if (found := _SIZES.match(line))
    ]
    assert len(rows) == 6
    for row in rows:
        count = float(row[1]) * {"million": 1e6, "billion": 1e9}[row[2]]
        per_value = {name: codec(name).encoded_nbytes(1 << 20) / (1 << 20) for name in ("raw", "int8")}
        memory, result = 20 * count / 1e9, per_value["raw"] * count / {"M": 1e6, "G": 1e9}[row[5]]
        both_ways = [
            2 * 8 * per_value[name] * count / rate for name, rate in (("raw", 1e9), ("raw", 1e8), ("int8", 1e8))
        ]
        told = [float(row[number]) for number in (3, 4, 6, 7, 8)]
        assert told == pytest.approx([memory, result, *both_ways], rel=0.04)
