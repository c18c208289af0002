"""The leases of one connection, from their arrival to their answer.

A lease waits in the inbox for its version, then in the compute queue for the compute thread. Each is answered once: by
its results and DONE, by FAILED, or, where it was revoked before it was begun, by an empty DONE. A void one (its version
was replaced) is not answered: the coordinator has leased it again.

What had not left when the link ends is kept for the next one (``unsent``): where the same block is leased again, it is
not computed again, and of its results only those are sent that have not come.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import structs
from torch import Tensor

from w5xde_async.compute.engine import LeafError
from w5xde_async.errors import MalformedFrame, UsageError, headline
from w5xde_async.net.outbox import Outbox
from w5xde_async.params.flat import ResultVector
from w5xde_async.store.failpoints import failpoint
from w5xde_async.wire import messages
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.worker.connection.arrivals import Arrivals
from w5xde_async.worker.connection.compute_queue import ComputeQueue, ComputeThread
from w5xde_async.worker.connection.follower_queue import FollowerQueue
from w5xde_async.worker.connection.inbox import Inbox
from w5xde_async.worker.connection.metering import Meter
from w5xde_async.worker.connection.own_data import OwnData
from w5xde_async.worker.executors.executor import Computed, HeldLease, LeaseExecutor, Unsent
from w5xde_async.worker.executors.in_place import InPlaceExecutor
from w5xde_async.worker.executors.island import IslandExecutor
from w5xde_async.worker.hooks import LeaseFailed
from w5xde_async.worker.uplink.result_encoder import BucketResult

logger = logging.getLogger(__name__)

_MOST_NOT_BEGUN = 4096
_MOST_CAUSES = 64
_WASTED_SAID_S = 60.0  # what is compared, or overtaken, may be so every second
_MOST_UNSENT = 2  # answers kept for the next link: the oldest, which had begun to leave


class Leases:
    """Belongs to the event loop, ``is_revoked`` aside."""

    def __init__(
        self,
        executor: LeaseExecutor,
        thread: ComputeThread,
        outbox: Outbox,
        meter: Meter | None = None,
        *,
        on_failure: Callable[[BaseException], None],
        on_failed: Callable[[LeaseFailed], None] | None = None,
        unsent: Sequence[Unsent] = (),
        must_share: bool = False,
        own: OwnData | None = None,
        seed: int = 0,
    ) -> None:
        """``unsent``: what an earlier link has left. ``on_failure`` hears that the compute thread broke off.

        ``must_share``: what the executor shares has to be shared. ``own``: data of this worker itself, read in a run
        with ``seed``.
        """
        self._must_share = must_share
        self._sharing = executor if isinstance(executor, InPlaceExecutor) and executor.shares else None
        self._executor, self._thread, self._outbox, self._meter = executor, thread, outbox, meter
        self._queue: ComputeQueue | FollowerQueue
        if isinstance(executor, IslandExecutor) and executor.follows:
            self._queue = FollowerQueue(executor, thread, self, on_failure=on_failure)
        else:
            self._queue = ComputeQueue(executor, thread, self, on_failure=on_failure)
        follows = isinstance(self._queue, FollowerQueue)
        self._inbox = Inbox(executor.parameters, executor.capacity_bytes, exact=executor.exact, follows=follows)
        self._own = own
        self._arrivals = None if own is None else Arrivals(
            own, seed, lease=self._enter, submit=self._ask, ask=lambda unread: outbox.post(encode(unread)),
            room=self._inbox.has_room, not_begun=self.not_begun, on_failure=on_failure,
        )  # fmt: skip
        self._earlier = list(unsent)
        self._on_failed, self._failed_in_a_row = on_failed, 0
        self._told_of: set[str] = set()  # causes of failed leaves: each is logged once
        self._wasted: dict[int, tuple[float, int]] = {}  # by a verdict's code: when it was said, and leases since
        self._results: dict[int, list[BucketResult]] = {}  # of leases whose DONE was not given yet
        self._there: dict[int, frozenset[int]] = {}  # of leases of begun blocks: buckets that have come
        self._unsent: dict[int, Unsent] = {}  # whose DONE has not left
        self._failures: dict[int, Sequence[ResultVector]] = {}  # whose FAILED has not left
        self._revoked: set[int] = set()
        self._not_begun: set[int] = set()  # given back before they were begun; until their verdict is here
        self.num_done = self.num_stale = self.num_applied = 0
        self._splits = 0  # halvings of microbatches, in the last block
        self.shared = False  #: parameters come, and results go, in memory that the coordinator has too
        self._lent: dict[int, Sequence[ResultVector]] = {}  # by lease: what the coordinator may read still
        self.leaf_s = 0.0  #: of computing, in the last block; 0.0 before the first

    @property
    def activity(self) -> str:
        """What the compute thread is doing, for people."""
        return self._queue.activity

    @property
    def held_bytes(self) -> int:
        """Bytes of batches held."""
        return self._inbox.held_bytes + self._arriving_bytes

    @property
    def _arriving_bytes(self) -> int:
        return 0 if self._arrivals is None else self._arrivals.held_bytes

    @property
    def whole_version(self) -> int:
        """The newest version that has come whole, where nothing of a newer one has come; else -1. What lies in memory
        that the coordinator writes is not this worker's to keep."""
        return -1 if self.shared else self._inbox.whole

    @property
    def ended(self) -> bool:
        """Whether the compute thread is done with what it was given."""
        return self._queue.ended

    def stop(self) -> None:
        """Begin no further block."""
        self._queue.stop()

    async def aclose(self) -> list[Unsent]:
        """Wait for the block under way. What has not left, for the next link."""
        if self._arrivals is not None:
            await self._arrivals.aclose()
        await self._queue.aclose()
        if isinstance(self._executor, IslandExecutor) and self._queue.ended:
            await asyncio.get_running_loop().run_in_executor(self._thread.pool, self._executor.end)
        self._forget_earlier()
        while self._failures:
            self._release(self._failures.popitem()[1])
        self._drop([lease for lease in self._unsent if lease in self._revoked or not self._executor.repeatable])
        self._drop(list(self._unsent)[_MOST_UNSENT:])
        return list(self._unsent.values())

    def _release(self, vectors: Sequence[ResultVector]) -> None:
        full = not self._executor.has_room
        self._executor.release(vectors)
        if full:
            self._queue.put(())  # the compute thread is at it again

    def _drop(self, leases: Sequence[int]) -> None:
        """These will not leave any more: their memory is free."""
        for lease in leases:
            self._release(self._unsent.pop(lease).vectors)

    def _forget_earlier(self) -> None:
        earlier, self._earlier = self._earlier, []
        for unsent in earlier:
            self._release(unsent.vectors)

    # -- in ------------------------------------------------------------------------------------------------

    def place(self, message: messages.Message, specs: Sequence[BufferSpec]) -> Sequence[memoryview]:
        """Memory for a frame's buffers. Raises MalformedFrame for a frame that has none, OverMemoryLimit."""
        if type(message) is messages.Params:
            if self.shared:
                raise MalformedFrame("PARAMS came with bytes that lie in shared memory")
            if self._sharing is not None:
                self._declined(self._sharing)
            return self._inbox.place_params(message, specs)
        if type(message) is messages.Lease:
            if message.local:
                if self._own is None:
                    raise MalformedFrame("LEASE names samples, and this worker has no data of its own")
                self._own.check(message, specs)
            return self._inbox.place_lease(specs, self._arriving_bytes)
        raise MalformedFrame(f"{type(message).__name__} came with buffers")

    def params(self, message: messages.Params, specs: Sequence[BufferSpec]) -> None:
        """A bucket of parameters has come.

        Raises MalformedFrame where a version without buckets has buffers, or one with buckets has not one, and where
        it is to lie in memory that there is not.
        """
        if message.shared:
            known = len(self._executor.layout.buckets)
            if self._sharing is None or message.num_buckets or max(message.shared) >= known:
                raise MalformedFrame("PARAMS tells of shared memory that this worker has not")
            if not self.shared:
                logger.info("link=shm")
                self.shared = True
        if bool(specs) != bool(message.num_buckets):
            raise MalformedFrame(f"PARAMS of {message.num_buckets} buckets came with {len(specs)} buffers")
        version = self._inbox.params(message)
        if any(unsent.lease.version < message.version for unsent in self._earlier):
            self._forget_earlier()
        if version is not None:
            self._queue.put((version, *self._inbox.take()))

    def _declined(self, sharing: InPlaceExecutor) -> None:
        """The coordinator does not read what this worker has shared."""
        if self._must_share:
            raise UsageError("--link shm: the coordinator cannot open this worker's memory; its log says why")
        logger.info("link=tcp reason=the coordinator cannot open this worker's memory; its log says why")
        sharing.unshare()
        self._sharing = None

    def lease(self, message: messages.Lease) -> None:
        """A lease and its batch have come."""
        if self._arrivals is None:
            self._enter(message, self._inbox.batch())
        else:
            self._arrivals.lease(message, self._inbox.batch())

    def _enter(self, message: messages.Lease, batch: tuple[Tensor, ...]) -> None:
        self._inbox.lease(message, batch)
        if message.there and self._executor.repeatable:
            self._there[message.lease] = frozenset(message.there)
        for unsent in self._earlier:
            if unsent.answers(message) and self._inbox.revoke(message.lease):
                self._earlier.remove(unsent)
                self._send_again(message, unsent)
                return
        if not self._executor.has_room:  # what nobody may ever ask for keeps no lease from being computed
            self._forget_earlier()
        self._queue.put(self._inbox.take())

    def submit(self, message: messages.Submit) -> None:
        """The coordinator asks for results."""
        if not self._executor.admit(message):
            return
        if self._arrivals is None:
            self._ask(message)
        else:
            self._arrivals.submit(message)

    def _ask(self, message: messages.Submit) -> None:
        self._inbox.submit(message)
        self._queue.put(self._inbox.take())

    def verdict(self, message: messages.Verdict) -> None:
        """What became of results."""
        if message.code == messages.VerdictCode.APPLIED:
            self.num_applied += len(message.leases)
        else:
            wasted = sorted(set(message.leases) - self._not_begun)
            self.num_stale += len(wasted)
            if wasted:
                self._tell_wasted(wasted, message)
        self._not_begun.difference_update(message.leases)
        self._revoked.difference_update(message.leases)  # whose REVOKE has crossed our DONE
        for lease in message.leases if self._lent else ():
            self._release(self._lent.pop(lease, ()))
        if self._executor.admit(message):
            self._queue.put((message,))

    def _tell_wasted(self, leases: Sequence[int], verdict: messages.Verdict) -> None:
        """One line a minute for each code."""
        now, (said_at, untold) = self._thread.clock(), self._wasted.get(verdict.code, (-math.inf, 0))
        if now - said_at < _WASTED_SAID_S:
            self._wasted[verdict.code] = said_at, untold + len(leases)
            return
        self._wasted[verdict.code] = now, 0
        more = f" ({untold} more since that was said last)" if untold else ""
        logger.info("leases not applied leases=%s reason=%s%s", leases[:8], verdict.reason[:200], more)

    def revoke(self, message: messages.Revoke) -> None:
        """Nobody waits for this lease any more."""
        lease = message.lease
        if self._inbox.revoke(lease):
            self.not_begun(lease)
        elif self._arrivals is not None and self._arrivals.revoke(lease):
            pass  # it says so itself
        elif lease == self._queue.computing or self._queue.holds(lease):
            self._revoked.add(lease)  # otherwise its DONE is on its way

    def draining(self) -> None:
        """The coordinator lets the worker finish what it holds."""
        self._queue.activity = "draining"

    # -- out -----------------------------------------------------------------------------------------------

    def is_revoked(self, lease: int) -> bool:
        """Whether nobody waits for this lease any more. Any thread."""
        return lease in self._revoked

    def result(self, lease: int, result: BucketResult) -> None:
        """One bucket is complete."""
        if self._executor.repeatable:
            self._results.setdefault(lease, []).append(result)
        if lease not in self._revoked and result.bucket not in self._there.get(lease, ()):
            if self.shared and result.slot >= 0:
                failpoint("shared.result.before")
                told = messages.Result(lease, result.bucket, result.slot + 1)
                self._outbox.post(encode(told), sent=_told)
            else:
                self._outbox.post(encode(messages.Result(lease, result.bucket), result.buffers), sent=result.sent)
            if self._meter is not None:
                layout, sent = self._executor.layout, sum(spec.nbytes for spec, _ in result.buffers)
                nbytes = layout.result_nbytes(layout.result_buckets[result.bucket])
                self._meter.result(sent if isinstance(self._executor, IslandExecutor) else nbytes, sent)
        elif result.sent is not None:
            result.sent()

    def done(self, held: HeldLease, computed: Computed, wait_s: float) -> None:
        """The whole block is."""
        lease = held.message.lease
        self.leaf_s = computed.outcome.compute_s / len(held.message.samples)
        self._note_splits(computed.outcome.splits)
        self._inbox.end(lease)
        self._answer(held.message, computed, wait_s)
        self._revoked.discard(lease)  # it was computed for nothing; that it was tells that we are still here
        self.num_done += 1
        self._failed_in_a_row = 0

    def _note_splits(self, splits: int) -> None:
        """Tell a person where lack of memory cuts microbatches into other pieces than before."""
        if splits > self._splits:
            logger.warning(
                "memory lacks for larger parts of a microbatch pieces=%d: the same results but for their last bits, "
                "except that batch norm and dropout see the pieces; larger ones are tried again later",
                1 << splits,
            )
        elif splits < self._splits:
            logger.info("memory does for larger parts of a microbatch again pieces=%d", 1 << splits)
        self._splits = splits

    def submitted(self, asked: messages.Submit, computed: Computed) -> None:
        """What SUBMIT asked for."""
        self._answer(asked, computed, 0.0)

    def failed(self, lease: int, error: LeafError) -> None:
        """The job's code raised."""
        self._inbox.end(lease)
        self._revoked.discard(lease)
        cause = headline(error.traceback)
        if cause not in self._told_of and len(self._told_of) < _MOST_CAUSES:
            self._told_of.add(cause)
            logger.warning("leaf failed leaf=%d error=%s", error.leaf, cause)
        self._results.pop(lease, None)
        self._there.pop(lease, None)
        self._failed_in_a_row += 1
        failed = messages.Failed(lease, error.leaf, error.error, error.traceback)
        self._failures[lease] = error.vectors
        sent: Callable[[], None] = partial(self._failure_left, lease)
        if self._on_failed is not None:
            told = LeaseFailed(error=cause, in_a_row=self._failed_in_a_row, ever=self.num_done > 0)
            sent = partial(_both, sent, partial(self._on_failed, told))
        self._outbox.post(encode(failed), sent=sent)

    def not_begun(self, lease: int) -> None:
        """The lease was revoked in time."""
        self._inbox.end(lease)
        self._revoked.discard(lease)
        if len(self._not_begun) < _MOST_NOT_BEGUN:
            self._not_begun.add(lease)
        self._outbox.post(encode(messages.Done(lease, (), (), (), (), (), 0, 0.0, 0.0)))

    def void(self, lease: int) -> None:
        """The lease's version has been replaced."""
        self._inbox.end(lease)

    def _answer(self, message: messages.Lease | messages.Submit, computed: Computed, wait_s: float) -> None:
        lease = message.lease
        for result in computed.results:
            self.result(lease, result)
        outcome = computed.outcome
        done = messages.Done(
            lease,
            outcome.losses,
            outcome.metric_names,
            outcome.metrics,
            outcome.untouched,
            outcome.absent,
            outcome.splits,
            outcome.compute_s,
            wait_s,
            computed.version,
            computed.encode_s,
            computed.raw_bytes,
            outcome.drew,
        )
        self._there.pop(lease, None)
        results = self._results.pop(lease, ())
        if isinstance(message, messages.Lease):
            self._post_done(message, Unsent(message, results, done, computed.vectors))
        else:
            self._outbox.post(encode(done), sent=partial(self._give_back, lease, computed.vectors))
        self._outbox.flush()

    def _post_done(self, message: messages.Lease, unsent: Unsent) -> None:
        """A lease's DONE, after its results: it is unsent until then."""
        self._unsent[message.lease] = unsent
        sent: Callable[[], None] = partial(self._left, message.lease)
        if self._meter is not None:
            sent = partial(_both, sent, self._meter.answered(message, unsent.done))
        self._outbox.post(encode(unsent.done), sent=sent)

    def _send_again(self, message: messages.Lease, unsent: Unsent) -> None:
        """The answer to an earlier lease of the same block is this one's too."""
        for result in unsent.results:
            self.result(message.lease, result._replace(slot=-1))  # it lies in another link's memory
        self._results.pop(message.lease, None)
        self._there.pop(message.lease, None)
        done = structs.replace(unsent.done, lease=message.lease)
        self._post_done(message, Unsent(message, unsent.results, done, unsent.vectors))

    def _left(self, lease: int) -> None:
        """A lease's whole answer has left."""
        if lease in self._unsent:
            self._give_back(lease, self._unsent.pop(lease).vectors)

    def _failure_left(self, lease: int) -> None:
        self._give_back(lease, self._failures.pop(lease, ()))

    def _give_back(self, lease: int, vectors: Sequence[ResultVector]) -> None:
        """An answer has left: its memory is free, or will be when the coordinator has said what became of it."""
        if self.shared:
            self._lent[lease] = vectors
            failpoint("shared.answer.after")
        else:
            self._release(vectors)


def _told() -> None:
    """A RESULT without bytes has left."""
    failpoint("shared.result.after")


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()
