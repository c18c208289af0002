"""What a worker says of its work, held against what the coordinator knows: before anything is done with it.

The wire has refused what no worker may say (``wire.messages``: types, finite durations, lengths of texts). Here is what
depends on the run: a DONE has as many values as its lease has leaves, names what there is, and took no longer than the
coordinator saw pass. Who is outside of that ends its own session, by a RemoteError, before any state has changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from msgspec.structs import replace

from w5xde_async.errors import RemoteError
from w5xde_async.params.layout import Layout
from w5xde_async.wire.messages import MOST_METRICS, Done

_MOST_NAMES = 16 * MOST_METRICS  # of metrics in one run, whoever says them
_LARGEST = (2 - 2**-23) * 2.0**127  # that is finite in float32
_MOST_WORKERS = 4096  # whose metrics are remembered


def seen(done: Done, elapsed_s: float, member_s: float, raw_bytes: int) -> Done:
    """``done`` with no more time and bytes in it than can be.

    ``elapsed_s`` since the lease was given, ``member_s`` since its worker joined; a worker that says less is believed:
    only it knows how long its data and its results were on their way. ``raw_bytes``: of a whole result.
    """
    elapsed_s, member_s = max(elapsed_s, 0.0), max(member_s, 0.0)
    if done.compute_s <= elapsed_s and done.wait_s <= member_s and not done.encode_s and not done.raw_bytes:
        return done
    return replace(
        done, compute_s=min(done.compute_s, elapsed_s), wait_s=min(done.wait_s, member_s),
        encode_s=min(done.encode_s, elapsed_s), raw_bytes=min(done.raw_bytes, raw_bytes),
    )  # fmt: skip


class Claims:
    """The checks of one run, and the names of the metrics that its workers report."""

    def __init__(self, layout: Layout) -> None:
        self._buckets, self._entries = len(layout.result_buckets), len(layout.entries)
        self._vector_bytes = layout.vector_bytes
        self._names: set[str] = set()  # at most _MOST_NAMES
        self._names_of: dict[str, set[str]] = {}  # worker -> what it has reported, at most MOST_METRICS
        self._last: tuple[str, ...] = ()

    def check(self, who: str, done: Done, leaves: int, *, elapsed_s: float, member_s: float) -> Done:
        """DONE as it may be used, of a lease of ``leaves`` leaves. Raises RemoteError where it cannot be true.

        ``who``: the identity that the worker has proved. A metric of a name too many is left out.
        """
        if len(done.losses) != leaves:
            raise RemoteError(f"it reported {len(done.losses)} losses for lease {done.lease} of {leaves} leaves")
        if large := [loss for loss in done.losses if _LARGEST < abs(loss) < math.inf]:
            raise RemoteError(f"it reported a loss of {max(large, key=abs):.3g}, and losses are float32")
        self.check_lists(done)
        if len(done.metrics) != leaves * len(done.metric_names):
            raise RemoteError(f"it reported {len(done.metrics)} metrics for {leaves} leaves")
        if done.metric_names != self._last:
            done = self._known_metrics(who, done, leaves)
        return seen(done, elapsed_s, member_s, self._vector_bytes)

    def check_lists(self, done: Done) -> None:
        """Buckets and parameters that there are, each once."""
        self._check_range(done.absent, self._buckets, "bucket", "absent")
        self._check_range(done.untouched, self._entries, "parameter", "untouched")

    @staticmethod
    def _check_range(numbers: Collection[int], count: int, what: str, said: str) -> None:
        if not numbers:
            return
        if max(numbers) >= count:
            raise RemoteError(f"it reported {what} {max(numbers)} of {count} as {said}")
        if len(set(numbers)) != len(numbers):
            raise RemoteError(f"it reported a {what} twice as {said}")

    def _known_metrics(self, who: str, done: Done, leaves: int) -> Done:
        names = done.metric_names
        own = self._names_of.setdefault(who, set())
        if len(self._names_of) > _MOST_WORKERS:
            del self._names_of[next(iter(self._names_of))]
        own.update([name for name in names if name not in own][: MOST_METRICS - len(own)])
        room = _MOST_NAMES - len(self._names)
        self._names.update([name for name in names if name in own and name not in self._names][:room])
        kept = [index for index, name in enumerate(names) if name in own and name in self._names]
        if len(kept) == len(names):
            self._last = names
            return done
        metrics = tuple(done.metrics[leaf * len(names) + index] for leaf in range(leaves) for index in kept)
        return replace(done, metric_names=tuple(names[index] for index in kept), metrics=metrics)
