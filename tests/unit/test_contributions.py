"""One row for each worker at the end, however often it came and went."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from w5xde_async.hub.members.contributions import Contributions
from w5xde_async.plan.membership import Member


def leave(
    contributions: Contributions, worker_id: str, name: str, joined_at: float, left_at: float, identity: str = ""
) -> None:
    link, outbox = SimpleNamespace(bytes_sent=2, bytes_received=3), SimpleNamespace(sending_s=0.0)
    session: Any = SimpleNamespace(identity=identity, link=link, outbox=outbox, network_s=0.0)
    session.links = (session,)
    member = Member(
        worker_id=worker_id, name=name, peer="", device="cpu", threads=1, incarnation=1, joined_at=joined_at,
        last_seen=left_at, leaves=1,
    )  # fmt: skip
    contributions.remember(session, member, left_at)


def rows(contributions: Contributions) -> list[tuple[str, int]]:
    return [(share.name, share.leaves) for share in contributions.shares()]


def test_a_worker_that_is_started_again_under_its_name_is_one_row() -> None:
    contributions = Contributions()
    for number in range(1000):
        leave(contributions, f"id {number}", "anna", number, number + 0.5)
        leave(contributions, f"key {number}", f"name {number}", number, number + 0.5, identity="invited")
    assert rows(contributions) == [("anna", 1000), ("name 999", 1000)]


def test_what_counts_of_a_worker_that_has_left_is_in_its_row() -> None:
    contributions = Contributions()
    leave(contributions, "id 1", "anna", 0.0, 1.0)
    leave(contributions, "id 2", "anna", 2.0, 3.0)  # again
    contributions.credit("id 2", 4, 8)
    contributions.credit("never heard of", 2, 4)
    assert [(share.name, share.leaves, share.samples) for share in contributions.shares()] == [
        ("anna", 6, 8), ("others", 2, 4),
    ]  # fmt: skip


def test_who_has_left_is_known_by_name() -> None:
    contributions = Contributions()
    leave(contributions, "id 1", "anna", 0.0, 1.0)
    leave(contributions, "id 2", "anna", 2.0, 3.0)  # again
    leave(contributions, "id 3", "bob", 0.0, 1.0, identity="invited")
    assert [contributions.name_of(f"id {number}") for number in range(1, 5)] == ["anna", "anna", "bob", ""]


def test_two_of_one_name_at_once_are_two_rows() -> None:
    contributions = Contributions()
    leave(contributions, "id 1", "anna", 0.0, 2.0)
    leave(contributions, "id 2", "anna", 1.0, 3.0)
    assert rows(contributions) == [("anna", 1), ("anna", 1)]


def test_the_bytes_of_a_rank_that_is_gone_count_once() -> None:
    """An island's head is a member for as long as any of its ranks has not ended."""
    contributions = Contributions()
    head, rank = (
        SimpleNamespace(link=SimpleNamespace(bytes_sent=2, bytes_received=3), ended=asyncio.Event()) for _ in range(2)
    )
    head.links = [head, rank]
    assert contributions.traffic([cast(Any, head)]) == (4, 6)
    contributions.close(cast(Any, rank))
    rank.ended.set()
    assert contributions.traffic([cast(Any, head)]) == (4, 6)


def test_rows_are_bounded_whatever_workers_call_themselves() -> None:
    contributions = Contributions()
    for number in range(2000):
        leave(contributions, f"id {number % 600}", f"anna {number}", number, number + 0.5)
    assert len(rows(contributions)) == 513
    assert sum(leaves for _, leaves in rows(contributions)) == 2000
