"""Results on their way out: what is coded, where it may lie, and what happens where a device has no room."""

from __future__ import annotations

import pytest
import torch
from tests.support import jobs
from tests.support.pools import OfAnotherDevice
from torch import Tensor

from w5xde_async.codecs.codec import Encoded
from w5xde_async.codecs.registry import codec
from w5xde_async.job import build_model
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.updates.coded import coded_up
from w5xde_async.wire.messages import VerdictCode
from w5xde_async.worker.uplink.result_encoder import BucketResult, ResultEncoder

LAYOUT = Layout.of(build_model(jobs.cnn_adamw()), bucket_bytes=4 << 10)


def filled(seed: int) -> ResultVector:
    vector = ResultVector(LAYOUT)
    generator = torch.Generator().manual_seed(seed)
    for piece in vector.buckets:
        piece.copy_(torch.randint(-99, 99, piece.shape, generator=generator))
    return vector


def sent(encoder: ResultEncoder, lease: int, vector: ResultVector) -> list[tuple[str, bytes]]:
    results: list[BucketResult] = [
        encoder.encode(lease, bucket.index, vector) for bucket in LAYOUT.result_buckets if encoder.has(bucket.index)
    ]
    found = [(spec.codec, bytes(data)) for result in results for spec, data in result.buffers]
    for result in results:
        if result.sent is not None:
            result.sent()
    return found


@pytest.mark.parametrize("name", ["raw", "lz4", "int8", "topk:0.1", "lz4:int8"])
@pytest.mark.parametrize("feedback", [False, True])
def test_the_bytes_are_those_of_values_in_host_memory(name: str, feedback: bool) -> None:
    here = ResultEncoder(LAYOUT, codec(name), feedback=feedback)
    there = ResultEncoder(LAYOUT, codec(name), feedback=feedback)
    there.pool = OfAnotherDevice()
    there.feedback = there._new_feedback()
    assert there.device_buckets == (frozenset() if here.codec.exact else frozenset(coded_up(LAYOUT)))
    for lease in range(4):
        assert sent(there, lease, filled(lease)) == sent(here, lease, filled(lease))
        for encoder in (here, there):
            encoder.settle([lease], VerdictCode.APPLIED)


@pytest.mark.parametrize("feedback", [False, True])
def test_where_a_device_has_no_room_the_host_encodes(feedback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, full = (ResultEncoder(LAYOUT, codec("int8"), feedback=feedback) for _ in range(2))
    encode, lacked = ResultEncoder._encoded, set[tuple[int, int]]()

    def lacking(encoder: ResultEncoder, lease: int, bucket: int, values: Tensor, weight: float) -> Encoded:
        if encoder is full and (lease, bucket) not in lacked:
            lacked.add((lease, bucket))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(encoder, lease, bucket, values, weight)

    monkeypatch.setattr(ResultEncoder, "_encoded", lacking)
    for lease in range(2):
        assert sent(full, lease, filled(lease)) == sent(plain, lease, filled(lease))
    assert lacked
