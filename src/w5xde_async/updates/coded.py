"""Which buckets of a layout codecs write, alike at both ends. Everything else travels as it lies in memory."""

from __future__ import annotations

import torch

from w5xde_async.params.layout import Layout


def coded_up(layout: Layout) -> dict[int, int]:
    """Bucket -> values, of results: sums of gradients, which are float32 whatever their parameters are."""
    return {b.index: b.numel for b in layout.result_buckets if layout.groups[b.group].role == "grad"}


def coded_down(layout: Layout) -> dict[int, int]:
    """Bucket -> values, of versions: trainable parameters that are float32.

    Those of half precision travel as they lie in memory: two bytes a value, and no delta that would have to be rounded
    to them once more at each end.
    """
    groups = layout.groups
    return {
        bucket: size
        for bucket, size in coded_up(layout).items()
        if groups[layout.buckets[bucket].group].dtype == torch.float32
    }
