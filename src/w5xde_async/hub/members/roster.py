"""Who is here: sessions joining, leaving and being dropped, whatever the update rule makes of their work.

``Hosting`` is the part of ``session.Host`` that every kind of training shares. What a lease is and what becomes of a
result is for its subclasses: ``training`` (the synchronous tree) and ``rounds`` (results that count as they come).
Everything here runs on the event loop's thread and never blocks.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import NamedTuple

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability.journal_writer import JournalWriter
from w5xde_async.coordinator.parameters.delta_publisher import Downlink
from w5xde_async.data.loader import Loader
from w5xde_async.errors import RefusalCode, RemoteError, W5xdeError
from w5xde_async.hub.members.contributions import Contributions
from w5xde_async.hub.members.liveness import Held, Leases, Liveness
from w5xde_async.hub.members.program_server import ProgramServer
from w5xde_async.hub.members.session import Session, quarantined
from w5xde_async.hub.work.block_store import Destination
from w5xde_async.hub.work.verdicts import Verdicts
from w5xde_async.params.layout import Layout
from w5xde_async.plan.membership import Member, Membership, Standing
from w5xde_async.plan.pacing import Pacing
from w5xde_async.telemetry.events import Bus, Waiting, Warned, WorkerJoined, WorkerLeft, WorkerQuarantined
from w5xde_async.wire.frame import Buffer, BufferSpec
from w5xde_async.wire.handshake import State
from w5xde_async.wire.messages import (
    ByeCode,
    Done,
    Drain,
    Failed,
    ProgramRequest,
    Ready,
    Refusal,
    Result,
    Retune,
    Revoke,
    Verdict,
    Welcome,
)

__all__ = ["Commit", "Counts", "Hosting", "NonFinite"]

#: A worker whose link has ended tries again every 2.5 s at most, once it has found that.
_RETURN_S = 5.0
_MOST_LOST = 512
_MOST_AWAITED = 1 << 16  # leases that a worker may ask about
_MOST_JOINING = 2  # links of one worker, beside a newer one, that build its model
_SHARE_HINT = "one name or address may have a quarter of --max-workers, or 8; raise it at the coordinator"


def _is_address(host: str) -> bool:
    """An address off this machine, to which what we say has come back: so much a stranger cannot make up."""
    try:
        return not ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


class NonFinite(W5xdeError):
    """Too many steps in a row had a non-finite gradient. Fields: ``step``, ``count``."""

    def __init__(self, step: int, count: int) -> None:
        self.step, self.count = step, count
        super().__init__(
            f"the gradient was not finite in {count} steps in a row, when the run was at step {step}: "
            "training diverges; lower the learning rate, set gradient_clip_val, or look at the data"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One commit, for whoever follows the run: how far it is now, and was before, in steps of the sampler."""

    step: int
    before: int

    def passes(self, every: int) -> bool:
        """Whether a multiple of ``every`` steps lies in it."""
        return self.step // every > self.before // every


class Counts(NamedTuple):
    """What became of the work so far. ``leaves`` were used, ``leaves_wasted`` were not; the rest counts leases."""

    leaves: int
    leaves_wasted: int
    stale: int
    duplicate: int
    rejected: int
    backed_up: int

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(*map(sum, zip(self, other, strict=True)))


class Hosting(ABC):
    """The members of one run, from ``admit`` to ``left``."""

    def __init__(
        self,
        *,
        ledger: Leases,
        layout: Layout,
        loader: Loader,
        welcome: Welcome,
        welcome_buffers: Sequence[tuple[BufferSpec, Buffer]] = (),
        config: CoordinatorConfig,
        bus: Bus,
        total_steps: int,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self.layout, self.loader, self.config, self.bus = layout, loader, config, bus
        self.total_steps = total_steps
        self.samples_applied = 0
        self.last_loss: float | None = None
        self.sessions: dict[str, Session] = {}
        self._joining: dict[Session, float] = {}  # let in, building their model -> when they last said something
        self._admitted: dict[Session, str] = {}  # those two and their ids
        self._ids: Counter[str] = Counter()
        self._ids_at: dict[tuple[str, str], Counter[str]] = {}  # (host or name, identity) -> the ids of its links
        self.membership = Membership(config.silence_s, self._takes_work)
        self.pacing = Pacing(config.pacing)
        self.on_commit: Callable[[Commit], None] = lambda commit: None
        #: A worker is put out: the name it has proved or else its id, and why.
        self.on_quarantine: Callable[[str, str], None] = lambda name, reason: None
        self._put_out_ids: set[str] = set()
        self.journaling: JournalWriter | None = None
        self.programs = ProgramServer(layout, config, bus)
        self.contributions = Contributions()
        self.downlink: Downlink | None = None  # where versions travel by a codec, or count when they come
        self.former = Counts(0, 0, 0, 0, 0, 0)  #: of the phases before, as ``contributions`` are
        self._welcome, self._welcome_buffers = welcome, list(welcome_buffers)
        self._layout_text = layout.describe()
        self._wake = asyncio.Event()
        self._liveness = Liveness(
            config=config, sessions=self.sessions, joining=self._joining, membership=self.membership,
            ledger=ledger, revoke=self._revoke, warn=self._warn, overran=self.pacing.overran,
        )  # fmt: skip
        self._leases = ledger
        self._failure: BaseException | None = None
        self._stopping = False
        self._stop_at = 0.0
        self._last_word: Refusal | None = None  # the run has ended for its workers: what those hear that come now
        self._lost: dict[str, float] = {}  # workers whose link ended without their goodbye, not back yet -> when
        self._returned = asyncio.Event()
        self._devices: set[tuple[str, int]] = set()
        self._bytes_before = (0, 0)
        self._retuned: Retune | None = None
        self._keeps_residuals = config.update.feedback and not config.update.uplink_codec.exact
        self.verdicts = Verdicts(self._tell, lasting=self._keeps_residuals, version=0)
        loader.on_ready = self._data_came
        loader.on_error = self.fail

    @property
    def joining(self) -> Collection[Session]:
        """Workers that were let in and build their model."""
        return self._joining.keys()

    # -- what the kinds of training differ in --------------------------------------------------------------

    @property
    @abstractmethod
    def progress(self) -> int:
        """Steps of the sampler that are applied: the run's end is ``total_steps``."""

    @abstractmethod
    def counts(self) -> Counts:
        """What became of the work of this phase so far."""

    def totals(self) -> Counts:
        """What became of the work so far."""
        return self.former.plus(self.counts())

    @abstractmethod
    async def run(self) -> None:
        """Train until the end, a stop or a failure (which is raised)."""

    @abstractmethod
    def _schedule(self, only: str | None = None) -> None:
        """Give work to whoever has room for it (``only``: the one worker of whom that may be new)."""

    @abstractmethod
    def _data_came(self) -> None:
        """The loader has read something: leases that waited for it can be sent."""

    def _takes_work(self, worker: str, does: bool) -> None:
        """A member takes work from now on, or no more."""
        self.pacing.takes_work(worker, does)

    @abstractmethod
    def _introduce(self, session: Session) -> None:
        """A worker has become a member: it lacks the parameters."""

    @abstractmethod
    def _take_back(self, session: Session) -> int:
        """A member is gone: its leases are for others. How many there were."""

    @abstractmethod
    def place(self, session: Session, result: Result, spec: BufferSpec) -> Destination:
        """See ``session.Host``."""

    @abstractmethod
    def arrived(self, session: Session, result: Result) -> None:
        """A placed result is complete."""

    @abstractmethod
    def done(self, session: Session, done: Done) -> None:
        """A lease is done."""

    @abstractmethod
    def failed(self, session: Session, failed: Failed) -> None:
        """The job raised on a leaf of a lease."""

    @abstractmethod
    def draining(self, session: Session, drain: Drain) -> None:
        """A worker wants to leave."""

    # -- the run -------------------------------------------------------------------------------------------

    def say_goodbye(self, code: ByeCode, reason: str) -> None:
        """Send every worker the last message, those that are building their model too, and those that come later."""
        codes = {ByeCode.FINISHED: RefusalCode.RUN_FINISHED, ByeCode.FAILED: RefusalCode.RUN_FAILED}
        self._last_word = Refusal(codes.get(code, RefusalCode.SHUTTING_DOWN), reason, "")
        for session in (*self.sessions.values(), *self._joining):
            session.outbox.supersede(1 << 62)  # nobody computes with these parameters any more
            session.say_goodbye(code, reason)

    async def wait_for_lost(self) -> None:
        """Return when those whose link has just ended are back for the last word, or have had the time for it.

        Else a worker that loses its link right before the end would look for the coordinator until its patience ends.
        """
        while (left_s := max(self._lost.values(), default=-math.inf) + _RETURN_S - self.clock()) > 0:
            self._returned.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._returned.wait()

    def stop(self) -> None:
        """End after the step under way, or after ``grace_s`` where that takes longer."""
        if not self._stopping:
            self._stopping = True
            self._stop_at = self.clock() + self.config.grace_s
            for session in self.sessions.values():
                session.post(Drain("the coordinator stops", self.config.grace_s))
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """End now; ``run`` raises ``error``."""
        self._failure = self._failure or error
        self._wake.set()

    def tick(self, now: float) -> None:
        """Revoke what is overdue, drop who is silent, tell the others that we live. Called every second or so."""
        self._liveness.tick(now, f"step {self.progress} of {self.total_steps}")
        self._schedule()

    def _links_of(self, principal: str) -> list[Session]:
        """Every link of one who has proved who he is, members' and others'."""
        return [one for one in (*self.sessions.values(), *self._joining) if one.principal == principal]

    def drop(self, name: str, reason: str) -> None:
        """End the links of a worker, by the name it has proved or by its id."""
        for session in (*self.sessions.values(), *self._joining):
            if name in (session.identity, session.worker_id):
                session.abort(reason)

    def _put_out(self, worker_id: str, session: Session | None, reason: str) -> bool:
        """A worker's result was proven wrong: end its link and keep it out. False where that is not wanted.

        ``session``: its own, where it may have left already.
        """
        if worker_id in self._put_out_ids:
            return True
        session = self.sessions.get(worker_id) or session
        name, identity = (worker_id, "") if session is None else (session.name, session.identity)
        wanted = self.config.quarantine
        self.bus.publish(WorkerQuarantined(worker_id=worker_id, name=name, reason=reason, put_out=wanted))
        if not wanted:
            return False
        self._put_out_ids.add(worker_id)
        self.on_quarantine(identity or worker_id, reason)
        for other in self._links_of(identity) if identity else ():
            if other is not session:  # the same name on another link: what it says is worth no more
                if other.worker_id in self.sessions:
                    self._put_out_ids.add(other.worker_id)
                other.abort(f"put out of the run: {reason}")
        member = self.membership.members.get(worker_id)
        if session is None or self.sessions.get(worker_id) is not session or member is None:
            return True
        if session.receiving is not None or session.state is not State.READY:
            session.abort(f"put out of the run: {reason}")  # it is told why when it comes back
        else:
            member.standing = Standing.OUT
            self._take_back(session)
            session.refuse(quarantined(reason))
            asyncio.get_running_loop().call_later(1.0, session.abort, f"put out of the run: {reason}")
        return True

    def _traffic(self) -> tuple[int, int]:
        """Bytes sent and received since the last call."""
        sent, received = self.contributions.traffic(self.sessions.values())
        before, self._bytes_before = self._bytes_before, (sent, received)
        return sent - before[0], received - before[1]

    def retune(self, codec: str, downlink: str, inner_steps: int) -> None:
        """From now on workers write by another codec, and versions travel by another."""
        self._retuned = Retune(codec, downlink)
        for session in self.sessions.values():
            session.post(self._retuned)
        self._welcome = replace(self._welcome, codec=codec, downlink=downlink)

    def _tell(self, worker: str, verdict: Verdict) -> None:
        session = self.sessions.get(worker)
        if session is not None:
            session.post(verdict)

    def _present(self) -> list[str]:
        """Workers that take work."""
        return [member.worker_id for member in self.membership.ready()]

    def _warn(self, text: str) -> None:
        self.bus.publish(Warned(text=text))

    def _has_credit(self, worker: str) -> bool:
        """A worker that does not take the leases it was sent gets no more of them."""
        return self.sessions[worker].outbox.lease_bytes <= self.config.credit_bytes

    def _revoke(self, grant: Held, reason: str) -> None:
        session = self.sessions.get(grant.worker)
        if session is not None and self._was_sent(grant) and not session.outbox.withdraw(grant.lease):
            session.post(Revoke(grant.lease, reason))
            member = self.membership.members.get(grant.worker)
            if member is not None:
                member.owes.add(grant.lease)

    def _was_sent(self, grant: Held) -> bool:
        """Whether a lease has been given to the worker's session; else it waits for its data."""
        return True

    def _answered(self, session: Session, lease: int) -> Member | None:
        """A worker has said what became of a lease: if that was the last that it owed, it is there again."""
        member = self.membership.members.get(session.worker_id)
        if member is not None:
            member.owes.discard(lease)
            if member.standing is Standing.LATE and not member.owes:
                member.standing = Standing.READY
        return member

    def _note_coding(self, session: Session, member: Member, done: Done) -> None:
        """What a worker says of its codec, and what has come from it: every bucket on both sides, coded or not."""
        member.encode_s = min(member.encode_s + done.encode_s, self.clock() - member.joined_at)
        member.encoded_bytes = session.result_bytes
        member.raw_bytes = (
            session.result_bytes
            if self.config.update.plain
            else member.raw_bytes + min(done.raw_bytes, self.layout.vector_bytes)
        )

    def downlink_bytes(self) -> tuple[int, int]:
        """Bytes of the versions that a codec wrote, before and after it, each once however many took it."""
        raw, encoded = self.contributions.downlink_bytes
        made = self.downlink
        return (raw, encoded) if made is None else (raw + made.raw_bytes, encoded + made.encoded_bytes)

    # -- session.Host --------------------------------------------------------------------------------------

    def admit(self, session: Session) -> Refusal | None:
        """A worker has proved itself; None lets it in."""
        if self._last_word is not None:
            self._is_back(session.worker_id)
            return self._last_word
        if self._stopping or self._failure is not None:
            return Refusal(RefusalCode.SHUTTING_DOWN, "the coordinator is stopping", "it may come back; try again")
        others = len(self._ids) - (session.worker_id in self._ids)
        if others >= self.config.max_workers:
            return Refusal(RefusalCode.RUN_FULL, f"the run has its {self.config.max_workers} workers", "")
        share, where = self.config.share, session.place[0]
        if session.identity or _is_address(where):
            same = self._ids_at.get((where, session.identity), ())
            if len(same) - (session.worker_id in same) >= share:
                return Refusal(RefusalCode.RUN_FULL, f"the run has its {share} workers of {where}", _SHARE_HINT)
        for older in [one for one in self._joining if one.worker_id == session.worker_id][:-_MOST_JOINING]:
            older.abort("the same worker has connected anew")
        self._admitted[session] = session.worker_id
        self._ids[session.worker_id] += 1
        self._ids_at.setdefault((where, session.identity), Counter())[session.worker_id] += 1
        self._joining[session] = session.admitted_at = self.clock()
        session.taken = (session.link.bytes_sent, session.admitted_at)
        return None

    def welcome(self) -> tuple[Welcome, list[tuple[BufferSpec, Buffer]]]:
        """The run, for a new worker."""
        text = self._layout_text
        layout = (BufferSpec("layout", "uint8", (len(text),), "raw", len(text)), text)
        return self._welcome, [layout, *self._welcome_buffers]

    async def make_room(self, session: Session) -> None:
        """Return when no other connection of the same worker is left."""
        while (older := self.sessions.get(session.worker_id)) is not None:
            if older.incarnation > session.incarnation:
                raise RemoteError("the same worker has connected anew since")
            # Its leases may be given out again only once nothing writes into their memory any more.
            older.abort("the same worker has connected anew")
            await older.ended.wait()

    def authorizes(self, session: Session, lease: int) -> bool:
        """Whether the worker holds that lease."""
        grant = self._leases.get(lease)
        return grant is not None and grant.worker == session.worker_id

    def program(self, session: Session, request: ProgramRequest) -> None:
        """The worker asks for the program; it is answered now or later."""
        self.programs.ask(session, request)

    def joined(self, session: Session, ready: Ready) -> Refusal | None:
        """The worker has built its model; None makes it a member."""
        self._is_back(session.worker_id)
        if self._last_word is not None:
            return self._last_word
        if ready.fingerprint != self.layout.fingerprint:
            return Refusal(
                RefusalCode.MODEL_MISMATCH,
                "the worker's model differs from the coordinator's",
                "use the same job file on both sides",
            )
        now = self.clock()
        self._joining.pop(session, None)
        self.membership.join(
            Member(
                worker_id=session.worker_id, name=session.name, peer=session.link.peer, device=ready.device,
                threads=ready.threads, incarnation=session.incarnation, joined_at=now, last_seen=now,
            )
        )  # fmt: skip
        self.sessions[session.worker_id] = session
        self._compare_devices(ready)
        self.bus.publish(
            WorkerJoined(
                worker_id=session.worker_id, name=session.name, peer=session.link.peer, device=ready.device,
                threads=ready.threads, num_workers=len(self.sessions),
            )
        )  # fmt: skip
        self._put_out_ids.discard(session.worker_id)  # somebody has let it in again
        if self._retuned is not None:  # it may have been welcomed before
            session.post(self._retuned)
        self._introduce(session)
        self.verdicts.returned(session.worker_id, ready.awaited[:_MOST_AWAITED])
        self._schedule()
        return None

    def _is_back(self, worker: str) -> None:
        if self._lost.pop(worker, None) is not None:
            self._returned.set()

    def _compare_devices(self, ready: Ready) -> None:
        device = (ready.device_name, ready.threads)
        if device in self._devices or len(self._devices) == 2:
            return  # nothing new, or it was said
        self._devices.add(device)
        if len(self._devices) == 2:
            listed = " and ".join(f"{name} with {threads} thread(s)" for name, threads in sorted(self._devices))
            self._warn(
                f"workers differ ({listed}): the run stays exact in what it counts, but its last bits may depend on "
                "which of them computed what; --threads makes them alike"
            )

    def left(self, session: Session, reason: str, *, clean: bool) -> None:
        """A session has ended, whoever ended it."""
        self.contributions.close(session)
        self._forget(session)
        if (admitted := self._admitted.pop(session, None)) is not None:
            home = (session.place[0], session.identity)
            for ids in (self._ids, self._ids_at[home]):
                ids[admitted] -= 1
                if not ids[admitted]:
                    del ids[admitted]
            if not self._ids_at[home]:
                del self._ids_at[home]
        self._joining.pop(session, None)
        member = self.membership.leave(session.worker_id, session.incarnation)
        if self.sessions.get(session.worker_id) is not session:
            if member is None and not clean and session.worker_id:
                self._warn(f"{session.name or session.link.peer} did not join: {reason}")
            return
        del self.sessions[session.worker_id]
        if session.state is not State.CLOSED and session.worker_id not in self._put_out_ids:
            self._lost.pop(session.worker_id, None)
            self._lost[session.worker_id] = self.clock()
            if len(self._lost) > _MOST_LOST:
                del self._lost[next(iter(self._lost))]
        if not clean and self._keeps_residuals and member is not None and member.leaves:
            self.contributions.residuals_lost += 1
            self._warn(
                f"{session.name} took with it what its codec had left out, unless it comes back "
                f"({self.contributions.residuals_lost} so far)"
            )
        returned = self._take_back(session)
        self.verdicts.left(session.worker_id)
        if member is not None:
            self.contributions.remember(session, member, self.clock())
        self.bus.publish(
            WorkerLeft(
                worker_id=session.worker_id, name=session.name, reason=reason, clean=clean,
                leases_returned=returned, num_workers=len(self.sessions),
            )
        )  # fmt: skip
        self._wake.set()
        if not self._stopping and self._failure is None and self.progress < self.total_steps:
            if not self.sessions:
                self.bus.publish(Waiting(reason="no workers"))
            self._schedule()

    @abstractmethod
    def _forget(self, session: Session) -> None:
        """Nothing is received for this session any more."""
