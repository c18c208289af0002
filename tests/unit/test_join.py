"""Join strings, secrets, certificates."""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.errors import UsageError
from w5xde_async.hub.members.credentials import Credentials
from w5xde_async.net.join import (
    Invitation,
    check_strength,
    new_secret,
    read_join_file,
    read_secret_file,
    worker_secret,
    write_private_line,
)
from w5xde_async.net.tls import TlsFiles, certificate_hash, client_context, is_loopback, own_certificate, server_context
from w5xde_async.settings import read
from w5xde_async.settings.programs import WorkerSettings
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.target import JoinFile, Target
from w5xde_async.worker.service import Worker

HASH = bytes(range(32))


@pytest.mark.parametrize("host", ["gpu.example.org", "10.0.0.7", "fe80::1", "fe80::1%eno1"])
@pytest.mark.parametrize("identity", ["", "alice-2"])
@pytest.mark.parametrize("also", [(), (("10.1.2.3", 77), ("fe80::1%25", 5555), ("a.example.org", 1))])
def test_a_join_string_says_all_and_shows_no_secret(host: str, identity: str, also: tuple[tuple[str, int], ...]):
    secret = "s3cret/with@odd:signs?"
    told = Invitation(host=host, port=5555, certificate=HASH, secret=secret, identity=identity, also=also)
    assert Invitation.parse(told.reveal(), place="here") == told
    for shown in (str(told), repr(told)):
        assert "s3cret" not in shown
        assert "odd" not in shown


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "does not begin"),
        ("http://hush@host:1?cert=sha256:" + "0" * 64, "does not begin"),
        ("w5xde://hush@host:1", "64 hexadecimal"),
        ("w5xde://hush@host:1?cert=md5:00", "64 hexadecimal"),
        ("w5xde://hush@host:1?cert=sha256:" + "0" * 63, "64 hexadecimal"),
        ("w5xde://hush@host:99999?cert=sha256:" + "0" * 64, "host:port"),
        ("w5xde://hush@?cert=sha256:" + "0" * 64, "host:port"),
        ("w5xde://hush@host:1?cert=sha256:" + "0" * 64 + "&worker=a b", "not a name"),
        ("w5xde://hush@host:1/path?cert=sha256:" + "0" * 64, "more in it"),
        ("w5xde://hush@host:1?cert=sha256:" + "0" * 64 + "&more=1", "more in it"),
        ("w5xde://hush@host:1?cert=sha256:" + "0" * 64 + "&also=a:b", "host:port"),
        ("w5xde://hush@host:1?cert=sha256:" + "0" * 64 + "&also=a" * 8, "too many"),
        ("w5xde://hush@a..b:1?cert=sha256:" + "0" * 64, "none that could answer"),
        ("w5xde://hush@hush:0?cert=sha256:" + "0" * 64 + "&also=" + "h" * 64, "none that could answer"),
        ("w5xde://hush@[::1?cert=sha256:" + "0" * 64, "cannot be read"),
    ],
)
def test_what_is_no_join_string_is_said_without_showing_it(text: str, reason: str):
    with pytest.raises(UsageError) as caught:
        Invitation.parse(text, place="join file x")
    assert "join file x" in str(caught.value)
    assert reason in str(caught.value)
    assert "hush" not in str(caught.value)


def _odd_forms(told: str) -> tuple[str, ...]:
    """Of a join string: all that ``Invitation.parse`` reads."""
    return (f"  {told}\r\n", told.replace("w5xde", "W5xde"), told.replace("://", ":\t//"))


def test_a_join_string_in_an_odd_form_is_that_join_string_wherever_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some took it for an address that is none, and showed it, secret and all."""
    told = Invitation(host="10.0.0.7", port=5, certificate=HASH, secret=new_secret())
    for odd in _odd_forms(told.reveal()):
        config = WorkerConfig(device="cpu")
        assert Target.of(odd, config).config.token == told.secret
        write_private_line(path := tmp_path / "join", odd)
        assert read_join_file(path) == told
        monkeypatch.setenv("W5XDE_JOIN", odd)
        assert read(WorkerSettings, (), prog="it")[0].where() == told.reveal()
        monkeypatch.delenv("W5XDE_JOIN")
        assert read(WorkerSettings, ("--join-file", str(path)), prog="it")[0].where() == told.reveal()
        target = asyncio.run(JoinFile(path, config).changed())
        assert target is not None
        assert target.addresses == (("10.0.0.7", 5),)


@pytest.mark.parametrize("given", ["w5xde://hush@10.0.0.7", "hush@host:5", "x://hush", b"w5xde://hush@host:5"])
def test_a_server_that_is_no_join_string_is_refused_without_showing_it(given: str | bytes) -> None:
    with pytest.raises(UsageError) as caught:
        Worker(given, config=WorkerConfig(device="cpu"))  # type: ignore[arg-type]
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("bad", ["a..b:1", "h" * 64, "10.0.0.1:0", "1.2.3.4.5"])
def test_one_good_address_is_enough(bad: str):
    for first, other in (("10.0.0.7:1", bad), (bad, "10.0.0.7:1")):
        told = Invitation.parse(f"w5xde://hush@{first}?cert=sha256:{'0' * 64}&also={other}", place="here")
        assert ("10.0.0.7", 1) in told.addresses
        assert len(told.addresses) == 2


_PIECES = st.sampled_from(
    [
        *("w5xde://", "s@", "h", "a..b", "127.0.0.1", "[fe80::1%25]", ":0", ":80", "?cert=sha256:" + "0" * 64),
        *("&also=", "&worker=", "%", "%00", "[", "]", "\u00e4", "\u2100", "\udc80", "/", "#", "\n"),
    ]
)


@given(st.lists(st.one_of(_PIECES, st.text(max_size=5)), max_size=10).map("".join))
def test_any_text_is_a_join_string_or_a_usage_error(text: str):
    for whole in (
        text,
        f"w5xde://s@{text}?cert=sha256:{'0' * 64}",
        f"w5xde://s@h:1?cert=sha256:{'0' * 64}&also={text}",
    ):
        try:
            told = Invitation.parse(whole, place="here")
        except UsageError:
            continue
        assert Invitation.parse(told.reveal(), place="here") == told


def test_a_workers_secret_is_its_own():
    run = new_secret()
    assert len(run) >= 43
    assert len({worker_secret(run, "a"), worker_secret(run, "b"), worker_secret(new_secret(), "a"), run}) == 4
    assert worker_secret(run, "a") == worker_secret(run, "a")
    for bad in ("", "a b", "../x", "x" * 65):
        with pytest.raises(UsageError):
            worker_secret(run, bad)


def test_files_with_secrets_are_for_their_owner_alone(tmp_path: Path):
    path = tmp_path / "deep" / "join"
    write_private_line(path, "one line")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret_file(path) == "one line"
    path.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        read_secret_file(path, kind="join file")
    for content, what in (("", "is empty"), ("two\nlines", "does not hold one line")):
        write_private_line(path, content)
        with pytest.raises(UsageError, match=f"{what}; copy it once more from where it was made"):
            read_secret_file(path)
    longest = Invitation(host="h", port=1, certificate=bytes(32), secret="ä" * 2000)
    write_private_line(path, longest.reveal())
    assert Invitation.parse(read_secret_file(path), place="here") == longest
    write_private_line(path, "x" * 20_000)
    with pytest.raises(UsageError, match="has more than 16384 characters"):
        read_secret_file(path)
    write_private_line(path, "\ufeffof an editor's")
    assert read_secret_file(path) == "of an editor's"
    with pytest.raises(UsageError, match="No such file"):
        read_secret_file(tmp_path / "none")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes with a name")
def test_a_pipe_with_a_name_is_refused_at_once_and_a_shells_is_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    os.mkfifo(path, 0o600)
    for nothing in (path, Path(os.devnull)):
        with pytest.raises(
            UsageError, match=f"^token file {nothing} is no regular file; write the line into one of mode"
        ):
            read_secret_file(nothing, kind="token file")
    if os.path.isdir("/dev/fd"):
        script = "import sys; from w5xde_async.net.join import *; print(read_secret_file(Path(sys.argv[1])))"
        shell = f"exec {sys.executable} -c '{script}' <(read; echo one line)"
        with subprocess.Popen(
            ["bash", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.communicate("now\n", timeout=60) == ("one line\n", None)


def test_what_is_no_file_is_not_replaced_by_a_secret(tmp_path: Path) -> None:
    """As root it would be /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(OSError, match="it is there, and no regular file"):
            write_private_line(path, "one line")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [one.name for one in tmp_path.iterdir()] == ["pipe"]


def test_an_own_certificate_is_made_once_and_kept_private(tmp_path: Path):
    files = own_certificate(tmp_path / "tls", "run")
    assert files.cert is not None
    assert files.key is not None
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    first = certificate_hash(files.cert)
    assert certificate_hash(own_certificate(tmp_path / "tls", "run").cert) == first  # type: ignore[arg-type]
    assert certificate_hash(own_certificate(tmp_path / "other", "run").cert) != first  # type: ignore[arg-type]
    context = server_context(files)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert client_context(TlsFiles()).minimum_version == ssl.TLSVersion.TLSv1_3


def test_before_a_certificate_may_be_words_in_any_alphabet(tmp_path: Path) -> None:
    """As ``openssl pkcs12`` writes them. OpenSSL reads on until the certificate begins."""
    files = own_certificate(tmp_path, "run")
    assert files.cert is not None
    known = certificate_hash(files.cert)
    files.cert.write_bytes("Bag Attributes\n    friendlyName: Zürich\n".encode() + files.cert.read_bytes())
    server_context(files)
    assert certificate_hash(files.cert) == known


def test_tls_files_that_will_not_do_are_named(tmp_path: Path):
    bad = tmp_path / "bad.pem"
    bad.write_text("nothing of the kind")
    for call in (
        lambda: server_context(TlsFiles(bad, bad)),
        lambda: client_context(TlsFiles(ca=bad)),
        lambda: certificate_hash(bad),
        lambda: certificate_hash(tmp_path / "none.pem"),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert "pem" in str(caught.value)


def test_loopback_is_this_machine():
    here = ("127.0.0.1", "127.9.9.9", "::1", "localhost", "LocalHost", "::ffff:127.0.0.1")
    assert [is_loopback(host) for host in here] == [True] * len(here)
    elsewhere = (
        "0.0.0.0",
        "::",
        "10.0.0.1",
        "localhost.evil.org",
        "",
        "127.example.org",
        "127.0.0.1.nip.io",
        "1270.0.0.1",
    )
    assert [is_loopback(host) for host in elsewhere] == [False] * len(elsewhere)


def test_a_name_that_begins_like_loopback_is_encrypted() -> None:
    assert CoordinatorConfig(host="127.example.org").uses_tls
    with pytest.raises(UsageError, match=r"nothing tells 127\.example\.org"):
        Worker("127.example.org:5555", config=WorkerConfig(device="cpu"))


def test_credentials_never_show_their_secret():
    held = Credentials("hush")
    assert "hush" not in repr(held)
    held.revoke("alice")
    assert held.revoked("bob", "alice")
    held.replace_revoked({"carol"}, {})
    assert [held.revoked(name) for name in ("alice", "carol")] == [False, True]
    held.rotate("other")
    assert held.secret_of("") == b"other"
    with pytest.raises(UsageError):
        held.rotate("")


def test_a_workers_secret_is_that_of_the_document() -> None:
    assert worker_secret("correct horse", "alice") == "N565vw5_LSjUlqgpHzmltSzqr47Eo6irGZN0UEnILOs"
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    assert worker_secret("correct horse", "alice") in text


@pytest.mark.parametrize("weak", ["x", "swordfish", "correct horse battery", "0123456789" * 3, "ab" * 40, "a" * 200])
def test_a_secret_that_could_be_guessed_is_refused_off_this_machine(weak: str) -> None:
    with pytest.raises(UsageError, match="token_urlsafe"):
        check_strength(weak, "the token")
    with pytest.raises(UsageError, match="could be guessed"):
        CoordinatorConfig(host="0.0.0.0", token=weak)
    with pytest.raises(UsageError, match="could be guessed"):
        Worker("10.0.0.1:5555", config=WorkerConfig(token=weak, device="cpu"))
    assert CoordinatorConfig(token=weak).token == weak  # on loopback that is its owner's affair


@pytest.mark.parametrize(("weak", "why"), [("ab" * 40, "2 different characters"), ("swordfish", "strength of 42 bits")])
def test_why_it_could_be_guessed_is_said(weak: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_strength(weak, "the token")


def test_a_random_secret_is_strong() -> None:
    for strong in (new_secret(), "0123456789abcdef" * 2, "another secret, long enough"):
        check_strength(strong, "the token")
    check_strength("", "the token")


def test_a_worker_trusts_no_server_that_nothing_tells_from_another() -> None:
    with pytest.raises(UsageError, match=r"--join-file.*--token-file.*--tls-ca-file.*--insecure"):
        Worker("10.0.0.1:5555", config=WorkerConfig(device="cpu"))
    Worker("10.0.0.1:5555", config=WorkerConfig(device="cpu", insecure=True))
    Worker("10.0.0.1:5555", config=WorkerConfig(device="cpu", token=new_secret()))


@pytest.mark.skipif(sys.platform == "win32", reason="files have no owner and group there")
@pytest.mark.parametrize(
    ("mode", "owner", "user", "taken"),
    [
        (0o440, 0, 1000, True),  # Kubernetes: fsGroup
        (0o640, 0, 1000, True),
        (0o444, 0, 1000, False),
        (0o460, 0, 1000, False),
        (0o440, 0, 0, False),  # who could change that should
        (0o440, 1000, 1000, False),
        (0o440, 2000, 1000, False),
    ],
)
def test_a_secret_that_root_has_given_to_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, user: int, taken: bool
) -> None:
    path = tmp_path / "token"
    path.write_text("one line\n")
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((stat.S_IFREG | mode, 0, 0, 0, owner, 0, 0, 0, 0, 0)))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if taken:
        assert read_secret_file(path) == "one line"
    else:
        with pytest.raises(UsageError, match="chmod 600"):
            read_secret_file(path)


def test_a_folder_is_no_file_for_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (Path(), Path(".."), tmp_path):
        with pytest.raises(OSError):  # noqa: PT011
            write_private_line(folder, "hush")
    assert not [path for path in (*tmp_path.iterdir(), *tmp_path.parent.iterdir()) if path.name.startswith(".tmp-")]
