"""Who is here: one incarnation a worker, known by what it last said."""

from __future__ import annotations

from w5xde_async.plan.membership import Departed, Member, Membership, Standing


def member(worker_id: str, incarnation: int = 1, now: float = 0.0) -> Member:
    return Member(
        worker_id=worker_id, name=worker_id, peer="", device="cpu", threads=1, incarnation=incarnation, joined_at=now,
        last_seen=now,
    )  # fmt: skip


def test_a_newer_incarnation_takes_the_older_ones_place() -> None:
    membership = Membership(silence_s=10)
    first, second = member("a", 1), member("a", 2)
    assert membership.join(first) is None
    assert membership.join(second) is first
    assert membership.ready() == [second]


def test_only_the_present_incarnation_leaves() -> None:
    membership = Membership(silence_s=10)
    membership.join(member("a", 2))
    assert membership.leave("a", 1) is None
    assert membership.leave("b", 1) is None
    left = membership.leave("a", 2)
    assert left is not None
    assert (left.incarnation, membership.members) == (2, {})


def test_who_drains_takes_no_work() -> None:
    membership = Membership(silence_s=10)
    for name in "abc":
        membership.join(member(name))
    membership.members["b"].standing = Standing.DRAINING
    assert [ready.worker_id for ready in membership.ready()] == ["a", "c"]


def test_who_says_nothing_is_silent() -> None:
    membership = Membership(silence_s=10)
    membership.join(member("a", now=0.0))
    membership.join(member("b", now=5.0))
    assert membership.silent(9.9) == []
    assert [silent.worker_id for silent in membership.silent(10.0)] == ["a"]
    membership.members["a"].last_seen = 8.0
    assert [silent.worker_id for silent in membership.silent(15.0)] == ["b"]


def test_those_who_left_first_are_forgotten_first_and_nobody_who_is_back() -> None:
    departed = Departed(2)
    assert [departed.left(worker) for worker in "abac"] == [None, None, None, "b"]
    departed.returned("a")
    assert [departed.left(worker) for worker in "de"] == [None, "c"]
    assert [worker in departed for worker in "abcde"] == [False, False, False, True, True]
