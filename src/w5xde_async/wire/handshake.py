"""Who may say what, when: the states of a session and the proof that both sides know the secret.

Two tables, one per side, list for each state the messages that the *peer* may send next; whatever is missing
from them is a protocol error. The proof is HMAC-SHA256 over the role, both nonces and ``binding`` (what the
channel adds: the certificate's hash under TLS, empty in plain text), so neither a replay nor a reflected
message is worth anything.

The worker proves itself first. A proof is worth guesses to whoever gets it: at a coordinator anybody may knock, and is
given none; a worker knocks only where it was told to. Nothing else is said of either before both proofs are made.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import Enum

from w5xde_async.errors import RefusalCode, UnexpectedMessage
from w5xde_async.wire import messages
from w5xde_async.wire.messages import Bye, Heartbeat, Message, Refusal

NONCE_BYTES = 32


class State(Enum):
    """Where a session stands, as the receiver sees it."""

    GREETING = "greeting"
    PROVING = "proving"
    NAMING = "naming"
    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"


Table = dict[tuple[State, type[Message]], State]

_AT_WORK = (State.READY, State.DRAINING)

#: What a coordinator may receive.
COORDINATOR: Table = {
    (State.GREETING, messages.Hello): State.PROVING,
    (State.PROVING, messages.Proof): State.NAMING,
    (State.NAMING, messages.Introduction): State.JOINING,
    (State.NAMING, messages.Probe): State.NAMING,
    (State.NAMING, messages.Volunteer): State.CLOSED,
    (State.JOINING, messages.ProgramRequest): State.JOINING,
    (State.JOINING, Heartbeat): State.JOINING,
    (State.JOINING, messages.Ready): State.READY,
    **{
        (state, kind): state
        for state in _AT_WORK
        for kind in (messages.Result, messages.Done, messages.Failed, messages.Unread, Heartbeat, messages.Report)
    },
    (State.READY, messages.Drain): State.DRAINING,
    **{(state, Bye): State.CLOSED for state in (State.JOINING, *_AT_WORK)},
}

#: What a worker may receive.
WORKER: Table = {
    (State.GREETING, messages.Challenge): State.PROVING,
    (State.PROVING, messages.Accepted): State.NAMING,
    (State.NAMING, messages.Welcome): State.JOINING,
    (State.NAMING, messages.Probed): State.NAMING,
    (State.NAMING, messages.Rendezvous): State.CLOSED,
    (State.JOINING, messages.Program): State.JOINING,
    (State.JOINING, Heartbeat): State.JOINING,
    (State.JOINING, messages.Params): State.READY,
    (State.JOINING, messages.Lease): State.READY,
    **{
        (state, kind): state
        for state in _AT_WORK
        for kind in (messages.Params, messages.Lease, messages.Verdict, messages.Revoke, messages.Submit, Heartbeat)
    },
    (State.JOINING, messages.Drain): State.DRAINING,
    (State.READY, messages.Drain): State.DRAINING,
    **{(state, Refusal): State.CLOSED for state in State if state is not State.CLOSED},
    **{(state, Bye): State.CLOSED for state in (State.JOINING, *_AT_WORK)},
}

#: For no other reason does a coordinator refuse before both sides have proved themselves: anybody may say so then.
_BEFORE_PROOF = (RefusalCode.PROTOCOL_VERSION, RefusalCode.AUTHENTICATION, RefusalCode.PROTOCOL_ERROR)


def advance(table: Table, state: State, message: Message) -> State:
    """The state after ``message``. Raises UnexpectedMessage where the table has no entry, and for a refusal before the
    proofs that tells of the run."""
    unproved = state in (State.GREETING, State.PROVING)
    if unproved and isinstance(message, Refusal) and message.code not in _BEFORE_PROOF:
        raise UnexpectedMessage(f"Refusal with code {message.code}", state.value)
    try:
        return table[state, type(message)]
    except KeyError:
        raise UnexpectedMessage(type(message).__name__, state.value) from None


def member_id(identity: str, key: str) -> str:
    """By what a worker is known: ``key``, which it alone says, under the name that it has proved ("" for the run's
    secret). It shows neither, so that it may be read by others."""
    made = hashlib.blake2b(f"{identity}\0{key}".encode(), digest_size=16, person=b"w5xde member")
    return made.hexdigest()


def prove(secret: bytes, role: str, worker_nonce: bytes, coordinator_nonce: bytes, binding: bytes = b"") -> bytes:
    """32 bytes that only a holder of ``secret`` can make; ``role`` is ``worker`` or ``coordinator``."""
    parts = (b"w5xde/1", role.encode(), worker_nonce, coordinator_nonce, binding)
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).digest()


def verify(
    proof: bytes, secret: bytes, role: str, worker_nonce: bytes, coordinator_nonce: bytes, binding: bytes = b""
) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(proof, prove(secret, role, worker_nonce, coordinator_nonce, binding))
