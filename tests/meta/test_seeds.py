"""Every item is shown as the table says, and the migration pages have its counts and its reasons."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.seeds.items import ROOT, Item, counted, items, missing, rows

ITEMS = items()
PAGES = sorted({item.page for item in ITEMS})


def test_every_item_is_shown_as_it_says() -> None:
    assert [f"{item.document}:{item.line} {item.what}: {why}" for item in ITEMS if (why := missing(item))] == []


def test_lines_rise_and_nothing_stands_there_twice() -> None:
    assert len(ITEMS) > 232
    assert [known for known, count in Counter(item[:4] for item in ITEMS).items() if count > 1] == []
    for document in {item.document for item in ITEMS}:
        lines = [item.line for item in ITEMS if item.document == document]
        assert lines == sorted(lines)
        assert len(set(lines)) > 20


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_the_counts_and_names_no_difference_that_is_none(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    own = [item for item in ITEMS if item.page == page]
    joined = " ".join(text.split())
    assert counted(own) in joined
    assert "`python -m tests.seeds`" in joined
    named = rows(text)
    assert len(named) == len(set(named)) > 5
    assert sorted(named) == sorted({item.how for item in own if item.state == "differs"})


def test_nothing_is_open() -> None:
    assert {item.state for item in ITEMS} == {"works", "differs", "gpu"}


def test_the_command_prints_them() -> None:
    ran = subprocess.run([sys.executable, "-m", "tests.seeds"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.splitlines()[-1] == f"all: {counted(ITEMS)}"


@pytest.mark.parametrize(
    ("state", "how"),
    [
        ("works", "unit/test_tuning.py::test_that_is_not_there"), ("works", "unit/test_nothing.py"),
        ("works", "unit/conftest.py"), ("works", "python bench/report.py"), ("works", "python bench/nothing.py"),
        ("differs", "no such row"), ("gpu", "unit/test_tuning.py::test_linux_sets_what_it_says"),
    ],
)  # fmt: skip
def test_the_check_sees_what_is_not_shown(state: str, how: str) -> None:
    assert missing(Item("W5XDE", "migrating-from-w5xde.md", 1, "anything", state, how))


def test_a_line_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="what is 'perhaps'"):
        items("[a | A | page.md]\n1 | something | perhaps: later")


def test_the_table_holds_no_path_of_one_machine() -> None:
    assert "/" not in "".join(item.what.replace("350 KB/s", "").replace("1.67 MB/s", "") for item in ITEMS)
    assert str(Path.home()) not in "".join(item.how for item in ITEMS)
