"""Results of codecs and of islands on their way in: each part lands where it belongs, and nothing else is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn

from w5xde_async.codecs.codec import BytePool
from w5xde_async.codecs.registry import codec
from w5xde_async.coordinator.parameters.receive_buffers import ReceiveBuffers
from w5xde_async.errors import RemoteError
from w5xde_async.hub.members.session import Session
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard
from w5xde_async.wire.frame import Buffer, BufferSpec
from w5xde_async.wire.messages import Result
from w5xde_async.worker.uplink.result_encoder import ResultEncoder

LAYOUT = Layout.of(nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20)), bucket_bytes=1024)


@dataclass(eq=False)
class Rank:
    rank: int
    shard: Shard


class Island:
    """Three ranks; the last has nothing."""

    def __init__(self, name: str) -> None:
        runs: list[list[tuple[int, int, int]]] = [[], [], []]
        for group in LAYOUT.groups:
            for number, begin in enumerate(range(0, group.numel, 7)):
                runs[number % 2].append((group.index, begin, min(begin + 7, group.numel)))
        self.shards = [Shard.of(LAYOUT, one) for one in runs]
        self.sessions = [cast(Session, Rank(rank, shard)) for rank, shard in enumerate(self.shards)]
        self.encoders = [ResultEncoder(LAYOUT, codec(name), feedback=False, shard=shard) for shard in self.shards]

    def holders(self, bucket: int) -> set[int]:
        return {rank for rank, shard in enumerate(self.shards) if bucket in shard.buckets}

    def part(self, rank: int, bucket: int, whole: ResultVector) -> Sequence[tuple[BufferSpec, Buffer]]:
        """What a rank sends of a bucket."""
        shard = self.shards[rank]
        own = ResultVector(shard.own)
        pieces = [whole.group(run.group)[run.begin : run.end] for run in shard.pieces(LAYOUT.buckets[bucket])]
        own.buckets[bucket].copy_(torch.cat(pieces))
        return self.encoders[rank].encode(1, bucket, own).buffers


def receive(receiver: ReceiveBuffers, session: Session, bucket: int, buffers: Sequence[Any]) -> bool:
    """Whether there was a place for it."""
    views, authorized = receiver.place_pieces(session, Result(1, bucket), [spec for spec, _ in buffers])
    assert authorized
    if views is None:
        return False
    for view, (_, data) in zip(views, buffers, strict=True):
        view[:] = memoryview(data).cast("B")
    receiver.arrived(session)
    return True


def filled(seed: int = 0) -> ResultVector:
    vector = ResultVector(LAYOUT)
    made = torch.Generator().manual_seed(seed)
    for piece in vector.buckets:
        piece.copy_(torch.randint(-8, 8, piece.shape, generator=made))
    return vector


@pytest.mark.parametrize("name", ["raw", "lz4", "int8", "topk:0.5"])
def test_the_parts_of_all_ranks_are_the_whole(name: str) -> None:
    receiver, island, sent = ReceiveBuffers(LAYOUT, codec(name)), Island(name), filled()
    expected = ResultVector(LAYOUT)
    expected.reset()
    pool = BytePool()
    for bucket in LAYOUT.result_buckets:
        assert bucket.index not in receiver.has(1, cast(Any, island))
        for rank in sorted(island.holders(bucket.index)):
            assert receive(receiver, island.sessions[rank], bucket.index, island.part(rank, bucket.index, sent))
            for _, begin, end in island.shards[rank].pieces(bucket):
                at = slice(begin - bucket.offset, end - bucket.offset)
                expected.buckets[bucket.index][at] = sent.buckets[bucket.index][at]
            if name not in ("raw", "lz4") and LAYOUT.groups[bucket.group].role == "grad":
                runs = island.shards[rank].pieces(bucket)
                own = torch.cat([sent.group(run.group)[run.begin : run.end] for run in runs])
                read = torch.empty_like(own)
                codec(name).decode(codec(name).encode(own, pool).data, read)
                for (_, begin, end), piece in zip(runs, read.split([r.end - r.begin for r in runs]), strict=True):
                    expected.buckets[bucket.index][begin - bucket.offset : end - bucket.offset] = piece
        assert bucket.index in receiver.has(1, cast(Any, island))
    parts, found = receiver.take(1), ResultVector(LAYOUT)
    assert all(receiver.decode(parts, found))
    for mine, wanted in zip(found.buckets, expected.buckets, strict=True):
        assert torch.equal(mine, wanted)
    receiver.release(parts)
    assert not receiver.pool.num_out


def test_a_part_that_came_is_not_taken_again() -> None:
    receiver, island, sent = ReceiveBuffers(LAYOUT, codec("int8")), Island("int8"), filled()
    assert receive(receiver, island.sessions[0], 0, island.part(0, 0, sent))
    assert not receive(receiver, island.sessions[0], 0, island.part(0, 0, sent))
    assert receive(receiver, island.sessions[1], 0, island.part(1, 0, sent))
    receiver.drop(1)
    assert not receiver.pool.num_out


def test_what_is_no_part_of_a_rank_is_refused() -> None:
    receiver, island, sent = ReceiveBuffers(LAYOUT, codec("int8")), Island("int8"), filled()
    coded = [spec for spec, _ in island.part(0, 0, sent)]
    raw = [spec for spec, _ in Island("raw").part(0, 0, sent)]
    (whole,) = coded
    for wrong in (
        [],
        [*coded, *coded],
        [whole._replace(nbytes=whole.nbytes - 1, shape=(whole.nbytes - 1,))],
        [whole._replace(nbytes=whole.nbytes + 1, shape=(whole.nbytes + 1,))],
        [whole._replace(dtype="int8")],
        [whole._replace(codec="topk:0.5")],
        raw[:-1],
        [*raw, raw[-1]],
    ):
        with pytest.raises(RemoteError):
            receiver.place_pieces(island.sessions[0], Result(1, 0), wrong)
    with pytest.raises(RemoteError):
        receiver.place_pieces(island.sessions[2], Result(1, 0), coded)  # who has nothing of it
    with pytest.raises(RemoteError):
        receiver.place_pieces(island.sessions[0], Result(1, 99), coded)
    assert not receiver.pool.num_out
