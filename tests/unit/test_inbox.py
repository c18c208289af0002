"""The worker's inbox: what can be computed, when; memory only for what layout and limit explain."""

from __future__ import annotations

import pytest
from torch import nn

from w5xde_async.errors import FrameTooLarge, MalformedFrame, RemoteError
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Lease, Params, Submit
from w5xde_async.worker.connection.inbox import MOST_LEASES, Inbox
from w5xde_async.worker.executors.in_place import InPlaceReceiver

ROW = BufferSpec("", "float32", (2, 4), "raw", 32)


def receiver() -> InPlaceReceiver:
    layout = Layout.of(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), bucket_bytes=4096)
    return InPlaceReceiver(layout, FlatState(layout))


def inbox(limit: int = 1 << 20) -> Inbox:
    return Inbox(receiver(), limit, exact=True)


def lease(number: int, version: int) -> Lease:
    return Lease(number, version, version, 0, (2,), 60.0, True, b"")


def give(box: Inbox, number: int, version: int) -> None:
    box.place_lease([ROW])
    box.lease(lease(number, version))


def test_a_version_is_whole_when_all_its_buckets_have_come() -> None:
    box = inbox()
    assert box.params(Params(0, 3, 2, 1.0)) is None
    version = box.params(Params(0, 1, 2, 1.0))
    assert version is not None
    assert (version.number, version.buckets) == (0, (1, 3))


def test_a_version_is_held_on_to_until_something_of_a_newer_one_lies_in_its_place() -> None:
    box = inbox()
    assert box.whole == -1
    box.params(Params(0, 0, 0, 1.0))
    assert box.whole == 0
    bucket = Layout.of(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), bucket_bytes=4096).buckets[0]
    message = Params(1, 0, 1, 1.0)
    box.place_params(message, [BufferSpec("", "float32", (bucket.numel,), "raw", 4 * bucket.numel)])
    assert box.whole == -1  # the link may break here
    box.params(message)
    assert box.whole == 1


def test_nothing_changed_is_a_version_too() -> None:
    version = inbox().params(Params(4, 0, 0, 2.0))
    assert version is not None
    assert (version.number, version.buckets, version.loss_scale) == (4, (), 2.0)


def test_buckets_of_an_overtaken_version_count_for_the_next() -> None:
    box = inbox()
    assert box.params(Params(0, 3, 2, 1.0)) is None  # bucket 3 is not sent again: it has not changed since
    version = box.params(Params(1, 0, 1, 1.0))
    assert version is not None
    assert version.buckets == (0, 3)


def test_an_older_version_after_a_newer_one_is_an_error() -> None:
    box = inbox()
    box.params(Params(5, 0, 1, 1.0))
    with pytest.raises(MalformedFrame, match="version 4 after version 5"):
        box.params(Params(4, 0, 1, 1.0))


def test_leases_wait_for_their_version_and_older_ones_are_void() -> None:
    box = inbox()
    give(box, 1, 0)
    give(box, 2, 1)
    assert box.take() == []
    box.params(Params(0, 0, 1, 1.0))
    assert [held.message.lease for held in box.take()] == [1]
    give(box, 3, 0)
    box.params(Params(1, 0, 1, 1.0))
    assert [held.message.lease for held in box.take()] == [2]
    assert box.take() == []
    box.end(1)
    box.end(2)
    assert box.held_bytes == 0


def test_a_revoked_lease_is_forgotten() -> None:
    box = inbox()
    give(box, 1, 0)
    box.revoke(1)
    box.revoke(99)
    box.params(Params(0, 0, 1, 1.0))
    assert box.take() == []
    assert box.held_bytes == 0


def test_the_memory_limit_counts_all_that_is_held() -> None:
    box = inbox(limit=64)
    give(box, 1, 0)
    give(box, 2, 0)
    with pytest.raises(FrameTooLarge, match="96 bytes is over the limit of 64"):
        box.place_lease([ROW])


@pytest.mark.parametrize(
    ("bucket", "spec"),
    [
        (999, BufferSpec("", "float32", (4,), "raw", 16)),
        (0, BufferSpec("", "float64", (4096,), "raw", 4096 * 8)),
        (0, BufferSpec("", "float32", (7,), "raw", 28)),
    ],
)
def test_parameters_that_the_layout_does_not_explain(bucket: int, spec: BufferSpec) -> None:
    with pytest.raises(MalformedFrame):
        receiver().place(Params(0, bucket, 1, 1.0), [spec])


def test_a_lease_has_no_more_samples_than_its_bytes_can_hold() -> None:
    box = inbox()
    box.place_lease([ROW])
    with pytest.raises(MalformedFrame, match="1000000000 samples in 32 bytes"):
        box.lease(Lease(1, 0, 0, 0, (10**9,), 60.0, False, b""))


@pytest.mark.parametrize("exact", [True, False])
def test_leases_without_bytes_are_no_more_than_a_coordinator_has_ahead(exact: bool) -> None:
    """Of a version that may never come, and of one that is there and computed slowly."""
    box = Inbox(receiver(), 1 << 20, exact=exact)
    box.params(Params(0, 0, 0, 1.0))
    for number in range(MOST_LEASES):
        box.lease(lease(number, 10**9 * (number % 2)), ())
        box.take()
    with pytest.raises(RemoteError, match="1024 leases at once"):
        box.lease(lease(MOST_LEASES, 10**9), ())
    box.end(0)
    box.lease(lease(MOST_LEASES, 10**9), ())


def test_requests_to_submit_that_wait_are_no_more_either() -> None:
    box = Inbox(receiver(), 1 << 20, exact=False)
    box.lease(lease(0, 10**9), ())
    for number in range(1, MOST_LEASES):
        box.submit(Submit(number, (0,)))
    with pytest.raises(RemoteError, match="1024 leases at once"):
        box.submit(Submit(MOST_LEASES, (0,)))
