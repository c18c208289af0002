"""What a coordinator holds at most."""

from __future__ import annotations

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.journaling import MOST_AHEAD
from w5xde_async.coordinator.referee import Referee

__all__ = ["memory_bound_bytes"]


def memory_bound_bytes(vector_bytes: int, state_bytes: int, num_leaves: int, config: CoordinatorConfig) -> int:
    """Most bytes that a coordinator holds for its workers, beside model, optimizer and the samples of two steps.

    Result vectors: one for each open block and, between them, at most log2(leaves) merged ones, never more than there
    are leaves, and four spare; those of audits and of the referee, which while it computes also holds a model; for each
    connection 256 KiB of read-ahead and one scratch bucket. Under other rules than the synchronous one: the results
    that workers have under way, and what the rule keeps; with codecs what is published. With a journal also the vectors
    of the steps that are not durable yet.
    """
    open_blocks = min(config.max_workers * config.pacing.leases_ahead, num_leaves)
    vectors = min(num_leaves, (open_blocks + 1) * max(1, num_leaves.bit_length())) + 4
    replica_bytes = 0
    if config.norm_gate or config.audit_fraction:
        vectors += config.audit.most_open + Referee.NUM_VECTORS
        replica_bytes = 2 * state_bytes
    if config.durability == "journal":
        vectors += MOST_AHEAD
    if not config.update.plain:  # what is published, one copy of it being sent, and deltas that wait for the slowest
        replica_bytes += 6 * state_bytes
    if config.update.rule != "sync":
        # Each worker's results under way, encoded (never more than they are raw), one decoded, and the rule's own.
        vectors = config.max_workers * config.pacing.leases_ahead + 4
        vectors += 64 if config.update.average not in ("mean", "radial") else 3
        if config.update.compensation:  # the versions under lease
            vectors += 2 + (16 if config.update.max_staleness is None else config.update.max_staleness)
    per_link = (256 << 10) + min(config.bucket_bytes, max(vector_bytes, state_bytes))
    return vectors * vector_bytes + replica_bytes + config.max_workers * per_link
