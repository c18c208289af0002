"""The forms of a layout's buckets, alike at both ends."""

from __future__ import annotations

import torch

from w5xde_async.codecs.codec import Form
from w5xde_async.params.layout import Bucket, Layout

__all__ = ["form_of", "forms_of", "is_coded", "is_coded_down"]


def is_coded(layout: Layout, bucket: Bucket) -> bool:
    """Whether a codec writes this bucket of a result: sums of gradients are float32 whatever their parameters are.

    Everything else travels as it lies in memory.
    """
    return layout.groups[bucket.group].role == "grad"


def is_coded_down(layout: Layout, bucket: Bucket) -> bool:
    """Whether a codec writes this bucket of a version: trainable parameters that are float32.

    Those of half precision travel as they lie in memory: two bytes a value, and no delta that would have to be rounded
    to them once more at each end.
    """
    return is_coded(layout, bucket) and layout.groups[bucket.group].dtype == torch.float32


def form_of(layout: Layout, bucket: Bucket) -> Form:
    """What a codec is to know of a bucket."""
    entries = (layout.entries[index] for index in bucket.entries)
    return Form.of(bucket.numel, ((entry.offset - bucket.offset, entry.shape) for entry in entries))


def forms_of(layout: Layout) -> dict[int, Form]:
    """By bucket, of all that a codec writes."""
    return {b.index: form_of(layout, b) for b in layout.result_buckets if is_coded(layout, b)}
