"""Whether a worker's own copy of the dataset is the run's: by shards, each with a fingerprint.

A shard is a run of indices, one of at most 64 of equal size. Its fingerprint is a digest of how many samples the
dataset has, and of four samples of the shard: the first, the last and two whose places the shard's number says. Nobody
sends a sample for it. It finds other data, another order and a part that is missing, not a single sample that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from w5xde_async.compute.batch import flatten, on_host
from w5xde_async.errors import JobError, ReadersLost
from w5xde_async.job import Job
from w5xde_async.openmp import alone
from w5xde_async.params.flat import bytes_of
from w5xde_async.plan.sampler import seed_for
from w5xde_async.randomness import random_state, seed_all
from w5xde_async.users_code import users_code

_MOST_SHARDS = 64
#: A sample's batch, as it is flattened: of one whose index is given, read with the seed 0.
ReadsOne = Callable[[int], tuple[bytes, tuple[Tensor, ...]]]


class Fingerprints(NamedTuple):
    """Of each shard; 0 of one that cannot be read. ``sample_bytes``: of the largest sample that was read."""

    shards: tuple[int, ...]
    sample_bytes: int


def shard_samples(num_samples: int) -> int:
    """Samples of each shard but the last."""
    return -(-num_samples // min(num_samples, _MOST_SHARDS))


def shards_of(indices: NDArray[np.int64], num_samples: int) -> frozenset[int]:
    """The shards in which these indices lie."""
    return frozenset(np.unique(indices // shard_samples(num_samples)).tolist())


def fingerprints(job: Job, read: ReadsOne | None = None, *, heard: Callable[[], None] = lambda: None) -> Fingerprints:
    """Of a dataset that is read by index. Reads some hundred samples: by ``read``, where not this thread is to.

    Blocks; ``heard`` is called before each sample. Raises JobError and ReadersLost, where ``read`` does: that is no
    sample's fault.
    """
    total, size = len(job.dataset), shard_samples(len(job.dataset))
    found, largest = [], 0
    own = read or partial(_read, job)

    def one(index: int) -> tuple[bytes, tuple[Tensor, ...]]:
        heard()
        return own(index)

    for first in range(0, total, size):
        last = min(first + size, total) - 1
        drawn = [first + seed_for("fingerprint", total, first, nth) % (last - first + 1) for nth in range(2)]
        try:
            digest, nbytes = _digest(one, [first, last, *drawn], total)
        except (JobError, ReadersLost):
            raise
        except Exception:  # whatever reading raises: this shard is not there
            digest, nbytes = 0, 0
        found.append(digest)
        largest = max(largest, nbytes)
    return Fingerprints(tuple(found), largest)


def _read(job: Job, index: int) -> tuple[bytes, tuple[Tensor, ...]]:
    collate = job.collate or default_collate
    with random_state(), alone(), users_code():  # what a dataset draws is seeded by the leaf later
        seed_all(0)
        structure, tensors = flatten(collate([job.dataset[index]]))
    return structure, tuple(map(on_host, tensors))


def _digest(read: ReadsOne, indices: list[int], total: int) -> tuple[int, int]:
    digest, largest = hashlib.blake2b(str((total, indices)).encode(), digest_size=8), 0
    for index in indices:
        structure, tensors = read(index)
        digest.update(structure)
        for tensor in tensors:
            digest.update(bytes_of(tensor))
        largest = max(largest, len(structure) + sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    return max(1, int.from_bytes(digest.digest(), "big") >> 1), largest
