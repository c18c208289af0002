"""Connections that nobody has let in: how many there may be, and which of them goes where another one comes.

A worker says something within milliseconds. So whoever has said nothing for a second goes first, then whoever has said
nothing for longest. Those that have said nothing and those that have share the places of their address evenly where
both want more: neither drives the other out. Each costs a step or two, however many there are.
"""

from __future__ import annotations

from typing import Protocol

_SAYS_WITHIN_S = 1.0


class Stranger(Protocol):
    """A connection. Compared by identity."""

    host: str

    @property
    def heard(self) -> int:
        """How much has come from it: only whether that is anything, and that it grows, has a meaning."""

    def close(self) -> None:
        """End it at once."""


class _Crowd:
    """Those of one address."""

    def __init__(self) -> None:
        self.silent: dict[Stranger, float] = {}  # and since when, in that order
        self.said: dict[Stranger, int] = {}  # and how much when somebody last looked; those are at the end

    def __len__(self) -> int:
        return len(self.silent) + len(self.said)

    def discard(self, one: Stranger) -> None:
        self.silent.pop(one, None)
        self.said.pop(one, None)

    def whose_turn_it_is(self, now: float) -> Stranger:
        """The one to go next."""
        while self.silent:
            one = next(iter(self.silent))
            if not one.heard:
                break
            del self.silent[one]
            self.said[one] = one.heard
        if self.silent:
            one, since = next(iter(self.silent.items()))
            if now - since >= _SAYS_WITHIN_S or 2 * len(self.silent) >= len(self) or not self.said:
                return one
        for _ in range(len(self.said)):
            one, before = next(iter(self.said.items()))
            if one.heard == before:
                break
            del self.said[one]
            self.said[one] = one.heard
        return next(iter(self.said))


class Strangers:
    """At most ``most``, and ``most_of_host`` of each address."""

    def __init__(self, most: float, most_of_host: float) -> None:
        self._most, self._most_of_host = most, most_of_host
        self._crowds: dict[str, _Crowd] = {}
        self._hosts: dict[int, dict[str, None]] = {}  # by how many there are of it
        self._largest = self._number = 0

    def __len__(self) -> int:
        return self._number

    def of(self, host: str) -> int:
        """How many there are of an address."""
        return len(self._crowds.get(host, ()))

    def has_room(self, host: str) -> bool:
        """Whether there may be one more of ``host`` without another's having to go."""
        return self.of(host) < self._most_of_host and self._number < self._most

    def make_room(self, host: str, now: float) -> bool:
        """Close whoever has to go for one more of ``host``. Whether anybody had to."""
        closed = False
        while self.of(host) >= self._most_of_host:
            closed = self._close_one(host, now)
        while self._number >= self._most:
            closed = self.close_one(now)
        return closed

    def close_one(self, now: float) -> bool:
        """Close one of an address that has most of them; False where there are none."""
        return bool(self._number) and self._close_one(next(iter(self._hosts[self._largest])), now)

    def add(self, one: Stranger, now: float) -> None:
        """It is here, for which there is room."""
        crowd = self._crowds.setdefault(one.host, _Crowd())
        crowd.silent[one] = now
        self._number += 1
        self._moved(one.host, len(crowd) - 1, len(crowd))

    def discard(self, one: Stranger) -> None:
        """It was let in, or is gone. Calling it twice is fine."""
        crowd = self._crowds.get(one.host)
        if crowd is None or (one not in crowd.silent and one not in crowd.said):
            return
        crowd.discard(one)
        self._number -= 1
        self._moved(one.host, len(crowd) + 1, len(crowd))
        if not crowd:
            del self._crowds[one.host]

    def _close_one(self, host: str, now: float) -> bool:
        one = self._crowds[host].whose_turn_it_is(now)
        self.discard(one)
        one.close()
        return True

    def _moved(self, host: str, before: int, after: int) -> None:
        if before:
            del self._hosts[before][host]
            if not self._hosts[before]:
                del self._hosts[before]
        if after:
            self._hosts.setdefault(after, {})[host] = None
        self._largest = after if after > self._largest or self._largest not in self._hosts else self._largest
