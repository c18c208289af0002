"""What is published, as it comes: several updates of a bucket in one version, and buckets side by side."""

from __future__ import annotations

import pytest
import torch
from tests.support import jobs

from w5xde_async import openmp
from w5xde_async.codecs.codec import BytePool
from w5xde_async.codecs.registry import codec
from w5xde_async.job import build_model
from w5xde_async.params.layout import Layout
from w5xde_async.updates.coded import coded_down
from w5xde_async.worker.executors.executor import BucketUpdate, Version
from w5xde_async.worker.executors.published import Published

LAYOUT = Layout.of(build_model(jobs.mlp_sgd()), bucket_bytes=4 << 10)


@pytest.mark.parametrize("beside", [False, True])
def test_updates_of_a_bucket_come_in_their_order(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delta, the bucket whole, and a delta to that: only what follows the whole one is in it."""
    monkeypatch.setattr(openmp, "_WORTH_A_THREAD", 1 if beside else 1 << 40)
    published, pool = Published(LAYOUT), BytePool()
    generator, updates, expected = torch.Generator().manual_seed(0), [], {}
    kinds = {bucket: torch.randn((3, size), generator=generator) for bucket, size in coded_down(LAYOUT).items()}
    chosen = codec("int8")
    for turn in range(3):
        for bucket, values in kinds.items():
            whole = turn == 1
            update = values[turn].clone() if whole else chosen.encode(values[turn], pool).data.clone()
            updates.append(BucketUpdate(bucket, None if whole else chosen, update, not whole))
            if whole:
                expected[bucket] = values[turn].clone()
            elif turn == 2:
                chosen.add_to(update, expected[bucket])
    assert len(kinds) > 3
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        published.apply(Version(number=1, loss_scale=1.0, buckets=tuple(kinds), updates=tuple(updates)))
    finally:
        torch.set_num_threads(before)
    for bucket, values in expected.items():
        assert torch.equal(published.state.bucket(LAYOUT.buckets[bucket]), values)
