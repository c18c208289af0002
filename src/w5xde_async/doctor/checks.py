"""The checks, each a line: name, route, port, certificate, secret, clock, round trip, rate each way, what auto chooses.

It proves the secret as a worker does and then measures with PROBE in place of joining: nobody counts it as a worker,
and it sends less than a megabyte each way. Everything has a deadline; all of it takes ten seconds at most. The rates
are those of one machine alone: in a run the coordinator's line is shared by all workers.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import NamedTuple

from w5xde_async.errors import ExitCode, LinkLost, Refused, UnexpectedMessage, W5xdeError
from w5xde_async.net.endpoint import connect, format_address
from w5xde_async.net.hanging import in_daemon_thread
from w5xde_async.net.link import Link
from w5xde_async.net.racing import NoneWorked, first_that_works
from w5xde_async.plan.strategy_choice import Figures, Situation, choose
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import PROBE_BYTES, Probe, Probed
from w5xde_async.worker.connection.handshake import prove_each_other
from w5xde_async.worker.connection.target import Target

_ALL_S = 10.0
_NAME_S, _PORT_S, _TLS_S, _PROOF_S, _RATE_S = 2.0, 2.0, 2.0, 1.5, 1.0  # measuring has what the others leave of it
_ROUND_TRIPS = 5
_MEASUREMENTS = 5  # of a rate: one alone says more of what the two machines did meanwhile than of the line
_MOST_PROBES, _ENOUGH_S = 54, 0.1  # of one of them
_UNSTEADY = 3.0  # times between the least and the most of them
_CLOCK_S = 30.0  # beyond that, logs of both sides cannot be compared, and certificates may not be valid yet
_ASSUMED_LEAF_S = 0.5
_LAYERS = 8  # of the model, by which fragments are bounded; the run knows better


class Finding(NamedTuple):
    """One line. ``advice``: what to do where it is not ``ok``; ``code``: the program's exit code for it."""

    name: str
    ok: bool
    said: str
    advice: str = ""
    code: ExitCode = ExitCode.ERROR

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'FAILED':<7} {self.name:<12} {self.said}" + (f"; {self.advice}" * (not self.ok))


class _Over(Exception):
    """What comes next needs what has failed."""


class Doctor:
    """Examines the way to one coordinator."""

    def __init__(self, target: Target, say: Callable[[Finding], None]) -> None:
        self._target, self._say = target, say
        self.code = ExitCode.OK  #: of the first check that failed and that a worker cannot do without
        self._addresses: list[tuple[str, int]] = []  # whose port answers

    async def examine(self) -> ExitCode:
        """Make all checks that can be made; returns ``code``."""
        ends = asyncio.get_running_loop().time() + _ALL_S
        try:
            await self._names()
            await self._ports()
            link = await self._certificate()
            try:
                await self._proof(link)
                await self._measure(link, ends)
            finally:
                link.abort()
        except _Over:
            pass
        return self.code

    def _found(self, name: str, said: str) -> None:
        self._say(Finding(name, True, said))

    def _failed(self, name: str, said: str, advice: str, code: ExitCode = ExitCode.UNREACHABLE) -> None:
        self.code = self.code or code
        self._say(Finding(name, False, said, advice, code))

    async def _names(self) -> None:
        """Names and routes of all addresses."""
        known, ends = 0, asyncio.get_running_loop().time() + _NAME_S  # for all names
        for host, port in self._target.addresses:
            try:
                ip_address(host.partition("%")[0])
                addresses = [host]
            except ValueError:
                began = time.monotonic()
                try:
                    async with asyncio.timeout_at(ends):
                        addresses = await in_daemon_thread(("resolve", host), partial(_resolve, host, port))
                except TimeoutError:
                    self._failed("name", f"{host}: the resolver does not answer", "check this machine's DNS")
                    continue
                except (OSError, UnicodeError) as error:
                    said = "it is no host name" if isinstance(error, UnicodeError) else error.strerror or error
                    advice = "check the spelling and this machine's DNS, or have the coordinator --advertise an address"
                    self._failed("name", f"{host}: {said}", advice)
                    continue
                self._found("name", f"{host} is {', '.join(addresses)} ({(time.monotonic() - began) * 1e3:.0f} ms)")
            known += 1
            for address in addresses:
                self._route(address, port)
        if not known:
            raise _Over

    def _route(self, address: str, port: int) -> None:
        """Which of this machine's addresses the system would use; nothing is sent."""
        try:
            numeric = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
            family, _, _, _, place = numeric[0]  # with the interface of a link-local address
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.setblocking(False)
                probe.connect(place)
                self._found("route", f"to {address} from {probe.getsockname()[0]}")
        except OSError as error:
            advice = "this machine has no way there: check its network, VPN and routes, or --advertise another address"
            self._failed("route", f"to {address}: {error.strerror or error}", advice)

    async def _ports(self) -> None:
        """One that answers is enough; all are tried side by side."""

        async def one(host: str, port: int) -> str:
            began = time.monotonic()
            try:
                async with asyncio.timeout(_PORT_S):
                    link = await connect(host, port, timeout_s=_PORT_S)
            except TimeoutError:
                return "no answer"
            except LinkLost as error:
                return error.reason
            link.abort()
            self._addresses.append((host, port))
            self._found("port", f"{format_address(host, port)} answers ({(time.monotonic() - began) * 1e3:.0f} ms)")
            return ""

        reasons = await asyncio.gather(*[one(*address) for address in self._target.addresses])
        silent = [
            f"{format_address(*address)}: {reason}"
            for address, reason in zip(self._target.addresses, reasons, strict=True)
            if reason
        ]
        if not self._addresses:
            refused = any("refused" in reason.lower() for reason in reasons)
            advice = (
                "nothing listens there: start the coordinator, and compare its --port and --host"
                if refused
                else "open the port in the firewalls between, forward it, or compare --advertise with the coordinator's"
            )
            self._failed("port", ", ".join(silent), advice)
            raise _Over
        self.code = ExitCode.OK  # a worker does without the names and routes that failed
        if silent:
            self._found("port", f"not needed: {', '.join(silent)}")

    async def _certificate(self) -> Link:
        target = self._target
        expected = target.config.certificate

        async def attempt(host: str, port: int) -> Link:
            return await connect(host, port, timeout_s=_TLS_S, ssl=target.tls, certificate=expected)

        try:
            link = await first_that_works([partial(attempt, *one) for one in self._addresses], discard=Link.abort)
        except NoneWorked as failed:
            for other in failed.errors:
                if not isinstance(other, LinkLost | Refused):
                    raise other from None
            refused = [one for one in failed.errors if isinstance(one, Refused)]
            self._no_certificate((refused or failed.errors)[0])
            raise _Over from None
        said = "none: not encrypted" if target.tls is None else "TLS 1.3, that of the join string"
        if target.tls is not None and not expected:
            said = "TLS 1.3, of the authority" if target.config.tls.ca is not None else "TLS 1.3, bound to the token"
        self._found("certificate", said)
        return link

    def _no_certificate(self, error: Exception) -> None:
        if isinstance(error, LinkLost):
            advice = (
                "its port accepts connections and TLS does not come about: the coordinator hangs, was stopped or is "
                "very busy, or it is another program; look at it on its machine"
            )
            self._failed("answer", error.reason, advice)
            return
        reason, hint = getattr(error, "reason", str(error)), getattr(error, "hint", "") or "compare TLS of both sides"
        self._failed("certificate", reason, hint, ExitCode.AUTHENTICATION)

    async def _proof(self, link: Link) -> None:
        config = self._target.config
        try:
            async with asyncio.timeout(_PROOF_S):
                await prove_each_other(link, token=config.token, identity=config.identity)
        except TimeoutError:
            advice = "the coordinator hangs or was stopped, or it is another program; look at it on its machine"
            self._failed("answer", "it accepts the connection and then says nothing", advice)
            raise _Over from None
        except Refused as error:
            self._failed("secret", error.reason, error.hint or "copy the present join file", error.exit_code)
            raise _Over from None
        except W5xdeError as error:
            advice = "what listens there may be no coordinator, or want TLS: use its join file"
            self._failed("answer", str(error), advice)
            raise _Over from None
        self._found("secret", "both sides know it" if config.token else "none is asked for")

    async def _measure(self, link: Link, ends: float) -> None:
        try:
            async with asyncio.timeout_at(ends):
                answer, up, down, best_s = await self._figures(link)
        except (TimeoutError, W5xdeError) as error:
            said = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            self._failed("rate", said, "the line is cut or very slow: try again, and look for losses with ping")
            raise _Over from None
        self._found("auto", _choice(answer, statistics.median(up), statistics.median(down), best_s))

    async def _figures(self, link: Link) -> tuple[Probed, list[float], list[float], float]:
        """The last answer, the rates up and down, and the shortest round trip."""
        trips, offsets = [], []
        answer: Probed | None = None
        for _ in range(_ROUND_TRIPS):
            began, wall = time.monotonic(), time.time()
            async with asyncio.timeout(_PROOF_S):
                (answer,) = await _exchange(link, 1, wanted=0, filler=b"")
            trips.append(time.monotonic() - began)
            offsets.append((trips[-1], answer.wall - (wall + trips[-1] / 2)))
        assert answer is not None
        _, ahead_s = min(offsets)
        said = f"the coordinator's is {abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}"
        if abs(ahead_s) <= _CLOCK_S:
            self._found("clock", said)
        else:
            self._say(Finding("clock", False, said, "set the clocks of both machines (NTP)"))  # a worker does with it
        self._found("round trip", f"{statistics.median(trips) * 1e3:.1f} ms, at best {min(trips) * 1e3:.1f} ms")
        up = await _bytes_per_s(link, min(trips), up=True)
        self._found("rate up", f"to the coordinator {_words(up)}")
        down = await _bytes_per_s(link, min(trips), up=False)
        self._found("rate down", f"from the coordinator {_words(down)}")
        return answer, up, down, min(trips)


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


async def _exchange(link: Link, count: int, *, wanted: int, filler: bytes) -> list[Probed]:
    """``count`` probes on their way at once, and their answers."""

    async def ask() -> None:
        for _ in range(count):
            await link.send(encode(Probe(wanted, filler)))

    async def hear() -> list[Probed]:
        answers: list[Probed] = []
        while len(answers) < count:
            message = (await link.recv()).message
            if not isinstance(message, Probed):
                raise UnexpectedMessage(type(message).__name__, "probing")
            answers.append(message)
        return answers

    _, answers = await asyncio.gather(ask(), hear())
    return answers


async def _bytes_per_s(link: Link, round_trip_s: float, *, up: bool) -> list[float]:
    """Several measurements, after more and more probes at once until they take long enough for the round trip not to
    matter. At least one."""
    count, ends, found = 2, time.monotonic() + _RATE_S, list[float]()
    while True:
        began = time.monotonic()
        async with asyncio.timeout(4 * _RATE_S):
            await _exchange(link, count, wanted=0 if up else PROBE_BYTES, filler=bytes(PROBE_BYTES) if up else b"")
        now = time.monotonic()
        took_s = max(now - began - round_trip_s, 1e-4)
        if took_s >= _ENOUGH_S or count == _MOST_PROBES or now >= ends:
            found.append(count * PROBE_BYTES / took_s)
            if len(found) == _MEASUREMENTS or now >= ends:
                return found
        else:
            count = min(3 * count, _MOST_PROBES)


def _words(rates: list[float]) -> str:
    """Rates in bytes/s: the middle, from where to where they go, and what it means where they differ much."""
    said = f"about {_mbit(statistics.median(rates))} Mbit/s"
    if len(rates) > 1:
        said += f" ({_mbit(min(rates))} to {_mbit(max(rates))} in {len(rates)} measurements)"
    if max(rates) > _UNSTEADY * min(rates):
        said += "; they differ much: a machine or the line is busy, so try again when it is not"
    return said


def _mbit(bytes_s: float) -> str:
    mbit_s = bytes_s * 8e-6
    return f"{mbit_s:,.0f}" if mbit_s >= 100 else f"{mbit_s:.2g}"


def _choice(answer: Probed, up_s: float, down_s: float, round_trip_s: float) -> str:
    """What ``--update auto`` would choose if all workers had this line."""
    leaf_s = answer.leaf_s or _ASSUMED_LEAF_S
    figures = Figures(batch_s=leaf_s, up_bytes_s=up_s, down_bytes_s=down_s, round_trip_s=round_trip_s)
    if not answer.num_values:
        return "the run has nothing to train"
    situation = Situation(num_values=answer.num_values, batch_bytes=0, num_layers=_LAYERS, workers=(figures,))
    known = f"a leaf takes {leaf_s:.2g} s" + ("" if answer.leaf_s else " (assumed: nobody has computed yet)")
    return (
        f"over this line alone --update auto would choose {choose(situation).reason} ({answer.num_values:,} values, "
        f"{known}); the run has --update {answer.update}"
    )
