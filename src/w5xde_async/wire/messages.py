"""The messages: one frozen class each, their types checked on the way in.

A message on the wire is its number and its fields in the order of the class. The annotation of a field is
its check: a header whose field has another type never becomes a message. Nor does one whose value is outside the
bounds that ``@_message`` gives for it: a duration is finite and not negative, a text has a length, so that nothing
behind this door has to ask again. What depends on the run (how many leaves a lease has) is for the receiver to check.
Numbers are never reused; any change of a field raises ``PROTOCOL_VERSION`` (docs/protocol.md says who may send what,
when).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Self, TypeVar, dataclass_transform, get_type_hints

from msgspec import DecodeError, Meta, Raw, msgpack

from w5xde_async.errors import MalformedFrame

__all__ = [
    "MESSAGES",
    "PROTOCOL_VERSION",
    "Accepted",
    "Bye",
    "ByeCode",
    "Challenge",
    "Done",
    "Drain",
    "Failed",
    "Heartbeat",
    "Hello",
    "Introduction",
    "Lease",
    "Message",
    "Params",
    "Program",
    "ProgramRequest",
    "Proof",
    "Ready",
    "Refusal",
    "Report",
    "Result",
    "Revoke",
    "Submit",
    "Verdict",
    "VerdictCode",
    "Welcome",
]

PROTOCOL_VERSION = 3

_MAX_INT = (1 << 63) - 1


def _at_most(most: int) -> Any:
    """A whole number from 0 to ``most``."""
    return Annotated[int, Meta(ge=0, le=most)]


def _between(least: float, most: float) -> Any:
    """A finite number in that range; NaN is in none."""
    return Annotated[float, Meta(ge=least, le=most)]


def _text(most: int) -> Any:
    """Text of at most that many characters."""
    return Annotated[str, Meta(max_length=most)]


def _data(most: int) -> Any:
    """At most that many bytes."""
    return Annotated[bytes, Meta(max_length=most)]


def _array_of(item: Any) -> Any:
    return tuple.__class_getitem__((item, ...))


def _texts(count: int, most: int) -> Any:
    """At most ``count`` different texts, printable, of at most ``most`` characters."""
    return Annotated[_array_of(_text(most)), Meta(max_length=count, extra={"check": _distinct_and_printable})]


def _distinct_and_printable(texts: tuple[str, ...]) -> bool:
    return len(set(texts)) == len(texts) and all(map(str.isprintable, texts))


#: Longest texts: of a name, of a sentence, of an error's own words, of a traceback.
NAME, SENTENCE, ERROR, TRACEBACK = 256, 1024, 4096, 65536
#: Most metrics that a job may report of a leaf, and characters of the name of one.
MOST_METRICS, METRIC_NAME = 64, 128
_SECONDS = _between(0.0, 1e9)
_BYTES = _at_most(1 << 60)


_WHOLE = _at_most(_MAX_INT)
#: What may stand for a field of these types. A float without a bound may be NaN or infinite (a loss may be).
_TYPES: dict[Any, Any] = {
    int: _WHOLE,
    float: float,
    bool: bool,
    str: str,
    bytes: bytes,
    tuple[int, ...]: _array_of(_WHOLE),
    tuple[float, ...]: tuple[float, ...],
    tuple[str, ...]: tuple[str, ...],
}
_PLACE = re.compile(r"\$\[(\d+)\]")


class Message:
    """Base of all messages. ``TYPE`` is the number on the wire."""

    __slots__ = ()
    TYPE: ClassVar[int]
    _names: ClassVar[tuple[str, ...]]
    _getter: ClassVar[Callable[[Any], Any]]
    _decode: ClassVar[Callable[[Any], tuple[Any, ...]]]
    _checks: ClassVar[tuple[tuple[int, Callable[[Any], bool]], ...]]  # what no type says, by place

    def fields(self) -> tuple[Any, ...]:
        """Field values in wire order."""
        values = type(self)._getter(self)
        return values if len(self._names) > 1 else (values,)

    @classmethod
    def parse(cls, packed: Raw | bytes) -> Self:
        """Build from the msgpack array of the fields. Raises MalformedFrame naming the field that is wrong."""
        try:
            values = cls._decode(packed)
        except (DecodeError, ValueError, RecursionError) as error:
            found = _PLACE.search(str(error))
            if found is not None:
                raise cls._malformed(int(found[1])) from None
            text = f"{cls.__name__} has {len(cls._names)} fields; this is something else ({type(error).__name__})"
            raise MalformedFrame(text) from None
        for place, check in cls._checks:
            if not check(values[place]):
                raise cls._malformed(place)
        return cls(*values)

    @classmethod
    def _malformed(cls, place: int) -> MalformedFrame:
        return MalformedFrame(f"{cls.__name__}.{cls._names[place]} has a value of the wrong type or range")


MESSAGES: dict[int, type[Message]] = {}


_M = TypeVar("_M", bound="Message")


@dataclass_transform(frozen_default=True)
def _message(kind: int, **bounds: Any) -> Callable[[type[_M]], type[_M]]:
    """Register a message under its number. ``bounds``: types for fields whose own allow too much."""

    def register(cls: type[_M]) -> type[_M]:
        made: Any = dataclass(frozen=True, slots=True)(cls)
        hints = get_type_hints(made)
        names = [f.name for f in fields(made)]
        if unknown := set(bounds) - set(names):
            raise ValueError(f"{cls.__name__} has no field {min(unknown)}")
        made.TYPE = kind
        types = tuple(bounds.get(name) or _TYPES[hints[name]] for name in names)
        extras = [(place, _extra(of)) for place, of in enumerate(types)]
        made._names, made._getter = tuple(names), staticmethod(attrgetter(*names))
        made._decode = staticmethod(msgpack.Decoder(tuple.__class_getitem__(types)).decode)
        made._checks = tuple((place, check) for place, check in extras if check is not None)
        if kind in MESSAGES:
            raise ValueError(f"message number {kind} is taken")
        MESSAGES[kind] = made
        result: type[_M] = made
        return result

    return register


def _extra(of: Any) -> Callable[[Any], bool] | None:
    """The check that stands beside a type."""
    metas = (meta.extra for meta in getattr(of, "__metadata__", ()) if meta.extra)
    return next((extra["check"] for extra in metas), None)


class VerdictCode(IntEnum):
    """What became of a lease's results. On the wire in VERDICT; never renumbered."""

    APPLIED = 0
    STALE = 1
    DUPLICATE = 2
    REJECTED = 3


class ByeCode(IntEnum):
    """Why the sender ends the link. On the wire in BYE; never renumbered."""

    FINISHED = 0  # the run is complete: a worker may exit
    STOPPING = 1  # the coordinator stops and may come back: a worker keeps trying
    FAILED = 2  # the run cannot go on: a worker exits with an error
    LEAVING = 3  # a worker goes, in good order
    MISMATCH = 4  # a worker built another model than the coordinator's


@_message(1, nonce=_data(64), worker_id=_text(NAME), name=_text(NAME), software=_text(NAME), identity=_text(NAME))
class Hello(Message):
    """Worker's first words, to a peer that has proved nothing: they say nothing of it.

    ``identity`` is the name whose own secret it will prove; empty where it has the run's. ``worker_id``, ``name`` and
    ``software`` are empty: this message keeps its fields in every version, and INTRODUCTION says them later.
    """

    protocol: int
    nonce: bytes
    worker_id: str
    name: str
    software: str
    identity: str = ""


@_message(2, nonce=_data(64), proof=_data(64))
class Challenge(Message):
    """Coordinator's answer to a stranger: whether it asks for a proof. ``proof`` is empty: see ACCEPTED."""

    protocol: int
    nonce: bytes
    auth: bool
    proof: bytes


@_message(3, proof=_data(64))
class Proof(Message):
    """Worker's proof (HMAC over both nonces); empty without ``auth``."""

    proof: bytes


@_message(4, reason=_text(SENTENCE), hint=_text(SENTENCE))
class Refusal(Message):
    """REFUSED: the coordinator says no and closes. ``code`` is errors.RefusalCode."""

    code: int
    reason: str
    hint: str


@_message(
    5,
    run_id=_text(NAME),
    run_name=_text(SENTENCE),
    precision=_text(NAME),
    fingerprint=_data(64),
    heartbeat_s=_between(1e-3, 1e5),
    silence_s=_between(1e-3, 1e6),
    update=_text(NAME),
    codec=_text(NAME),
    downlink=_text(NAME),
)
class Welcome(Message):
    """The run, for a worker that has proved itself. Buffers: the layout (params.layout) and, under a rule of local
    steps, the inner optimizer (msgpack, compute.inner).

    ``silence_s`` is how long either side may say nothing before it counts as gone. ``update`` names the update rule,
    ``codec`` how results are to be written, with error ``feedback`` or without, and ``downlink`` how PARAMS deltas are.
    """

    run_id: str
    run_name: str
    term: int
    seed: int
    precision: str
    microbatch_size: int
    accumulate: int
    bucket_bytes: int
    fingerprint: bytes
    heartbeat_s: float
    silence_s: float
    update: str = "sync"
    codec: str = "raw"
    downlink: str = "raw"
    feedback: bool = True


@_message(
    6,
    fingerprint=_data(64),
    device=_text(NAME),
    device_name=_text(NAME),
    threads=_at_most(1 << 16),
    torch_version=_text(NAME),
)
class Ready(Message):
    """The worker has built the same model and wants work. ``threads`` counts its torch threads.

    ``awaited``: leases whose results left on an earlier link and whose verdicts it has not read; each is answered.
    """

    fingerprint: bytes
    device: str
    device_name: str
    threads: int
    torch_version: str
    awaited: tuple[int, ...] = ()


@_message(7)
class Params(Message):
    """One bucket of one version's parameters; the version is whole when all ``num_buckets`` have come.

    Buckets that a commit did not change are not sent; with ``num_buckets`` 0 nothing changed and no buffer follows.
    ``loss_scale`` is what losses at this version are multiplied with (fp16; 1 otherwise). With ``delta`` the buffer is
    to be added to what the worker has of this bucket; otherwise it is the bucket whole.
    """

    version: int
    bucket: int
    num_buckets: int
    loss_scale: float
    delta: bool = False


@_message(8)
class Lease(Message):
    """One block at one version, with its data. ``samples`` counts each leaf's samples, in order.

    ``structure`` is the msgpack description of a batch; the buffers are its tensors. ``packed`` says that
    each buffer holds one tensor's rows for all leaves; otherwise leaf after leaf. ``deadline_s`` is a duration.
    Under rules that take late results ``version`` is the oldest that will do, and under rules of local steps the lease
    is one inner step, with ``rates`` for its optimizer (compute.inner).
    """

    lease: int
    version: int
    step: int
    start: int
    samples: tuple[int, ...]
    deadline_s: float
    packed: bool
    structure: bytes
    rates: tuple[float, ...] = ()


@_message(9)
class Result(Message):
    """One bucket of a block's sum; one buffer of exactly the bucket's size."""

    lease: int
    bucket: int


@_message(
    10,
    metric_names=_texts(MOST_METRICS, METRIC_NAME),
    splits=_at_most(63),
    compute_s=_SECONDS,
    wait_s=_SECONDS,
    encode_s=_SECONDS,
    raw_bytes=_BYTES,
)
class Done(Message):
    """The lease is computed and all its buckets are sent.

    ``losses`` has one mean loss a leaf; ``metrics`` holds ``len(metric_names)`` values a leaf. ``untouched`` lists
    trainable parameters (layout index) that no leaf of the block gave a gradient, ``absent`` the buckets that no
    leaf changed and for which no RESULT comes. ``splits`` counts the halvings that a lack of device memory forced
    (bits then differ from an undivided leaf). ``compute_s`` is forward, backward and, under rules of local steps, the
    optimizer. ``version`` is the one that was computed with, ``encode_s`` what its codec took, and ``raw_bytes`` what
    its results would be without one.
    """

    lease: int
    losses: tuple[float, ...]
    metric_names: tuple[str, ...]
    metrics: tuple[float, ...]
    untouched: tuple[int, ...]
    absent: tuple[int, ...]
    splits: int
    compute_s: float
    wait_s: float
    version: int = 0
    encode_s: float = 0.0
    raw_bytes: int = 0


@_message(11, error=_text(ERROR), traceback=_text(TRACEBACK))
class Failed(Message):
    """The job's own code raised on one leaf (``leaf`` is its number in the step)."""

    lease: int
    leaf: int
    error: str
    traceback: str


@_message(12, reason=_text(SENTENCE))
class Verdict(Message):
    """What became of leases; ``code`` is VerdictCode. A worker may forget a lease only after its verdict.

    ``buckets``, with APPLIED: those of the lease's results that counted; empty where all that was sent did.
    """

    leases: tuple[int, ...]
    code: int
    reason: str
    buckets: tuple[int, ...] = ()


@_message(13, reason=_text(SENTENCE))
class Revoke(Message):
    """The lease is void; results for it will be stale."""

    lease: int
    reason: str


@_message(14, activity=_text(SENTENCE))
class Heartbeat(Message):
    """I am alive, and this is what I am doing."""

    activity: str


@_message(15, reason=_text(SENTENCE), grace_s=_SECONDS)
class Drain(Message):
    """From a worker: give me no more work, I am leaving. From the coordinator: finish what you hold, no more comes."""

    reason: str
    grace_s: float


@_message(16, reason=_text(SENTENCE))
class Bye(Message):
    """The last message on a link. ``code`` is ByeCode."""

    code: int
    reason: str


@_message(17, digest=_data(64))
class ProgramRequest(Message):
    """From a worker without the job's code: the training step as a program. ``form`` is the one that it knows.

    ``digest`` is that of the program it holds already; empty for none.
    """

    form: int
    digest: bytes


@_message(18, digest=_data(64))
class Program(Message):
    """The training step. Buffers: the text, then its constants; none where the worker holds this ``digest`` already."""

    digest: bytes


@_message(19)
class Submit(Message):
    """To a worker under a rule of local steps: when all leases sent so far are computed, send how far you have gone
    from where you began, in ``buckets``, as the results of ``lease``.
    """

    lease: int
    buckets: tuple[int, ...]


@_message(
    20,
    host_bytes=_BYTES,
    device_bytes=_BYTES,
    device_total_bytes=_BYTES,
    cpu_s=_SECONDS,
    flops_per_leaf=_between(0.0, 1e30),
)
class Report(Message):
    """What a worker's process uses, told with every heartbeat; 0 for what it does not know.

    ``device_bytes`` hold its tensors, of ``device_total_bytes``. ``flops_per_leaf`` was counted on its first block.
    """

    host_bytes: int
    device_bytes: int
    device_total_bytes: int
    cpu_s: float
    flops_per_leaf: float


@_message(22, proof=_data(64))
class Accepted(Message):
    """The worker's proof was right, and this is the coordinator's own: only who knows the secret is given one."""

    proof: bytes


@_message(23, key=_text(64), name=_text(NAME), software=_text(NAME))
class Introduction(Message):
    """Who the worker is, to a coordinator that has proved itself.

    ``key`` is a secret of this process: who says it again is the same worker on another link.
    """

    key: str
    name: str
    software: str
