"""Why a worker waits, where that is the same under every update rule."""

from __future__ import annotations

from w5xde_async.hub.members.session import Session
from w5xde_async.plan.membership import Member, Standing

__all__ = ["reason_of_network", "reason_of_standing"]


def reason_of_standing(member: Member) -> str | None:
    if member.standing is Standing.DRAINING:
        return "nothing: it is leaving"
    if member.standing is Standing.LATE:
        return "its own answer: a lease was taken from it and it has not said what became of it"
    return None


def reason_of_network(session: Session) -> str | None:
    if session.receiving is not None:
        return "the network: its result is on its way"
    return "the network: a lease is on its way" if session.outbox.lease_bytes else None
