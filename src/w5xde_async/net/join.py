"""Join strings: all that a machine needs to join a run, in one line.

``w5xde://SECRET@host:port?cert=sha256:HEX[&also=host:port]...[&worker=NAME]``. It holds the secret, so it lives in a
file of mode 0600 or in the environment, never among arguments. With ``worker=NAME`` the secret is that worker's own
(:func:`worker_secret`), which opens the run to this name alone and can be revoked by it. ``also``: other addresses of
the same coordinator.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import os
import re
import secrets
import shlex
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from w5xde_async.errors import UsageError
from w5xde_async.net.endpoint import format_address, split_address, valid_host
from w5xde_async.net.tls import is_exposed, write_private

_SCHEME = "w5xde"
_LEAST_BITS, _LEAST_CHARACTERS = 128, 8  # of a secret; and different ones of its characters
MOST_ALSO = 7
_MOST_CHARACTERS = 16_384  # of a secret's file: a join string may have three for each of a secret's 4000 bytes
_STDIN = Path("/dev/stdin")
_OF_SHELLS = (Path("/dev/fd"), Path("/proc/self/fd"))  # what they call the pipe of <(...)
_IDENTITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """A join string, taken apart. ``certificate`` is the SHA-256 of the coordinator's (DER), 32 bytes."""

    host: str
    port: int
    certificate: bytes
    secret: str = field(default="", repr=False)
    identity: str = ""
    also: tuple[tuple[str, int], ...] = ()

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """All of them, (host, port), the likeliest first."""
        return ((self.host, self.port), *self.also)

    def __str__(self) -> str:
        """Without the secret, as it may be shown."""
        return self._format("")

    def reveal(self) -> str:
        """The join string, secret and all."""
        return self._format(f"{quote(self.secret, safe='')}@")

    def _format(self, secret: str) -> str:
        worker = f"&worker={self.identity}" if self.identity else ""
        address = format_address(self.host, self.port)
        also = "".join(f"&also={quote(format_address(*one), safe='[]:')}" for one in self.also)
        return f"{_SCHEME}://{secret}{address}?cert=sha256:{self.certificate.hex()}{also}{worker}"

    @classmethod
    def parse(cls, text: str, *, place: str) -> Invitation:
        """``place`` says where the text is from. Raises UsageError, which never shows the text.

        One address that could answer is enough; the others are kept, and fail when they are tried.
        """

        def wrong(reason: str) -> UsageError:
            return UsageError(f"{place}: not a join string ({reason}); it looks like {_SCHEME}://SECRET@host:port?cert=sha256:...")  # fmt: skip  # noqa: E501

        try:
            text.encode()  # the environment may hold bytes that are no text
            parts = urlsplit(text.strip())
            query = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
        except ValueError:
            raise wrong("it cannot be read as an address") from None
        if parts.scheme != _SCHEME:
            raise wrong(f"it does not begin with {_SCHEME}://")
        secret, at, address = parts.netloc.rpartition("@")
        algorithm, _, digest = query.get("cert", [""])[0].partition(":")
        if algorithm != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise wrong("cert=sha256: and 64 hexadecimal digits are missing")
        identity = query.get("worker", [""])[0]
        if identity and not _IDENTITY.fullmatch(identity):
            raise wrong("worker= is not a name")
        if set(query) - {"cert", "worker", "also"} or parts.path not in ("", "/") or parts.fragment:
            raise wrong("there is more in it")
        try:
            host, port = split_address(address)
            also = tuple(split_address(one) for one in query.get("also", ()))
        except UsageError:
            raise wrong("host:port is missing") from None
        if not any(_may_answer(*one) for one in ((host, port), *also)):
            raise wrong("its address is none that could answer: compare the host and the port")
        if len(also) > MOST_ALSO:
            raise wrong("it has too many addresses")
        return cls(host=host, port=port, certificate=bytes.fromhex(digest), secret=unquote(secret) if at else "",
                   identity=identity, also=also)  # fmt: skip


def _may_answer(host: str, port: int) -> bool:
    """Whether a worker can try it. One of several that it cannot is no reason not to try the others."""
    try:
        valid_host(host)
    except UsageError:
        return False
    return port > 0


def new_secret() -> str:
    """32 random bytes as text that needs no quoting."""
    return secrets.token_urlsafe(32)


def check_strength(secret: str, what: str) -> None:
    """Refuse a secret that could be guessed: whoever is given a proof of it may try as many as he can compute.

    Judged by length and alphabet, so that a sentence passes too easily and nothing random is refused. "" is no secret,
    and passes. Raises UsageError.
    """
    if not secret:
        return
    alphabets = (("0123456789", 10), ("abcdef", 6), ("ghijklmnopqrstuvwxyz", 20), ("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 26))
    known = "".join(letters for letters, _ in alphabets)
    size = sum(count for letters, count in alphabets if set(secret) & set(letters))
    size += 32 if set(secret) - set(known) else 0
    bits = len(secret) * math.log2(max(size, 2))
    if bits < _LEAST_BITS:
        why = f"it has the strength of {bits:.0f} bits at most, and off this machine {_LEAST_BITS} are needed"
    elif (different := len(set(secret))) < _LEAST_CHARACTERS:
        why = f"it has {different} different characters, and off this machine {_LEAST_CHARACTERS} are needed"
    else:
        return
    raise UsageError(
        f"{what} could be guessed: {why}; make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
    )


def worker_secret(secret: str, identity: str) -> str:
    """The secret of one worker, from one that the coordinator keeps to itself. Raises UsageError for a bad name."""
    if not _IDENTITY.fullmatch(identity):
        raise UsageError(f"worker name {identity!r}: give 1 to 64 letters, digits, dots, dashes or underscores")
    made = hmac.new(secret.encode(), b"w5xde/1 worker " + identity.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(made).decode().rstrip("=")


def expanded(path: Path, kind: str) -> Path:
    """With the home that ``~`` stands for. Raises UsageError where there is none."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise UsageError(f"{kind} {path}: nobody here has such a home directory; give the whole path") from None


def read_secret_file(path: Path, *, kind: str = "secret file") -> str:
    """The one line of a file that only its owner can read (a secret, a join string). Raises UsageError.

    One of root's may be readable by a group too where this is another user: that is how a container is given a secret.
    A pipe is read where a shell has opened it (``<(...)``): one with a name would be waited for until somebody writes.
    """
    path = expanded(path, kind)
    try:
        with open(path, encoding="utf-8-sig", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            piped = stat.S_ISFIFO(status.st_mode) and (path.parent in _OF_SHELLS or path == _STDIN)
            if not piped and not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{kind} {path} is no regular file; write the line into one of mode 0600")
            if piped:
                os.set_blocking(file.fileno(), True)
            text = file.read(_MOST_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"{kind} {path} cannot be read: {reason}") from error
    if is_exposed(status):
        raise UsageError(f"{kind} {path} can be read by others; run: chmod 600 {shlex.quote(str(path))}")
    if len(text) > _MOST_CHARACTERS:
        raise UsageError(f"{kind} {path} has more than {_MOST_CHARACTERS} characters; write the one line alone into it")
    text = text.strip()
    if not text or len(text.splitlines()) != 1:
        what = f"{kind} {path} {'does not hold one line' if text else 'is empty'}"
        raise UsageError(f"{what}; copy it once more from where it was made")
    return text


def read_join_file(path: Path) -> Invitation:
    """What a join file says; it is for its owner alone, as ``read_secret_file`` says. Raises UsageError."""
    return Invitation.parse(read_secret_file(path, kind="join file"), place=f"join file {path}")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write_private_line(path: Path, text: str) -> None:
    """Replace ``path`` by one line, readable by its owner alone. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, text.encode() + b"\n")
