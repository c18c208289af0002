"""The members of a run: workers joining, leaving and being dropped, whatever the update rule makes of their work.

What a lease is and what becomes of a result is for ``Scheduling``, which a training implements. Everything here runs on
the event loop's thread and never blocks.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address

from msgspec import structs

from w5xde_async.errors import RefusalCode, RemoteError
from w5xde_async.hub.config import NetworkConfig
from w5xde_async.hub.members.contributions import Contributions
from w5xde_async.hub.members.island import Island
from w5xde_async.hub.members.liveness import Liveness, Scheduling
from w5xde_async.hub.members.meeting import Meeting
from w5xde_async.hub.members.program_server import ProgramServer
from w5xde_async.hub.members.session import Session, quarantined
from w5xde_async.hub.members.sharing import SharedResults
from w5xde_async.params.layout import Layout
from w5xde_async.plan.leases import Grant
from w5xde_async.plan.membership import Member, Membership, Standing
from w5xde_async.plan.numerics import RunNumerics, fits, is_known, refusal
from w5xde_async.segments import Segment, Unshared
from w5xde_async.store.failpoints import failpoint
from w5xde_async.telemetry.events import Bus, Warned, WorkerJoined, WorkerLeft, WorkerQuarantined
from w5xde_async.telemetry.wording import plural
from w5xde_async.threads import submitted
from w5xde_async.wire.frame import Buffer, BufferSpec
from w5xde_async.wire.handshake import State
from w5xde_async.wire.messages import (
    ByeCode,
    Done,
    Drain,
    Message,
    ProgramRequest,
    Ready,
    Refusal,
    Rendezvous,
    Revoke,
    Volunteer,
    Welcome,
)

logger = logging.getLogger(__name__)

#: A worker whose link has ended tries again every 2.5 s at most, once it has found that.
_RETURN_S = 5.0
#: One that fell silent, as behind a line that is cut, first has to find that, and then the line has to come back.
_SILENT_RETURN_S = 30.0
#: A rank that was told where its island meets, until it is here: a process that starts and builds its model.
_STARTING_S = 20.0
_MOST_LOST = 512
_MOST_AWAITED = 1 << 16  # leases that a worker may ask about
_MOST_JOINING = 2  # links of one worker, beside a newer one, that build its model
#: One name or address may come and go without a result so often in so many seconds, or four times --max-workers.
_MOST_VAIN, _VAIN_S = 1024, 600.0
_MOST_VAIN_HOMES = 1024
_REFUSALS_SAID_S = 60.0  # between two lines of links that were refused for one reason
_NO_FAULT = (RefusalCode.RUN_FINISHED, RefusalCode.RUN_FAILED, RefusalCode.SHUTTING_DOWN)  # the run ends, for all
_MEETING_S = 5.0  # that a volunteer is kept waiting for others before it has to say again that it is there
_REASON = 300  # characters
_OTHER_CODE = (
    "worker {name} has other code than this coordinator, in the job's file or in what that imports from its folder: "
    "its model and data fit, but another loss or forward gives other bits; start it with the same files, or without "
    "--job: it is then sent what to compute. Where files were edited meanwhile, stop the run and resume it"
)
_SHARE_HINT = "one name or address may have a quarter of --max-workers, or 8; raise it at the coordinator"


def _is_address(host: str) -> bool:
    """An address off this machine, to which what we say has come back: so much a stranger cannot make up."""
    try:
        return not ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What a new worker is told of the run: ``message``, ``layout`` and ``buffers`` beside it.

    ``segment``: where the parameters lie, for workers on this machine. ``code``: digest of the job's source, where it
    is known.
    """

    message: Welcome
    layout: Layout
    buffers: Sequence[tuple[BufferSpec, Buffer]] = ()
    segment: Segment | None = None
    code: bytes = b""


class Roster:
    """The members of one run: an ``Admission`` for sessions, from ``admit`` to ``left``.

    ``sessions`` are members by worker id. What is done with their work is for ``Scheduling``.
    """

    def __init__(
        self,
        scheduling: Scheduling,
        greeting: Greeting,
        config: NetworkConfig,
        bus: Bus,
        clock: Callable[[], float],
        *,
        contributions: Contributions,
        numerics: RunNumerics,
        on_quarantine: Callable[[str, str], None] = lambda name, reason: None,
    ) -> None:
        """``on_quarantine`` is given the name that a quarantined worker has proved, or else its id, and the reason."""
        self.sessions: dict[str, Session] = {}
        self.membership = Membership(config.silence_s, scheduling.takes_work)
        self.programs = ProgramServer(greeting.layout, config, bus)
        self.contributions = contributions
        #: Whether a worker that vanishes takes with it what its codec has left out.
        self.keeps_residuals = config.update.feedback and not config.update.uplink_codec.exact
        self._scheduling, self._greeting, self._config, self._numerics = scheduling, greeting, config, numerics
        self._bus, self._clock, self._on_quarantine = bus, clock, on_quarantine
        self._welcome, self._layout_text = greeting.message, greeting.layout.describe()
        self._num_values = sum(bucket.numel for bucket in greeting.layout.result_buckets)
        self._joining: dict[Session, float] = {}  # let in, building their model -> when they last said something
        self._admitted: dict[Session, str] = {}  # those two and their ids
        self._ids: Counter[str] = Counter()
        self._ids_at: dict[tuple[str, str], Counter[str]] = {}  # (host or name, identity) -> the ids of its links
        self._islands: dict[str, Island] = {}  # by worker id: those that have a rank here
        self._part_of: dict[Session, Island] = {}
        self._meeting = Meeting()
        self._quarantined: set[str] = set()  # ids
        self._refusals: dict[RefusalCode, tuple[float, int]] = {}  # when it was told of one, and of how many not since
        self._other_code = False  # whether somebody has been named that has it
        self._last_word: Refusal | None = None  # the run has ended for its workers: what those hear that come now
        self._lost: dict[
            str, float
        ] = {}  # workers whose link ended without their goodbye -> until when they may return
        #: (name or host, identity) -> how often its workers came and went without a result, less what time has
        #: forgiven, and when that was so. Each is a line of the log and two records.
        self._vain: dict[tuple[str, str], tuple[float, float]] = {}
        self._starting: deque[float] = deque(maxlen=_MOST_LOST)  # until when ranks may come that have met
        self._goodbye_at = -math.inf
        self._returned = asyncio.Event()
        self._bytes_before = (0, 0)
        self._liveness = Liveness(config, self.sessions, self._joining, self.membership, scheduling, self._warn)

    @property
    def joining(self) -> Collection[Session]:
        """Workers that were let in and build their model."""
        return self._joining.keys()

    @property
    def present(self) -> list[str]:
        """Workers that take work."""
        return [member.worker_id for member in self.membership.ready()]

    def member(self, worker: str) -> Member | None:
        """A member by its id."""
        return self.membership.members.get(worker)

    # -- what members are told -----------------------------------------------------------------------------

    def tick(self, now: float, activity: str) -> None:
        """Revoke what is overdue, drop members that are silent, tell the others that the coordinator lives."""
        self._liveness.tick(now, activity)

    def await_answer(self, worker: str) -> None:
        """A lease of this worker was taken from it: see ``Liveness.await_answer``."""
        self._liveness.await_answer(worker)

    def tell(self, worker: str, message: Message) -> None:
        """Send a message to a worker, if it is here."""
        session = self.sessions.get(worker)
        if session is not None:
            session.post_to_all(message)

    def tell_stop(self, grace_s: float) -> None:
        """Tell all members that the coordinator stops and will wait for ``grace_s`` seconds."""
        for session in self.sessions.values():
            session.post(Drain("the coordinator stops", grace_s))

    def revoke(self, grant: Grant, reason: str) -> None:
        """Tell a worker that a lease was taken from it; a lease that still lies in its outbox is not sent."""
        session = self.sessions.get(grant.worker)
        if session is not None and not session.withdraw(grant.lease):
            session.post(Revoke(grant.lease, reason))
            member = self.member(grant.worker)
            if member is not None:
                member.owes.add(grant.lease)

    def say_goodbye(self, code: ByeCode, reason: str) -> None:
        """Send every worker the last message, those that are building their model too, and those that come later."""
        codes = {ByeCode.FINISHED: RefusalCode.RUN_FINISHED, ByeCode.FAILED: RefusalCode.RUN_FAILED}
        self._last_word = Refusal(codes.get(code, RefusalCode.SHUTTING_DOWN), reason, "")
        self._goodbye_at = self._clock()
        for session in (*self.sessions.values(), *self._joining):
            for link in session.links:
                link.outbox.supersede(1 << 62)  # nobody computes with these parameters any more
            session.say_goodbye(code, reason)

    async def wait_for_lost(self, hurries: Callable[[], bool] = lambda: False) -> None:
        """Return when workers whose link has just ended, or that do not answer the last message, have learned of the
        end, or have had the time for it: longer where they fell silent, since a line may be cut for a while, and for
        ranks of islands that have just been brought together, whose processes start.

        Otherwise a worker that loses its link right before the end would look for the coordinator until its timeout.
        ``hurries``: whether nobody wants to wait for long any more.
        """
        said = False
        while True:
            now = self._clock()
            unheard = [self._heard_of_until(session, now) for session in self.sessions.values()]
            until = max((*self._lost.values(), *self._starting, *unheard), default=-math.inf)
            left_s = (min(until, self._goodbye_at + _RETURN_S) if hurries() else until) - now
            if left_s <= 0:
                return
            if now - self._goodbye_at > _RETURN_S and not said:
                said = True
                self._warn(
                    f"waits {left_s:.0f} s to tell of the end workers that were cut off or just start; Ctrl-C ends that"
                )
            self._returned.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 1.0)):
                    await self._returned.wait()

    def _heard_of_until(self, session: Session, now: float) -> float:
        """How long to wait for the answer to the last message."""
        member = self.membership.members.get(session.worker_id)
        if member is None:
            return -math.inf
        if session.link.heard(self._config.heartbeat_s, self._config.silence_s):
            member.last_seen = now
        if now - member.last_seen < 2 * self._config.heartbeat_s:
            return self._goodbye_at + _RETURN_S
        return member.last_seen + _SILENT_RETURN_S

    # -- what members do -----------------------------------------------------------------------------------

    def answered(self, session: Session, lease: int) -> Member | None:
        """A worker has said what became of a lease: if that was the last that it owed, it is there again."""
        member = self.membership.members.get(session.worker_id)
        if member is not None:
            member.owes.discard(lease)
            if member.standing is Standing.LATE and not member.owes:
                member.standing = Standing.READY
        return member

    def note_coding(self, session: Session, member: Member, done: Done) -> None:
        """What a worker says of its codec, and what has come from it: every bucket on both sides, coded or not."""
        member.encode_s = min(member.encode_s + done.encode_s, self._clock() - member.joined_at)
        member.encoded_bytes = sum(link.result_bytes for link in session.links)
        member.raw_bytes = (
            member.encoded_bytes
            if self._config.update.plain
            else member.raw_bytes + min(done.raw_bytes, self._greeting.layout.vector_bytes)
        )

    def has_credit(self, worker: str) -> bool:
        """Whether a worker has read enough of the leases sent to it to get more."""
        return self.sessions[worker].lease_bytes <= self._config.credit_bytes

    def traffic_since(self) -> tuple[int, int]:
        """Bytes sent and received since the last call."""
        sent, received = self.contributions.traffic(self.sessions.values())
        before, self._bytes_before = self._bytes_before, (sent, received)
        return sent - before[0], received - before[1]

    # -- who is kept out -----------------------------------------------------------------------------------

    def _links_of(self, principal: str) -> list[Session]:
        """All links of one proved identity, those of members and others."""
        return [one for one in (*self.sessions.values(), *self._joining) if one.principal == principal]

    def drop(self, name: str, reason: str) -> None:
        """End the links of a worker, by the name it has proved or by its id."""
        for session in (*self.sessions.values(), *self._joining):
            if name in (session.identity, session.worker_id):
                session.abort(reason)

    def quarantine(self, worker_id: str, session: Session | None, reason: str, *, identity: str = "") -> bool:
        """A worker's result was proven wrong: end its link and keep it out. False where that is not wanted.

        ``session``: its own, where it may have left already. ``identity``: the name that it had proved, if any.
        """
        if worker_id in self._quarantined:
            return True
        session = self.sessions.get(worker_id) or session
        if session is None:
            name = self.contributions.name_of(worker_id) or worker_id
        else:
            name, identity = session.name, session.identity
        wanted = self._config.quarantine
        self._bus.publish(WorkerQuarantined(worker_id=worker_id, name=name, reason=reason, put_out=wanted))
        if not wanted:
            return False
        self._quarantined.add(worker_id)
        self._on_quarantine(identity or worker_id, reason)
        for other in self._links_of(identity) if identity else ():
            if other is not session:  # the same name on another link: what it says is worth no more
                if other.worker_id in self.sessions:
                    self._quarantined.add(other.worker_id)
                other.abort(f"quarantined: {reason}")
        member = self.membership.members.get(worker_id)
        if session is None or self.sessions.get(worker_id) is not session or member is None:
            return True
        self._put_out(session, member, quarantined(reason), f"quarantined: {reason}")
        return True

    def _put_out(self, session: Session, member: Member, refusal: Refusal, reason: str) -> None:
        if any(link.receiving is not None or link.state is not State.READY for link in session.links):
            session.abort(reason)  # it is told why when it comes back
            return
        member.standing = Standing.OUT
        session.refuse(refusal)  # first: it did not die of what it had
        self._scheduling.take_back(session)
        asyncio.get_running_loop().call_later(1.0, session.abort, reason)

    def keep_to(self, asked: str) -> list[str]:
        """From now on sums are made so: members that make them in another way are told, and leave. Their ids."""
        others = []
        for worker, session in tuple(self.sessions.items()):
            member, ready = self.member(worker), session.ready
            if member is not None and ready is not None and not fits(ready.numerics, asked):
                others.append(worker)
                reason, hint = refusal(ready.numerics, asked)
                self._put_out(session, member, Refusal(RefusalCode.NUMERICS, reason, hint), reason)
        return others

    # -- Admission -----------------------------------------------------------------------------------------

    def admit(self, session: Session) -> Refusal | None:
        """A worker has proved itself; None lets it in."""
        if session.ranks > 1 and self._starting:
            self._starting.popleft()
            self._returned.set()
        if self._last_word is not None:
            self._is_back(session.worker_id)
            return self._last_word
        if not self._scheduling.accepts:
            return Refusal(RefusalCode.SHUTTING_DOWN, "the coordinator is stopping", "it may come back; try again")
        others = len(self._ids) - (session.worker_id in self._ids)
        if others >= self._config.max_workers:
            reason = f"the run has its {plural(self._config.max_workers, 'worker')}"
            return Refusal(RefusalCode.RUN_FULL, reason, "raise its --max-workers, or wait until one has left")
        share, where = self._config.share, session.place[0]
        if self._vain_of(session) > self._most_vain - 1:
            reason = f"workers of {where} have come and gone {self._most_vain} times without a result"
            return Refusal(RefusalCode.RUN_FULL, reason, "see why they end; others are let in little by little")
        if session.identity or _is_address(where):
            same = self._ids_at.get((where, session.identity), ())
            if len(same) - (session.worker_id in same) >= share:
                reason = f"the run has its {plural(share, 'worker')} of {where}"
                return Refusal(RefusalCode.RUN_FULL, reason, _SHARE_HINT)
        same_link = (session.worker_id, session.rank)
        for older in [one for one in self._joining if (one.worker_id, one.rank) == same_link][:-_MOST_JOINING]:
            older.abort("the same worker has connected anew")
        self._admitted[session] = session.worker_id
        self._ids[session.worker_id] += 1
        self._ids_at.setdefault((where, session.identity), Counter())[session.worker_id] += 1
        self._joining[session] = session.admitted_at = self._clock()
        session.uptake.begin(session.admitted_at)
        return None

    async def volunteer(self, session: Session, volunteer: Volunteer) -> Rendezvous | Refusal:
        """A worker wants to be a rank of an island: where the others are, once they are there."""
        if self._last_word is not None:
            return self._last_word
        host = volunteer.host or session.link.peer.rpartition(":")[0].strip("[]")
        patience_s = min(_MEETING_S, self._config.handshake_s / 2)
        found = await self._meeting.wait(volunteer.shape, volunteer.ranks, host, volunteer.port, patience_s)
        if found is not None:
            self._starting.append(self._clock() + _STARTING_S)
            return found
        here = self._meeting.num_waiting(volunteer.shape, volunteer.ranks) + 1
        return Refusal(
            RefusalCode.RUN_FULL, f"{here} of {volunteer.ranks} members of an island {volunteer.shape} are here",
            "start the others with the same --island-member",
        )  # fmt: skip

    def outline(self) -> tuple[int, float, str, str]:
        """Of the run, for one who only probes."""
        leaf_s = self._scheduling.pacing.fastest_leaf_s or 0.0
        return self._num_values, leaf_s, self._welcome.update, self._config.island

    def welcome(self, session: Session) -> tuple[Welcome, list[tuple[BufferSpec, Buffer]]]:
        """The run, for a new worker."""
        text, segment = self._layout_text, self._offered(session)
        layout = (BufferSpec("layout", "uint8", (len(text),), "raw", len(text)), text)
        memory = () if segment is None else segment.told
        welcome = structs.replace(self._welcome, numerics=self.asked, memory=memory)
        return welcome, [layout, *self._greeting.buffers]

    @property
    def asked(self) -> str:
        """How members must make their sums; empty: in any way.

        Under rules other than sync no two workers give the same in any case.
        """
        return self._numerics.asked(self._config.numerics) if self._welcome.update == "sync" else ""

    async def make_room(self, session: Session) -> None:
        """Return when no other connection of the same worker is left.

        Raises RemoteError where the same worker has connected anew meanwhile. Of an island nothing comes back: its
        ranks begin anew together, as another worker.
        """
        while (older := self.sessions.get(session.worker_id)) is not None:
            if older.ranks > 1 or session.ranks > 1:
                raise RemoteError("an island and a worker, or two islands, do not have one id")
            if older.incarnation > session.incarnation:
                raise RemoteError("the same worker has connected anew since")
            # Its leases may be given out again only once nothing writes into their memory any more.
            older.abort("the same worker has connected anew")
            await older.ended.wait()

    def program(self, session: Session, request: ProgramRequest) -> None:
        """The worker asks for the program; it is answered now or later."""
        self.programs.ask(session, request)

    def joined(self, session: Session, ready: Ready) -> Refusal | None:
        """The worker has built its model; None makes it a member."""
        self._is_back(session.worker_id)
        if self._last_word is not None:
            return self._last_word
        if ready.fingerprint != self._greeting.layout.fingerprint:
            return Refusal(
                RefusalCode.MODEL_MISMATCH,
                "the worker's model differs from the coordinator's",
                "use the same job file on both sides",
            )
        if not is_known(ready.numerics, session.ranks):
            raise RemoteError(f"a worker of {session.ranks} rank(s) makes no sums as {ready.numerics!r} says")
        if not fits(ready.numerics, self.asked):
            return Refusal(RefusalCode.NUMERICS, *refusal(ready.numerics, self.asked))
        if session.ranks > 1:
            self._assemble(session, ready)
            if session.island is None:
                return None
            session = session.island.head
            assert session.ready is not None
            ready = session.ready
        now = self._clock()
        for link in session.links:
            self._joining.pop(link, None)
            link.heard_at = now
        device = f"{ready.device} {ready.shape}".rstrip()
        self.membership.join(
            Member(
                worker_id=session.worker_id, name=session.name, peer=session.link.peer, device=device,
                threads=ready.threads, incarnation=session.incarnation, joined_at=now, last_seen=now,
                link=session.kind,
            )
        )  # fmt: skip
        self.sessions[session.worker_id] = session
        if differ := self._numerics.note_device(ready.device_name, ready.threads):
            self._warn(differ)
        if ready.code and self._greeting.code and ready.code != self._greeting.code and not self._other_code:
            self._other_code = True
            self._warn(_OTHER_CODE.format(name=session.name))
        self._bus.publish(
            WorkerJoined(
                worker_id=session.worker_id, name=session.name, peer=session.link.peer, device=device,
                threads=ready.threads, num_workers=len(self.sessions), link=session.kind,
            )
        )  # fmt: skip
        self._quarantined.discard(session.worker_id)  # somebody has let it in again
        self._scheduling.introduce(session, ready.awaited[:_MOST_AWAITED])
        self._scheduling.schedule()
        return None

    def _assemble(self, session: Session, ready: Ready) -> None:
        """A rank of an island is ready. Its sessions know the island once all are. Raises RemoteError."""
        island = self._islands.get(session.worker_id) or Island(self._greeting.layout, session.ranks)
        try:
            island.add(session, ready)
        finally:
            if session in island.sessions:  # then its end is an end of the island, too
                self._islands[session.worker_id] = self._part_of[session] = island
        if island.complete:
            for one in island.sessions:
                one.island = island

    def _offered(self, session: Session) -> Segment | None:
        """What of its memory the coordinator has together with this worker."""
        return self._greeting.segment if session.ranks == 1 and session.link.same_host else None

    async def share(self, session: Session, ready: Ready) -> None:
        """Have ``session.shared``, where the worker has opened what WELCOME told it of."""
        segment, hello = self._offered(session), session.hello
        if not ready.memory or segment is None or hello is None:
            return
        opened = partial(SharedResults, segment, ready.memory, hello.nonce, self._greeting.layout)
        try:
            job = submitted(partial(asyncio.get_running_loop().run_in_executor, None), opened)
        except RuntimeError as error:  # it can start no thread
            logger.info("results come over the network worker=%s reason=%s", session.name, error)
            return
        try:
            session.shared = await asyncio.wrap_future(job)
        except Unshared as error:
            logger.info("results come over the network worker=%s reason=%s", session.name, error.reason)
            return
        failpoint("shared.open.after")

    def _is_back(self, worker: str) -> None:
        if self._lost.pop(worker, None) is not None:
            self._returned.set()

    def authorizes(self, session: Session, lease: int) -> bool:
        """Whether the worker holds that lease."""
        return self._scheduling.ledger.held_by(session.worker_id, lease) is not None

    def refused(self, session: Session, code: RefusalCode, reason: str) -> None:
        """Who is not let in was told so. One line a minute for each code: strangers are not to fill a log."""
        if code in _NO_FAULT:
            return
        self.contributions.links_refused += 1
        now, (said_at, untold) = self._clock(), self._refusals.get(code, (-math.inf, 0))
        if now - said_at < _REFUSALS_SAID_S:
            self._refusals[code] = said_at, untold + 1
            return
        self._refusals[code] = now, 0
        more = f" ({untold} more were refused for such a reason since that was told last)" if untold else ""
        self._warn(f"{session.name or session.link.peer} did not join: {reason[:_REASON]}{more}")

    def left(self, session: Session, reason: str, *, clean: bool) -> None:
        """A session has ended, whoever ended it."""
        self.contributions.close(session)
        self._scheduling.release(session)
        session.shared = None
        if (admitted := self._admitted.pop(session, None)) is not None:
            home = (session.place[0], session.identity)
            for ids in (self._ids, self._ids_at[home]):
                ids[admitted] -= 1
                if not ids[admitted]:
                    del ids[admitted]
            if not self._ids_at[home]:
                del self._ids_at[home]
        self._joining.pop(session, None)
        if session.ranks > 1 and session.island is None:  # the others need not wait for it
            for other in [one for one in self._joining if one.worker_id == session.worker_id]:
                other.abort(f"its island is lost, rank {session.rank}: {reason}")
        island = self._part_of.pop(session, None)
        if island is not None:  # its memory is free only once nothing is received by any rank
            if not island.ended(session, reason):
                return
            del self._islands[session.worker_id]
            if session.island is not None:
                session, reason = island.head, island.reason if not clean else reason
        member = self.membership.leave(session.worker_id, session.incarnation)
        if self.sessions.get(session.worker_id) is not session:
            if member is None and not clean and session.worker_id:
                self._note_vain(session)
                self._warn(f"{session.name or session.link.peer} did not join: {reason}")
            return
        del self.sessions[session.worker_id]
        self._returned.set()
        if session.state is not State.CLOSED and session.worker_id not in self._quarantined and session.ranks == 1:
            self._lost.pop(session.worker_id, None)
            returns_s = _SILENT_RETURN_S if session.fell_silent else _RETURN_S
            self._lost[session.worker_id] = self._clock() + returns_s
            if len(self._lost) > _MOST_LOST:
                del self._lost[next(iter(self._lost))]
        if not clean and self.keeps_residuals and member is not None and member.computed:
            self.contributions.residuals_lost += 1
            self._warn(
                f"{session.name} took with it what its codec had left out, unless it comes back "
                f"({self.contributions.residuals_lost} so far)"
            )
        returned = self._scheduling.take_back(session)
        if member is None or not member.computed:
            self._note_vain(session)
        if member is not None:
            self.contributions.remember(session, member, self._clock())
        self._bus.publish(
            WorkerLeft(
                worker_id=session.worker_id, name=session.name, reason=reason, clean=clean,
                leases_returned=returned, num_workers=len(self.sessions),
            )
        )  # fmt: skip
        self._scheduling.departed(session.worker_id)

    @property
    def _most_vain(self) -> int:
        return max(_MOST_VAIN, 4 * self._config.max_workers)  # all may be cut off and come back, again and again

    def _vain_of(self, session: Session) -> float:
        number, at = self._vain.get((session.place[0], session.identity), (0.0, 0.0))
        return max(number - (self._clock() - at) * self._most_vain / _VAIN_S, 0.0)

    def _note_vain(self, session: Session) -> None:
        """Its worker has come and gone without a result."""
        home, number = (session.place[0], session.identity), min(self._vain_of(session) + 1.0, self._most_vain)
        self._vain.pop(home, None)
        self._vain[home] = number, self._clock()
        if len(self._vain) > _MOST_VAIN_HOMES:
            del self._vain[next(iter(self._vain))]

    def _warn(self, text: str) -> None:
        self._bus.publish(Warned(text=text))
