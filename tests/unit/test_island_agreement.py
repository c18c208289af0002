"""In what ranks differ, said once and for people."""

from __future__ import annotations

from w5xde_async.parallel.agreement import fingerprint_of, first_difference


def test_the_first_difference_is_named_with_the_ranks() -> None:
    alike = {"torch": "2.13", "--island": "fsdp=3"}
    assert first_difference([alike, dict(alike), dict(alike)]) == ""
    assert first_difference([alike, {**alike, "torch": "2.12"}, alike]) == "torch: 2.13 on 0, 2; 2.12 on 1"
    assert first_difference([alike, {**alike, "more": "x"}]) == "more: nothing on 0; x on 1"


def test_a_fingerprint_is_of_all_that_is_given() -> None:
    assert fingerprint_of(1, [2]) == fingerprint_of(1, [2]) != fingerprint_of(1, [3])
