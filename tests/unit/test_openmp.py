"""How threads of the coordinator program wait for each other, and that its workers are not told so."""

from __future__ import annotations

import os

import pytest

from w5xde_async import openmp


@pytest.fixture(autouse=True)
def nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_ours", False)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # put back after the test
        monkeypatch.delenv(name)


def test_they_sleep_and_those_of_workers_do_as_ever() -> None:
    openmp.wait_without_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "0"
    assert "GOMP_SPINCOUNT" not in openmp.of_others(dict(os.environ))
    assert openmp.of_others({"A": "1"}) == {"A": "1"}


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "0"), ("OMP_WAIT_POLICY", "active")])
def test_what_the_environment_says_counts_for_all(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    before = dict(os.environ)
    openmp.wait_without_spinning()
    assert dict(os.environ) == before
    assert openmp.of_others(before) == before
