"""What workers are told of the results that they have sent: one verdict a lease, once the fate of all of it is known.

A bucket that was received *counts* when its step is committed with it in the sum. The buckets of one lease may have
different fates: where two workers compute the same block, or one leaves a part behind, each slot takes what comes
first. So a verdict waits until no bucket of its lease is in a sum that is not committed. If only some buckets counted,
it names them. A worker whose codec leaves something out then commits or takes back the residual of each bucket.

Verdicts outlive links. What was said, or would have been, while a worker's link was ending is said again when the
worker is back and names the lease in READY (``returned``). A verdict is forgotten once the worker has shown that it had
it: links keep their order, so it has read all that was sent before the version that it answers for. STALE is not kept:
it is what a worker hears of every lease that is not known. What counts is kept beside each step and checkpoint
(``Counted``): the next coordinator says it, where this one is killed before its worker has read it.

Pure bookkeeping: sends through ``post``, knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from w5xde_async.wire.messages import Verdict, VerdictCode

_MOST_GONE = 512  # workers that have left and whose verdicts are kept for their return
_MOST_COUNTED = 4096  # leases, of workers that never came back

_Fate = tuple[VerdictCode | int, str, tuple[int, ...]]  # code, reason and buckets of a verdict


class Counted:
    """Leases of one run that count, whole or in part, and whose workers may not know it yet. No lease of another term
    has the same number."""

    def __init__(self) -> None:
        self._leases: dict[int, tuple[int, tuple[int, ...]]] = {}  # since which version, and which buckets; (): all

    def note(self, lease: int, buckets: tuple[int, ...], version: int) -> None:
        """It counts in ``version``."""
        self._leases[lease] = version, buckets
        if len(self._leases) > _MOST_COUNTED:
            del self._leases[next(iter(self._leases))]

    def known(self, lease: int) -> None:
        """Its worker knows."""
        self._leases.pop(lease, None)

    def buckets_of(self, lease: int) -> tuple[int, ...] | None:
        """Which count, () for all; None where nothing is known."""
        return None if (found := self._leases.get(lease)) is None else found[1]

    def records(self, first: int, last: int) -> list[list[int]]:
        """Those that count since these versions, each with its buckets: for journal and checkpoints. In any thread."""
        known = list(self._leases.items())  # at once: the event loop goes on meanwhile
        return [[lease, *b] for lease, (version, b) in known if first <= version <= last]

    def clear(self) -> None:
        """Nothing is known."""
        self._leases.clear()

    def restore(self, records: Iterable[Iterable[int]], version: int) -> None:
        """What ``records`` has said at ``version``. Raises TypeError, ValueError for what it has not."""
        for record in records:
            lease, *buckets = map(int, record)
            self.note(lease, tuple(buckets), version)


@dataclass(slots=True)
class _Lease:
    """A lease of which something has come and which has no verdict yet."""

    worker: str
    unsettled: set[int] = field(default_factory=set)  # buckets in the sum of a step that is not committed
    counted: set[int] = field(default_factory=set)
    partly: bool = False  # something of it does not count, or may not
    waits: bool = False  # its block is whole by it, and is committed or discarded
    answer: tuple[VerdictCode, str] | None = None  # the worker is done with it: what it hears where nothing counted


class _Told(NamedTuple):
    verdict: Verdict
    version: int  # whoever answers for this version or a later one has had the verdict


class Verdicts:
    """Of one training. ``version`` is the one that was published last."""

    def __init__(
        self, post: Callable[[str, Verdict], None], *, lasting: bool, version: int, counted: Counted | None = None
    ) -> None:
        """``post`` sends to a worker that is here. ``lasting``: keep them for workers that come back, where it matters
        to them (their codec leaves something out). ``counted``: also of coordinators before this one."""
        self._post, self._lasting, self.version = post, lasting, version
        self._counted = Counted() if counted is None else counted
        self._leases: dict[int, _Lease] = {}
        self._told: dict[str, dict[int, _Told]] = {}  # worker -> lease -> what it may not have read

    # -- what comes ----------------------------------------------------------------------------------------

    def received(self, lease: int, worker: str, bucket: int) -> None:
        """A bucket has come and is in the sum of its block."""
        self._of(lease, worker).unsettled.add(bucket)

    def turned_away(self, lease: int, worker: str) -> None:
        """A bucket of an open lease came where another's is, or comes."""
        self._of(lease, worker).partly = True

    def finished(self, lease: int, worker: str) -> None:
        """The block, or the submission, is whole with this lease's DONE: it is committed or discarded later."""
        known = self._of(lease, worker)
        known.waits, known.answer = True, (VerdictCode.DUPLICATE, "another worker's results were taken")

    def answered(self, lease: int, worker: str, code: VerdictCode, reason: str) -> None:
        """The worker is done with a lease that finished nothing: ``code`` where none of its buckets counts."""
        known = self._leases.get(lease)
        if known is None or known.worker != worker:
            self._say(worker, Verdict((lease,), code, reason), self.version + 1)
            return
        if not known.waits:  # else it says so twice
            known.partly, known.answer = True, known.answer or (code, reason)
            self._settle((lease,), self.version + 1)

    def confirmed(self, worker: str, version: int) -> None:
        """A worker has answered for a version: it has read what was sent before that."""
        told = self._told.get(worker)
        while told and next(iter(told.values())).version <= version:
            lease = next(iter(told))
            del told[lease]
            self._counted.known(lease)

    # -- what becomes of it --------------------------------------------------------------------------------

    def dropped(self, lease: int, bucket: int) -> None:
        """A bucket that was received is not in the sum any more: others compute it again."""
        known = self._leases.get(lease)
        if known is not None:
            known.unsettled.discard(bucket)
            known.partly = True
            self._settle((lease,), self.version + 1)

    def decided(self, lease: int, code: VerdictCode, reason: str) -> None:
        """What was finished is discarded, or counts as a whole."""
        known = self._leases.get(lease)
        if known is not None:
            known.waits, known.answer = False, (code, reason)
            self._settle((lease,), self.version + 1)

    def published(self, version: int) -> None:
        """A version was made of results whose verdicts are said one by one."""
        self.version = version

    def committed(self, version: int) -> None:
        """A step was committed with all that was received for it. Before workers are told of the version."""
        self.version = version
        for known in self._leases.values():
            known.counted |= known.unsettled
            known.unsettled.clear()
            if known.waits and not known.partly:
                known.answer = (VerdictCode.APPLIED, "")
            known.waits = False
        self._settle(list(self._leases), version)

    def presume(self, worker: str) -> None:
        """The worker leaves before its step is committed: what is in the step's sums counts when that is.

        The worker is told so now. A coordinator that is killed before the commit breaks that word.
        """
        its = [lease for lease, known in self._leases.items() if known.worker == worker]
        for lease in its:
            known = self._leases[lease]
            known.counted |= known.unsettled
            known.unsettled.clear()
            known.waits = False
            if not known.partly:
                known.answer = (VerdictCode.APPLIED, "")
        self._settle(its, self.version + 1)

    # -- who comes and goes --------------------------------------------------------------------------------

    def owed(self, worker: str) -> bool:
        """Whether a verdict is still to come for something that this worker has sent."""
        return any(known.worker == worker for known in self._leases.values())

    def left(self, worker: str) -> None:
        """The worker is gone; what it has sent stays, and nothing more of it comes."""
        for lease, known in list(self._leases.items()):
            if known.worker == worker and known.answer is None:
                self.answered(lease, worker, VerdictCode.STALE, "its link had ended")

    def returned(self, worker: str, awaited: Iterable[int]) -> None:
        """A worker is here again, or for the first time, and lacks the verdicts on ``awaited``."""
        told, known_of = self._told.pop(worker, {}), list[tuple[str, int, _Fate]]()
        for lease in awaited:
            known = self._leases.get(lease)
            if known is not None and known.worker == worker:
                continue  # it comes
            if lease in told:
                verdict = told[lease].verdict
                fate: _Fate = verdict.code, verdict.reason, verdict.buckets
            elif (counts := self._counted.buckets_of(lease)) is not None:
                fate = VerdictCode.APPLIED, "", counts
            else:
                fate = VerdictCode.STALE, "nothing of it counted", ()
            known_of.append((worker, lease, fate))
        self._tell(known_of, self.version + 1)

    # -- inner ---------------------------------------------------------------------------------------------

    def _of(self, lease: int, worker: str) -> _Lease:
        known = self._leases.get(lease)
        if known is None:
            known = self._leases[lease] = _Lease(worker)
        return known

    def _settle(self, leases: Iterable[int], version: int) -> None:
        """Say what became of leases, of each once all of it is known."""
        settled = list[tuple[str, int, _Fate]]()
        for lease in leases:
            known = self._leases[lease]
            if known.waits or known.unsettled or known.answer is None:
                continue
            del self._leases[lease]
            code, reason = known.answer
            buckets: tuple[int, ...] = ()
            if known.counted:
                code, buckets = VerdictCode.APPLIED, tuple(sorted(known.counted)) if known.partly else ()
            settled.append((known.worker, lease, (code, reason, buckets)))
        self._tell(settled, version)

    def _tell(self, leases: Iterable[tuple[str, int, _Fate]], version: int) -> None:
        """A message for all of a worker's that have the same fate: its session ends if too many wait to be sent."""
        alike: dict[tuple[str, _Fate], list[int]] = {}
        for worker, lease, fate in leases:
            alike.setdefault((worker, fate), []).append(lease)
        for (worker, (code, reason, buckets)), same in alike.items():
            self._say(worker, Verdict(tuple(same), code, reason, buckets), version)

    def _say(self, worker: str, verdict: Verdict, version: int) -> None:
        self._post(worker, verdict)
        if self._lasting:
            told = self._told[worker] = self._told.pop(worker, {})
            for lease in verdict.leases:
                told.pop(lease, None)
                if verdict.code != VerdictCode.STALE:  # what a lease of which nothing is known is told, too: a worker
                    told[lease] = _Told(verdict, version)  # may say of any number that it is done with that lease
                if verdict.code == VerdictCode.APPLIED:
                    self._counted.note(lease, verdict.buckets, version)
            if len(self._told) > _MOST_GONE:
                del self._told[next(iter(self._told))]
