"""``python -m w5xde_async.launch.health``: whether a container's coordinator answers at ``/health``; exit code 0 or 1.

Off loopback the dashboard speaks TLS, with a certificate that nobody has signed; what is asked is on this machine, and
the answer no secret. A container whose first process is a worker, or a coordinator that was told to have no dashboard
or one at any port, is well while it runs.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from w5xde_async.errors import UsageError
from w5xde_async.net.endpoint import parse_address
from w5xde_async.settings import CoordinatorSettings, read

DASHBOARD_PORT = 5556
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
    if "coordinator" not in words:
        return 0
    host, port = "127.0.0.1", DASHBOARD_PORT
    with suppress(UsageError):  # the coordinator has said it, and has ended
        arguments = words[words.index("coordinator") + 1 :]
        told, _ = read(CoordinatorSettings, arguments, prog="", environment=environment)
        if not told.dashboard or not told.values["dashboard_address"]:
            return 0
        given, port = parse_address(told.values["dashboard_address"], DASHBOARD_PORT, listens=True)
        host = {"0.0.0.0": host, "::": "::1"}.get(given, given)
    return 0 if not port or answers(port, host) else 1  # 0: any port, which only the coordinator knows


if __name__ == "__main__":
    sys.exit(main())
