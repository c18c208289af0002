"""What a coordinator shows of itself and asks of its workers: certificate, secret, join string.

Off loopback everything is encrypted unless ``insecure`` says otherwise. What was not given is made at the first start
and kept in the run directory (``tls/``, ``secret``: mode 0600), so that join strings outlive restarts. ``reload`` takes
a changed secret and the list of revoked workers (``revoked``: a name a line) into a running coordinator. A worker that
was put out for wrong results stands in that list too, with the reason; without its line it may come back.
"""

from __future__ import annotations

import socket
import ssl
import tempfile
from pathlib import Path

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.credentials import Credentials
from w5xde_async.errors import StoreError
from w5xde_async.net.join import Invitation, new_secret, read_secret_file, worker_secret, write_private_line
from w5xde_async.net.tls import certificate_hash, is_loopback, own_certificate, server_context

__all__ = ["Security", "reachable", "uses_tls"]

_QUARANTINED = "quarantined: "
_CERTIFIED = "w5xde coordinator"  # strangers read it: it says nothing of the run


def uses_tls(config: CoordinatorConfig) -> bool:
    """Off loopback always, on it when asked for; never with ``insecure``."""
    asked = config.tls.cert is not None or config.join_file is not None
    return not config.insecure and (asked or not is_loopback(config.host))


class Security:
    """Built in an executor: it reads and writes files. Raises UsageError, StoreError."""

    def __init__(self, config: CoordinatorConfig, run_path: Path | None) -> None:
        self._config, self._run_path = config, run_path
        self.context: ssl.SSLContext | None = None
        certificate, self._secret = b"", config.token
        if uses_tls(config):
            self.context, certificate = self._certificate()
            self._secret = self._secret or self._own_secret()
        self.credentials = Credentials(self._secret, certificate)
        self._read_revoked()

    def __repr__(self) -> str:
        return f"<Security: {self.words}>"

    @property
    def words(self) -> str:
        """For the first lines on the screen."""
        if self.context is None:
            return (
                ("token, NOT encrypted" if self._config.insecure else "token")
                if self._secret
                else "no token, loopback only"
            )
        ca = ", workers need a certificate" if self._config.tls.ca is not None else ""
        return f"TLS 1.3, secret{ca}"

    def invitation(self, port: int, identity: str = "") -> Invitation | None:
        """The join string (of one worker, where ``identity`` names it); None without TLS."""
        if self.context is None:
            return None
        secret = worker_secret(self._secret, identity) if identity else self._secret
        return Invitation(
            host=self._config.advertise or reachable(self._config.host), port=port,
            certificate=self.credentials.binding, secret=secret, identity=identity,
        )  # fmt: skip

    def write_join_file(self, port: int) -> Path | None:
        """Write the join string where workers' owners can take it; the path, None without TLS or run directory."""
        invitation = self.invitation(port)
        given = self._config.join_file
        path = Path(given) if given is not None else (self._run_path / "join" if self._run_path is not None else None)
        if invitation is None or path is None:
            return None
        try:
            write_private_line(path, invitation.reveal())
        except OSError as error:
            raise StoreError(str(path), f"cannot write the join file: {error.strerror or error}") from error
        return path

    def page_context(self) -> tuple[ssl.SSLContext, bytes]:
        """For pages that a browser opens: no certificate is asked of it. And the certificate's hash. Blocking."""
        files = self._config.tls
        if files.cert is None and self._run_path is not None:
            files = own_certificate(self._run_path / "tls", _CERTIFIED)
        if files.cert is not None:
            return server_context(files.with_ca(None)), certificate_hash(files.cert)
        with tempfile.TemporaryDirectory() as directory:
            own = own_certificate(Path(directory), _CERTIFIED)
            assert own.cert is not None
            return server_context(own), certificate_hash(own.cert)

    def rotate(self, secret: str) -> None:
        """Another secret for everybody who joins from now on."""
        self.credentials.rotate(secret)
        self._secret = secret

    def reload(self) -> bool:
        """Read the run directory's ``secret`` and ``revoked`` again; True when the secret is another."""
        self._read_revoked()
        path = None if self._run_path is None else self._run_path / "secret"
        if path is None or not path.exists():
            return False
        secret = read_secret_file(path)
        if secret == self._secret:
            return False
        self.rotate(secret)
        return True

    def note_quarantine(self, name: str, reason: str) -> None:
        """Have a worker stay out after a restart too. Raises StoreError where the list cannot be written."""
        if self._run_path is None or not name.isprintable() or name != name.strip() or "#" in name or not name:
            return  # a name that somebody has chosen so that it is no line of a list
        path = self._run_path / "revoked"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{name}  # {_QUARANTINED}{' '.join(reason.split())}\n")
        except OSError as error:
            raise StoreError(str(path), f"cannot keep the quarantine: {error.strerror or error}") from error

    def _certificate(self) -> tuple[ssl.SSLContext, bytes]:
        files = self._config.tls
        if files.cert is not None:
            return server_context(files), certificate_hash(files.cert)
        if self._run_path is not None:
            own = own_certificate(self._run_path / "tls", _CERTIFIED)
        else:
            with tempfile.TemporaryDirectory() as directory:  # the context keeps what it has loaded
                own = own_certificate(Path(directory), _CERTIFIED)
                assert own.cert is not None
                return server_context(own.with_ca(files.ca)), certificate_hash(own.cert)
        assert own.cert is not None
        return server_context(own.with_ca(files.ca)), certificate_hash(own.cert)

    def _own_secret(self) -> str:
        if self._run_path is None:
            return new_secret()
        path = self._run_path / "secret"
        if path.exists():
            return read_secret_file(path)
        secret = new_secret()
        try:
            write_private_line(path, secret)
        except OSError as error:
            raise StoreError(str(path), f"cannot keep the secret: {error.strerror or error}") from error
        return secret

    def _read_revoked(self) -> None:
        path = None if self._run_path is None else self._run_path / "revoked"
        if path is None or not path.exists():
            self.credentials.replace_revoked(set(), {})
            return
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise StoreError(str(path), f"cannot read the revoked workers: {error}") from error
        names, quarantined = set(), {}
        for line in lines:
            name, _, note = line.partition("#")
            name, note = name.strip(), note.strip()
            if name and note.startswith(_QUARANTINED):
                quarantined[name] = note.removeprefix(_QUARANTINED)
            elif name:
                names.add(name)
        self.credentials.replace_revoked(names, quarantined)


def reachable(host: str) -> str:
    """An address under which others may find a host that listens on all of its addresses."""
    if host not in ("", "0.0.0.0", "::"):
        return host
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the system picks the address it would use
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
