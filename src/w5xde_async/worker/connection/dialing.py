"""Reaching the coordinator and being let in; tried again, with jitter, when the link or the coordinator is lost."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import random
import socket
from collections.abc import Callable
from dataclasses import replace

import stamina

from w5xde_async.errors import (
    FrameTooLarge,
    LinkLost,
    LocalError,
    RefusalCode,
    Refused,
    RemoteError,
    Unreachable,
    UsageError,
    W5xdeError,
)
from w5xde_async.net.endpoint import format_address, parse_address
from w5xde_async.net.join import Invitation, check_strength
from w5xde_async.net.link import Link
from w5xde_async.net.tls import client_context, is_loopback
from w5xde_async.runtime import Runtime
from w5xde_async.wire.handshake import member_id
from w5xde_async.wire.messages import Welcome
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.handshake import Joined, join
from w5xde_async.worker.connection.metering import Traffic

_TLS_ALERT = 0x1503  # how a TLS record that says "not understood" begins, read as the length of a header
_HUNG_UP = 3
#: Before it connects again after links that ended, one after the other, without a lease that was applied.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_TRY_AGAIN = (RefusalCode.SHUTTING_DOWN, RefusalCode.RUN_FULL, RefusalCode.TERM)


class _NotNow(W5xdeError):
    """The coordinator answered but cannot take us now."""


class Dialer:
    """Where one worker's coordinator is, and who the worker is to it. Survives links."""

    def __init__(
        self,
        server: str,
        config: WorkerConfig,
        runtime: Runtime,
        *,
        on_welcome: Callable[[Welcome], Welcome] | None = None,
    ) -> None:
        """``server`` is ``host:port``, a join string (whose secret and certificate then count), or "" where ``join``
        is given a link. Raises UsageError.
        """
        if server.startswith("w5xde://"):
            told = Invitation.parse(server, place="server")
            self.host, self.port = told.host, told.port
            config = replace(
                config, token=told.secret or config.token, identity=told.identity, certificate=told.certificate
            )
        else:
            self.host, self.port = parse_address(server) if server else ("", 0)
        self.config, self._runtime, self._on_welcome = config, runtime, on_welcome
        secure = bool(server) and not config.insecure and (config.asks_for_tls or not is_loopback(self.host))
        if secure and not (config.certificate or config.tls.ca is not None or config.token):
            raise UsageError(
                f"nothing tells {self.host} from another machine that answers in its place: give the coordinator's "
                "join file (--join-file), its token (--token-file, W5XDE_TOKEN) or its authority (--tls-ca-file); "
                "--insecure goes without encryption, for a network that you trust"
            )
        if not config.certificate and config.tls.ca is None and not is_loopback(self.host):
            check_strength(config.token, "the token")  # whoever answers is given a proof of it
        self._tls = client_context(config.tls) if secure else None
        self._hung_up = 0  # TLS stood and the coordinator closed without a word, so many times in a row
        self._key = runtime.random_bytes(16).hex()
        self.worker_id = member_id(config.identity, self._key)
        self.name = config.name or f"{socket.gethostname()}-{os.getpid()}"
        self.traffic = Traffic()
        self._terms: dict[str, int] = {}  # run -> the highest term served
        self._heard = ""  # what the last coordinator said that it did
        self._failed_links = 0  # in a row: ended without a goodbye and without a lease that was applied

    def link_ended(self, *, failed: bool, applied: bool, heard: str) -> None:
        """A link that ``join`` gave is over. ``failed``: it ended without a goodbye; ``applied``: a lease counted;
        ``heard``: what the coordinator said that it was doing."""
        self._heard = heard or self._heard
        self._failed_links = 0 if applied else self._failed_links + failed

    async def join(self, given: Link | None = None) -> Joined:
        """Reach the coordinator and be let in; tried again with jitter until ``connect_timeout_s`` is over.

        With ``given`` it is tried once, over that link. Raises Unreachable, Refused, and what ``on_welcome`` raises;
        over a given link LinkLost and RemoteError too.
        """
        joined = await self._join(given)
        welcome = joined.welcome
        if self._terms.get(welcome.run_id) != welcome.term:
            self._failed_links = 0  # another coordinator: the last link ended with its own, through no fault of ours
        self._terms[welcome.run_id] = welcome.term
        return joined

    async def _join(self, given: Link | None) -> Joined:
        if given is not None:
            return await self._try_to_join(self.config.connect_timeout_s, given)
        if self._failed_links:
            await asyncio.sleep(_pause_s(self._failed_links))
        clock, limit = self._runtime.clock, self.config.connect_timeout_s
        began = clock()

        def goes_on(error: Exception) -> bool:
            return isinstance(error, LinkLost | _NotNow | RemoteError) and clock() - began < limit

        try:
            async for attempt in stamina.retry_context(
                on=goes_on, attempts=None, timeout=None, wait_initial=0.1, wait_max=2.0, wait_jitter=0.5,
            ):  # fmt: skip
                with attempt:
                    return await self._try_to_join(max(limit - (clock() - began), 0.5))
        except (LinkLost, _NotNow, RemoteError) as error:
            reason = error.reason if isinstance(error, LinkLost) else str(error)
            raise Unreachable(format_address(self.host, self.port), reason, limit, self._heard) from error
        raise LocalError("retrying ended without a result")

    async def _try_to_join(self, left_s: float, given: Link | None = None) -> Joined:
        link = given or await self._runtime.connect(self.host, self.port, timeout_s=min(left_s, 10.0), ssl=self._tls)
        try:
            self._check_certificate(link)
            async with asyncio.timeout(min(left_s, 20.0)):
                joined = await join(
                    link, key=self._key, name=self.name, token=self.config.token, terms=self._terms,
                    identity=self.config.identity,
                )  # fmt: skip
            self._hung_up = 0
            self.traffic.add(link)
            if self._on_welcome is not None:
                joined = joined._replace(welcome=self._on_welcome(joined.welcome))
            return joined
        except BaseException as error:
            link.abort()
            if given is None:
                self._explain(error, link)
            if isinstance(error, TimeoutError):
                raise LinkLost(link.peer, "it accepted the connection and then said nothing") from None
            if given is None and isinstance(error, Refused) and error.code in _TRY_AGAIN:
                raise _NotNow(error.reason) from None
            raise

    def _check_certificate(self, link: Link) -> None:
        expected = self.config.certificate
        if expected and not hmac.compare_digest(hashlib.sha256(link.certificate).digest(), expected):
            raise Refused(
                RefusalCode.AUTHENTICATION,
                "the coordinator's certificate is not the one of the join string",
                "take its present join string; if it has not changed, somebody sits between",
            )

    def _explain(self, error: BaseException, link: Link) -> None:
        """Raise Refused where an ended handshake means that both sides disagree about TLS."""
        if self._tls is None and isinstance(error, FrameTooLarge) and error.nbytes >> 16 == _TLS_ALERT:
            raise Refused(
                RefusalCode.AUTHENTICATION,
                "the coordinator speaks TLS and this worker does not",
                "use its join file, or leave out --insecure",
            ) from None
        if not isinstance(error, LinkLost) or self._terms or link.bytes_received:
            return
        if self._tls is None:
            reason = f"{error.reason} at the first words; it may want TLS: use its join file"
            raise LinkLost(link.peer, reason) from None
        self._hung_up += 1
        if self._hung_up >= _HUNG_UP:
            # TLS 1.3 tells a client that its certificate is missing or wrong only after the handshake.
            raise Refused(
                RefusalCode.AUTHENTICATION,
                f"the coordinator closed right after TLS began ({error.reason})",
                "it may want a certificate of this worker: --tls-cert and --tls-key",
            ) from None


def _pause_s(failed_links: int) -> float:
    """Twice as long after each failed link, with jitter: no lease is to go round in milliseconds."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(failed_links - 1, 32), _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
