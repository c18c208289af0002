"""Who may join: what a coordinator keeps of it in its run directory."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from tests.support.cluster import settings
from tests.support.jobs import mlp_sgd

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import StoreError, UsageError
from w5xde_async.hub.members import access as access_module
from w5xde_async.hub.members.access import Access
from w5xde_async.net.join import new_secret
from w5xde_async.net.tls import TlsFiles, client_context, out_of_date, own_certificate, server_context
from w5xde_async.runtime import Runtime
from w5xde_async.telemetry.events import Bus, Warned

TLS = CoordinatorConfig(host="0.0.0.0", advertise="there.example.org")


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def joins(path: Path) -> str:
    """What a start there tells workers' owners."""
    told = Access(TLS, path).invitation(5555)
    assert told is not None
    return told.reveal()


def test_a_directory_that_is_made_anew_lets_the_same_workers_in(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    access = Access(TLS, path)
    access.rotate("another-secret-that-is-long-and-random-0123456789")
    access.lock_out("mallory", "it computed wrongly")
    access.keep()
    before, told = content(path), joins(path)
    shutil.rmtree(path)
    path.mkdir()
    access.write_anew()
    assert content(path) == before
    assert all(file.stat().st_mode & 0o077 == 0 for file in path.rglob("*"))
    assert joins(path) == told
    assert Access(TLS, path).credentials.quarantined("mallory") == "it computed wrongly"


def test_what_was_read_or_written_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were that to fail, half of a change would have been made."""
    path = tmp_path / "run"
    path.mkdir()
    access, read, before = Access(TLS, path), access_module.read_regular, set[str]()

    def once(path: Path) -> bytes:
        if path.name == "secret" or path.name in before:
            raise OSError(errno.EIO, "Input/output error")
        before.add(path.name)
        return read(path)

    monkeypatch.setattr(access_module, "read_regular", once)
    access.rotate(first := new_secret())
    assert (path / "secret").read_text() == f"{first}\n"
    (path / "secret").write_text(second := new_secret())
    (path / "revoked").write_text("mallory\n")
    access.reload()
    assert access.credentials.revoked("mallory")
    shutil.rmtree(path)
    access.write_anew()
    assert (path / "secret").read_text() == f"{second}\n"
    assert (path / "revoked").read_text() == "mallory\n"


@pytest.mark.parametrize("secret", ["", " x", "two\nlines", "x" * 4001, pytest.param("\udc80" * 30, id="halves")])
def test_a_new_secret_is_one_line_of_text(secret: str) -> None:
    with pytest.raises(UsageError, match="the new secret is not one line of text"):
        Access(CoordinatorConfig(), None).rotate(secret)


def test_what_lies_there_is_left_alone(tmp_path: Path) -> None:
    access = Access(TLS, tmp_path)
    (tmp_path / "secret").write_text("one-that-somebody-has-put-there-meanwhile-0123456789\n")
    before = content(tmp_path)
    access.write_anew()
    assert content(tmp_path) == before


def empties(path: Path) -> None:
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def test_who_was_let_in_again_is_not_locked_out_by_a_directory_that_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    access = Access(TLS, path)
    access.lock_out("pardoned")
    access.keep()
    (path / "revoked").unlink()
    access.reload()
    assert not access.credentials.revoked("pardoned")
    shutil.rmtree(path)
    access.write_anew()
    assert not (path / "revoked").exists()


@pytest.mark.parametrize("lose", [shutil.rmtree, empties], ids=["deleted", "emptied"])
@pytest.mark.parametrize("kept", ["before", "after"])
def test_who_is_locked_out_while_the_directory_is_gone_stays_out_with_those_before(
    lose: Callable[[Path], None], kept: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    access = Access(TLS, path)
    access.lock_out("mallory", "it computed wrongly")
    access.keep()
    lose(path)
    access.lock_out("eve")
    if kept == "before":
        with suppress(StoreError):  # there may be no directory
            access.keep()
    access.write_anew()
    again = Access(TLS, path).credentials
    assert again.revoked("eve")
    assert again.quarantined("mallory") == "it computed wrongly"
    assert len((path / "revoked").read_text().splitlines()) == 2


def test_a_directory_that_is_gone_lets_nobody_in_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    access = Access(TLS, path)
    access.lock_out("mallory")
    access.keep()
    shutil.rmtree(path)
    access.reload()
    assert access.credentials.revoked("mallory")


def test_a_secret_that_is_gone_is_told_of_and_who_is_revoked_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    access = Access(TLS, path)
    before = (path / "secret").read_text()
    (path / "secret").unlink()
    (path / "revoked").write_text("mallory\n")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"secret is gone: the secret stays the same"):
            access.reload()
    assert access.credentials.revoked("mallory")
    (path / "secret").write_text(before)
    (path / "secret").chmod(0o600)
    assert not access.reload()


@pytest.mark.skipif(os.name == "nt", reason="no such limit")
def test_what_a_full_disk_takes_of_a_name_locks_nobody_else_out(tmp_path: Path) -> None:
    import resource

    access = Access(TLS, tmp_path)
    access.lock_out("carol")
    access.keep()
    access.lock_out("lab-2")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "revoked").stat().st_size + 3, before[1]))
    try:
        with pytest.raises(StoreError, match="cannot keep lab-2 out after a restart"):
            access.keep()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "revoked").read_text() == "carol\n"
    access.keep()
    assert (tmp_path / "revoked").read_text() == "carol\nlab-2\n"


def test_that_a_join_file_is_written_over_another_runs_is_said(tmp_path: Path) -> None:
    """As in a worker's shell, whose W5XDE_JOIN_FILE says where it reads."""
    config, join, token = replace(TLS, join_file=tmp_path / "join"), tmp_path / "join", new_secret()
    mine, others = Access(config, tmp_path / "mine"), Access(config, tmp_path / "others")
    assert mine.overwrites(5555) == ""  # nothing is there
    join.write_text("w5xde://what")
    join.chmod(0o600)
    assert mine.overwrites(5555) == ""  # nor any run's
    others.write_join_file(5556)
    said = mine.overwrites(5555)
    assert said.startswith(f"--join-file {join} named another run's coordinator, at there.example.org:5556, and names")
    mine.write_join_file(5555)
    assert mine.overwrites(5555) == ""
    again = Access(config, tmp_path / "mine")
    assert again.overwrites(5557) == ""  # a restart, on another port
    given = replace(config, token=token)
    Access(given, None).write_join_file(5555)
    assert Access(given, None).overwrites(5555) == ""  # another certificate alone: it was renewed
    assert Access(given, None).overwrites(5556)
    assert Access(TLS, tmp_path / "mine").overwrites(5555) == ""


def test_that_a_join_file_is_written_over_another_runs_with_the_same_certificate_is_said(tmp_path: Path) -> None:
    """As where --tls-cert is a machine's, and all runs on it have it."""
    files, join = own_certificate(tmp_path, "digits"), tmp_path / "join"
    config = replace(TLS, join_file=join, tls=TlsFiles(files.cert, files.key))
    mine, others = (Access(replace(config, token=new_secret()), None) for _ in range(2))
    others.write_join_file(5556)
    assert mine.overwrites(5555).startswith(f"--join-file {join} named another run's coordinator")
    mine.write_join_file(5555)
    assert mine.overwrites(5557) == ""


def test_a_join_file_that_could_not_be_written_is_owed(tmp_path: Path) -> None:
    access, secret = Access(TLS, tmp_path), tmp_path / "secret"
    join = access.write_join_file(5555)
    assert join is not None
    join.unlink()
    join.mkdir()
    secret.write_text(new_secret())
    for _ in range(2):
        assert access.reload()
        with pytest.raises(StoreError, match="cannot write the join file"):
            access.write_join_file(5555)
    join.rmdir()
    assert access.reload()
    assert access.write_join_file(5555) == join
    assert join.read_text().strip() == joins(tmp_path)
    assert not access.reload()


@pytest.mark.parametrize("damage", [lambda path: path.write_text(""), lambda path: path.chmod(0o644)])
def test_a_damaged_secret_of_the_runs_own_may_be_deleted(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    path = tmp_path / "run"
    path.mkdir()
    Access(TLS, path)
    before = (path / "secret").read_text()
    damage(path / "secret")
    with pytest.raises(UsageError, match="; or delete it, and the next start makes another, with another join string"):
        Access(TLS, path)
    (path / "secret").unlink()
    Access(TLS, path)
    assert (path / "secret").read_text() not in ("", before)


def test_a_list_is_read_where_nothing_else_is_left(tmp_path: Path) -> None:
    """What invitations were made from is all that lies there beside a token and a certificate that were given."""
    path = tmp_path / "run"
    path.mkdir()
    given = own_certificate(tmp_path / "tls", "of another place")
    access = Access(replace(TLS, token="a-token-that-is-long-and-random-0123456789abcdef", tls=given), path)
    assert [file.name for file in path.iterdir()] == ["inviting"]
    (path / "inviting").unlink()
    (path / "revoked").write_text("mallory\n")
    access.reload()
    assert access.credentials.revoked("mallory")


def test_beside_a_token_that_was_given_the_secret_is_neither_read_nor_written(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "secret").mkdir()  # of which nothing can be read
    token = "a-token-that-is-long-and-random-0123456789abcdef"
    access = Access(replace(TLS, token=token), path)
    access.reload()
    (path / "secret").rmdir()
    access.write_anew()
    assert not (path / "secret").exists()


def test_the_certificate_lies_there_no_sooner_than_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    path.mkdir()
    access = Access(TLS, path)
    shutil.rmtree(path)
    writes, written = access_module.write_private, list[str]()

    def write(to: Path, content: bytes) -> None:
        writes(to, content)
        written.append(to.name)

    monkeypatch.setattr(access_module, "write_private", write)
    access.write_anew()
    assert written.index("key.pem") < written.index("cert.pem")


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("cert.pem", lambda data: data[: len(data) // 2], "cannot be used"),
        ("cert.pem", lambda data: b"", "cannot be used"),
        ("key.pem", lambda data: data.replace(b"M", b"N"), "cannot be used"),
        ("key.pem", None, "No such file"),
    ],
    ids=["half", "empty", "flipped", "no key"],
)
def test_a_certificate_of_its_own_that_is_damaged_says_what_to_delete(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes] | None, said: str
) -> None:
    own_certificate(tmp_path, "digits")
    file = tmp_path / name
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UsageError, match=said) as caught:
        own_certificate(tmp_path, "digits")
    assert f"delete {tmp_path / 'cert.pem'}, and the next start makes another pair" in str(caught.value)
    (tmp_path / "cert.pem").unlink()
    files = own_certificate(tmp_path, "digits")
    assert files.cert is not None
    server_context(files)


@pytest.mark.parametrize("mode", [0o666, 0o640, 0o604])
def test_a_key_of_its_own_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    own_certificate(tmp_path, "digits")
    (tmp_path / "key.pem").chmod(mode)
    with pytest.raises(UsageError, match=f"can be read by others; run: chmod 600 {tmp_path}/key.pem$"):
        own_certificate(tmp_path, "digits")


@pytest.mark.parametrize("make", [server_context, client_context])
def test_a_key_that_others_may_read_is_refused_on_both_sides(
    make: Callable[[TlsFiles], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = own_certificate(tmp_path, "digits")
    assert files.key is not None
    files.key.chmod(0o640)
    with pytest.raises(UsageError, match=f"can be read by others; run: chmod 600 {tmp_path}/key.pem"):
        make(files)
    if os.geteuid() == 0:  # as a secret is mounted: root's, for our group
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        make(files)
        files.key.chmod(0o644)
        with pytest.raises(UsageError, match="can be read by others"):
            make(files)


@pytest.mark.parametrize("make", [server_context, client_context])
def test_a_key_with_a_passphrase_is_refused_and_nothing_asked(make: Callable[[TlsFiles], Any], tmp_path: Path) -> None:
    files = own_certificate(tmp_path, "digits")
    assert files.key is not None
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(UsageError, match=f"the key {files.key} is encrypted: give one without a passphrase"):
        make(files)


def test_the_dates_of_a_certificate(tmp_path: Path) -> None:
    files = own_certificate(tmp_path, "digits")
    assert files.cert is not None
    now = datetime.now(UTC)
    assert out_of_date(files.cert, now) == ""
    assert "is not valid before" in out_of_date(files.cert, now - timedelta(days=2))
    assert "has expired at" in out_of_date(files.cert, now + timedelta(days=3651))
    (tmp_path / "cert.pem").write_text("none")
    with pytest.raises(UsageError, match="cannot be read"):
        out_of_date(files.cert, now)


async def test_the_start_tells_of_a_certificate_that_has_expired(tmp_path: Path) -> None:
    files, told = await asyncio.to_thread(own_certificate, tmp_path, "digits"), list[str]()
    later, bus = Runtime(wall=lambda: time.time() + 4000 * 86400), Bus()
    bus.subscribe(lambda event: told.append(event.text) if isinstance(event, Warned) else None)
    config = settings(tls=TlsFiles(files.cert, files.key), token=new_secret(), host="127.0.0.1")
    async with Coordinator(mlp_sgd(), config=config, bus=bus, runtime=later):
        assert [text for text in told if "has expired" in text and "--tls-ca-file" in text]


@pytest.mark.parametrize(("config", "refused"), [(TLS, True), (replace(TLS, host="127.0.0.1"), False)])
def test_a_secret_in_the_directory_that_could_be_guessed_is_refused_off_loopback(
    tmp_path: Path, config: CoordinatorConfig, refused: bool
) -> None:
    """At the start, and where it is read again: then nothing has changed."""
    if not refused:
        config = replace(config, join_file=tmp_path / "join")  # TLS all the same
    path = tmp_path / "run"
    path.mkdir()
    access = Access(config, path)
    before = (path / "secret").read_text()
    (path / "secret").write_text("abc\n")
    (path / "revoked").write_text("mallory\n")
    if refused:
        with pytest.raises(UsageError, match=r"the secret in .*/run/secret could be guessed: it has the strength of"):
            access.reload()
        assert not access.credentials.revoked("mallory")
        with pytest.raises(UsageError, match="could be guessed"):
            Access(config, path)
        (path / "secret").write_text(before)
        assert not access.reload()
        assert access.credentials.revoked("mallory")
    else:
        assert access.reload()
        Access(config, path)
