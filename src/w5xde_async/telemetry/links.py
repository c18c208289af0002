"""Where a run's dashboard is: the link as it is printed, and as a private line of the run directory.

It has all that a program needs that asks: the token, and the hash of the certificate, which nobody else vouches for.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

#: In the run directory while the dashboard answers. Mode 0600: the link holds the token.
LINK_FILE = "dashboard"
#: Of the query: for programs. A browser's address loses it with the token.
HASH_NAME = "sha256"
_HASH_BYTES = 32


class DashboardLink(NamedTuple):
    """``url``: with the token, where it has one. ``certificate`` is the SHA-256 of the certificate (DER), empty without
    TLS."""

    url: str
    certificate: bytes = b""

    def line(self) -> str:
        """What is printed, and stands in the file."""
        if not self.certificate:
            return self.url
        return f"{self.url}{'&' if '?' in self.url else '?'}{HASH_NAME}={self.certificate.hex()}"

    @classmethod
    def parse(cls, line: str) -> DashboardLink:
        """The inverse of ``line``. Raises ValueError."""
        parts = urlsplit(line.strip())
        given = parse_qsl(parts.query, keep_blank_values=True)
        (told,) = [value for name, value in given if name == HASH_NAME] or [""]
        certificate = bytes.fromhex(told)
        if certificate and len(certificate) != _HASH_BYTES:
            raise ValueError(f"{HASH_NAME} is no hash of {_HASH_BYTES} bytes")
        rest = urlencode([(name, value) for name, value in given if name != HASH_NAME])
        return cls(urlunsplit(parts._replace(query=rest)), certificate)
