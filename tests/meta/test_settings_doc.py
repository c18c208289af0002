"""docs/settings.md is what the settings classes say, and names every variable that the code names."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from w5xde_async.settings import PROGRAMS, Answer, WorkerSettings, flag_names, read, to_mapping
from w5xde_async.settings.flags import declared

ROOT = Path(__file__).parents[2]
GENERATOR = runpy.run_path(str(ROOT / "docs" / "make_settings.py"))


def test_the_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert GENERATOR["main"](["--check"]) == 0, capsys.readouterr().err


def test_the_check_sees_a_change(tmp_path: Path) -> None:
    page = tmp_path / "settings.md"
    globals_of_main = GENERATOR["main"].__globals__
    before, globals_of_main["PAGE"] = globals_of_main["PAGE"], page
    try:
        assert GENERATOR["main"](["--check"]) == 1
        assert GENERATOR["main"]([]) == 0
        page.write_text(page.read_text().replace("--max-steps", "--most-steps"))
        assert GENERATOR["main"](["--check"]) == 1
    finally:
        globals_of_main["PAGE"] = before


def test_every_flag_and_variable_of_the_code_is_in_the_page() -> None:
    page = GENERATOR["PAGE"].read_text(encoding="utf-8")
    assert len(PROGRAMS) >= 2
    for program in PROGRAMS:
        assert all(f"`{one.variable}`" in page for one in declared(program).values() if not one.setting.hidden)
        flags = {
            flag for flag in flag_names(program) if flag not in ("--print-config", "--version", "--help", "--help-all")
        }
        assert {flag for flag in flags if f"`{flag}" not in page and f", {flag}`" not in page} <= {"--exit-with-stdin"}
    for path in (ROOT / "src").rglob("*.py"):
        for variable in re.findall(r"\bW5XDE_[A-Z_]+[A-Z]\b", path.read_text(encoding="utf-8")):
            assert f"`{variable}`" in page, f"{path.name} names {variable}"


def test_a_workers_printed_settings_can_be_read_back(tmp_path: Path) -> None:
    given = ["--server", "h:1", "--memory-limit", "64MiB", "--inline-block", "0", "--lifetime", "1h", "--compile"]
    with pytest.raises(Answer) as printed:
        read(WorkerSettings, [*given, "--print-config"], prog="w")
    file = tmp_path / "w5xde.toml"
    file.write_text(printed.value.text)
    assert tomllib.loads(printed.value.text)["worker"]["lifetime"] == 3600.0
    again, _ = read(WorkerSettings, ["--config", str(file)], prog="w")
    assert to_mapping(again) == to_mapping(read(WorkerSettings, given, prog="w")[0])
