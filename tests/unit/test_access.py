"""Who may join: what a coordinator keeps of it in its run directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.hub.members.access import Access

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


def test_what_lies_there_is_left_alone(tmp_path: Path) -> None:
    access = Access(TLS, tmp_path)
    (tmp_path / "secret").write_text("one-that-somebody-has-put-there-meanwhile-0123456789\n")
    before = content(tmp_path)
    access.write_anew()
    assert content(tmp_path) == before
