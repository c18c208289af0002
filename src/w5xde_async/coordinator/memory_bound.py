"""What a coordinator holds at most."""

from __future__ import annotations

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability.journal_writer import MOST_AHEAD
from w5xde_async.hub.config import NetworkConfig
from w5xde_async.net.stock import BUFFERED_BYTES

#: Result vectors of a recomputation under way: the most that an engine holds for a few leaves.
_RECOMPUTATION_VECTORS = 3
EXTRA_LINKS = 64  #: beside the workers': of strangers, and of who comes back before its old link is found


def most_held(config: NetworkConfig) -> int:
    """Finished blocks that may wait for verification before nothing more of their step is leased."""
    return config.max_workers * config.pacing.leases_ahead


def most_vectors(num_leaves: int, config: CoordinatorConfig) -> int:
    """Most result vectors that are out under the synchronous rule, four spare, and one to divide a step's sum in.

    One for each block that is open or held, and, between those, at most log2(leaves) merged ones; never more than there
    are leaves. Audits have their own.
    """
    blocks = config.max_workers * config.pacing.leases_ahead
    judged = config.compares
    blocks = min(blocks + (most_held(config) if judged else 0), num_leaves)
    merged = min(num_leaves, (blocks + 1) * max(1, num_leaves.bit_length()))
    return merged + 5 + (config.audit.most_open if judged else 0)


def memory_bound_bytes(vector_bytes: int, state_bytes: int, num_leaves: int, config: CoordinatorConfig) -> int:
    """Most bytes that a coordinator holds for its workers, beside model, optimizer and samples that wait for a lease.

    Those samples belong to

    - two steps under the synchronous rule,
    - as many steps as there are leases, plus one, under the others.

    Result vectors (``most_vectors``), and those of a recomputation, which meanwhile also holds a model; for each
    connection, of workers and of as many that have not been let in, 256 KiB of read-ahead and the buffers of a pair of
    asyncio's own; for each worker's one scratch bucket, and what is queued for it (``credit_bytes``; the lease that
    goes beyond is among the samples). An island is one worker with a link for each rank, and all that for each of them:
    here a worker has one link. Under other rules than the synchronous one: the results that workers have under way, and
    what the rule keeps; with codecs what is published. With a journal also the vectors of the
    steps that are not durable yet.
    """
    vectors = most_vectors(num_leaves, config) + _RECOMPUTATION_VECTORS
    replica_bytes = 2 * state_bytes
    if config.durability == "journal":
        vectors += MOST_AHEAD
    if config.update.rule != "sync":
        # Each worker's results under way, encoded (never more than they are raw), one decoded, and the rule's own.
        # Under rules of local steps leases have no results, and a fragment is asked for again when it has come.
        results = 1 if config.update.local else config.pacing.leases_ahead
        vectors, replica_bytes = config.max_workers * results + 4, 0
        vectors += 64 if config.update.average == "median" else 3
    if not config.update.plain:  # what is published, one copy of it being sent, and deltas that wait for the slowest
        replica_bytes += 6 * state_bytes
    per_link = 2 * ((256 << 10) + BUFFERED_BYTES) + min(config.bucket_bytes, max(vector_bytes, state_bytes))
    links_bytes = (config.max_workers + EXTRA_LINKS) * per_link + config.max_workers * config.credit_bytes
    return vectors * vector_bytes + replica_bytes + links_bytes
