"""One worker's connection, as the coordinator sees it: handshake, frames in, frames out.

A session owns its link and its outbox and knows nothing of training: it asks ``Admission`` who may join, and
``WorkSource`` what to do with results. Results are received straight into the memory that the work source lends, once
an open lease authorizes them at exactly the layout's size; results that no lease authorizes any more (it was given to
another) are received into scratch and dropped.

The outbox is bounded by what is put into it: the leases a worker may hold, one version of the parameters (a newer
version takes the place of what is still unsent of an older one) and small messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from w5xde_async.errors import (
    LinkLost,
    MalformedFrame,
    RefusalCode,
    RemoteError,
    UnexpectedMessage,
    UsageError,
    W5xdeError,
)
from w5xde_async.hub.members.credentials import Credentials
from w5xde_async.hub.members.island import Island
from w5xde_async.hub.members.sharing import SharedResults
from w5xde_async.net.link import Link
from w5xde_async.net.outbox import Outbox
from w5xde_async.params.shard import Shard
from w5xde_async.store.failpoints import failpoint
from w5xde_async.threads import ended, submitted
from w5xde_async.wire.frame import SESSION_CAPS, Buffer, BufferSpec, encode
from w5xde_async.wire.handshake import COORDINATOR, NONCE_BYTES, State, advance, member_id, prove, verify
from w5xde_async.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Bye,
    ByeCode,
    Challenge,
    Done,
    Drain,
    Failed,
    Heartbeat,
    Hello,
    Introduction,
    Lease,
    Message,
    Probe,
    Probed,
    ProgramRequest,
    Proof,
    Ready,
    Refusal,
    Rendezvous,
    Report,
    Result,
    Revoke,
    Submit,
    Unread,
    Volunteer,
    Welcome,
)

logger = logging.getLogger(__name__)

_MOST_MESSAGES = 256  # small ones that may wait for one worker, beside a revoke for each of its leases
_TALK_RATE, _TALK_BURST = 256, 2048  # messages a second, and at once, that no lease authorizes
_GARBAGE_BYTES = 64 << 20  # results that nothing authorizes: more than this in a row is no accident

#: Why one is dropped whose handshake takes too long, by how far that has come.
_SILENT = "silent for {seconds:.0f} s before it had "
_OVERDUE = {
    **dict.fromkeys(State, _SILENT + "proved itself"),
    State.NAMING: _SILENT + "said what it wants",
    State.JOINING: "the description of the run (WELCOME) had not left for it within {seconds:.0f} s: its line is slow, "
    "or it takes nothing",
}

#: Of one connection, in the time that a handshake may take: 3 MB each way.
_MOST_PROBES = 1024


class Admission(Protocol):
    """What a session needs of the list of members: it lets workers in, and is told who came and who left."""

    def admit(self, session: Session) -> Refusal | None:
        """A worker has proved itself; None lets it in."""

    def outline(self) -> tuple[int, float, str, str]:
        """Of the run, for one who only probes: values of a result, seconds of a leaf (0: unknown), the update rule, and
        what its workers are to form (empty: nothing)."""

    async def volunteer(self, session: Session, volunteer: Volunteer) -> Rendezvous | Refusal:
        """The worker wants to be a rank of an island: where the others are, once they are there."""

    def welcome(self, session: Session) -> tuple[Welcome, list[tuple[BufferSpec, Buffer]]]:
        """The run, for a new worker."""

    async def make_room(self, session: Session) -> None:
        """Return when no other connection of the same worker is left."""

    async def share(self, session: Session, ready: Ready) -> None:
        """Have ``session.shared``, where the worker has opened what WELCOME told it of."""

    def program(self, session: Session, request: ProgramRequest) -> None:
        """The worker asks for the program; it is answered now or later."""

    def joined(self, session: Session, ready: Ready) -> Refusal | None:
        """The worker has built its model; None makes it a member."""

    def authorizes(self, session: Session, lease: int) -> bool:
        """Whether the worker holds that lease."""

    def refused(self, session: Session, code: RefusalCode, reason: str) -> None:
        """Who is not let in was told so. Strangers come as often as they like."""

    def left(self, session: Session, reason: str, *, clean: bool) -> None:
        """The session has ended, whoever ended it; ``clean``: after a goodbye."""


class WorkSource(Protocol):
    """What a session needs of whoever hands out work."""

    def place(self, session: Session, result: Result, spec: BufferSpec) -> tuple[memoryview | None, bool]:
        """Memory for a result, None for what is dropped, and whether a lease authorizes it.

        Raises RemoteError for a wrong size.
        """

    def place_pieces(
        self, session: Session, result: Result, specs: Sequence[BufferSpec]
    ) -> tuple[Sequence[memoryview] | None, bool]:
        """The same for an island's rank, whose result is what of its shard lies in the bucket."""

    def unpack(self, session: Session, result: Result) -> Callable[[], None] | None:
        """A placed result has come whole: what is to be done in a thread before it has ``arrived``, if anything is. It
        writes into lent memory, and raises RemoteError for what cannot be read."""

    def arrived(self, session: Session, result: Result) -> None:
        """A placed result is complete, and unpacked."""

    def lay(self, session: Session, result: Result, piece: Tensor) -> bool:
        """A result is complete in memory that its worker shares, in ``piece``: it is to be read from there until the
        worker is told what became of its lease. Whether a lease authorizes it. Raises RemoteError."""

    def done(self, session: Session, done: Done) -> None:
        """A lease is done. Raises RemoteError where what the worker says cannot be true."""

    def failed(self, session: Session, failed: Failed) -> None:
        """The job raised on a leaf of a lease."""

    def unread(self, session: Session, unread: Unread) -> None:
        """The worker wants the data of a lease that named samples."""

    def draining(self, session: Session, drain: Drain) -> None:
        """The worker wants to leave."""


class Uptake:
    """Whether a peer takes what it is sent: by what its machine acknowledges, where that is known.

    Elsewhere by what could be handed over. A slow line takes that in portions, each after a while; as long as such a
    while has been, it may be again.
    """

    _PATIENCE, _MOST = 2.0, 10.0  # times the longest while, and times ``silence_s`` at most

    def __init__(self) -> None:
        self._taken, self._since, self._longest_s = 0, 0.0, 0.0

    def begin(self, now: float) -> None:
        """Nothing waits to be sent."""
        self._since = now

    def stalled_s(self, link: Link, now: float, silence_s: float) -> float:
        """Seconds for which the peer has taken nothing, where they are too many; else 0.0."""
        acked = link.acked_bytes
        taken, waited_s = link.bytes_sent if acked is None else acked, now - self._since
        if taken != self._taken:
            self._taken, self._since = taken, now
            self._longest_s = max(self._longest_s, waited_s) if acked is None else 0.0
            return 0.0
        allowed_s = min(max(silence_s, self._PATIENCE * self._longest_s), self._MOST * silence_s)
        return waited_s if waited_s >= allowed_s else 0.0


class Session:
    """One connection from its first byte to its last."""

    def __init__(
        self, link: Link, admission: Admission, work: WorkSource, *, token: str | Credentials, handshake_s: float,
        incarnation: int, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """``token``: the run's secret ("" for none), or all that decides who may join."""
        self.link, self.incarnation = link, incarnation
        self.worker_id, self.name = "", ""
        self.hello: Hello | None = None
        self.state = State.GREETING
        self.receiving: int | None = None  # the lease whose result is being received into lent memory
        self._receiving_bytes = 0  # of that result
        self._unpacking = False  # a thread writes into lent memory
        self.receiving_s = 0.0  # spent in the middle of receiving results
        self.result_bytes = 0  # of those results
        self._header_at = 0.0  # when the header of the last one came
        self._told = (0, 0.0)  # bytes and seconds of results of which ``results_since`` has told
        self.current_version = -1  # the version that was published
        self.unsent: set[int] = set()  # buckets whose newest value this worker has not been sent
        self.admitted_at = 0.0
        self.uptake = Uptake()
        self._asked_of = 0  # the lease of ``has_taken``
        self._sent_through: int | None = None  # and how far its line is to come, if it is not there
        self.ended = asyncio.Event()
        self.last_message = ""
        self.report: Report | None = None  # the last that it sent
        self.given_up = False  # we ended the link, not the worker
        self.broke_protocol = False  #: so that what it has sent of unfinished blocks is not to count either
        self.fell_silent = False  # and for no other reason than that nothing came or was taken
        self.identity = ""  # the name that the worker has proved
        self.code_free = False  # it computes with the coordinator's program
        self.ready: Ready | None = None  # what it said of itself when its model was built
        self.rank, self.ranks = 0, 1  # of an island
        self.island: Island | None = None
        self.shard: Shard | None = None  # of an island's rank: what is sent to it and comes from it
        self.shared: SharedResults | None = None  # where its results lie, if the parameters are shared with it
        self._named: set[int] = set()  # leases that named samples, and are not answered
        self.heard_at = 0.0  # when anything came from an island's rank
        self._admission, self._work, self._handshake_s = admission, work, handshake_s
        self._credentials = token if isinstance(token, Credentials) else Credentials(token)
        self.outbox = Outbox(link, clock=clock)
        self._clock, self._wall = clock, wall
        self._closing = self._mismatch = False
        self.told = asyncio.Event()  #: its last message has left, or its link has ended
        self._revokes = 0  # that wait to be sent
        self._scratch = bytearray()
        self._garbage = 0
        self._aggregating = False
        self._talked, self._talked_at = 0.0, clock()
        self._end_reason = ""

    @property
    def place(self) -> tuple[str, bool]:
        """Where it computes: under which proven name or on which host, and whether with the coordinator's program (see
        ``plan.attempts``)."""
        return self.identity or self.link.peer.rpartition(":")[0] or self.link.peer, self.code_free

    @property
    def kind(self) -> str:
        """How parameters and results travel."""
        return "tcp" if self.shared is None else "shm"

    @property
    def principal(self) -> str:
        """Who it is, as far as that was proved: its own name, else the run's secret and its id."""
        return self.identity or self.worker_id

    @property
    def vanished(self) -> bool:
        """The worker is gone without a word, and it was not us: what it computed may have killed it."""
        if self.island is not None and self.island.gone:
            return self.island.vanished
        return not self.given_up and self.state is not State.CLOSED

    @property
    def dismissed(self) -> bool:
        """It was told the last message."""
        return self._closing

    @property
    def links(self) -> Sequence[Session]:
        """Of a member: its own session, or those of all ranks."""
        return (self,) if self.island is None else self.island.sessions

    @property
    def lease_bytes(self) -> int:
        """Bytes of leases that wait to be sent to it."""
        return self.outbox.lease_bytes if self.island is None else max(one.outbox.lease_bytes for one in self.links)

    def has_taken(self, lease: int) -> bool:
        """Whether the worker's machine has acknowledged all that had been handed to the system when this was first
        asked of ``lease``, of one lease after the other. A slow line takes a while for it: the system's buffers hold
        megabytes. True where nobody says what is acknowledged."""
        for one in self.links:
            if one._asked_of != lease:
                one._asked_of, one._sent_through = lease, one.link.sent_through
            if one._sent_through is not None:
                acked = one.link.acked_bytes
                if acked is not None and acked < one._sent_through:
                    return False
                one._sent_through = None
        return True

    def is_receiving(self, lease: int) -> bool:
        """Whether a result of that lease is being received into lent memory."""
        return any(one.receiving == lease for one in self.links)

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for one result of this link that has no other place."""
        if len(self._scratch) < nbytes:
            self._scratch = bytearray(nbytes)
        return memoryview(self._scratch)[:nbytes]

    def divert(self) -> bool:
        """Drop the result that is being received: nothing is written into lent memory any more.

        False where that cannot be now. Of an island: the one that is received on this link.
        """
        if self._unpacking:
            return False
        if self.receiving is not None and not self.link.divert(self.scratch(self._receiving_bytes)):
            return False
        self.receiving = None
        return True

    @property
    def network_s(self) -> float:
        """Seconds in which results were received and anything was sent; of an island, on the line that took longest."""
        return max(one.receiving_s + one.outbox.sending_s for one in self.links)

    def results_since(self) -> tuple[int, float]:
        """Bytes of results that have come since this was asked last, and the seconds that these were on their way; of
        an island, those of all links, and of the one that took longest."""
        nbytes, seconds = sum(one.result_bytes for one in self.links), max(one.receiving_s for one in self.links)
        before, self._told = self._told, (nbytes, seconds)
        return nbytes - before[0], seconds - before[1]

    async def gone(self) -> None:
        """Return when it has ended; of an island, when all of its sessions have."""
        for session in self.links:
            await session.ended.wait()

    # -- life ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the worker until either side ends. Never raises for what the peer does."""
        reason, clean, member = "", False, False
        try:
            async with asyncio.timeout(self._handshake_s - self.link.greeted_s):
                if not await self._greet():
                    return
            member = True
            await self._serve()
            reason, clean = self._end_reason or "said goodbye", not self._mismatch
        except TimeoutError:
            reason = _OVERDUE[self.state].format(seconds=self._handshake_s)
        except RemoteError as error:
            reason = f"broke the protocol: {error}"
            self.given_up = self.broke_protocol = True  # it did not die of its work
            if not self.worker_id:
                self._admission.refused(self, RefusalCode.PROTOCOL_ERROR, reason)
            await self._say(encode(Refusal(RefusalCode.PROTOCOL_ERROR, str(error)[:500], "")))
        except LinkLost as error:
            reason = self._end_reason or error.reason
            clean = self.state is State.CLOSED or self._closing
        except W5xdeError:
            raise
        except Exception as error:
            if self._aggregating:
                raise  # perhaps halfway through a result: better no run than a wrong one
            # Ours, not the worker's: it ends this session, so that the run goes on, and must not pass unseen.
            logger.exception("session failed worker=%s peer=%s: a bug of the coordinator", self.name, self.link.peer)
            reason = (
                f"the coordinator failed on what it said, by a bug of its own ({type(error).__name__}: see its log)"
            )
            self.given_up = True
            await self._say(encode(Refusal(RefusalCode.PROTOCOL_ERROR, reason, "")))
        except asyncio.CancelledError:
            reason, clean = self._end_reason or "coordinator closed", True
            raise
        finally:
            self.link.abort() if reason and not clean else None
            try:
                if member or reason:
                    self._admission.left(self, reason, clean=clean)
            finally:
                self.ended.set()
                self.told.set()  # or never will

    async def _greet(self) -> bool:
        received = await self.link.recv()
        hello = received.message
        self.state = advance(COORDINATOR, self.state, hello)
        assert isinstance(hello, Hello)
        self.hello = hello
        if hello.protocol != PROTOCOL_VERSION:
            await self._refuse(
                RefusalCode.PROTOCOL_VERSION,
                f"this coordinator speaks protocol {PROTOCOL_VERSION}, the worker {hello.protocol}",
                "install the same version of w5xde-async on both sides",
            )
            return False
        if not 16 <= len(hello.nonce) <= 64:
            raise MalformedFrame("the nonce has between 16 and 64 bytes")
        nonce, auth = os.urandom(NONCE_BYTES), self._credentials.required
        # A connection that an application handed in without TLS shows no certificate: the worker binds to none either.
        binding = self._credentials.binding if self.link.encrypted else b""
        try:
            secret = self._credentials.secret_of(hello.identity) if auth else b""
        except UsageError:
            raise MalformedFrame("the identity is not a name") from None
        await self.link.send(encode(Challenge(PROTOCOL_VERSION, nonce, auth, b"")))
        received = await self.link.recv()
        self.state = advance(COORDINATOR, self.state, received.message)
        assert isinstance(received.message, Proof)
        if auth and not verify(received.message.proof, secret, "worker", hello.nonce, nonce, binding):
            await self._refuse(
                RefusalCode.AUTHENTICATION,
                "the token is missing or wrong",
                "set the coordinator's token in W5XDE_TOKEN or --token-file, or use its join file",
            )
            return False
        self.identity = hello.identity if auth else ""
        own = prove(secret, "coordinator", hello.nonce, nonce, binding) if auth else b""
        await self.link.send(encode(Accepted(own)))
        for _ in range(_MOST_PROBES):
            received = await self.link.recv()
            self.state = advance(COORDINATOR, self.state, received.message)
            if not isinstance(received.message, Probe):
                break
            if await self._keeps_out():
                return False
            num_values, leaf_s, update, island = self._admission.outline()
            filler = bytes(received.message.wanted)
            await self.link.send(encode(Probed(self._wall(), num_values, leaf_s, update, filler, island)))
        if isinstance(received.message, Volunteer):
            if not await self._keeps_out():
                self.link.let_in = True  # of one island alone there may be many
                await self._bring_together(received.message)
            return False
        if not isinstance(received.message, Introduction):
            raise UnexpectedMessage(type(received.message).__name__, f"{self.state.value}, after so many of them")
        self.rank, self.ranks = received.message.rank, received.message.ranks
        if self.rank >= self.ranks:
            raise MalformedFrame(f"rank {self.rank} of {self.ranks}")
        self.worker_id = member_id(self.identity, received.message.key)
        self.name = _shown(self.identity, received.message.name)
        if await self._keeps_out():
            return False
        refusal = self._admission.admit(self)
        if refusal is not None:
            await self._refuse(RefusalCode(refusal.code), refusal.reason, refusal.hint)
            return False
        self.link.caps, self.link.let_in = SESSION_CAPS, True
        message, buffers = self._admission.welcome(self)
        await self.link.send(encode(message, buffers))
        return True

    async def _keeps_out(self) -> bool:
        """Whether it was refused, by the name that it has proved or, once it has said it, its id."""
        name = self.identity or self.worker_id
        if self._credentials.revoked(name, self.worker_id):
            await self._refuse(
                RefusalCode.AUTHENTICATION, "this worker's access has been revoked", "ask whoever runs the coordinator"
            )
            return True
        if why := self._credentials.quarantined(name, self.worker_id):
            refused = quarantined(why)
            await self._refuse(RefusalCode.QUARANTINED, refused.reason, refused.hint)
            return True
        return False

    async def _bring_together(self, volunteer: Volunteer) -> None:
        """Tell a volunteer where the others are. One that goes before is nobody's partner. Raises LinkLost,
        RemoteError."""
        meeting = asyncio.ensure_future(self._admission.volunteer(self, volunteer))
        reading = asyncio.ensure_future(self.link.recv())
        try:
            await asyncio.wait((meeting, reading), return_when=asyncio.FIRST_COMPLETED)
            if not meeting.done():
                raise UnexpectedMessage(type(reading.result().message).__name__, "waiting for the other ranks")
            await self._say(encode(meeting.result()))
        finally:
            meeting.cancel()
            reading.cancel()
            await asyncio.gather(meeting, reading, return_exceptions=True)

    async def _serve(self) -> None:
        writer = asyncio.create_task(self._write(), name=f"write {self.name}")
        try:
            await self._read()
        except LinkLost:
            if writer.done() and not writer.cancelled() and (error := writer.exception()) is not None:
                raise error from None
            raise
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _read(self) -> None:
        while self.state is not State.CLOSED:
            try:
                message, specs, _ = await self.link.recv(self._accept)
                if type(message) is Result and specs:
                    self.receiving_s += self._clock() - self._header_at
                    self.result_bytes += specs[0].nbytes if self.shard is None else sum(spec.nbytes for spec in specs)
                    self._aggregating = True
                    if self.receiving is not None and (unpack := self._work.unpack(self, message)) is not None:
                        await self._in_thread(unpack)
                        if self.given_up:  # meanwhile: nothing more of it counts, and the link says so next
                            self.receiving = None
            finally:
                placed, self.receiving = self.receiving, None
            if type(message) is Result:
                if not specs:
                    self._take_shared(message)
                elif placed is not None:
                    self._garbage = 0
                    self._work.arrived(self, message)
                self._aggregating = False
                continue
            self.state = advance(COORDINATOR, self.state, message)
            if type(message) is Done:
                if not self._admission.authorizes(self, message.lease):
                    self._talk()
                self._named.discard(message.lease)
                self._aggregating = True
                if self.island is None:
                    self._work.done(self, message)
                elif (done := self.island.done(self, message)) is not None:
                    self._work.done(self.island.head, done)
                self._aggregating = False
            elif type(message) is Failed:
                if not self._admission.authorizes(self, message.lease):
                    self._talk()
                self._named.discard(message.lease)
                if self.island is not None:
                    self.island.failed(message.lease)
                self._work.failed(self if self.island is None else self.island.head, message)
            elif type(message) is Unread:
                if message.lease not in self._named:
                    raise RemoteError(f"it asked for the data of lease {message.lease}, which named no samples")
                self._named.discard(message.lease)
                self._work.unread(self, message)
            elif type(message) is Heartbeat:
                self._talk()
                self.last_message = message.activity[:200]
            elif type(message) is Report:
                self._talk()
                self.report = message
            elif type(message) is Drain:
                if self.ranks > 1 and self.island is None:  # it will not wait for the other ranks
                    self.say_goodbye(ByeCode.LEAVING, "drained")
                else:
                    self._work.draining(self if self.island is None else self.island.head, message)
            elif type(message) is Bye:
                self._end_reason = self._end_reason or message.reason[:300]
                self._mismatch = message.code == ByeCode.MISMATCH
            elif type(message) is ProgramRequest:
                if self.code_free:
                    raise RemoteError("it asked for the program twice on one link")
                self.code_free = True
                self._admission.program(self, message)
            elif type(message) is Ready:
                self.ready = message
                await self._admission.share(self, message)
                await self._admission.make_room(self)  # last: nothing is waited for between this and joining
                refusal = self._admission.joined(self, message)
                if refusal is not None:
                    await self._say(encode(refusal))
                    self._end_reason = refusal.reason
                    return

    async def _in_thread(self, unpack: Callable[[], None]) -> None:
        """Do that in a thread, and always wait for it: the memory into which it writes is lent for as long."""
        loop = asyncio.get_running_loop()
        try:
            job = submitted(partial(loop.run_in_executor, None), unpack)
        except RuntimeError:  # it can start no thread
            unpack()
            return
        self._unpacking = True
        try:
            done = await ended(job)
        finally:
            self._unpacking = False
        done.result()

    def _take_shared(self, result: Result) -> None:
        """A result lies in memory: it is read from there."""
        self.state = advance(COORDINATOR, self.state, result)
        if self.shared is None:
            raise MalformedFrame("RESULT came without its buffer")
        piece = self.shared.find(result)
        failpoint("shared.lay.before")
        self._aggregating = True
        authorized = self._work.lay(self, result, piece)
        self._aggregating = False
        failpoint("shared.lay.after")
        if authorized:
            self.result_bytes += piece.nbytes
            self._garbage = 0
        else:
            self._talk()

    def _talk(self) -> None:
        """A message that no lease authorizes. A few a second are usual; a worker that sends many more is dropped."""
        now = self._clock()
        self._talked = max(0.0, self._talked - _TALK_RATE * (now - self._talked_at)) + 1
        self._talked_at = now
        if self._talked > _TALK_BURST:
            raise RemoteError(f"it says more than {_TALK_RATE} things a second that no lease authorizes")

    def _accept(self, message: Message, specs: tuple[BufferSpec, ...]) -> Sequence[memoryview]:
        self.state = advance(COORDINATOR, self.state, message)
        if type(message) is not Result or (len(specs) != 1 and self.shard is None):
            raise MalformedFrame(f"{type(message).__name__} came with {len(specs)} buffers")
        if message.slot:
            raise MalformedFrame("RESULT came with a buffer that it says lies in shared memory")
        self._header_at = self._clock()
        if self.shard is not None:
            return self._accept_pieces(message, specs)
        view, authorized = self._work.place(self, message, specs[0])
        if view is not None:
            self.receiving, self._receiving_bytes = message.lease, specs[0].nbytes
            return (view,)
        return (self._unplaced(specs[0].nbytes, authorized=authorized),)

    def _accept_pieces(self, message: Result, specs: Sequence[BufferSpec]) -> Sequence[memoryview]:
        nbytes = sum(spec.nbytes for spec in specs)
        views, authorized = self._work.place_pieces(self, message, specs)
        if views is not None:
            self.receiving, self._receiving_bytes = message.lease, nbytes
            return views
        scratch = self._unplaced(nbytes, authorized=authorized)
        ends = accumulate(spec.nbytes for spec in specs)
        return [scratch[end - spec.nbytes : end] for spec, end in zip(specs, ends, strict=True)]

    def _unplaced(self, nbytes: int, *, authorized: bool) -> memoryview:
        """Memory for a result that is dropped."""
        self._garbage += 0 if authorized else nbytes
        if self._garbage > max(_GARBAGE_BYTES, 64 * nbytes):
            raise RemoteError("it keeps sending results that no lease authorizes")
        return self.scratch(nbytes)

    # -- out -----------------------------------------------------------------------------------------------

    def post(self, message: Message, buffers: Sequence[tuple[BufferSpec, Buffer]] = ()) -> None:
        """Queue a message. A worker that makes us say more and more, but reads none of it, is dropped."""
        if type(message) is Revoke:
            self._revokes += 1
            self.outbox.post(encode(message), sent=self._revoke_left)
        else:
            self.outbox.post(encode(message, buffers))
        if self.outbox.num_messages - self._revokes > _MOST_MESSAGES:
            self.abort(f"it takes none of what it is told ({_MOST_MESSAGES} messages)")

    def _revoke_left(self) -> None:
        self._revokes -= 1

    def post_lease(self, lease: Lease, buffers: Sequence[tuple[BufferSpec, Buffer]]) -> None:
        """Queue a lease; ``withdraw`` takes it back as long as it is not on its way."""
        if self.island is None:
            if lease.local:
                self._named.add(lease.lease)
            self.outbox.post(encode(lease, buffers), lease=lease.lease)
            return
        for session, (own, data) in zip(self.links, self.island.divided(lease, buffers), strict=True):
            session.outbox.post(encode(own, data), lease=lease.lease)

    def post_submit(self, asked: Submit) -> None:
        """Ask for what was computed; of an island, every rank for its part."""
        if self.island is not None:
            self.island.submits.add(asked.lease)
        self.post_to_all(asked)

    def post_to_all(self, message: Message) -> None:
        """``post``; of an island, to every rank."""
        for link in self.links:
            link.post(message)

    def withdraw(self, lease: int) -> bool:
        """Take a lease back that is not on its way. False where it is: of an island, where it is to the head."""
        if not self.outbox.withdraw(lease):
            return False
        self._named.discard(lease)
        if self.island is not None:
            for session in self.island.sessions[1:]:
                session.outbox.withdraw(lease)
        return True

    def say_goodbye(self, code: ByeCode, reason: str) -> None:
        """The last message; the worker then closes. Said once."""
        if self._closing:
            return
        self._closing = True
        self._end_reason = "the run failed" if code == ByeCode.FAILED else reason  # why is told once, at its end
        self.outbox.post(encode(Bye(code, reason)), sent=self.told.set)
        for session in self.links:
            session.say_goodbye(code, reason)

    def refuse(self, refusal: Refusal) -> None:
        """Say no to one that was let in; the worker then closes."""
        for session in self.links:
            session.given_up = True
            session._end_reason = refusal.reason
            session.post(refusal)

    def dismiss(self, reason: str) -> None:
        """End at once a worker that is to come anew. It is told why, unless it is being sent something."""
        for session in self.links:
            session.link.send_now(encode(Bye(ByeCode.STOPPING, reason)))
        self.abort(reason)

    def abort(self, reason: str, *, silent: bool = False) -> None:
        """End at once; ``run`` returns with that reason. ``silent``: it is that nothing comes or is taken."""
        self.fell_silent = silent
        self._end_reason = self._end_reason or reason
        self.given_up = True
        self.link.abort()

    async def _write(self) -> None:
        # A link that breaks here breaks for the reader too, which knows the reason and what the peer said last.
        try:
            with suppress(LinkLost):
                await self.outbox.run()
        except Exception:  # of a ``sent``: nothing leaves any more, and the reader would go on
            self.link.abort()
            raise

    async def _refuse(self, code: RefusalCode, reason: str, hint: str) -> None:
        self._admission.refused(self, code, reason)
        await self._say(encode(Refusal(code, reason, hint)))

    async def _say(self, chunks: list[Buffer]) -> None:
        """A last word before closing; whether it arrives is not ours to know."""
        try:
            async with asyncio.timeout(1.0):
                await self.link.send(chunks)
                await self.link.aclose()
        except (W5xdeError, TimeoutError):
            self.link.abort()


def quarantined(reason: str) -> Refusal:
    """What a worker is told whose results were wrong."""
    return Refusal(
        RefusalCode.QUARANTINED,
        f"this worker was quarantined: {reason}"[:500],
        "where others are quarantined too, the job's step keeps something from call to call (a counter, a cache), "
        "which no two workers have alike; else check its memory, its drivers and its versions. Whoever runs the "
        "coordinator can let it in again (revoked)",
    )


def _shown(identity: str, name: str) -> str:
    """How a worker is called in lists: by what it proved, and by what it calls itself; for people alone."""
    name = name[:64]
    return f"{identity} ({name})" if identity and name != identity else name
