"""A worker's results in memory that the coordinator reads: what it must show first, and what it may tell of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.support.memory_links import memory_pair
from torch import nn

from w5xde_async.errors import MalformedFrame
from w5xde_async.hub.members.sharing import SharedResults, witness
from w5xde_async.net.endpoint import connect, listen
from w5xde_async.net.link import Link
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.params.slots import SHARED_SLOTS, slot_bytes, slots_in
from w5xde_async.segments import Segment, Unshared, unsupported
from w5xde_async.wire.messages import Result

pytestmark = pytest.mark.skipif(unsupported() != "", reason=unsupported())

LAYOUT = Layout.of(nn.Sequential(nn.Linear(64, 70), nn.BatchNorm1d(70), nn.Linear(70, 3)), bucket_bytes=1 << 12)
NBYTES = SHARED_SLOTS * slot_bytes(LAYOUT)
SECRET, NONCE = bytes(range(32)), b"a link's own nonce, of 32 bytes!"


@pytest.fixture
def parameters() -> Iterator[Segment]:
    with closing(Segment("parameters", FlatState.nbytes(LAYOUT), SECRET)) as segment:
        yield segment


def results(parameters: Segment, secret: bytes, nbytes: int = NBYTES) -> tuple[Segment, SharedResults]:
    segment = Segment("results", nbytes, secret)
    return segment, SharedResults(parameters, segment.told, NONCE, LAYOUT)


def test_every_bucket_of_every_vector_is_found_where_the_worker_wrote_it(parameters: Segment) -> None:
    segment, shared = results(parameters, witness(SECRET, NONCE))
    with closing(segment):
        for vector in slots_in(LAYOUT, segment.payload, SHARED_SLOTS):
            for bucket in LAYOUT.result_buckets:
                vector.buckets[bucket.index].fill_(100 * vector.slot + bucket.index)
                found, written = shared.find(Result(1, bucket.index, vector.slot + 1)), vector.buckets[bucket.index]
                assert (found.shape, found.dtype) == (written.shape, written.dtype)
                assert torch.equal(found, written)


def test_a_piece_is_there_as_long_as_somebody_has_it(parameters: Segment) -> None:
    """Its worker is gone, and its session."""
    segment, shared = results(parameters, witness(SECRET, NONCE))
    vector = slots_in(LAYOUT, segment.payload, SHARED_SLOTS)[3]
    vector.buckets[0].fill_(7.0)
    piece = shared.find(Result(1, 0, 4))
    mine = memfds()
    segment.close()
    del segment, vector, shared
    gc.collect()
    assert (mine, memfds()) == (2, 1)
    assert bool((piece == 7.0).all())
    del piece
    gc.collect()
    assert memfds() == 0


def memfds() -> int:
    """Results that this process has mapped."""
    return sum("memfd:w5xde-shared-results" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize(
    "made_with",
    [
        SECRET,
        witness(SECRET, b"another link's nonce, of 32 byte"),
        witness(b"a guess", NONCE),
        witness(SECRET, NONCE)[:31],
    ],
    ids=["the secret itself", "another link", "not the secret", "too short"],
)
def test_memory_that_does_not_show_that_its_maker_read_the_parameters_is_not_read(
    parameters: Segment, made_with: bytes
) -> None:
    with pytest.raises(Unshared, match="does not show"):
        results(parameters, made_with)


def test_memory_of_another_size_is_not_read(parameters: Segment) -> None:
    with pytest.raises(Unshared, match="another size"):
        results(parameters, witness(SECRET, NONCE), NBYTES + (1 << 16))


@pytest.mark.parametrize(
    ("bucket", "slot"), [(0, 0), (0, SHARED_SLOTS + 1), (0, (1 << 63) - 1), (len(LAYOUT.result_buckets), 1)]
)
def test_what_is_not_there_is_malformed(parameters: Segment, bucket: int, slot: int) -> None:
    segment, shared = results(parameters, witness(SECRET, NONCE))
    with closing(segment), pytest.raises(MalformedFrame):
        shared.find(Result(1, bucket, slot))


async def test_both_ends_on_this_machine_are_known_by_their_addresses() -> None:
    seen: list[bool] = []

    async def serve(link: Link) -> None:
        seen.append(link.same_host)

    listening = await listen("127.0.0.1", 0, serve)
    link = await connect("127.0.0.1", listening.port, timeout_s=5.0)
    assert link.same_host
    await link.aclose()
    await listening.aclose()
    assert seen == [True]
    assert [one.same_host for one in memory_pair()] == [False, False]


class _Ends:
    def __init__(self, mine: object, theirs: object) -> None:
        self._said = {"sockname": mine, "peername": theirs}

    def get_extra_info(self, name: str) -> object:
        return self._said[name]


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        (("10.0.0.5", 1), ("10.0.0.5", 2), True),
        (("10.0.0.5", 1), ("10.0.0.6", 2), False),
        (("::ffff:10.0.0.5", 1, 0, 0), ("10.0.0.5", 2), True),
        (("::1", 1, 0, 0), ("::1", 2, 0, 0), True),
        ("", "/run/coordinator.sock", True),
        (None, None, False),
        (None, ("10.0.0.5", 2), False),
    ],
)
def test_the_same_machine(mine: object, theirs: object, same: bool) -> None:
    link = Link.__new__(Link)
    link._writer = _Ends(mine, theirs)  # type: ignore[assignment]
    assert link.same_host is same
