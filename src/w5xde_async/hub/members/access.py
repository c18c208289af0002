"""What a coordinator shows of itself and asks of its workers: certificate, secret, join string.

Off loopback everything is encrypted unless ``insecure`` says otherwise. What was not given is made at the first start
and kept in the run directory (``tls/``, ``secret``: mode 0600), so that join strings outlive restarts. ``reload`` takes
a changed secret and the list of revoked workers (``revoked``: a name a line) into a running coordinator. Who was
revoked, or quarantined for wrong results (with the reason), is added to that list; without its line it may come back.

A token that was given goes before the directory's ``secret``, which is then neither read nor written.
"""

from __future__ import annotations

import os
import ssl
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from w5xde_async.errors import StoreError, UsageError
from w5xde_async.hub.config import NetworkConfig
from w5xde_async.hub.members.credentials import Credentials
from w5xde_async.net.endpoint import format_address
from w5xde_async.net.join import (
    Invitation,
    check_strength,
    new_secret,
    read_join_file,
    read_secret_file,
    write_private_line,
)
from w5xde_async.net.own_addresses import advertised, own_addresses
from w5xde_async.net.tls import OWN_FILES, certificate_hash, is_loopback, own_certificate, server_context, write_private
from w5xde_async.store.filesystem import read_regular, regular

_QUARANTINED = "quarantined: "
# In the run directory.
_SECRET, _INVITING, _REVOKED = "secret", "inviting", "revoked"
_TLS = tuple(f"tls/{name}" for name in reversed(OWN_FILES))  # as they are written: where the certificate is, the key is
_CERTIFIED = "w5xde coordinator"  # strangers read it: it says nothing of the run


class Access:
    """Built in an executor: it reads and writes files. Raises UsageError, StoreError."""

    def __init__(self, config: NetworkConfig, run_path: Path | None) -> None:
        self._config, self._run_path = config, run_path
        self._lock = threading.Lock()  # over the files: what is written while they are read must not be lost
        self._in_join_file: str | None = None  # the secret with which it was written last
        self._unwritten: dict[str, str | None] = {}  # locked out, not in ``revoked`` (yet) -> why, of a quarantine
        self.context: ssl.SSLContext | None = None
        certificate, self._secret = b"", config.token
        self._addresses: tuple[str, ...] = ()
        if config.uses_tls:
            self._addresses = () if config.advertise else own_addresses(config.host)  # here, since it asks a resolver
            self.context, certificate = self._certificate()
            self._secret = self._secret or self._own_secret()
        self._from_file = self.context is not None and not config.token and run_path is not None
        self.credentials = Credentials(self._secret, certificate, self._inviting() if self.context is not None else "")
        self._kept: dict[str, bytes] = {}  # what of this object lies in the run directory, as it was known last
        self._read_revoked()
        ours = _TLS if self.context is not None and config.tls.cert is None else ()
        self._remember(*ours, *((_INVITING,) if self.context is not None else ()))
        self._remember(*((_SECRET,) if self._from_file else ()))

    def __repr__(self) -> str:
        return f"<Access: {self.words}>"

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
        secret = self.credentials.invited(identity) if identity else self._secret
        told = self._config.advertise
        (host, at), *also = advertised(told, port) if told else [(one, port) for one in self._addresses]
        return Invitation(
            host=host, port=at, also=tuple(also),
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
            why = f"cannot write the join file: {error.strerror or error}"
            raise (StoreError(str(path), why) if given is None else UsageError(f"--join-file {path}: {why}")) from error
        self._in_join_file = invitation.secret
        return path

    def overwrites(self, port: int) -> str:
        """What to say where ``--join-file`` names the file of another coordinator; "" otherwise. Blocking."""
        ours, path = self.invitation(port), self._config.join_file
        if ours is None or path is None:
            return ""
        try:
            there = read_join_file(path)
        except UsageError:  # none is there, or something else
            return ""
        same = there.certificate == ours.certificate
        if same and self._config.tls.cert is None:  # made for this run, which has it in its directory
            return ""
        renewed = (there.host, there.port) == (ours.host, ours.port)
        if there.secret == ours.secret and (same or renewed):
            return ""
        return (
            f"--join-file {path} named another run's coordinator, at {format_address(there.host, there.port)}, and "
            "names this one now: if that run goes on, its workers do not find it there any more. A coordinator writes "
            "what --join-file and W5XDE_JOIN_FILE name; give each run a file of its own"
        )

    def page_context(self) -> tuple[ssl.SSLContext, bytes]:
        """For pages that a browser opens: no certificate is asked of it. And the certificate's hash. Blocking."""
        files = self._config.tls
        if files.cert is None and self._run_path is not None:
            files = own_certificate(self._run_path / "tls", _CERTIFIED)
            with self._lock:
                self._remember(*_TLS)
        if files.cert is not None:
            return server_context(files.with_ca(None)), certificate_hash(files.cert)
        with tempfile.TemporaryDirectory() as directory:
            own = own_certificate(Path(directory), _CERTIFIED)
            assert own.cert is not None
            return server_context(own), certificate_hash(own.cert)

    @property
    def lasting(self) -> bool:
        """Whether a rotated secret is that of the next start too."""
        return self._from_file

    def rotate(self, secret: str) -> None:
        """Another secret for everybody who joins from now on. Blocking. Raises UsageError, StoreError."""
        try:
            one_line = secret == secret.strip() and len(secret.splitlines()) == 1 and len(secret.encode()) <= 4000
        except UnicodeError:  # halves of characters
            one_line = False
        if not one_line:
            raise UsageError("the new secret is not one line of text")
        if not is_loopback(self._config.host):
            check_strength(secret, "the new secret")
        with self._lock:
            if self._from_file:  # first: who cannot keep it must not give it out
                self._write_secret(secret)
            self._take(secret)

    def reload(self) -> bool:
        """Read the run directory's ``secret`` and ``revoked`` again; True when the join file has another secret.

        Raises UsageError, StoreError; then all is as it was. Where ``secret`` itself is gone, UsageError, after
        ``revoked`` was read.
        """
        with self._lock:
            if self._is_gone():  # with everything: nobody has taken a line out of a list
                return False
            path = self._run_path / _SECRET if self._from_file and self._run_path is not None else None
            there = path is not None and path.exists()
            secret = self._read_secret(path) if path is not None and there else None
            self._read_revoked()
            if path is not None and not there:
                raise UsageError(
                    f"{path} is gone: the secret stays the same until the coordinator ends, and the next one makes "
                    "another; write a line there to change it now"
                )
            if changed := secret not in (None, self._secret):
                assert secret is not None
                self._take(secret)
            return changed or self._in_join_file not in (None, self._secret)

    def _take(self, secret: str) -> None:
        self.credentials.rotate(secret)
        self._secret = secret
        if self._from_file:
            self._kept[_SECRET] = secret.encode() + b"\n"

    def lock_out(self, name: str, reason: str | None = None) -> None:
        """Let that worker in no more; ``reason`` is a quarantine's. ``keep`` makes it last."""
        if reason is not None:
            self.credentials.quarantine(name, reason)
        elif self.credentials.revoked(name):
            return
        else:
            self.credentials.revoke(name)
        self._unwritten[name] = reason

    def keep(self) -> None:
        """Have everybody who was locked out stay out after a restart. Blocking. Raises StoreError."""
        with self._lock:
            self._keep()

    def _keep(self) -> None:
        if self._run_path is None:
            return
        # Others stay out as long as this runs: they have chosen their names so that they are no lines of a list.
        listed = {name: why for name, why in tuple(self._unwritten.items()) if _is_line(name)}
        if not listed:
            return
        path = self._run_path / _REVOKED
        lines = [
            name if why is None else f"{name}  # {_QUARANTINED}{' '.join(why.split())}" for name, why in listed.items()
        ]
        lost = self._kept.get(_REVOKED, b"") if self._is_gone() else b""
        try:
            with open(path, "a+b", buffering=0, opener=regular) as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(end - 1, 0))
                before = lost if not end else file.read(1)
                begun = before[-1:] not in (b"", b"\n")  # a list that was written by hand may end so
                new = "".join(("\n" * begun, *(f"{line}\n" for line in lines))).encode()
                left = memoryview(lost + new if not end else new)
                try:
                    while left:
                        left = left[file.write(left) or 0 :]
                    os.fsync(file.fileno())
                except OSError:
                    with suppress(OSError):  # half a line is somebody else's name
                        file.truncate(end)
                    raise
        except OSError as error:
            what = f"cannot keep {', '.join(listed)} out after a restart: {error.strerror or error}"
            raise StoreError(str(path), what) from error
        for name in listed:
            del self._unwritten[name]
        self._remember(_REVOKED)

    def write_anew(self) -> None:
        """The run directory was deleted or moved, and is made anew: what lay in it of this object lies there again.
        Else the next start would make another secret, and turn everybody away. Blocking. Raises StoreError."""
        with self._lock:
            for name, content in self._kept.items():
                assert self._run_path is not None
                path = self._run_path / name
                if not path.exists():
                    try:
                        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                        write_private(path, content)
                    except OSError as error:
                        raise StoreError(str(path), f"cannot write it anew: {error.strerror or error}") from error
            self._keep()  # who was locked out while there was no place for it

    def _is_gone(self) -> bool:
        """Whether the run directory was deleted or moved, or is being made anew."""
        if (directory := self._run_path) is None:
            return False
        others = [name for name in self._kept if name != _REVOKED]
        there = (*others, _REVOKED) if others else ("",)  # a list that is made anew is whole
        return not any((directory / name).exists() for name in there)

    def _remember(self, *names: str) -> None:
        """What lies there now."""
        if (directory := self._run_path) is None:
            return
        for name in names:
            path = directory / name
            try:
                self._kept[name] = read_regular(path)
            except FileNotFoundError:
                self._kept.pop(name, None)
            except OSError as error:
                raise StoreError(str(path), f"cannot read it: {error.strerror or error}") from error

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

    def _inviting(self) -> str:
        """What invitations are made from: of this coordinator alone, kept so that they outlive it."""
        if self._run_path is None:
            return new_secret()
        path = self._run_path / _INVITING
        if not path.exists():
            self._write_line(path, new_secret(), "what invitations are made from")
        return _read_own(path, "and invitations are void")

    def _write_line(self, path: Path, text: str, what: str) -> None:
        try:
            write_private_line(path, text)
        except OSError as error:
            raise StoreError(str(path), f"cannot keep {what}: {error.strerror or error}") from error

    def _own_secret(self) -> str:
        if self._run_path is None:
            return new_secret()
        path = self._run_path / _SECRET
        if not path.exists():
            self._write_secret(secret := new_secret())
            return secret
        return self._read_secret(path)

    def _read_secret(self, path: Path) -> str:
        secret = _read_own(path, "with another join string")
        if not is_loopback(self._config.host):
            check_strength(secret, f"the secret in {path}")
        return secret

    def _write_secret(self, secret: str) -> None:
        assert self._run_path is not None
        self._write_line(self._run_path / _SECRET, secret, "the secret")

    def _read_revoked(self) -> None:
        """Raises StoreError; then all is as it was."""
        path = None if self._run_path is None else self._run_path / _REVOKED
        try:
            content = None if path is None or not path.exists() else read_regular(path)
            lines = [] if content is None else content.decode().splitlines()
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
        for name, reason in tuple(self._unwritten.items()):
            if reason is None:
                names.add(name)
            else:
                quarantined[name] = reason
        self.credentials.replace_revoked(names, quarantined)
        if content is None:
            self._kept.pop(_REVOKED, None)
        else:
            self._kept[_REVOKED] = content


def _read_own(path: Path, otherwise: str) -> str:
    """One of the run's own secrets. ``otherwise``: what comes of another. Raises UsageError."""
    try:
        return read_secret_file(path)
    except UsageError as error:
        raise UsageError(f"{error}; or delete it, and the next start makes another, {otherwise}") from None


def _is_line(name: str) -> bool:
    return bool(name) and name.isprintable() and name == name.strip() and "#" not in name
