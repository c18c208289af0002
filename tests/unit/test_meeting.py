"""Where the members of an island meet."""

from __future__ import annotations

import asyncio

import pytest

from w5xde_async.errors import UsageError
from w5xde_async.hub.members.meeting import Meeting
from w5xde_async.net.interfaces import address_of
from w5xde_async.wire.messages import Rendezvous


async def test_who_says_the_same_meets_at_the_first_to_come() -> None:
    meeting = Meeting()
    found = await asyncio.gather(*[meeting.wait("dp=2", 2, f"host{n}", 1000 + n, 5.0) for n in range(4)])
    assert found == [Rendezvous(n % 2, f"host{n - n % 2}", 1000 + n - n % 2) for n in range(4)]
    assert not meeting.num_waiting("dp=2", 2)


async def test_who_wants_another_island_is_not_brought_together() -> None:
    meeting = Meeting()
    found = await asyncio.gather(
        meeting.wait("dp=2", 2, "a", 1, 0.01), meeting.wait("fsdp=2", 2, "b", 2, 0.01),
        meeting.wait("dp=3", 3, "c", 3, 0.01),
    )  # fmt: skip
    assert found == [None] * 3
    assert not any(meeting.num_waiting(*kind) for kind in (("dp=2", 2), ("fsdp=2", 2), ("dp=3", 3)))


async def test_who_has_given_up_or_is_gone_is_nobodys_partner() -> None:
    meeting = Meeting()
    gone = asyncio.create_task(meeting.wait("dp=2", 2, "gone", 1, 5.0))
    await asyncio.sleep(0)
    assert meeting.num_waiting("dp=2", 2) == 1
    gone.cancel()
    first = asyncio.create_task(meeting.wait("dp=2", 2, "first", 2, 5.0))
    await asyncio.sleep(0)
    second = await meeting.wait("dp=2", 2, "second", 3, 5.0)
    assert (await first, second) == (Rendezvous(0, "first", 2), Rendezvous(1, "first", 2))


async def test_who_is_found_in_the_turn_in_which_its_patience_ends_is_told() -> None:
    """The others have been sent to it."""
    meeting = Meeting()
    found = await asyncio.gather(meeting.wait("dp=2", 2, "a", 1, 0.0), meeting.wait("dp=2", 2, "b", 2, 5.0))
    assert found == [Rendezvous(0, "a", 1), Rendezvous(1, "a", 1)]


def test_the_address_of_an_interface() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"none of this machine.s: .*lo"):
        address_of("nothing0")
