"""Who may say what, when; and proofs that are worth nothing to anyone else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w5xde_async.errors import RefusalCode, UnexpectedMessage
from w5xde_async.wire.handshake import COORDINATOR, WORKER, State, Table, advance, prove, verify
from w5xde_async.wire.messages import (
    MESSAGES,
    Accepted,
    Bye,
    Challenge,
    Done,
    Drain,
    Heartbeat,
    Hello,
    Introduction,
    Lease,
    Message,
    Params,
    Proof,
    Ready,
    Refusal,
    Result,
    Verdict,
    Welcome,
)

tables = pytest.mark.parametrize("table", [COORDINATOR, WORKER], ids=["coordinator", "worker"])


def blank(cls: type[Message]) -> Message:
    """An instance whose fields say nothing: the tables look at the type alone."""
    said = {"numerics": "exact", "code": RefusalCode.PROTOCOL_ERROR}
    return cls(*[said.get(name, ()) for name in cls.__struct_fields__])


def walk(table: Table, *steps: type) -> State:
    state = State.GREETING
    for cls in steps:
        state = advance(table, state, blank(cls))
    return state


def test_a_session_as_the_coordinator_sees_it():
    assert (
        walk(COORDINATOR, Hello, Proof, Introduction, Ready, Result, Done, Heartbeat, Drain, Result, Done, Bye)
        is State.CLOSED
    )


def test_a_session_as_the_worker_sees_it():
    steps = (Challenge, Accepted, Welcome, Params, Lease, Verdict, Heartbeat, Drain, Verdict, Bye)
    assert walk(WORKER, *steps) is State.CLOSED


@pytest.mark.parametrize("said", [(), (Challenge,), (Challenge, Accepted), (Challenge, Accepted, Welcome)])
def test_a_worker_may_be_refused_until_it_works(said: tuple[type, ...]):
    assert walk(WORKER, *said, Refusal) is State.CLOSED


@pytest.mark.parametrize("code", [*RefusalCode, 0, 99])
def test_who_has_proved_nothing_refuses_only_whom_it_cannot_talk_to(code: int):
    """That the run is finished, or this worker's access revoked, is to be believed of the coordinator alone."""
    names = ("PROTOCOL_VERSION", "AUTHENTICATION", "PROTOCOL_ERROR")
    before = code in [RefusalCode[name] for name in names]
    for state in (State.GREETING, State.PROVING, State.NAMING, State.JOINING):
        if before or state in (State.NAMING, State.JOINING):
            assert advance(WORKER, state, Refusal(code, "", "")) is State.CLOSED
            continue
        with pytest.raises(UnexpectedMessage, match=f"Refusal with code {int(code)} is not allowed"):
            advance(WORKER, state, Refusal(code, "", ""))


@tables
def test_what_the_table_lacks_is_refused(table: Table):
    for state in State:
        for cls in MESSAGES.values():
            if (state, cls) in table:
                assert advance(table, state, blank(cls)) is table[state, cls]
                continue
            with pytest.raises(UnexpectedMessage) as caught:
                advance(table, state, blank(cls))
            assert (caught.value.message, caught.value.state) == (cls.__name__, state.value)


@tables
def test_every_state_is_reached_and_closed_is_the_end(table: Table):
    assert {State.GREETING} | set(table.values()) == set(State)
    assert not [state for state, _ in table if state is State.CLOSED]


@tables
def test_nothing_leads_past_authentication(table: Table):
    """Every way from GREETING to READY goes through PROVING, NAMING and JOINING."""
    inside = {State.READY, State.DRAINING}
    for (state, _), after in table.items():
        if after in inside:
            assert state in {State.JOINING, *inside}
        if after is State.JOINING:
            assert state in {State.NAMING, State.JOINING}
        if after is State.NAMING:
            assert state in {State.PROVING, State.NAMING}


def test_each_side_takes_only_what_the_other_says():
    from_coordinator_only = {Challenge, Accepted, Welcome, Refusal, Lease, Params, Verdict}
    from_worker_only = {Hello, Proof, Introduction, Ready, Result, Done}
    assert not from_coordinator_only & {cls for _, cls in COORDINATOR}
    assert not from_worker_only & {cls for _, cls in WORKER}


# -- proofs

RIGHT = {
    "secret": b"secret",
    "role": "worker",
    "worker_nonce": b"w" * 32,
    "coordinator_nonce": b"c" * 32,
    "binding": b"certificate",
}


def test_a_proof_verifies():
    proof = prove(**RIGHT)
    assert len(proof) == 32
    assert verify(proof, **RIGHT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("secret", b"Secret"),
        ("role", "coordinator"),  # a message reflected to its sender
        ("worker_nonce", b"x" * 32),  # a replay
        ("coordinator_nonce", b"x" * 32),
        ("binding", b""),  # somebody in the middle with another certificate
    ],
)
def test_a_proof_is_worth_nothing_elsewhere(field: str, value: object):
    assert not verify(prove(**RIGHT), **{**RIGHT, field: value})


def test_no_other_bytes_verify():
    proof = prove(**RIGHT)
    for wrong in (b"", proof[:-1], proof + b"\0", bytes(32), bytes([proof[0] ^ 1]) + proof[1:]):
        assert not verify(wrong, **RIGHT)


@given(st.binary(max_size=6), st.binary(max_size=6), st.binary(max_size=6), st.binary(max_size=6))
def test_moving_a_byte_between_the_nonces_changes_the_proof(a: bytes, b: bytes, c: bytes, d: bytes):
    """Lengths are part of what is signed: (ab, c) and (a, bc) are not the same."""
    assert (prove(b"s", "worker", a, b) == prove(b"s", "worker", c, d)) == ((a, b) == (c, d))
    assert a + b == b"" or prove(b"s", "worker", a + b, b"") != prove(b"s", "worker", b"", a + b)
