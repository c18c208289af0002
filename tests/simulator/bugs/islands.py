"""Bugs of workers that have several links."""

from __future__ import annotations

from typing import Any

from tests.simulator.bugs.registry import Put, bug

from w5xde_async.coordinator.sync.results import Results
from w5xde_async.hub.members.island import Island
from w5xde_async.wire.messages import Result


@bug(
    "island-first-done",
    "an island's lease is done when its head says so, whatever the other ranks have sent",
    kind="islands",
)
def _first_done(put: Put) -> None:
    put(Island, "done", lambda self, session, done: None if session.rank else done)


@bug("island-first-piece", "a slot is filled when the first rank's pieces of it have come", kind="islands")
def _first_piece(put: Put) -> None:
    real = Results._piece_arrived

    def arrived(self: Results, session: Any, result: Result, grant: Any) -> None:
        gathered = self._pieces[result.lease, result.bucket]
        others = gathered.missing - {session.rank}
        gathered.missing -= others
        real(self, session, result, grant)
        gathered.missing |= others

    put(Results, "_piece_arrived", arrived)
