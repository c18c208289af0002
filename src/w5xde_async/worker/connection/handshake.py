"""The worker's side of the handshake: from a fresh link to a WELCOME."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import w5xde_async
from w5xde_async.compute.program.carriage import Unloading, digest_of
from w5xde_async.compute.program.form import FORM, Document
from w5xde_async.errors import LinkLost, MalformedFrame, RefusalCode, Refused, UnexpectedMessage, W5xdeError
from w5xde_async.job import PRECISIONS
from w5xde_async.net.link import Accept, Link, Received
from w5xde_async.net.outbox import Outbox
from w5xde_async.params.layout import MAX_LAYOUT_BYTES, Layout
from w5xde_async.updates.config import LOCAL_RULES, RULES
from w5xde_async.wire import messages
from w5xde_async.wire.frame import SESSION_CAPS, BufferSpec, encode
from w5xde_async.wire.handshake import NONCE_BYTES, WORKER, State, advance, prove, verify

_MAX_INNER_BYTES = 1 << 20
_LAST_WORDS_S = 2.0

#: In our words: who has proved nothing may say and advise anything.
_UNPROVED = {
    RefusalCode.PROTOCOL_VERSION: (
        f"the coordinator speaks another protocol than this worker, which speaks {messages.PROTOCOL_VERSION}",
        "install the same version of w5xde-async on both sides",
    ),
    RefusalCode.AUTHENTICATION: (
        "the token is missing or wrong",
        "set the coordinator's token in W5XDE_TOKEN or --token-file, or use its join file",
    ),
    RefusalCode.PROTOCOL_ERROR: (
        "the coordinator could not read what this worker said",
        "see what listens there, and that both sides have the same version of w5xde-async",
    ),
}

Receive = Callable[[Accept], Awaitable[Received]]
"""As ``Link.recv``."""


class Joined(NamedTuple):
    """A link on which both sides have proved themselves, and what the coordinator said of the run."""

    link: Link
    welcome: messages.Welcome
    layout: Layout
    inner: bytes = b""  # what WELCOME said of the inner optimizer
    nonce: bytes = b""  # of our HELLO


class Dismissed(W5xdeError):
    """The coordinator said goodbye while the worker was still preparing. Field: ``bye``."""

    def __init__(self, bye: messages.Bye) -> None:
        self.bye = bye
        super().__init__(bye.reason[:300])


class RefusedUnproved(Refused):
    """As Refused, before the other side has proved itself: whoever answers may say so."""


async def join(
    link: Link, *, key: str, name: str, token: str, terms: Mapping[str, int], identity: str = "", rank: int = 0,
    ranks: int = 1,
) -> Joined:  # fmt: skip
    """Prove each other the secret and learn of the run.

    Over TLS the proofs are bound to the certificate that the coordinator showed: one who sits between with a
    certificate of his own can pass nobody's proof on. ``identity``: the name that the secret belongs to. ``key``: a
    secret of this worker, by which the coordinator knows it again, on each link of its ``ranks``; neither it nor
    ``name`` is told to one who has not proved himself.

    ``terms`` holds, for each run served before, the highest term seen: a coordinator of a lower one has been replaced
    and is refused.

    Raises Refused (by the coordinator, or by us where it cannot prove itself), LinkLost, RemoteError.
    """
    nonce = await prove_each_other(link, token=token, identity=identity)
    await link.send(encode(messages.Introduction(key, name[:64], w5xde_async.__version__, rank, ranks)))
    link.caps = SESSION_CAPS
    texts: list[bytearray] = []

    def accept(message: messages.Message, specs: tuple[BufferSpec, ...]) -> Sequence[memoryview]:
        names = tuple(spec.name for spec in specs)
        if type(message) is not messages.Welcome or names not in (("layout",), ("layout", "inner")):
            raise MalformedFrame(f"{type(message).__name__} came with buffers in place of WELCOME")
        for spec, most in zip(specs, (MAX_LAYOUT_BYTES, _MAX_INNER_BYTES), strict=False):
            if spec.dtype != "uint8" or spec.nbytes > most:
                raise MalformedFrame(f"WELCOME's {spec.name} of {spec.nbytes} bytes")
            texts.append(bytearray(spec.nbytes))
        return [memoryview(text) for text in texts]

    received = await link.recv(accept)
    advance(WORKER, State.NAMING, received.message)
    if isinstance(received.message, messages.Refusal):
        raise refused(received.message)
    welcome = received.message
    if not isinstance(welcome, messages.Welcome):
        raise UnexpectedMessage(type(welcome).__name__, State.NAMING.value)
    if not texts:
        raise MalformedFrame("WELCOME came without the layout")
    if welcome.term < terms.get(welcome.run_id, 0):
        raise Refused(
            RefusalCode.TERM,
            f"the coordinator is of term {welcome.term} of its run; this worker has served {terms[welcome.run_id]}",
            "a newer coordinator took its place; stop the older one",
        )
    if welcome.precision not in PRECISIONS:
        raise MalformedFrame(f"WELCOME has the precision {welcome.precision[:40]!r}")
    if welcome.update not in RULES or (welcome.update in LOCAL_RULES) != (len(texts) == 2):
        raise Refused(
            RefusalCode.PROTOCOL_VERSION,
            f"the coordinator trains by a rule that this worker does not know ({welcome.update[:40]!r})",
            "install the same version of w5xde-async on both sides",
        )
    return Joined(link, welcome, Layout.parse(bytes(texts[0])), bytes(texts[1]) if len(texts) > 1 else b"", nonce)


async def meet(link: Link, volunteer: messages.Volunteer, *, token: str, identity: str = "") -> messages.Rendezvous:
    """Prove each other the secret and hear where the other ranks of an island are.

    Raises Refused (RUN_FULL where they are not all there yet), LinkLost, RemoteError.
    """
    await prove_each_other(link, token=token, identity=identity)
    await link.send(encode(volunteer))
    answer = await _expect(link, State.NAMING)
    if not isinstance(answer, messages.Rendezvous) or answer.rank >= volunteer.ranks:
        raise UnexpectedMessage(type(answer).__name__, "waiting for the other ranks")
    return answer


async def ask(link: Link, *, token: str, identity: str = "") -> messages.Probed:
    """Prove each other the secret and hear of the run without joining it. Raises Refused, LinkLost, RemoteError."""
    await prove_each_other(link, token=token, identity=identity)
    await link.send(encode(messages.Probe(0, b"")))
    answer = await _expect(link, State.NAMING)
    if not isinstance(answer, messages.Probed):
        raise UnexpectedMessage(type(answer).__name__, "asking for the run")
    return answer


async def prove_each_other(link: Link, *, token: str, identity: str = "") -> bytes:
    """The part of ``join`` before the worker says who it is: both sides know the secret.

    Returns the nonce of HELLO. Raises RefusedUnproved, LinkLost, RemoteError.
    """
    try:
        return await _prove_each_other(link, token=token, identity=identity)
    except Refused as error:
        raise RefusedUnproved(error.code, error.reason, error.hint) from None


async def _prove_each_other(link: Link, *, token: str, identity: str) -> bytes:
    secret = token.encode()
    nonce = os.urandom(NONCE_BYTES)
    binding = hashlib.sha256(link.certificate).digest() if link.certificate else b""
    try:
        await link.send(encode(messages.Hello(messages.PROTOCOL_VERSION, nonce, "", "", "", identity)))
    except LinkLost as lost:
        # TLS 1.3 refuses a certificate after the handshake: why it went, the coordinator has said before.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await _expect(link, State.GREETING)
        raise lost
    challenge = await _expect(link, State.GREETING)
    assert isinstance(challenge, messages.Challenge)
    if challenge.protocol != messages.PROTOCOL_VERSION:
        raise Refused(
            RefusalCode.PROTOCOL_VERSION,
            f"the coordinator speaks protocol {challenge.protocol}, this worker {messages.PROTOCOL_VERSION}",
            "install the same version of w5xde-async on both sides",
        )
    if secret and not challenge.auth:
        raise Refused(
            RefusalCode.AUTHENTICATION,
            "this worker has a token and the coordinator asks for none",
            "it may not be the coordinator you mean; unset W5XDE_TOKEN if it is",
        )
    if challenge.auth and not secret:
        raise Refused(
            RefusalCode.AUTHENTICATION,
            "the coordinator asks for a token and this worker has none",
            "set the coordinator's token in W5XDE_TOKEN or --token-file",
        )
    proof = prove(secret, "worker", nonce, challenge.nonce, binding) if challenge.auth else b""
    await link.send(encode(messages.Proof(proof)))
    accepted = await _expect(link, State.PROVING)
    assert isinstance(accepted, messages.Accepted)
    if challenge.auth and not verify(accepted.proof, secret, "coordinator", nonce, challenge.nonce, binding):
        raise Refused(
            RefusalCode.AUTHENTICATION,
            "the coordinator does not know this worker's token",
            "compare the tokens of both sides (W5XDE_TOKEN, --token-file)",
        )
    return nonce


async def fetch_program(receive: Receive, outbox: Outbox, digest: bytes) -> tuple[bytes, Document | None]:
    """(digest, program) of the run; None where ``digest`` names it already. Heartbeats go on meanwhile.

    Raises Refused where there is none, ProgramRefused over a limit, LinkLost, RemoteError.
    """
    unloading = Unloading()

    def accept(message: messages.Message, specs: tuple[BufferSpec, ...]) -> Sequence[memoryview]:
        if type(message) is not messages.Program:
            raise MalformedFrame(f"{type(message).__name__} came with buffers in place of PROGRAM")
        return unloading.place(specs)

    outbox.post(encode(messages.ProgramRequest(FORM, digest)))
    while True:
        received = await receive(accept)
        message = received.message
        if advance(WORKER, State.JOINING, message) is not State.JOINING and not isinstance(
            message, messages.Refusal | messages.Bye
        ):
            raise UnexpectedMessage(type(message).__name__, "waiting for the program")
        if isinstance(message, messages.Refusal):
            raise refused(message)
        if isinstance(message, messages.Bye):
            raise Dismissed(message)
        if isinstance(message, messages.Program):
            if not received.specs:
                if message.digest != digest:
                    raise MalformedFrame("PROGRAM came without the program")
                return digest, None
            document = unloading.document
            if digest_of(document) != message.digest:
                raise MalformedFrame("PROGRAM is not what its digest says")
            return message.digest, document


async def _expect(link: Link, state: State) -> messages.Message:
    message = (await link.recv()).message
    advance(WORKER, state, message)
    if isinstance(message, messages.Refusal):
        told = refused(message)
        raise told if state is State.NAMING else Refused(told.code, *_UNPROVED[told.code])
    return message


def refused(message: messages.Refusal) -> Refused:
    """The coordinator's refusal as an exception."""
    try:
        code = RefusalCode(message.code)
    except ValueError:
        code = RefusalCode.PROTOCOL_ERROR
    return Refused(code, message.reason[:500], message.hint[:500])
