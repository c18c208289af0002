"""An island's links, frame by frame: whatever its ranks say in whatever order, each leaf counts once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from tests.support.scripted import Run, Scripted, scripted, settle

from w5xde_async.errors import LinkLost
from w5xde_async.hub.members.session import Session
from w5xde_async.net.endpoint import connect, listen
from w5xde_async.net.link import Link
from w5xde_async.params.shard import Shard
from w5xde_async.plan.tree import Block
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import Done, Drain, Failed, Lease, Params, Rendezvous, Volunteer
from w5xde_async.worker.connection.handshake import join, meet


def half_of(frame: list[Any]) -> list[Any]:
    """The header and a part of the buffers."""
    return frame[: len(frame) // 2]


async def step(run: Run, workers: list[Scripted], *, begun: int = 0) -> None:
    """One worker, or all ranks of an island, compute what they are leased until a step is committed.

    Of its leases ``begun`` have been computed.
    """
    version, leases = run.training.version, partial(workers[0].all, Lease)
    number = begun + sum(lease.step < version for lease in leases())

    def goes_on(known: int) -> bool:
        return run.training.version > version or len(leases()) > known

    while run.training.version == version:
        await run.until(partial(goes_on, number))
        if run.training.version > version:
            return
        lease = leases()[number]
        number += 1
        if lease.step > version:
            await run.commits(version + 1)
            return
        for worker in workers:
            await worker.version(version)
            await worker.compute(lease)


async def test_each_rank_gets_its_parameters_and_data_and_the_sum_is_made_of_all_pieces() -> None:
    async with scripted() as run:
        ranks = await run.island("island")
        for _ in range(3):
            await step(run, ranks)
        leases = [await rank.lease() for rank in ranks]
        assert len({lease.lease for lease in leases}) == 1
        assert all(lease.samples == leases[0].samples for lease in leases)
        assert all(rank.all(Params) for rank in ranks)
        assert run.applied() == {3.0}
        # How long a result takes on the island's line is told by what came on all of its links.
        assert run.training.results._result_bytes == run.prepared.spec.layout.vector_bytes


async def test_a_rank_that_fails_while_another_sends_frees_the_memory_and_the_leaf_is_computed_elsewhere() -> None:
    async with scripted() as run:
        ranks = await run.island("island")
        lease = await ranks[0].lease()
        await ranks[1].lease()
        frame = ranks[0].result(lease, 0)
        await ranks[0].link.send(half_of(frame))
        await settle()
        memory = run.training.store.vector(Block(lease.start, lease.start + len(lease.samples))).bucket_bytes[0]
        await ranks[1].link.send(encode(Failed(lease.lease, lease.start, "ValueError: no", "traceback")))
        await settle()
        assert ranks[0].session.receiving is None
        single = await run.worker("single")
        await single.send(await single.lease(), 0)
        before = bytes(memory)
        with suppress(LinkLost):
            await ranks[0].link.send([b"\x7f" * len(piece) for piece in frame[len(frame) // 2 :]])  # it is nothing
        await settle()
        assert bytes(memory) == before
        for rank in ranks:
            rank.link.abort()
        await run.until(lambda: all(rank.ended() for rank in ranks))
        await single.send(await single.lease(), *range(1, len(run.prepared.spec.layout.result_buckets)))
        await single.done(await single.lease())
        await step(run, [single], begun=1)
        assert run.applied() == {1.0}


async def test_a_lease_that_was_revoked_before_it_was_begun_is_no_debt_for_good() -> None:
    async with scripted(silence_s=1e6) as run:
        ranks = await run.island("island")
        single = await run.worker("single")
        lease = await ranks[0].lease()
        await run.pass_time(lease.deadline_s + 1)
        assert lease.lease in ranks[0].revoked()
        await ranks[0].link.send(encode(Done(lease.lease, (), (), (), (), (), 0, 0.0, 0.0)))
        await settle()
        await single.compute(await single.lease())
        await run.until(lambda: len(ranks[0].all(Lease)) > 1)


async def test_done_without_a_piece_ends_the_island_and_nothing_else() -> None:
    async with scripted() as run:
        ranks = await run.island("island")
        lease = await ranks[0].lease()
        await ranks[0].compute(lease)
        await ranks[1].done(lease)
        assert all(rank.ended() for rank in ranks)
        single = await run.worker("single")
        await step(run, [single])
        assert run.applied() == {1.0}


@pytest.mark.parametrize("lost", [0, 1])
async def test_half_a_result_of_a_lost_island_is_nothing(lost: int) -> None:
    async with scripted() as run:
        ranks = await run.island("island")
        lease = await ranks[0].lease()
        await ranks[0].send(lease, 0)
        await ranks[1].link.send(half_of(ranks[1].result(lease, 0)))
        await settle()
        ranks[lost].link.abort()
        await run.until(lambda: all(rank.ended() for rank in ranks))
        single = await run.worker("single")
        await step(run, [single])
        assert run.applied() == {1.0}


async def test_a_port_that_takes_few_strangers_takes_all_ranks() -> None:
    """Those of islands that are here, and those that wait for the others."""
    async with scripted(max_workers=4) as run:
        roster = run.training.roster

        async def on_link(link: Link) -> None:
            await Session(link, roster, run.training, token="", handshake_s=30.0, incarnation=1).run()

        links, waiting = list[Link](), list[asyncio.Task[Rendezvous]]()
        listener = await listen("127.0.0.1", 0, on_link, max_strangers=2)
        for island in range(3):
            for rank in range(4):
                links.append(await connect("127.0.0.1", listener.port, timeout_s=5))
                await join(links[-1], key=f"{island}", name="", token="", terms={}, rank=rank, ranks=4)
        for number in range(1, 5):
            links.append(await connect("127.0.0.1", listener.port, timeout_s=5))
            waiting.append(run.task(meet(links[-1], Volunteer("dp=4", 4, "here", number), token="")))
            await run.until(lambda: roster._meeting.num_waiting("dp=4", 4) == len(waiting) % 4)
        assert sorted(found.rank for found in await asyncio.gather(*waiting)) == [0, 1, 2, 3]
        await asyncio.gather(listener.aclose(), *(link.aclose() for link in links))


async def test_a_silent_rank_is_a_lost_island() -> None:
    async with scripted() as run:
        ranks = await run.island("island")
        for _ in range(12):
            await ranks[0].beat()
            await run.pass_time(run.config.silence_s / 4)
            if ranks[0].ended():
                break
        assert all(rank.ended() for rank in ranks)


async def test_the_same_rank_twice_is_refused() -> None:
    async with scripted() as run:
        ranks = await run.island("island")
        other = await run.worker("island", ready=False, rank=1, ranks=2)
        other.shard = ranks[1].shard
        await other.ready()
        assert other.ended()
        await step(run, ranks)


@pytest.mark.parametrize("says", [{"together": 2}, {"together": 3}, {"share": 2}, {"numerics": "tp=2 1f2e3d4c"}])
async def test_ranks_that_do_not_agree_are_refused_and_nothing_else(says: dict[str, Any]) -> None:
    async with scripted() as run:
        alone = await run.worker("alone")
        layout = run.prepared.spec.layout
        halves = [
            [(g.index, 0, g.numel // 2) for g in layout.groups],
            [(g.index, g.numel // 2, g.numel) for g in layout.groups],
        ]
        ranks = []
        for number, half in enumerate(halves):
            ranks.append(await run.worker("island", ready=False, rank=number, ranks=2))
            ranks[-1].shard, ranks[-1].says = Shard.of(layout, half), says if number else {}
            await ranks[-1].ready()
        await run.until(lambda: all(rank.ended() for rank in ranks))
        assert not run.training.roster._islands
        assert not run.training.roster._part_of
        await step(run, [alone])


async def test_an_island_of_which_no_rank_can_be_one_leaves_nothing_behind() -> None:
    async with scripted() as run:
        first = await run.worker("island", ready=False, rank=0, ranks=3)
        first.shard, first.says = Shard.whole(run.prepared.spec.layout), {"together": 2}
        await first.ready()
        assert first.ended()
        assert not run.training.roster._islands


async def test_an_island_and_a_worker_do_not_have_one_id() -> None:
    """Whoever comes second is refused, and the first works on."""
    async with scripted() as run:
        ranks, alone = await run.island("one"), await run.worker("other")
        second = await run.worker("one")
        assert second.ended()
        with pytest.raises(LinkLost):
            await run.island("other")
        await settle()
        assert not run.training.roster.joining
        assert not any(one.ended() for one in (*ranks, alone))
        assert run.training.roster.sessions == {"one": ranks[0].session, "other": alone.session}
        assert len(run.training.roster._islands) == 1


async def test_a_rank_that_is_lost_before_the_island_is_whole_keeps_the_others_from_waiting() -> None:
    async with scripted() as run:
        first = await run.worker("island", ready=False, rank=0, ranks=2)
        first.shard = Shard.whole(run.prepared.spec.layout)
        await first.ready()
        second = await run.worker("island", ready=False, rank=1, ranks=2)
        second.link.abort()
        await run.until(first.ended)
        assert not run.training.roster.joining


async def test_a_rank_that_leaves_before_the_island_is_whole_is_let_go() -> None:
    async with scripted() as run:
        first = await run.worker("island", ready=False, rank=0, ranks=2)
        first.shard = Shard.whole(run.prepared.spec.layout)
        await first.ready()
        await first.link.send(encode(Drain("asked to leave", 5.0)))
        await run.until(first.said_goodbye)
