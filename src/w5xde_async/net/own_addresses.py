"""Under which addresses others may find this machine: what was told, or else what its interfaces have.

A host that listens on all of its addresses has several, and which of them another machine can reach is that machine's
to find out: a join string names them all, the likeliest first.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from w5xde_async.errors import UsageError
from w5xde_async.net.endpoint import DEFAULT_PORT, parse_address
from w5xde_async.net.interfaces import ipv4_addresses
from w5xde_async.net.join import MOST_ALSO

_MOST = 1 + MOST_ALSO
_ANY = ("", "0.0.0.0", "::")
#: Reserved for documentation: a route to them is the default route.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def advertised(text: str, port: int = DEFAULT_PORT, *, place: str = "--advertise") -> tuple[tuple[str, int], ...]:
    """``HOST[:PORT]`` or ``[IPv6][:PORT]``, several with commas between, as (host, port); ``port`` where none is given.

    Raises UsageError, also for an address that stands for all of a machine's.
    """
    found = tuple(_one(part.strip(), port, place) for part in text.split(","))
    if len(found) > _MOST:
        raise UsageError(f"{place} {text!r} names more than {_MOST} addresses")
    return found


def _one(text: str, port: int, place: str) -> tuple[str, int]:
    with suppress(ValueError):
        if ip_address(text).version == 6:
            text = f"[{text}]"
    host, port = parse_address(text, port, place=place)
    with suppress(ValueError):
        if ip_address(host.partition("%")[0]).is_unspecified:
            raise UsageError(
                f"{place} {text!r} is no machine's address: give the one under which others reach this one"
            )
    return host, port


def own_addresses(host: str) -> tuple[str, ...]:
    """Where others may find a host that listens on ``host``: at least one, the one that the default route has first.

    Those of loopback and of a single link are left out, unless there is no other. The resolver, which may keep its
    caller waiting, is asked for this machine's name only where no interface has an address, and elsewhere than on
    Linux, where nobody else knows of several.
    """
    if host not in _ANY:
        return (host,)
    families = {"0.0.0.0": (4,), "::": (6,)}.get(host, (4, 6))
    found, near = dict[str, None](), dict[str, None]()  # ordered sets
    for addresses in (_of_default_routes, _of_interfaces, _of_name):
        if addresses is _of_name and found and sys.platform == "linux":
            break
        for address in addresses():
            with suppress(ValueError):
                parsed = ip_address(address)
                if parsed.version not in families or parsed.is_unspecified or parsed.is_multicast:
                    continue
                if not (parsed.is_loopback or parsed.is_link_local):
                    found[str(parsed)] = None
                elif parsed.version == 4 or parsed.is_loopback:  # of IPv6's nobody could say on which link
                    near[str(parsed)] = None
    last = sorted(near, key=lambda address: ip_address(address).is_loopback)
    return tuple(found or last)[:_MOST] or ("127.0.0.1" if 4 in families else "::1",)


def _of_default_routes() -> Iterator[str]:
    """The system picks the address that it would use; nothing is sent."""
    for family, elsewhere in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            yield str(probe.getsockname()[0])


def _of_interfaces() -> Iterator[str]:
    if sys.platform != "linux":
        return
    with suppress(OSError):
        yield from ipv4_addresses()
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            yield str(ip_address(bytes.fromhex(line.split()[0])))


def _of_name() -> Iterator[str]:
    with suppress(OSError, UnicodeError):
        for _, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(address[0])
