"""Runs here lose workers on purpose, and few of those come back: nobody waits seconds for them at the end."""

from __future__ import annotations

import pytest

from w5xde_async.hub.members import roster


@pytest.fixture(autouse=True)
def short_wait_for_lost(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.path.name != "test_endings.py":  # which looks at this wait itself
        monkeypatch.setattr(roster, "_RETURN_S", 0.2)
        monkeypatch.setattr(roster, "_SILENT_RETURN_S", 0.2)
