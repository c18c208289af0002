"""Whose sums may be in one run."""

from __future__ import annotations

import pytest

from w5xde_async.plan.numerics import ANY, EXACT, FIRST, RunNumerics, fits, is_known, refusal

TP = "tp=2 1f2e3d4c"


def test_the_first_result_that_counts_decides() -> None:
    run = RunNumerics()
    assert run.asked(FIRST) == ""
    assert not run.note(TP)
    assert run.asked(FIRST) == TP
    assert fits(TP, run.asked(FIRST))
    assert not fits(EXACT, run.asked(FIRST))
    assert not fits("tp=2 other", run.asked(FIRST))
    assert all(word in " ".join(refusal(EXACT, TP)) for word in (EXACT, TP, "--numerics any"))


@pytest.mark.parametrize(("wanted", "numerics", "taken"), [
    (EXACT, EXACT, True), (EXACT, TP, False), (EXACT, "exact evil", False),
    ("tp=2", TP, True), ("tp=2", "tp=4 1f2e3d4c", False), (ANY, TP, True),
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


def test_a_resume_goes_on_with_the_kind_that_has_computed_unless_another_is_asked_for_which_is_told() -> None:
    run = RunNumerics()
    run.restore([EXACT], [])
    assert run.asked(FIRST) == run.asked(EXACT) == EXACT
    assert run.asked("tp=2") == "tp=2"
    assert f"in several ways ({EXACT}, {TP})" in run.note(TP)
    assert run.asked(FIRST) == run.asked("tp=2") == TP
    alike, mixed = RunNumerics(), RunNumerics()
    alike.restore([TP], [])
    assert not alike.note(TP)
    mixed.restore([EXACT, TP], [])  # the resume tells of both
    assert mixed.asked(FIRST) == ""
    assert not mixed.note(TP)
    mixed.begin_from([EXACT], [])  # as a journal that is set aside is forgotten
    assert mixed.past == [EXACT]


def test_what_the_coordinator_computes_for_workers_decides_nothing_and_is_told() -> None:
    run = RunNumerics()
    assert not run.note(EXACT, decides=False)
    assert run.asked(FIRST) == ""
    assert f"in several ways ({EXACT}, {TP})" in run.note(TP)
    assert run.asked(FIRST) == TP


@pytest.mark.parametrize(("numerics", "ranks", "known"), [
    (EXACT, 1, True), (EXACT, 2, True), (TP, 2, True), (TP, 4, True), ("tp=2 of the program 1f2e3d4c", 2, True),
    ("fsdp=2,tp=2 of the job 1f2e3d4c", 4, True), (TP, 1, False), (TP, 3, False), ("evil", 2, False),
    ("exact evil", 1, False), ("exact 1f2e3d4c", 2, False), ("tp=2", 2, False), ("tp=0 1f2e3d4c", 2, False),
    ("tp=2 1f2e3d4c\x1b", 2, False), ("dp=2 1f2e3d4c", 2, False), (" exact", 1, False),
])  # fmt: skip
def test_only_what_a_worker_can_be_is_believed(numerics: str, ranks: int, known: bool) -> None:
    assert is_known(numerics, ranks) is known


def test_devices_that_differ_are_told_once_and_those_before_a_resume_count() -> None:
    run = RunNumerics()
    told = [run.note_device("cpu", threads) for threads in (1, 1, 2, 1, 3)]
    assert [bool(text) for text in told] == [False, False, True, False, False]
    assert "cpu with 1 thread and cpu with 2 threads" in told[2]
    again = RunNumerics()
    again.devices[:] = run.devices[:1]
    assert not again.note_device("cpu", 1)
    assert "cpu with 2 threads" in again.note_device("cpu", 2)
