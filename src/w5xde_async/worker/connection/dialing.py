"""Reaching the coordinator and being let in; tried again, with jitter, when the link or the coordinator is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from w5xde_async.errors import (
    FrameTooLarge,
    LinkLost,
    RefusalCode,
    Refused,
    RemoteError,
    Unreachable,
    UsageError,
    W5xdeError,
)
from w5xde_async.net.endpoint import check_certificate
from w5xde_async.net.link import Link
from w5xde_async.net.racing import NoneWorked, first_that_works
from w5xde_async.runtime import Runtime
from w5xde_async.wire.frame import encode
from w5xde_async.wire.handshake import member_id
from w5xde_async.wire.messages import Bye, ByeCode, Rendezvous, Volunteer, Welcome
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.handshake import Joined, RefusedUnproved, ask, join, meet
from w5xde_async.worker.connection.metering import Traffic
from w5xde_async.worker.connection.target import JoinFile, Target
from w5xde_async.worker.executors.island import Rank

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")

_TLS_ALERT = 0x1503  # how a TLS record that says "not understood" begins, read as the length of a header
_HUNG_UP = 3
_TLS_REFUSAL = "_ALERT_"  # in OpenSSL's name of what the other side has said no to; a connection that is cut has none
#: While it looks for a coordinator it says so no more often than that.
_GOODBYE_S = 2.0
_SAID_EVERY_S = 30.0
#: Before it connects again after links that ended, one after the other, without a lease that was applied.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_LONGER_PAUSES = 5  # while there is no coordinator: then they are of 0.8 to 1.6 s
_BROKE_ADVICE = "see what listens there, and that both sides have the same version of w5xde-async"
_TRY_AGAIN = (RefusalCode.SHUTTING_DOWN, RefusalCode.RUN_FULL, RefusalCode.TERM)


class _NotNow(W5xdeError):
    """We cannot be taken in now. Fields: ``answered``, whether the coordinator has said so; ``hint``, what it says is
    to be done."""

    def __init__(self, reason: str, hint: str = "", *, answered: bool = True) -> None:
        self.hint, self.answered = hint, answered
        super().__init__(reason)


class _Foreign(W5xdeError):
    """Whoever answered is not the coordinator that this worker has served already. Field: ``refused``, the error that
    a worker ends with at once if it has served none."""

    def __init__(self, refused: Refused) -> None:
        self.refused = refused
        super().__init__(refused.reason)


class Dialer:
    """Where one worker's coordinator is, and who the worker is to it. Survives links."""

    def __init__(
        self,
        server: str,
        config: WorkerConfig,
        runtime: Runtime,
        *,
        join_file: Path | None = None,
        on_welcome: Callable[[Welcome], Welcome] | None = None,
        rank: Rank | None = None,
    ) -> None:
        """``server`` is ``host:port``, a join string (whose secret and certificate then count), or "" where ``join``
        is given a link. ``join_file`` is read again whenever the coordinator is looked for; then ``server`` is what it
        held, or "" where it was not there yet. ``rank``: of an island. Raises UsageError.
        """
        self._target = Target.of(server, config) if server else None
        self._join_file = None if join_file is None else JoinFile(join_file, config, known=server)
        self.config = config if self._target is None else self._target.config
        self._runtime, self._on_welcome = runtime, on_welcome
        self.stays_here = False  #: no other machine will do: what it sends is computed without a sandbox
        self._hung_up = 0  # TLS stood and the coordinator refused it afterwards, so many times in a row
        self._key = runtime.random_bytes(16).hex() if rank is None else rank.key
        self._rank, self._ranks = (0, 1) if rank is None else (rank.rank, rank.ranks)
        self.worker_id = member_id(self.config.identity, self._key)
        self.name = config.name or f"{socket.gethostname()}-{os.getpid()}"
        self.traffic = Traffic()
        self._jitter = random.Random(runtime.random_bytes(16))  # the process's own belongs to a block being computed
        self._terms: dict[str, int] = {}  # run -> the highest term served
        self._heard = ""  # what the last coordinator said that it did
        self._failed_links = 0  # in a row: ended without a goodbye and without a lease that was applied
        self._reason = ""  # why the last attempt failed
        self._refused: _NotNow | None = None  # what the coordinator said then, if it answered
        self._lacks_tls = False  # so it seems, since the last attempt
        self._broke = ""  # how who answered has broken the protocol, since it was joined last
        self._breaks = 0  # in a row: links that ended so, though they had begun, and of which nothing came
        self._breaking_s = 0.0  # of those after the first, and of the pauses before them
        self._began = self._warned = 0.0  # when the last link began; when the last of ``_breaks`` was told of

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, the likeliest where there are several; "" and 0 where none is known yet."""
        return ("", 0) if self._target is None else self._target.addresses[0]

    @property
    def is_here(self) -> bool:
        """Whether the coordinator is known and on this machine."""
        return self._target is not None and self._target.is_here

    @property
    def is_known(self) -> bool:
        """Whether it has an address, or a file that may yet say one."""
        return self._target is not None or self._join_file is not None

    @property
    def circles(self) -> bool:
        """Whether the coordinator has broken the protocol again and again, and nothing came of any link."""
        return self._breaks > 1

    def unreachable(self, waited_s: float) -> Unreachable:
        """What to raise after so long."""
        reason = self._reason or "no answer so far"
        if self._refused is not None:
            return Unreachable(str(self._target), reason, waited_s, advice=self._refused.hint, answered=True)
        if self._broke:  # which says more than that nobody listens there any more
            before = "" if self._broke in reason else f"; before that it broke the protocol: {self._broke}"
            return Unreachable(str(self._target), reason + before, waited_s, self._heard, _BROKE_ADVICE)
        if self._target is not None or self._join_file is None:
            return Unreachable(str(self._target or ""), reason, waited_s, self._heard)
        advice = "start the coordinator, which writes it, or name the file of another (--join-file)"
        return Unreachable(f"join file {self._join_file.path}", reason, waited_s, self._heard, advice)

    def link_ended(self, *, failed: bool, applied: bool, heard: str, served_s: float = 0.0, broke: str = "") -> None:
        """A link that ``join`` gave is over. ``failed``: it ended without a goodbye; ``applied``: a lease counted;
        ``heard``: what the coordinator said that it was doing; ``served_s``: how long it was ready for leases;
        ``broke``: how the coordinator has broken the protocol."""
        self._broke = broke
        self._heard = heard or self._heard
        self._failed_links = 0 if applied else self._failed_links + failed
        ended = self._runtime.clock()
        # Who has nothing for us lasts so long, or says goodbye.
        if applied or served_s >= self.config.connect_timeout_s or not (failed or broke):
            self._breaks, self._breaking_s = 0, 0.0
        if self._breaks:
            self._breaking_s += ended - self._began
        if broke:
            self._breaks += 1
            if self._breaks == 1 or ended - self._warned >= _SAID_EVERY_S:
                self._warned = ended
                logger.warning(
                    "coordinator broke the protocol, connecting again times=%d reason=%s", self._breaks, broke
                )

    async def join(self, given: Link | None = None) -> Joined:
        """Reach the coordinator and be let in; tried again with jitter until ``connect_timeout_s`` is over. As long may
        pass with coordinators that let us in and then break the protocol, before anything has come of it.

        With ``given`` it is tried once, over that link. Raises Unreachable, Refused, and what ``on_welcome`` raises;
        over a given link LinkLost and RemoteError too.
        """
        joined = await self._join(given)
        self._began = self._runtime.clock()
        welcome = joined.welcome
        if self._terms.get(welcome.run_id) != welcome.term:
            self._failed_links = 0  # another coordinator: the last link ended with its own, through no fault of ours
        self._terms[welcome.run_id] = welcome.term
        self._broke = ""
        return joined

    async def find(self) -> None:
        """Wait until an address is known: a join file may be there late. Raises Unreachable, UsageError."""

        async def nothing_more(_: float) -> None:
            return None

        await self._again_and_again(nothing_more)

    async def meet(self, volunteer: Volunteer) -> Rendezvous:
        """Hear where the other ranks of an island are; tried again until ``connect_timeout_s`` is over.

        Raises Unreachable, Refused.
        """
        return await self._outside(
            lambda link, config: meet(link, volunteer, token=config.token, identity=config.identity)
        )

    async def island(self) -> str:
        """Hear what the run's workers are to form ("" for nothing); tried again as ``meet`` is.

        Raises Unreachable, Refused.
        """
        probed = await self._outside(lambda link, config: ask(link, token=config.token, identity=config.identity))
        return probed.island

    async def _outside(self, talk: Callable[[Link, WorkerConfig], Awaitable[_Found]]) -> _Found:
        """The result of a talk over a link that joins nothing, by jittered attempts."""

        async def attempt(left_s: float) -> _Found:
            config = self.config if self._target is None else self._target.config
            link = await self._reach(min(left_s, 10.0))
            try:
                check_certificate(link, config.certificate)
                async with asyncio.timeout(min(left_s, 20.0)):
                    found = await talk(link, config)
                self._hung_up = 0
                return found
            except TimeoutError:
                if self._refused is not None:  # which takes a while, and there was none left
                    raise self._refused from None
                raise LinkLost(link.peer, _too_late(link)) from None
            except Refused as error:
                raise self._judged(error) from None
            except BaseException as error:
                self._explain(error, link)
                raise
            finally:
                link.abort()

        return await self._again_and_again(attempt)

    async def _join(self, given: Link | None) -> Joined:
        if given is not None:
            return await self._try_to_join(self.config.connect_timeout_s, given)
        left_s = self.config.connect_timeout_s - self._breaking_s
        if self._breaks > 1 and left_s <= 0 and self._broke:
            self._reason = f"it let this worker in and then broke the protocol, {self._breaks} times: {self._broke}"
            self._refused = None
            raise self.unreachable(self.config.connect_timeout_s)
        if self._failed_links:
            pause_s = _pause_s(self._failed_links, self._jitter)
            if self._breaks and left_s > 0:  # once it is used up, links that are merely lost are waited for as ever
                pause_s = min(pause_s, left_s)
                self._breaking_s += pause_s
            await asyncio.sleep(pause_s)
        return await self._again_and_again(self._try_to_join)

    async def _again_and_again(self, attempt_once: Callable[[float], Awaitable[_Found]]) -> _Found:
        """The first result, by jittered attempts that are told how many seconds are left."""
        clock, limit = self._runtime.clock, self.config.connect_timeout_s
        began = said = clock()
        warned, failed = False, 0
        while True:
            known = self._broke
            try:
                await self._read_join_file()
                return await attempt_once(max(limit - (clock() - began), 0.5))
            except (LinkLost, _NotNow, _Foreign, RemoteError) as error:
                self._reason = error.reason if isinstance(error, LinkLost) else str(error)
                self._refused = error if isinstance(error, _NotNow) and error.answered else None
                left_s, foreign = limit - (clock() - began), isinstance(error, _Foreign)
                if left_s <= 0:
                    raise (error.refused if isinstance(error, _Foreign) else self.unreachable(limit)) from error
            broke = self._broke != known
            # Perhaps only the person here changes that.
            at_once = (self._lacks_tls or foreign or broke) and not warned
            if at_once or clock() - said >= _SAID_EVERY_S:
                said, warned = clock(), warned or at_once
                level = logging.WARNING if at_once else logging.INFO
                where = self._target or "unknown"
                logger.log(
                    level, "no coordinator yet server=%s reason=%s gives_up_in_s=%.0f", where, self._reason, left_s
                )
            failed += 1
            await asyncio.sleep(_pause_s(min(failed, _LONGER_PAUSES), self._jitter))

    async def _read_join_file(self) -> None:
        """Where the coordinator is now. Raises _NotNow, and UsageError for a machine that will not do."""
        if self._join_file is None:
            return
        try:
            target = await self._join_file.changed()
        except UsageError as error:
            if self._target is None:
                raise _NotNow(str(error), answered=False) from None
            if self._join_file.was_read:
                self._join_file.complain(str(error))
            return
        if target is None:
            return
        if self.stays_here and not target.is_here:
            raise UsageError(
                f"the join file names another machine now ({target}), and this worker computes without a sandbox; "
                "start it again"
            )
        logger.info("join file read server=%s", target)
        self._target, self._hung_up = target, 0

    async def _try_to_join(self, left_s: float, given: Link | None = None) -> Joined:
        config = self.config if self._target is None else self._target.config
        self._lacks_tls = False
        link = given or await self._reach(min(left_s, 10.0))
        try:
            check_certificate(link, config.certificate)
            async with asyncio.timeout(min(left_s, 20.0)):
                joined = await join(
                    link, key=self._key, name=self.name, token=config.token, terms=self._terms,
                    identity=config.identity, rank=self._rank, ranks=self._ranks,
                )  # fmt: skip
            self._hung_up = 0
            self.traffic.add(link)
            if self._on_welcome is not None:
                joined = joined._replace(welcome=await self._welcomed(joined))
            return joined
        except BaseException as error:
            link.abort()
            if given is None:
                self._explain(error, link)
            if isinstance(error, TimeoutError):
                raise LinkLost(link.peer, _too_late(link)) from None
            if given is None and isinstance(error, Refused):
                raise self._judged(error) from None
            raise

    async def _welcomed(self, joined: Joined) -> Welcome:
        """What counts in place of the WELCOME. Where the application does not want the run, leave in good order."""
        assert self._on_welcome is not None
        try:
            return self._on_welcome(joined.welcome)
        except Exception as error:
            with suppress(LinkLost, TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await joined.link.send(encode(Bye(ByeCode.LEAVING, str(error)[:500])))
                    await joined.link.aclose()
            raise

    async def _reach(self, timeout_s: float) -> Link:
        """A link to the first of the coordinator's addresses that shows its certificate. Raises _Foreign, LinkLost and,
        before the first coordinator was served, Refused."""
        try:
            return await self._reach_any(timeout_s)
        except Refused as refused:
            raise self._foreign(refused) from None

    def _judged(self, refused: Refused) -> W5xdeError:
        """What to raise for what was said over a link. Before the proofs, only a certificate that was checked tells the
        coordinator from who may have taken its address."""
        if isinstance(refused, RefusedUnproved) and not (self._target is not None and self._target.is_certified):
            return self._foreign(refused)
        return _NotNow(refused.reason, refused.hint) if refused.code in _TRY_AGAIN else refused

    def _foreign(self, refused: Refused) -> W5xdeError:
        """What to raise where not the coordinator itself has refused: who has been let in once with these settings
        knows that they are right. A proxy, or somebody in between, may answer for a coordinator that is away."""
        return _Foreign(refused) if self._terms else refused

    async def _reach_any(self, timeout_s: float) -> Link:
        target = self._target
        assert target is not None

        async def attempt(address: tuple[str, int]) -> tuple[tuple[str, int], Link]:
            certificate = target.config.certificate
            more = {"certificate": certificate} if certificate else {}  # which an application's own need not know
            link = await self._runtime.connect(*address, timeout_s=timeout_s, ssl=target.tls, **more)
            check_certificate(link, certificate)  # an application's own ``connect`` may not have
            return address, link

        if len(target.addresses) == 1:
            return (await attempt(target.addresses[0]))[1]
        try:
            won, link = await first_that_works(
                [partial(attempt, address) for address in target.addresses], discard=lambda result: result[1].abort()
            )
        except NoneWorked as failed:
            for other in failed.errors:
                if not isinstance(other, LinkLost | Refused):
                    raise other from None
            lost = [error for error in failed.errors if isinstance(error, LinkLost)]
            if not lost:
                raise failed.errors[0] from None
            raise LinkLost(str(target), ", ".join(f"{each.peer}: {each.reason}" for each in lost)) from None
        self._target = target.preferring(won)
        return link

    def _explain(self, error: BaseException, link: Link) -> None:
        """Raise Refused or _Foreign where an ended handshake means that both sides disagree about TLS."""
        tls = None if self._target is None else self._target.tls
        if tls is None and isinstance(error, FrameTooLarge) and error.nbytes >> 16 == _TLS_ALERT:
            refused = Refused(
                RefusalCode.AUTHENTICATION,
                "the coordinator speaks TLS and this worker does not",
                "use its join file, or leave out --insecure",
            )
            raise self._foreign(refused) from None
        if isinstance(error, RemoteError):
            self._broke = str(error)
            if not self._terms:
                raise LinkLost(link.peer, f"what listens there may be no coordinator: {error}") from None
        if not isinstance(error, LinkLost) or self._terms or link.bytes_received:
            return
        if tls is None:
            self._lacks_tls = True
            reason = f"{error.reason} at the first words; it may want TLS: use its join file"
            raise LinkLost(link.peer, reason) from None
        self._hung_up = self._hung_up + 1 if _TLS_REFUSAL in error.reason else 0
        if self._hung_up >= _HUNG_UP:
            # TLS 1.3 tells a client that its certificate is missing or wrong only after the handshake.
            raise Refused(
                RefusalCode.AUTHENTICATION,
                f"the coordinator closed right after TLS began ({error.reason})",
                "it may want a certificate of this worker: --tls-cert and --tls-key",
            ) from None


def _too_late(link: Link) -> str:
    return f"it accepted the connection and then {'did not say all' if link.bytes_received else 'said nothing'} in time"


def _pause_s(failed: int, jitter: random.Random) -> float:
    """Twice as long after each failed link or attempt, with jitter: no lease is to go round in milliseconds."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(failed - 1, 32), _LONGEST_PAUSE_S) * jitter.uniform(0.5, 1.0)
