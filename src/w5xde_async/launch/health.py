"""``python -m w5xde_async.launch.health``: whether a container's coordinator answers at ``/health``; exit code 0 or 1.

Off loopback the dashboard speaks TLS, with a certificate that nobody has signed; what is asked is on this machine, and
the answer no secret. Where the dashboard is, its run directory says, for it may have moved to another port. A container
whose first process is no coordinator, or one that has no dashboard or does not say where, is well while it runs.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from w5xde_async.errors import UsageError
from w5xde_async.net.endpoint import parse_address
from w5xde_async.settings import CoordinatorSettings, read
from w5xde_async.telemetry.links import LINK_FILE, DashboardLink

DASHBOARD_PORT = 5556
_PROGRAMS = ("w5xde", "w5xde_async")  # the latter behind ``python -m``
_MODULE = ("-m", "w5xde_async.coordinator")
_TIMEOUT_S = 4.0


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a dashboard says there that its coordinator lives. Blocking."""
    unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    for connection in (
        http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=unchecked),
        http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S),
    ):
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    return False


def main(first: Path = Path("/proc/1/cmdline"), environment: Mapping[str, str] = os.environ) -> int:
    """The exit code. ``first``: the command line of the container's first process, in the same ``environment``."""
    words = first.read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    arguments = _of_coordinator(words)
    if arguments is None:
        return 0
    host, port = "127.0.0.1", DASHBOARD_PORT
    with suppress(UsageError):  # the coordinator has said it, and has ended
        told, _ = read(CoordinatorSettings, arguments, prog="", environment=environment)
        if not told.dashboard or not told.values["dashboard_address"]:
            return 0
        given, port = parse_address(told.values["dashboard_address"], DASHBOARD_PORT, listens=True)
        host = {"0.0.0.0": host, "::": "::1"}.get(given, given)
        if told.run_dir is not None:
            with suppress(OSError, ValueError):
                link = DashboardLink.parse((told.run_dir / LINK_FILE).read_text(encoding="utf-8"))
                port = urlsplit(link.url).port or port
    return 0 if not port or answers(port, host) or not _can_have_one() else 1  # 0: any port


def _of_coordinator(words: Sequence[str]) -> Sequence[str] | None:
    """The arguments of the coordinator whose command line this is; None: it is another program's."""
    for at, (one, other) in enumerate(pairwise(words), 2):  # what starts it may stand before it: tini, sudo -u w5xde
        if (PurePath(one).name in _PROGRAMS and other == "coordinator") or (one, other) == _MODULE:
            return words[at:]
    return None


def _can_have_one() -> bool:
    """Whether this image has what a dashboard needs."""
    try:
        import w5xde_async.telemetry.dashboard.server  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
