"""Where a run's dashboard is, as the run directory tells it: one private line, the link and its certificate's hash."""

from __future__ import annotations

from typing import NamedTuple

#: In the run directory while the dashboard answers. Mode 0600: the link holds the token.
LINK_FILE = "dashboard"


class DashboardLink(NamedTuple):
    """``certificate`` is the SHA-256 of the certificate (DER), empty without TLS."""

    url: str
    certificate: bytes = b""

    def line(self) -> str:
        """What stands in the file."""
        return f"{self.url} {self.certificate.hex()}".strip()

    @classmethod
    def parse(cls, line: str) -> DashboardLink:
        """The inverse of ``line``. Raises ValueError."""
        url, _, certificate = line.strip().partition(" ")
        return cls(url, bytes.fromhex(certificate))
