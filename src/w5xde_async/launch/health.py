"""``python -m w5xde_async.launch.health``: whether a container's coordinator answers at ``/health``; exit code 0 or 1.

Off loopback the dashboard speaks TLS, with a certificate that nobody has signed; what is asked is on this machine, and
the answer no secret. A container whose first process is a worker has no dashboard and is well while it runs.
"""

from __future__ import annotations

import http.client
import ssl
import sys
from pathlib import Path

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


def main(first: Path = Path("/proc/1/cmdline"), port: int = DASHBOARD_PORT) -> int:
    """The exit code. ``first``: the command line of the container's first process."""
    is_coordinator = b"coordinator" in first.read_bytes().split(b"\0")
    return 0 if not is_coordinator or answers(port) else 1


if __name__ == "__main__":
    sys.exit(main())
