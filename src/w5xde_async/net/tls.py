"""TLS: whose certificate, and what it is checked against.

Nothing below TLS 1.3. A coordinator without a certificate makes one for itself (:func:`own_certificate`), which no
authority vouches for: a worker then compares its hash with that of the join string, or has both sides prove the shared
secret over it (``wire.handshake``, ``binding``), so that whoever sits between with a certificate of his own is found
out. With ``ca`` the usual rules hold, host name included; with ``ca`` on both sides each needs a certificate.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import os
import shlex
import ssl
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NoReturn

from w5xde_async.config import PATH, YES_OR_NO, Config, setting
from w5xde_async.errors import StoreError, UsageError, need
from w5xde_async.store.filesystem import regular

_CERTIFICATE, _KEY = OWN_FILES = "cert.pem", "key.pem"
_VALID_DAYS = 3650


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: a certificate (chain), its private key, and the authorities that the other side must have."""

    cert: Path | None = setting(
        None, "TLS certificate (PEM); without it a self-signed one is made", PATH, "network", flag="tls_cert"
    )
    key: Path | None = setting(None, "its private key", PATH, "network", flag="tls_key")
    ca: Path | None = setting(
        None, "authorities: every worker needs a certificate of them", PATH, "network", flag="tls_ca_file"
    )

    def with_ca(self, ca: Path | None) -> TlsFiles:
        return replace(self, ca=ca)


@dataclass(frozen=True, kw_only=True)
class SecurityConfig(Config):
    """What both ends of a link are told: the shared secret ``token``, ``tls`` and whether to do without."""

    token: str = field(default="", repr=False)
    tls: TlsFiles = field(default_factory=TlsFiles)
    insecure: bool = setting(
        False, "no TLS off loopback: whoever sits between can read and alter everything", YES_OR_NO, "network"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.token.encode()
        except UnicodeError:
            raise UsageError("the token (W5XDE_TOKEN, --token-file) is no text: give letters and digits") from None
        need(
            (self.tls.cert is None) == (self.tls.key is None),
            "a TLS certificate and its key go together: give --tls-cert and --tls-key, or neither",
        )
        need(
            not (self.insecure and self.asks_for_tls),
            "--insecure and TLS's settings contradict each other; leave out one of them",
        )

    @property
    def asks_for_tls(self) -> bool:
        """Whether a setting is given that only TLS has a use for."""
        return self.tls.cert is not None or self.tls.ca is not None


def is_loopback(host: str) -> bool:
    """Whether bytes for ``host`` stay on this machine."""
    if host.lower() == "localhost":
        return True
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False  # a name, whatever it begins with
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def own_certificate(directory: Path, name: str) -> TlsFiles:
    """The self-signed certificate in ``directory`` (mode 0700), made (files of mode 0600) where there is none.

    It stays the same over restarts, so that join strings do. Raises StoreError, and UsageError where it is there and
    cannot be used, or others may read its key.
    """
    files = TlsFiles(directory / _CERTIFICATE, directory / _KEY)
    try:
        if not (directory / _CERTIFICATE).exists():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            key, cert = _self_signed(name)
            write_private(directory / _KEY, key)
            write_private(directory / _CERTIFICATE, cert)  # last: where it is, the key is
            return files
    except OSError as error:
        raise StoreError(str(directory), f"cannot keep the certificate: {error.strerror or error}") from error
    try:
        for path in (directory / _CERTIFICATE, directory / _KEY):
            with suppress(FileNotFoundError), open(path, "rb", opener=regular):
                pass  # OpenSSL would wait for a pipe
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
    except (OSError, UsageError) as error:
        if isinstance(error, UsageError) and (directory / _KEY).exists() and is_exposed(_status(directory / _KEY)):
            raise  # it says what to do
        again = f"delete {directory / _CERTIFICATE}, and the next start makes another pair, with another join string"
        raise UsageError(f"{error}; {again}") from None
    return files


def is_exposed(status: os.stat_result) -> bool:
    """Whether others than its owner may read a file, or write it. What root has laid there for us, as secrets are
    mounted, its group may read: that is us."""
    if sys.platform == "win32":
        return False
    given = status.st_uid == 0 != os.geteuid()
    return bool(stat.S_IMODE(status.st_mode) & (0o037 if given else 0o077))


def out_of_date(cert: Path, now: datetime.datetime) -> str:
    """What is wrong with the dates of a certificate (PEM), for a person; "" where nothing is. Raises UsageError."""
    from cryptography import x509

    try:
        read = x509.load_pem_x509_certificate(cert.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"certificate {cert} cannot be read: {_reason(error)}") from None
    begins, ends = read.not_valid_before_utc, read.not_valid_after_utc
    if begins <= now <= ends:
        return ""
    when = f"is not valid before {begins:%Y-%m-%d %H:%M}" if now < begins else f"has expired at {ends:%Y-%m-%d %H:%M}"
    return f"the certificate {cert} {when} UTC: workers that check it by --tls-ca-file refuse it"


def certificate_hash(cert: Path) -> bytes:
    """SHA-256 over the first certificate of a PEM file (DER). Raises UsageError."""
    try:
        text = cert.read_text(encoding="ascii", errors="replace")  # before the certificate may be words
        begin = text.index("-----BEGIN CERTIFICATE-----")
        end = text.index("-----END CERTIFICATE-----", begin) + len("-----END CERTIFICATE-----")
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin:end])).digest()
    except (OSError, ValueError) as error:
        raise UsageError(f"certificate {cert} cannot be read: {_reason(error)}") from None


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For a coordinator; with ``ca`` every worker needs a certificate of it. Raises UsageError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load(context, files)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For a worker. Without ``ca`` it is the caller who checks the certificate's hash. Raises UsageError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if files.ca is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    if files.cert is not None:
        try:
            if files.key is not None and is_exposed(_status(files.key)):
                hint = f"run: chmod 600 {shlex.quote(str(files.key))}"
                raise UsageError(f"the key {files.key} can be read by others; {hint}")
            context.load_cert_chain(files.cert, files.key, password=partial(_refuse_encrypted, files))
        except (OSError, ssl.SSLError) as error:
            place = f"{files.cert}" + (f" with key {files.key}" if files.key is not None else "")
            raise UsageError(f"TLS certificate {place} cannot be used: {_reason(error)}") from None
    if files.ca is not None:
        try:
            context.load_verify_locations(files.ca)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"TLS authorities {files.ca} cannot be used: {_reason(error)}") from None


def _refuse_encrypted(files: TlsFiles) -> NoReturn:
    """In place of OpenSSL's question on the terminal."""
    raise UsageError(
        f"the key {files.key or files.cert} is encrypted: give one without a passphrase (openssl pkey -in KEY -out NEW)"
    )


def _status(path: Path) -> os.stat_result:
    descriptor = os.open(path, getattr(os, "O_PATH", os.O_RDONLY))  # what is a pipe is left to OpenSSL to read
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is not a PEM certificate"


def _self_signed(name: str) -> tuple[bytes, bytes]:
    """Key and certificate, PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"w5xde {name}"[:64])])
    now = datetime.datetime.now(datetime.UTC)
    # A day early: clocks differ, and a pinned certificate's dates say nothing anyway.
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, cert.public_bytes(pem)


def write_private(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file of mode 0600, in one step. Raises OSError, also for what is there and no file: root
    may replace /dev/null."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is there, and no regular file", str(path))
    temporary = path.parent / f".tmp-{path.name}-{os.urandom(4).hex()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
