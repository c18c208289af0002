"""Why a worker waits, under the synchronous rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from w5xde_async.coordinator.training import reason_of_network, reason_of_standing
from w5xde_async.hub.members.session import Session
from w5xde_async.plan.membership import Member

if TYPE_CHECKING:
    from w5xde_async.coordinator.sync.training import SyncTraining

_MOST_NAMES = 3


def reason_to_wait(training: SyncTraining, session: Session, member: Member) -> str:
    """What keeps a worker from computing at this moment, for a person; empty where nothing does."""
    if (reason := reason_of_standing(member)) is not None:
        return reason
    if not training.phase.begun:
        return f"workers: the run begins with {training.phase.min_workers}"
    steps = training.ledger.open_steps
    if training.computes_here and training.version < training.total_steps:
        return "steps that are worth sending: the coordinator computes these itself"
    if not steps:
        return "the end of the run"
    if training.takes_place_of(session):
        return "leaves that are worth sending: the coordinator computes its part itself"
    held = training.ledger.held(member.worker_id)
    if any(grant.step == steps[0] for grant in held):
        if (reason := reason_of_network(session)) is not None:
            return reason
        if held[0].lease in training.scheduler.unread:
            return "data: the loader has not read its samples yet"
        return ""
    if training.ledger.free_leaves(steps[0]):
        if session.lease_bytes > training.context.config.credit_bytes:
            return "the network: it has not taken the leases that it was sent"
        return "a lease"
    if training.ledger.complete(steps[0]):
        return f"the update of step {steps[0] + 1}"
    return f"step {steps[0] + 1}: {_holders(training, steps[0], member.worker_id)}"


def _holders(training: SyncTraining, step: int, worker: str) -> str:
    """Who still computes leaves of a step."""
    held = [
        (other.name, leaves)
        for other in training.roster.sessions.values()
        if other.worker_id != worker and (leaves := training.ledger.num_held_leaves(other.worker_id, step))
    ]
    if not held:
        return "its last results are being added"
    number = sum(leaves for _, leaves in held)
    verb = "computes" if len(held) == 1 else "compute"
    return f"{_names([name for name, _ in held])} {verb} the last {number} {'leaf' if number == 1 else 'leaves'}"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown
