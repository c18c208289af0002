"""Where one worker's coordinator is: an address, a join string, or a join file, which may come late and change.

A coordinator that was started anew may listen on another port, or on another machine: its join file says so, and a
worker that looks for it reads the file again. On a network disk that may hang, so it is read in a thread that nobody
waits for.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from w5xde_async.errors import UsageError
from w5xde_async.net.endpoint import format_address, is_no_address, parse_address
from w5xde_async.net.hanging import in_daemon_thread
from w5xde_async.net.join import Invitation, check_strength, expanded, read_join_file
from w5xde_async.net.tls import client_context, is_loopback
from w5xde_async.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

_READ_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses of one coordinator, the likeliest first; ``config`` with the join string's secret and certificate."""

    addresses: tuple[tuple[str, int], ...]
    config: WorkerConfig
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, server: str, config: WorkerConfig) -> Target:
        """``server`` is ``host:port`` or a join string. Raises UsageError, also where nothing says who will answer."""
        addresses: tuple[tuple[str, int], ...]
        if is_no_address(server):
            told = Invitation.parse(server, place="server")
            addresses = told.addresses
            config = replace(
                config, token=told.secret or config.token, identity=told.identity, certificate=told.certificate
            )
        else:
            addresses = (parse_address(server),)
        elsewhere = next((host for host, _ in addresses if not is_loopback(host)), "")
        secure = not config.insecure and (config.asks_for_tls or bool(elsewhere))
        if secure and not (config.certificate or config.tls.ca is not None or config.token):
            raise UsageError(
                f"nothing tells {elsewhere or addresses[0][0]} from another machine that answers in its place: give "
                "the coordinator's join file (--join-file), its token (--token-file, W5XDE_TOKEN) or its authority "
                "(--tls-ca-file); --insecure goes without encryption, for a network that you trust"
            )
        if not config.certificate and config.tls.ca is None and elsewhere:
            check_strength(config.token, "the token")  # whoever answers is given a proof of it
        return cls(addresses, config, client_context(config.tls) if secure else None)

    @property
    def is_certified(self) -> bool:
        """Whether who has come to TLS with it is the coordinator, whatever it knows: its certificate is checked."""
        return self.tls is not None and bool(self.config.certificate or self.config.tls.ca is not None)

    @property
    def is_here(self) -> bool:
        """Whether all of it is this machine."""
        return all(is_loopback(host) for host, _ in self.addresses)

    def __str__(self) -> str:
        return ", ".join(format_address(*address) for address in self.addresses)

    def preferring(self, address: tuple[str, int]) -> Target:
        """The same with this one of its addresses first."""
        return replace(self, addresses=(address, *(one for one in self.addresses if one != address)))


class JoinFile:
    """A join file that is read again each time that its coordinator is looked for."""

    def __init__(self, path: Path, config: WorkerConfig, *, known: str = "") -> None:
        """``known``: what it held when it was read last."""
        self.path, self._config, self._text = expanded(path, "join file"), config, known
        self._complained = ""

    async def changed(self) -> Target | None:
        """What it says now; None where that is what it said before. Raises UsageError where it cannot be used (yet)."""
        try:
            async with asyncio.timeout(_READ_S):
                read = await in_daemon_thread(("join file", self.path), partial(_read, self.path))
        except TimeoutError:
            raise UsageError(f"join file {self.path} cannot be read: its disk does not answer") from None
        except OSError as error:
            raise UsageError(f"join file {self.path} cannot be read: {error.strerror or error}") from None
        if read == self._text:
            return None
        target = Target.of(read, self._config)
        self._text = read
        return target

    @property
    def was_read(self) -> bool:
        """Whether what is known of the coordinator is from this file."""
        return is_no_address(self._text)

    def complain(self, problem: str) -> None:
        """Say once what is wrong with a file that was right before."""
        if problem != self._complained:
            self._complained = problem
            logger.warning("join file not read again, going on with what it said before reason=%s", problem)


def _read(path: Path) -> str:
    if not path.exists():
        raise UsageError(f"join file {path} is not there yet")
    return read_join_file(path).reveal()
