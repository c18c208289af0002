"""The forms of a layout's buckets, alike at both ends."""

from __future__ import annotations

from w5xde_async.codecs.codec import Form
from w5xde_async.params.layout import Bucket, Layout

__all__ = ["form_of", "forms_of", "is_coded"]


def is_coded(layout: Layout, bucket: Bucket) -> bool:
    """Whether a codec writes this bucket: trainable parameters, float32. Everything else travels as it lies."""
    return layout.groups[bucket.group].role == "grad"


def form_of(layout: Layout, bucket: Bucket) -> Form:
    """What a codec is to know of a bucket."""
    entries = (layout.entries[index] for index in bucket.entries)
    return Form.of(bucket.numel, ((entry.offset - bucket.offset, entry.shape) for entry in entries))


def forms_of(layout: Layout) -> dict[int, Form]:
    """By bucket, of all that a codec writes."""
    return {b.index: form_of(layout, b) for b in layout.result_buckets if is_coded(layout, b)}
