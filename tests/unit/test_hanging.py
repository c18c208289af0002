"""Calls in threads that nobody waits for."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from w5xde_async.errors import UsageError
from w5xde_async.net.hanging import in_daemon_thread
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.target import JoinFile


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_what_found_no_thread_is_asked_again_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match=r"no thread can be started \(can't start new thread\); raise pids.max"):
            await in_daemon_thread("what", lambda: 7)
    async with asyncio.timeout(10.0):
        assert await in_daemon_thread("what", lambda: 7) == 7


async def test_a_join_file_for_which_there_is_no_thread_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker whose coordinator is away goes on looking for it."""
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(UsageError, match=r"join file .* cannot be read: no thread can be started"):
        await JoinFile(tmp_path / "join", WorkerConfig()).changed()
