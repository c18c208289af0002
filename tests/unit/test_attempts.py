"""When work is to blame for those who vanished with it."""

from __future__ import annotations

import pytest

from w5xde_async.plan import attempts
from w5xde_async.plan.attempts import Places


def places(present: list[str], delivered: list[str]) -> Places:
    made = Places(lambda: present)
    for worker in {*present, *delivered, *(f"dead-{n}" for n in range(9))}:
        made.joined(worker, "one host")
    for worker in delivered:
        made.delivered(worker)
    return made


def deaths(number: int, delivered: bool = False) -> dict[str, bool]:
    return {f"dead-{n}": delivered for n in range(number)}


def test_eight_deaths_are_enough_where_nobody_else_is() -> None:
    assert not places([], []).kills(deaths(7), 8)
    assert places([], []).kills(deaths(8), 8)
    assert places(["new"], []).kills(deaths(8), 8)


def test_one_that_delivered_and_is_here_tries_first() -> None:
    assert not places(["honest"], ["honest"]).kills(deaths(9), 8)
    assert places(["honest"], ["honest"]).kills(deaths(8) | {"honest": True}, 8)


def test_eight_deaths_of_workers_that_delivered_are_enough() -> None:
    assert places(["honest"], ["honest"]).kills(deaths(8, delivered=True), 8)


def test_another_place_tries_first_whoever_died() -> None:
    elsewhere = places(["far"], [])
    elsewhere.joined("far", "another host")
    assert not elsewhere.kills(deaths(9, delivered=True), 8)


def test_those_who_come_and_go_push_out_nobody_who_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_REMEMBERED", 3)
    made = places(["stays"], ["stays"])
    for number in range(9):
        made.joined(f"guest-{number}", "far")
        made.delivered(f"guest-{number}")
        made.left(f"guest-{number}")
    assert (made.of("stays"), made.has_delivered("stays")) == ("one host", True)
    known = [number for number in range(9) if made.of(f"guest-{number}") == "far"]
    assert known == [number for number in range(9) if made.has_delivered(f"guest-{number}")] == [6, 7, 8]
