"""A worker's own copy of the dataset: which shards of it are there, and batches of what leases name.

Batches are those that the coordinator would send: the same samples, collated leaf by leaf, with the same seeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

from w5xde_async.compute.batch import joined
from w5xde_async.data.config import ReadersConfig
from w5xde_async.data.reader import LeafReader, Read, with_local_data
from w5xde_async.data.shards import Fingerprints
from w5xde_async.errors import LocalError, MalformedFrame
from w5xde_async.job import Job
from w5xde_async.plan.sampler import seed_for
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Lease

logger = logging.getLogger(__name__)

#: A worker joins without its own data once it has waited so long for one sample: a disk or a server hangs.
_SILENT_S = 60.0
_READ_S = 5.0  # for a read to end that nobody needs any more


class OwnBatch(NamedTuple):
    """A block's batch, as a LEASE would have brought it."""

    structure: bytes
    packed: bool
    tensors: tuple[Tensor, ...]


class OwnData:
    """Reads what leases name. Belongs to the event loop; reading is done elsewhere."""

    def __init__(
        self, job: Job, where: str, config: ReadersConfig, *, reference: str, make_pool: Callable[[int, str], Executor]
    ) -> None:
        """``where``: as the job's ``local_data`` takes it. ``reference``: how other processes load the job. Blocks.

        Raises JobError where that cannot be opened.
        """
        self._job = with_local_data(job, where)
        self._reader = LeafReader(self._job, config, reference=reference or None, local=where, make_pool=make_pool)
        self._fingerprinting: asyncio.Future[Fingerprints] | None = None
        self._heard_at = 0.0  # on the loop's clock: the last of their samples was begun
        self._waited_for = False

    async def shards(self) -> tuple[int, ...]:
        """The fingerprint of each shard, 0 for one that cannot be read; none while a read hangs.

        Raises LocalError where that keeps this process from computing, or no process can be had that reads; JobError
        where one cannot load the job.
        """
        loop = asyncio.get_running_loop()

        def heard() -> None:
            self._heard_at = loop.time()

        if self._fingerprinting is None:
            heard()
            self._fingerprinting = self._reader.submit(self._reader.fingerprints, heard)
        self._waited_for = True
        try:
            while not self._fingerprinting.done():
                left_s = self._heard_at + _SILENT_S - loop.time()
                if left_s <= 0:
                    said = f"a read of --local-data has taken more than {_SILENT_S:.0f} s, as where a disk or a server "
                    if self._reader.reads_here:  # seeded: nothing else in this process may draw before it has ended
                        others = "" if self._reader.gathers else ", or with --loader-processes"  # which gather no rows
                        raise LocalError(
                            f"{said}hangs, and nothing can be computed in the process that waits for it: start the "
                            f"worker without --local-data{others}, and it is sent its data"
                        )
                    logger.warning(
                        "%shangs: this worker joins without its own data and is sent what it computes", said
                    )  # fmt: skip
                    return ()
                await asyncio.wait([self._fingerprinting], timeout=left_s)
        finally:
            self._waited_for = False
        return self._fingerprinting.result().shards

    @property
    def activity(self) -> str:
        """What a worker that joins waits for here, for a person; "" for nothing."""
        if not self._waited_for:
            return ""
        return f"reading its own data, {asyncio.get_running_loop().time() - self._heard_at:.0f} s for one sample"

    def check(self, lease: Lease, specs: Sequence[BufferSpec]) -> None:
        """Raises MalformedFrame where a lease does not name samples as it should."""
        wanted = [("int64", (sum(lease.samples),), "raw")]
        if lease.structure or lease.packed or [(spec.dtype, spec.shape, spec.codec) for spec in specs] != wanted:
            raise MalformedFrame("LEASE names its samples in another way")

    async def read(self, lease: Lease, indices: Tensor, seed: int) -> OwnBatch:
        """The batch of ``lease``, whose samples are ``indices`` (int64). ``seed``: the run's.

        Raises whatever reading raises.
        """
        named: np.ndarray[tuple[int], np.dtype[np.int64]] = indices.numpy()
        if len(named) and not 0 <= named.min() <= named.max() < len(self._job.dataset):
            raise IndexError(f"sample {int(named.max())} of {len(self._job.dataset)}")
        if self._reader.gathers:
            read = await self._reader.read(named, 0)
            return OwnBatch(read.structure, True, read.tensors)
        ends = list(accumulate(lease.samples))
        reading: list[asyncio.Future[Read]] = []
        for leaf, (end, count) in enumerate(zip(ends, lease.samples, strict=True), lease.start):
            reading.append(self._reader.read(named[end - count : end], seed_for("data", seed, lease.step, leaf)))
        reads = await asyncio.gather(*reading)
        tensors = tuple(tensor for read in reads for tensor in read.tensors)
        return OwnBatch(joined([read.structure for read in reads]), False, tensors)

    async def quiet(self) -> None:
        """Return when what is being read now has been read."""
        await self._reader.quiet()

    async def aclose(self) -> bool:
        """Wait for reads under way. False where one hangs, as on a network disk: its thread is left to itself."""
        try:
            async with asyncio.timeout(_READ_S):
                await self._reader.aclose()
        except TimeoutError:
            logger.warning("a read of --local-data hangs; nothing waits for it any more")
            return False
        return True
