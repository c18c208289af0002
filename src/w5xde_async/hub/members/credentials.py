"""Who may join: the run's secret, each worker's own, and the names that are locked out.

Whoever has the run's secret may join, nameless: names are proved by secrets of their own (``net.join.worker_secret``),
which nobody can make of the run's. So locking that name out keeps it out; so it does for one that was quarantined
because its results were wrong, which is told why. Changing the run's secret locks everybody out who joins anew;
who is in stays in until it is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

from w5xde_async.errors import UsageError
from w5xde_async.net.join import worker_secret


class Credentials:
    """``binding`` is what proofs are bound to: the hash of the coordinator's certificate, empty without TLS."""

    def __init__(self, secret: str = "", binding: bytes = b"", inviting: str = "") -> None:
        """``inviting``: what workers' own secrets are made from besides. Nobody but the coordinator has it, so that the
        run's secret, which many have, opens the run under no name."""
        self.binding, self._inviting = binding, inviting
        self._secret = secret
        self._revoked: set[str] = set()
        self._quarantined: dict[str, str] = {}  # name -> why

    def __repr__(self) -> str:
        return f"<Credentials {'with' if self._secret else 'without'} a secret, {len(self._revoked)} names locked out>"

    @property
    def required(self) -> bool:
        """Whether workers must prove a secret."""
        return bool(self._secret)

    def secret_of(self, identity: str) -> bytes:
        """What a worker of that name proves; the run's own secret for the nameless. Raises UsageError."""
        return self.invited(identity).encode() if identity else self._secret.encode()

    def invited(self, identity: str) -> str:
        """The secret of the worker of that name. Raises UsageError."""
        return worker_secret(f"{self._inviting}{self._secret}", identity)

    def rotate(self, secret: str) -> None:
        """From now on this is the run's secret. Raises UsageError for an empty one."""
        if not secret:
            raise UsageError("the new secret is empty")
        self._secret = secret

    def revoke(self, name: str) -> None:
        """Lock out a worker by its own name or, until it chooses another, by its id."""
        self._revoked.add(name)

    def quarantine(self, name: str, reason: str) -> None:
        """Lock out a worker whose results were wrong."""
        self._quarantined[name] = reason

    def quarantined(self, *names: str) -> str:
        """Why a worker of one of these names was quarantined; "" where none was."""
        return next((self._quarantined[name] for name in names if name in self._quarantined), "")

    def revoked(self, *names: str) -> bool:
        return any(name in self._revoked for name in names)

    def replace_revoked(self, names: set[str], quarantined: Mapping[str, str]) -> None:
        """Exactly these are locked out; ``quarantined`` says why some of them are."""
        self._revoked, self._quarantined = set(names), dict(quarantined)
