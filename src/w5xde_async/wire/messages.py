"""The messages: one frozen class each, their types checked on the way in.

A message on the wire is its number and its fields in the order of the class. The annotation of a field is
its check: a header whose field has another type, or a value outside the annotation's bounds, never becomes a message. A
duration is finite and not negative, a text has a length and is fit for a terminal and a log, so that nothing behind
this door has to ask again. What depends on the run (how many leaves a lease has) is for the receiver to check. Numbers
are never reused; any change of a field raises ``PROTOCOL_VERSION`` (docs/protocol.md says who may send what, when).
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Self, get_type_hints

from msgspec import DecodeError, Meta, Raw, Struct, msgpack, structs

from w5xde_async.errors import MalformedFrame

PROTOCOL_VERSION = 11

#: Most bytes that a probe carries, each way: with them a frame is still one of the handshake.
PROBE_BYTES = 3072
#: Most shards of a dataset.
MOST_SHARDS = 64
#: Most links of one worker.
MOST_RANKS = 1024
#: Most metrics that a job may report of a leaf, and characters of the name of one.
MOST_METRICS, METRIC_NAME = 64, 128
#: Least and most seconds between two signs of life, and of silence.
HEARTBEAT_S, SILENCE_S = (1e-3, 1e5), (1e-3, 1e6)

_Whole = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Wholes = tuple[_Whole, ...]
_Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]  # a number of them
_Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]  # NaN is in no range
_Name = Annotated[str, Meta(max_length=256)]
_Sentence = Annotated[str, Meta(max_length=1024)]
_Data = Annotated[bytes, Meta(max_length=64)]
_MetricNames = Annotated[tuple[Annotated[str, Meta(max_length=METRIC_NAME)], ...], Meta(max_length=MOST_METRICS)]
_Filler = Annotated[bytes, Meta(max_length=PROBE_BYTES)]
_PLACE = re.compile(r"\$\[(\d+)\]")


class Message(Struct, frozen=True, array_like=True):
    """Base of all messages. ``TYPE`` is the number on the wire."""

    TYPE: ClassVar[int]

    @classmethod
    def parse(cls, packed: Raw | bytes) -> Self:
        """Build from the msgpack array of the fields; in its texts nothing steers a terminal or begins a line.

        Raises MalformedFrame naming the field that is wrong.
        """
        names = cls.__struct_fields__
        count = len(names)
        head = bytes([0x90 + count]) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
        if memoryview(packed)[: len(head)] != head:  # msgspec forgives what has a default, or is too much
            raise MalformedFrame(f"{cls.__name__} has {len(names)} fields; this is something else")
        try:
            message: Self = _DECODERS[cls].decode(packed)
            steering = {name: text for name in _TEXTS[cls] if not (text := getattr(message, name)).isprintable()}
            if steering:
                message = structs.replace(message, **{name: _harmless(name, text) for name, text in steering.items()})
        except (DecodeError, ValueError, RecursionError) as error:
            found = _PLACE.search(str(error))
            if found is None:
                raise MalformedFrame(f"{cls.__name__}: {str(error)[:200]}") from None
            place = f"{cls.__name__}.{names[int(found[1])]}"
            raise MalformedFrame(f"{place} has a value of the wrong type or range") from None
        return message


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


class Hello(Message, frozen=True):
    """Worker's first words, to a peer that has proved nothing: they say nothing of it.

    ``identity`` is the name whose own secret it will prove; empty where it has the run's. ``worker_id``, ``name`` and
    ``software`` are empty: this message keeps its fields in every version, and INTRODUCTION says them later.
    """

    TYPE = 1
    protocol: _Whole
    nonce: _Data
    worker_id: _Name
    name: _Name
    software: _Name
    identity: _Name = ""


class Challenge(Message, frozen=True):
    """Coordinator's answer to a stranger: whether it asks for a proof. ``proof`` is empty: see ACCEPTED."""

    TYPE = 2
    protocol: _Whole
    nonce: _Data
    auth: bool
    proof: _Data


class Proof(Message, frozen=True):
    """Worker's proof (HMAC over both nonces); empty without ``auth``."""

    TYPE = 3
    proof: _Data


class Refusal(Message, frozen=True):
    """REFUSED: the coordinator says no and closes. ``code`` is errors.RefusalCode."""

    TYPE = 4
    code: _Whole
    reason: _Sentence
    hint: _Sentence


class Welcome(Message, frozen=True):
    """The run, for a worker that has proved itself. Buffers: the layout (params.layout) and, under a rule of local
    steps, the inner optimizer (msgpack, compute.inner).

    ``silence_s`` is how long either side may say nothing before it counts as gone. ``update`` names the update rule,
    ``codec`` how results are to be written, with error ``feedback`` or without, and ``downlink`` how PARAMS deltas are.
    ``numerics``: only who computes so may join (plan.numerics); empty: everybody. ``memory``: to a worker on the same
    machine, the segment in which the parameters lie (process, descriptor, bytes: ``segments``); else empty.
    ``threads``: more than so many would only slow a microbatch down; 0: nothing is known of that.
    """

    TYPE = 5
    run_id: _Name
    run_name: _Sentence
    term: _Whole
    seed: _Whole
    precision: _Name
    microbatch_size: Annotated[int, Meta(ge=1, le=1 << 31)]
    accumulate: Annotated[int, Meta(ge=1, le=1 << 31)]
    bucket_bytes: _Whole
    fingerprint: _Data
    heartbeat_s: Annotated[float, Meta(ge=HEARTBEAT_S[0], le=HEARTBEAT_S[1])]
    silence_s: Annotated[float, Meta(ge=SILENCE_S[0], le=SILENCE_S[1])]
    update: _Name = "sync"
    codec: _Name = "raw"
    downlink: _Name = "raw"
    feedback: bool = True
    numerics: _Name = ""
    memory: _Wholes = ()
    threads: Annotated[int, Meta(ge=0, le=1 << 20)] = 0


class Ready(Message, frozen=True):
    """The worker has built the same model and wants work. ``threads`` counts its torch threads.

    ``awaited``: leases whose results left on an earlier link and whose verdicts it has not read; each is answered.
    ``held``: the version under the synchronous rule, of this run and term, whose parameters it has from an earlier
    link, whole and to the bit; empty for none. ``unsent``: leases of an earlier link whose results it has still: where
    the block is free it is leased the same again, and sends what has not come.

    Of an island's rank: ``shape`` is what the island is for people ("fsdp=2"), ``shard`` what of the layout comes to
    this rank and from it (params.shard), ``share`` which leaves' data it needs, and ``together`` with how many
    neighbours (plan.shares). The worker is ready when all of its ranks are. ``numerics``: how its sums are made
    (plan.numerics). ``memory``: the segment in which its results lie, as in WELCOME; empty where it has opened none.
    ``shards``: fingerprints of its own copy of the dataset (data.shards), 0 for a shard that it lacks; empty for none.
    ``code``: digest of the job's own source (``Job.source``); empty where it has none, or none that is known.
    """

    TYPE = 6
    fingerprint: _Data
    device: _Name
    device_name: _Name
    threads: Annotated[int, Meta(ge=0, le=1 << 16)]
    torch_version: _Name
    awaited: _Wholes = ()
    held: _Wholes = ()
    unsent: _Wholes = ()
    shape: _Name = ""
    shard: _Wholes = ()
    share: _Whole = 0
    together: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    numerics: _Name = "exact"
    memory: _Wholes = ()
    shards: Annotated[_Wholes, Meta(max_length=MOST_SHARDS)] = ()
    code: _Data = b""

    def __post_init__(self) -> None:
        if not self.numerics or not self.numerics.isprintable():
            raise MalformedFrame("Ready.numerics has a value of the wrong type or range")


class Params(Message, frozen=True):
    """One bucket of one version's parameters; the version is whole when all ``num_buckets`` have come.

    Buckets that a commit did not change are not sent; with ``num_buckets`` 0 nothing changed and no buffer follows.
    ``loss_scale`` is what losses at this version are multiplied with (fp16; 1 otherwise). With ``delta`` the buffer is
    to be added to what the worker has of this bucket; otherwise it is the bucket whole. An island's rank is sent what
    of its shard lies in the bucket, a buffer for each piece. ``shared``: the version is whole, and these buckets have
    new values in the memory that both have; ``num_buckets`` is 0 then.
    """

    TYPE = 7
    version: _Whole
    bucket: _Whole
    num_buckets: _Whole
    loss_scale: float
    delta: bool = False
    shared: _Wholes = ()


class Lease(Message, frozen=True):
    """One block at one version, with its data. ``samples`` counts each leaf's samples, in order.

    ``structure`` is the msgpack description of a batch; the buffers are its tensors. ``packed`` says that
    each buffer holds one tensor's rows for all leaves; otherwise leaf after leaf. ``deadline_s`` is a duration.
    ``there``: result buckets of the block that have come already, and are not sent again where that changes nothing.
    Under rules that take late results ``version`` is the oldest that will do, and under rules of local steps the lease
    is one inner step, with ``rates`` for its optimizer (compute.inner).

    ``step_samples``: of the whole step, by which its sum is divided; 0 where that is not so.

    With ``local`` the one buffer, int64, names the samples, and the worker reads them itself; ``structure`` is empty.
    """

    TYPE = 8
    lease: _Whole
    version: _Whole
    step: _Whole
    start: _Whole
    samples: _Wholes
    deadline_s: float
    packed: bool
    structure: bytes
    rates: tuple[float, ...] = ()
    there: _Wholes = ()
    local: bool = False
    step_samples: Annotated[int, Meta(ge=0, le=1 << 40)] = 0


class Result(Message, frozen=True):
    """One bucket of a block's sum; one buffer of exactly the bucket's size, or one for each piece of a rank's shard.

    With ``slot`` no buffer follows: the bucket lies in that vector of the worker's shared memory, counted from 1.
    """

    TYPE = 9
    lease: _Whole
    bucket: _Whole
    slot: _Whole = 0


class Done(Message, frozen=True):
    """The lease is computed and all its buckets are sent; of an island, once from each rank, and what it says beside
    that is said by rank 0.

    ``losses`` has one mean loss a leaf; ``metrics`` holds ``len(metric_names)`` values a leaf. ``untouched`` lists
    trainable parameters (layout index) that no leaf of the block gave a gradient, ``absent`` the buckets that no leaf
    changed and for which no RESULT comes. ``splits`` counts the halvings that a lack of device memory forced (bits then
    differ from an undivided leaf), the same in all buckets of the lease. ``compute_s`` is forward, backward and, under
    rules of local steps, the optimizer. ``version`` is the one that was computed with, ``encode_s`` what its codec
    took, and ``raw_bytes`` what its results would be without one. ``drew``: torch's generators have been drawn from, in
    this lease or before, as far as was looked.
    """

    TYPE = 10
    lease: _Whole
    losses: tuple[float, ...]
    metric_names: _MetricNames
    metrics: tuple[float, ...]
    untouched: _Wholes
    absent: _Wholes
    splits: Annotated[int, Meta(ge=0, le=63)]
    compute_s: _Seconds
    wait_s: _Seconds
    version: _Whole = 0
    encode_s: _Seconds = 0.0
    raw_bytes: _Bytes = 0
    drew: bool = False

    def __post_init__(self) -> None:
        names = self.metric_names
        if len(set(names)) < len(names) or not all(map(str.isprintable, names)):
            raise MalformedFrame("Done.metric_names has a value of the wrong type or range")


class Failed(Message, frozen=True):
    """The job's own code raised on one leaf (``leaf`` is its number in the step)."""

    TYPE = 11
    lease: _Whole
    leaf: _Whole
    error: Annotated[str, Meta(max_length=4096)]
    traceback: Annotated[str, Meta(max_length=65536)]


class Verdict(Message, frozen=True):
    """What became of leases; ``code`` is VerdictCode. A worker may forget a lease only after its verdict.

    ``buckets``, with APPLIED: those of the lease's results that counted; empty where all that was sent did.
    """

    TYPE = 12
    leases: _Wholes
    code: _Whole
    reason: _Sentence
    buckets: _Wholes = ()


class Revoke(Message, frozen=True):
    """The lease is void; results for it will be stale."""

    TYPE = 13
    lease: _Whole
    reason: _Sentence


class Heartbeat(Message, frozen=True):
    """I am alive, and this is what I am doing."""

    TYPE = 14
    activity: _Sentence


class Drain(Message, frozen=True):
    """From a worker: give me no more work, I am leaving. From the coordinator: finish what you hold, no more comes."""

    TYPE = 15
    reason: _Sentence
    grace_s: _Seconds


class Bye(Message, frozen=True):
    """The last message on a link. ``code`` is ByeCode."""

    TYPE = 16
    code: _Whole
    reason: _Sentence


class ProgramRequest(Message, frozen=True):
    """From a worker without the job's code: the training step as a program. ``form`` is the one that it knows.

    ``digest`` is that of the program it holds already; empty for none.
    """

    TYPE = 17
    form: _Whole
    digest: _Data


class Program(Message, frozen=True):
    """The training step. Buffers: the text, then its constants; none where the worker holds this ``digest`` already."""

    TYPE = 18
    digest: _Data


class Submit(Message, frozen=True):
    """To a worker under a rule of local steps: when all leases sent so far are computed, send how far you have gone
    from where you began, in ``buckets``, as the results of ``lease``.
    """

    TYPE = 19
    lease: _Whole
    buckets: _Wholes


class Report(Message, frozen=True):
    """What a worker's process uses, told with every heartbeat; 0 for what it does not know.

    ``device_bytes`` hold its tensors, of ``device_total_bytes``. ``flops_per_leaf`` was counted on its first block.
    ``leaf_s``: what a leaf of its last block took to compute, known before the block's results have been sent.
    """

    TYPE = 20
    host_bytes: _Bytes
    device_bytes: _Bytes
    device_total_bytes: _Bytes
    cpu_s: _Seconds
    flops_per_leaf: Annotated[float, Meta(ge=0.0, le=1e30)]
    leaf_s: _Seconds = 0.0


class Accepted(Message, frozen=True):
    """The worker's proof was right, and this is the coordinator's own: only who knows the secret is given one."""

    TYPE = 22
    proof: _Data


class Introduction(Message, frozen=True):
    """Who the worker is, to a coordinator that has proved itself.

    ``key`` is a secret of this process: who says it again is the same worker on another link. The ``ranks`` of an
    island say the same key, each on a link of its own.
    """

    TYPE = 23
    key: Annotated[str, Meta(max_length=64)]
    name: _Name
    software: _Name
    rank: Annotated[int, Meta(ge=0, le=MOST_RANKS - 1)] = 0
    ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1


class Probe(Message, frozen=True):
    """From one who has proved itself, in place of INTRODUCTION: it measures the way here and does not join.

    ``wanted``: bytes of filler in the answer. ``filler`` means nothing.
    """

    TYPE = 24
    wanted: Annotated[int, Meta(ge=0, le=PROBE_BYTES)]
    filler: _Filler


class Probed(Message, frozen=True):
    """Answer to a PROBE. ``wall``: seconds since 1970 by the coordinator's clock.

    Of its run: ``num_values`` that a result has, ``leaf_s`` for a leaf of the fastest worker (0 where nobody's is
    known), the name of the update rule, and the ``island`` that its workers are to form ("pp=2"; empty: none).
    """

    TYPE = 25
    wall: Annotated[float, Meta(ge=0.0, le=1e12)]
    num_values: _Bytes
    leaf_s: _Seconds
    update: _Name
    filler: _Filler
    island: _Name = ""


class Volunteer(Message, frozen=True):
    """From one who has proved itself, in place of INTRODUCTION: it wants to be one rank of an island of ``shape``, with
    others that say the same.

    As rank 0 it would serve the group's store at ``host`` (empty: where this link comes from) and ``port``.
    """

    TYPE = 26
    shape: _Name
    ranks: Annotated[int, Meta(ge=2, le=MOST_RANKS)]
    host: _Name
    port: Annotated[int, Meta(ge=1, le=65535)]


class Rendezvous(Message, frozen=True):
    """Answer to VOLUNTEER: all are there. The ranks meet at ``host`` and ``port``, and join as one worker."""

    TYPE = 27
    rank: Annotated[int, Meta(ge=0, le=MOST_RANKS - 1)]
    host: _Name
    port: Annotated[int, Meta(ge=1, le=65535)]


class Unread(Message, frozen=True):
    """The worker cannot read what a ``local`` LEASE names: the same lease is to come again, with its data."""

    TYPE = 28
    lease: _Whole
    reason: _Sentence


MESSAGES: dict[int, type[Message]] = {cls.TYPE: cls for cls in Message.__subclasses__()}
_DECODERS: dict[type[Message], Any] = {cls: msgpack.Decoder(cls) for cls in MESSAGES.values()}
_TEXTS: dict[type[Message], tuple[str, ...]] = {
    cls: tuple([name for name, kind in get_type_hints(cls).items() if kind is str]) for cls in MESSAGES.values()
}
#: Those in which a line may end: a traceback has many.
_OF_LINES = ("error", "traceback")


def _harmless(name: str, text: str) -> str:
    """That field's text: whoever sent it writes no line of its own where it is shown, and moves no cursor."""
    return "".join(
        char if char.isprintable() or (char == "\n" and name in _OF_LINES)
        else " " if char.isspace() else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )  # fmt: skip
