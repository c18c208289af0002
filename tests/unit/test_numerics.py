"""Whose sums may be in one run."""

from __future__ import annotations

import pytest

from w5xde_async.plan.numerics import ANY, EXACT, FIRST, RunNumerics, fits, refusal

TP = "tp=2 1f2e3d4c"


def test_the_first_worker_decides() -> None:
    run = RunNumerics()
    assert run.asked(FIRST) == ""
    assert not run.note(TP)
    assert run.asked(FIRST) == TP
    assert fits(TP, run.asked(FIRST))
    assert not fits(EXACT, run.asked(FIRST))
    assert not fits("tp=2 other", run.asked(FIRST))
    assert all(word in " ".join(refusal(EXACT, TP)) for word in (EXACT, TP, "--numerics any"))


@pytest.mark.parametrize(("wanted", "numerics", "taken"), [
    (EXACT, EXACT, True), (EXACT, TP, False), ("tp=2", TP, True), ("tp=2", "tp=4 1f2e3d4c", False), (ANY, TP, True),
])  # fmt: skip
def test_or_the_setting(wanted: str, numerics: str, taken: bool) -> None:
    assert fits(numerics, RunNumerics().asked(wanted)) is taken


def test_a_shape_that_is_asked_for_is_one_division_once_somebody_has_come() -> None:
    run = RunNumerics()
    run.note(TP)
    assert run.asked("tp=2") == TP


def test_that_there_are_several_is_told_once_and_those_that_were_are_remembered() -> None:
    run = RunNumerics()
    run.past[:] = ["tp=4 before"]
    told = [run.note(one) for one in ("tp=4 before", EXACT, EXACT, TP, EXACT, "tp=2 other")]
    assert [bool(text) for text in told] == [False, True, False, False, False, False]
    assert f"in several ways ({EXACT}, tp=4 before)" in told[1]
    assert run.past == ["tp=4 before", EXACT, TP, "tp=2 other"]
    assert run.asked(ANY) == ""
    for number in range(1000):
        run.note(f"tp=2 {number}")
    assert len(run.past) == 64


def test_the_first_worker_after_a_resume_decides_anew_which_is_told() -> None:
    run = RunNumerics()
    run.restore([EXACT], [])
    assert run.asked(FIRST) == ""
    assert f"in several ways ({EXACT}, {TP})" in run.note(TP)
    assert run.asked(FIRST) == TP
    alike, mixed = RunNumerics(), RunNumerics()
    alike.restore([TP], [])
    assert not alike.note(TP)
    mixed.restore([EXACT, TP], [])  # the resume tells of both
    assert not mixed.note(TP)


def test_devices_that_differ_are_told_once_and_those_before_a_resume_count() -> None:
    run = RunNumerics()
    told = [run.note_device("cpu", threads) for threads in (1, 1, 2, 1, 3)]
    assert [bool(text) for text in told] == [False, False, True, False, False]
    assert "cpu with 1 thread and cpu with 2 threads" in told[2]
    again = RunNumerics()
    again.devices[:] = run.devices[:1]
    assert not again.note_device("cpu", 1)
    assert "cpu with 2 threads" in again.note_device("cpu", 2)
