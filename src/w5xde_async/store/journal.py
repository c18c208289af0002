"""The journal: every step's reduced gradient, appended to segment files, so that nothing committed is computed twice.

A record is a header (step, sizes, CRC-32 of the payload, CRC-32 of the header itself), a payload (JSON metadata, then
raw bytes) and a chain value: blake2b over the chain value before it and the whole record. A segment begins with a
header that says whose it is, which step it stands on, and how its predecessor ended; the chain runs through all of
them. A segment is made whole under a temporary name, so only the end of the newest one can ever be torn.

What is damaged at the end of the newest segment and was never durable is dropped and counted. Each record says up to
where the file was durable when it was written: a damaged record that a later whole one knows to have been durable is
not a torn end but a corrupted journal, and that is refused, like a broken chain or a segment that is missing.

One writer at a time (the run directory's lock). Blocking. Digests find damage, they do not authenticate.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import mmap
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from w5xde_async.errors import CheckpointCorrupt, StoreError
from w5xde_async.store.failpoints import failpoint
from w5xde_async.store.filesystem import Filesystem, disk_errors, explain, regular, temporary_beside, unused
from w5xde_async.store.state import JSON

logger = logging.getLogger(__name__)

FORMAT = 1
_SEGMENT = re.compile(r"segment-(\d{9})")
_MAGIC = b"W5XJ"
_SEGMENT_MAGIC = b"W5XDEJNL"
_CHAIN_BYTES = 32
# magic, step, bytes of metadata, bytes of data, file position known to be durable, CRC-32 of the payload
_RECORD = struct.Struct("<4sQIQQI")
_HEADER_BYTES = _RECORD.size + 4  # and the CRC-32 of all that
_SEGMENT_PREFIX = struct.Struct("<8sII")  # magic, bytes of JSON, their CRC-32
_MAX_META_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One step. ``step`` counts commits from 1; ``data`` is raw bytes, in pieces when it is to be written."""

    step: int
    meta: dict[str, JSON]
    data: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a segment begins, as the checkpoint of the same step keeps it."""

    sequence: int
    chain: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Steps that were not journalled because the disk failed: those after ``after``, up to ``until``."""

    after: int
    until: int


@dataclass(slots=True)
class Replay:
    """What reading came to: the last step read, bytes of a torn end, a gap that reading stopped at."""

    step: int
    torn_bytes: int = 0
    gap: Gap | None = None


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment's header. ``previous_nbytes``: how much of the one before it counts."""

    path: Path
    sequence: int
    step: int
    term: int
    chain: bytes
    previous_nbytes: int
    gap: bool
    header_bytes: int


def newest_term(directory: Path, run_id: str) -> int:
    """The newest term of a run that began a segment, as far as headers can be read; 0: none did."""
    newest = 0
    for path in directory.glob("*segment-*"):
        with suppress(StoreError):
            content, _ = _header(path)
            if content["run_id"] == run_id:
                newest = max(newest, content["term"])
    return newest


class Journal:
    """The journal of one run: ``replay`` what is there, then ``begin``, then append."""

    def __init__(self, directory: Path, *, run_id: str, fingerprint: str, filesystem: Filesystem | None = None) -> None:
        """``fingerprint`` is the model's: the bytes of a record mean nothing under another one. Touches no disk."""
        self._directory = directory
        self._run_id, self._fingerprint = run_id, fingerprint
        self._filesystem = filesystem or Filesystem()
        self._file: BinaryIO | None = None
        self._path = directory  # of that file
        self._sequence = 0
        self._position = 0  # the end of what was written to the file, and what of it is durable:
        self._chain = b""
        self._step = 0
        self._durable = (0, b"", 0)  # position, chain, step
        self._term = 0

    # --- reading

    @property
    def exists(self) -> bool:
        """Whether there is any segment."""
        return bool(self._paths())

    @property
    def newest_term(self) -> int:
        """The newest term that began a segment, 0 before the first. Raises CheckpointCorrupt."""
        with disk_errors(self._directory, "list the journal"):
            abandoned = [path for path in self._directory.glob("abandoned-segment-*")]
        return max((self._read_header(path).term for path in (*self._paths()[-1:], *abandoned)), default=0)

    def read(self, after: int, position: Position | None, replay: Replay) -> Iterator[Entry]:
        """Every step after ``after``, in order, each verified before it is given; ``replay`` is filled on the way.

        ``position`` is what the checkpoint of step ``after`` says about the segment that begins there, if it does.
        The entry's memory is valid until the next one.

        Raises:
            CheckpointCorrupt: damage that no crash explains; says where and what to do.
            StoreError: it cannot be read.
        """
        replay.step = after
        with disk_errors(self._directory, "read the journal"):
            if paths := self._paths():
                # A process that was killed may have written what no disk has yet. What is read now is built upon: a
                # power cut must not take it away again.
                self._filesystem.sync_file(paths[-1])
                self._filesystem.sync_directory(self._directory)
            segments = self._from(after, position)
            last = segments[-1] if segments else None
            self._sequence = last.sequence if last else 0
            for segment, following in itertools.zip_longest(segments, segments[1:]):
                if segment.gap and segment.step > replay.step:
                    # The disk failed there, loudly; a checkpoint took over, but not the one that is being resumed.
                    replay.gap = Gap(replay.step, segment.step)
                    return
                yield from self._read_segment(segment, following, replay)

    def _from(self, after: int, position: Position | None) -> list[_Segment]:
        """The headers of the segments that matter, checked against each other."""
        paths = self._paths()
        if position is not None and position.sequence not in [_sequence(path) for path in paths]:
            raise self._corrupt(self._directory, f"segment {position.sequence} is missing: step {after} ends before it")
        # From the newest backwards: a checkpoint needs only what comes after it.
        segments: list[_Segment] = []
        for path in reversed(paths):
            segment = self._read_header(path)
            if segments and segment.sequence != segments[-1].sequence - 1:
                raise self._corrupt(self._directory, f"segment {segments[-1].sequence - 1} is missing")
            segments.append(segment)
            if segment.sequence == position.sequence if position is not None else segment.step <= after:
                break
        segments.reverse()
        if not segments:
            return []
        first = segments[0]
        if position is not None and first.chain.hex() != position.chain:
            raise self._corrupt(first.path, "its chain is not the checkpoint's")
        if first.step > after and not first.gap:
            raise self._corrupt(self._directory, f"the steps from {after + 1} to {first.step} are missing")
        return segments

    def _read_segment(self, segment: _Segment, following: _Segment | None, replay: Replay) -> Iterator[Entry]:
        path = segment.path
        with open(path, "rb", opener=regular) as file:
            size = file.seek(0, 2)
            end = following.previous_nbytes if following is not None else size
            if end > size:
                raise self._corrupt(path, f"it has {size} bytes of {end}")
            file.seek(segment.header_bytes)
            chain, step, at = segment.chain, segment.step, segment.header_bytes
            while at < end:
                found = _read_record(file, at, end, chain)
                if isinstance(found, str):
                    if following is not None or self._durable_beyond(path, at):
                        raise self._corrupt(path, f"the record after step {step}, at byte {at}, {found}")
                    replay.torn_bytes = size - at
                    break
                entry, chain, at = found
                if entry.step != step + 1:
                    raise self._corrupt(path, f"step {entry.step} follows step {step}")
                step = entry.step
                if step > replay.step:
                    replay.step = step
                    yield entry
            if following is not None and chain != following.chain:
                raise self._corrupt(following.path, "the chain is broken: it does not stand on the segment before it")
            if following is not None and step != following.step and not following.gap:
                raise self._corrupt(following.path, f"it stands on step {following.step}, not on step {step}")
            self._durable = (at, chain, step)

    def _durable_beyond(self, path: Path, damaged_at: int) -> bool:
        """Whether a whole record behind ``damaged_at`` says that the damaged one had been durable."""
        with open(path, "rb", opener=regular) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            at = view.find(_MAGIC, damaged_at + 1)
            while at >= 0:
                header = _unpack(view[at : at + _HEADER_BYTES])
                if header is not None and header[3] > damaged_at:
                    _, meta_bytes, data_bytes, _, crc = header
                    payload_at = at + _HEADER_BYTES
                    end = payload_at + meta_bytes + data_bytes
                    found = 0
                    for start in range(payload_at, min(end, len(view)), _CHUNK_BYTES):
                        found = zlib.crc32(view[start : min(start + _CHUNK_BYTES, end)], found)
                    if end <= len(view) and found == crc:
                        return True
                at = view.find(_MAGIC, at + 1)
        return False

    def _read_header(self, path: Path) -> _Segment:
        content, nbytes = _header(path)
        if content["run_id"] != self._run_id:
            raise self._corrupt(path, f"it belongs to run {content['run_id']}, and this is run {self._run_id}")
        if content["fingerprint"] != self._fingerprint:
            raise self._corrupt(path, "it belongs to another model")
        if _SEGMENT.fullmatch(path.name) and content["sequence"] != _sequence(path):
            raise self._corrupt(path, f"it is segment {content['sequence']} under another name")
        return _Segment(
            path=path, sequence=content["sequence"], step=content["step"], term=content["term"],
            chain=bytes.fromhex(content["chain"]), previous_nbytes=content["previous_nbytes"], gap=content["gap"],
            header_bytes=nbytes,
        )  # fmt: skip

    def _corrupt(self, path: Path, reason: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(str(path), reason)

    def _paths(self) -> list[Path]:
        """The segments, oldest first."""
        with disk_errors(self._directory, "list the journal"):
            if not self._directory.is_dir():
                return []
            return sorted(path for path in self._directory.iterdir() if _SEGMENT.fullmatch(path.name))

    # --- writing

    def begin(self, step: int, term: int, replay: Replay | None = None) -> Position:
        """Go on after ``step`` with a segment of this ``term``. ``replay`` is what ``read`` came to, if there was any.

        Raises:
            StoreError: the disk said no; the journal is as it was.
        """
        self._term = term
        with disk_errors(self._directory, "begin a segment of the journal"):
            if replay is not None and replay.gap is not None:
                # What lies behind the gap belongs to a course of the run that is not gone on with.
                for path in reversed(self._paths()):
                    if self._read_header(path).step >= replay.gap.until:
                        self._filesystem.rename(path, unused(path.with_name(f"abandoned-{path.name}")))
                self._filesystem.sync_directory(self._directory)
                self._sequence = max((_sequence(path) for path in self._paths()), default=0)
            if not self._durable[1]:
                seed = f"{self._run_id} {self._fingerprint}".encode()
                self._durable = (0, hashlib.blake2b(seed, digest_size=_CHAIN_BYTES).digest(), step)
            return self._open_segment(step)

    def append(self, entry: Entry) -> None:
        """Write one step behind the last; durable after ``sync``. Raises OSError; then ``close`` and ``rotate``.

        Raises ValueError where the step does not follow the last.
        """
        file, write = self._file, self._filesystem.write
        assert file is not None
        if entry.step != self._step + 1:
            raise ValueError(f"step {entry.step} does not follow step {self._step}")
        meta = json.dumps(entry.meta, allow_nan=False, separators=(",", ":")).encode()
        nbytes = sum(piece.nbytes for piece in entry.data)
        crc = zlib.crc32(meta)
        for piece in entry.data:
            crc = zlib.crc32(piece, crc)
        header = _RECORD.pack(_MAGIC, entry.step, len(meta), nbytes, self._durable[0], crc)
        header += zlib.crc32(header).to_bytes(4, "little")
        chain = hashlib.blake2b(self._chain, digest_size=_CHAIN_BYTES)
        chain.update(header)
        chain.update(meta)
        failpoint("journal.append.before")
        write(file, header)
        write(file, meta)
        failpoint("journal.append.half", file.flush)
        for piece in entry.data:
            write(file, piece)
            chain.update(piece)
        self._chain = chain.digest()
        write(file, self._chain)
        self._position += len(header) + len(meta) + nbytes + _CHAIN_BYTES
        self._step = entry.step
        failpoint("journal.append.after", file.flush)

    def sync(self) -> None:
        """Return when everything that was appended is durable.

        Raises:
            OSError: the disk said no, or has no such file any more; ``close`` and ``rotate``.
            StoreError: whoever came after has read the journal already: what was appended is no step of the run.
        """
        assert self._file is not None
        failpoint("journal.sync.before")
        self._filesystem.sync(self._file)
        self._filesystem.fence()
        if not self._path.exists():  # the run directory was deleted, or moved away with it: no start would read this
            raise FileNotFoundError(errno.ENOENT, "it was deleted or moved", str(self._path))
        self._durable = (self._position, self._chain, self._step)
        failpoint("journal.sync.after")

    def rotate(self, step: int) -> Position:
        """Go on in a new segment that stands on ``step``; what was appended is made durable first. Raises OSError.

        A ``step`` beyond the last one that is durable leaves a gap that says of itself that it is one: the checkpoint
        of that step must become durable before the journal counts again.
        """
        if self._file is not None and self._position != self._durable[0]:
            self.sync()
        return self._open_segment(step)

    def probe(self, nbytes: int) -> None:
        """Write and remove a file of ``nbytes``. Raises OSError where the disk does not take it."""
        path = temporary_beside(self._directory / "probe")
        self._filesystem.make_directories(self._directory)
        try:
            with self._filesystem.create(path) as file:
                for start in range(0, nbytes, _CHUNK_BYTES):
                    self._filesystem.write(file, bytes(min(_CHUNK_BYTES, nbytes - start)))
                self._filesystem.sync(file)
        finally:
            with suppress(OSError):
                self._filesystem.remove(path)

    def prune(self, step: int) -> None:
        """Remove segments that no replay from ``step`` or later needs; a failure costs only space."""
        try:
            paths = self._paths()
            doomed = [
                path for path, following in itertools.pairwise(paths) if self._read_header(following).step <= step
            ]
            failpoint("journal.prune.before")
            for path in doomed:  # oldest first: what stays has no hole
                self._filesystem.remove(path)
            failpoint("journal.prune.after")
        except (OSError, StoreError) as error:
            reason = explain(error) if isinstance(error, OSError) else error.reason
            logger.warning("journal not pruned path=%s reason=%s", self._directory, reason)

    def set_aside(self) -> Path | None:
        """Move the whole journal beside itself and return where it lies now; None where there is none."""
        self.close()
        if not self._directory.is_dir():
            return None
        target = unused(self._directory.with_name(f"abandoned-{self._directory.name}"))
        with disk_errors(self._directory, "set the journal aside"):
            self._filesystem.rename(self._directory, target)
            self._filesystem.sync_directory(target.parent)
        self._sequence, self._durable = 0, (0, b"", 0)
        return target

    def left_aside(self, term: int) -> Path | None:
        """Where ``set_aside`` has left the journal whose newest segment is of this ``term``, if no other is there."""
        found = sorted(self._directory.parent.glob(f"abandoned-{self._directory.name}*"))
        whole = [path for path in found if newest_term(path, self._run_id) == term]
        return whole[-1] if term and whole and not self._directory.exists() else None

    def leads_on(self, directory: Path, after: int, position: Position | None) -> bool:
        """Whether what ``set_aside`` has left at ``directory`` goes on from a checkpoint, as ``read`` would have it."""
        aside = Journal(directory, run_id=self._run_id, fingerprint=self._fingerprint, filesystem=self._filesystem)
        try:
            return bool(aside._from(after, position))
        except StoreError:
            return False

    def remove(self) -> None:
        """Remove the whole journal: a checkpoint of its last step is durable. Raises StoreError."""
        self.close()
        doomed = temporary_beside(self._directory)
        with disk_errors(self._directory, "remove the journal"):
            # Durably, before a later term is stored: what a power cut brought back of it would lack that one's segment.
            self._filesystem.rename(self._directory, doomed)
            self._filesystem.sync_directory(doomed.parent)
            self._filesystem.remove(doomed)

    def close(self) -> None:
        """Let go of the file. Calling it twice is fine."""
        if self._file is not None:
            with suppress(OSError):  # what was not synced counts for nothing
                self._file.close()
            self._file = None

    def _open_segment(self, step: int) -> Position:
        self.close()
        position, chain, last = self._durable
        sequence = self._sequence + 1
        target = self._directory / f"segment-{sequence:09d}"
        content = {
            "format": FORMAT, "run_id": self._run_id, "fingerprint": self._fingerprint, "sequence": sequence,
            "step": step, "term": self._term, "chain": chain.hex(), "previous_nbytes": position, "gap": step != last,
        }  # fmt: skip
        body = json.dumps(content).encode()
        header = _SEGMENT_PREFIX.pack(_SEGMENT_MAGIC, len(body), zlib.crc32(body)) + body
        failpoint("segment.create.before")
        temporary = temporary_beside(target)
        file: BinaryIO | None = None
        self._filesystem.make_directories(self._directory)  # it may have been deleted meanwhile
        try:
            file = self._filesystem.create(temporary)
            self._filesystem.write(file, header)
            self._filesystem.sync(file)
            failpoint("segment.create.half")
            self._filesystem.rename(temporary, target)
            self._filesystem.sync_directory(self._directory)
        except BaseException:
            with suppress(OSError):
                if file is not None:
                    file.close()
            for path in (temporary, target):
                with suppress(OSError):
                    self._filesystem.remove(path)
            raise
        self._file, self._path, self._sequence = file, target, sequence
        self._position, self._chain, self._step = len(header), chain, step
        self._durable = (len(header), chain, step)
        failpoint("segment.create.after")
        return Position(sequence, chain.hex())


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """What a segment's header says, and its bytes. Raises CheckpointCorrupt where it is damaged, and StoreError."""
    with disk_errors(path, "read the journal"):
        with open(path, "rb", opener=regular) as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(_SEGMENT_PREFIX.size)
            body = b""
            if len(prefix) == _SEGMENT_PREFIX.size:
                magic, nbytes, crc = _SEGMENT_PREFIX.unpack(prefix)
                body = file.read(min(nbytes, size))
                if magic != _SEGMENT_MAGIC or len(body) != nbytes or zlib.crc32(body) != crc:
                    body = b""
    if not body:
        raise CheckpointCorrupt(str(path), "its header is damaged")
    content: dict[str, Any] = json.loads(body)
    if content["format"] != FORMAT:
        raise StoreError(str(path), f"format {content['format']} is not one this version reads; upgrade w5xde-async")
    return content, _SEGMENT_PREFIX.size + len(body)


def _sequence(path: Path) -> int:
    named = _SEGMENT.fullmatch(path.name)
    assert named is not None
    return int(named[1])


def _unpack(data: bytes) -> tuple[int, int, int, int, int] | None:
    """Step, bytes of metadata and of data, durable position, CRC: None where the header is not whole."""
    if len(data) != _HEADER_BYTES or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return None
    magic, step, meta_bytes, data_bytes, durable, crc = _RECORD.unpack(data[:-4])
    return (step, meta_bytes, data_bytes, durable, crc) if magic == _MAGIC else None


def _read_record(file: BinaryIO, at: int, end: int, chain: bytes) -> tuple[Entry, bytes, int] | str:
    """The record at ``at``, the chain after it and where it ends; or what is wrong with it."""
    raw = file.read(min(_HEADER_BYTES, end - at))
    header = _unpack(raw)
    if header is None:
        return "has a damaged header"
    step, meta_bytes, data_bytes, _, crc = header
    after = at + _HEADER_BYTES + meta_bytes + data_bytes + _CHAIN_BYTES
    if after > end or meta_bytes > _MAX_META_BYTES:  # before anything is allocated
        return f"claims bytes up to {after} of {end}"
    payload = bytearray(meta_bytes + data_bytes)
    file.readinto(payload)  # type: ignore[attr-defined]
    found = file.read(_CHAIN_BYTES)
    if zlib.crc32(payload) != crc:
        return "does not match its CRC"
    expected = hashlib.blake2b(chain, digest_size=_CHAIN_BYTES)
    expected.update(raw)
    expected.update(payload)
    if expected.digest() != found:
        return "does not match its chain"
    meta: dict[str, Any] = json.loads(payload[:meta_bytes])
    return Entry(step=step, meta=meta, data=[memoryview(payload)[meta_bytes:]]), found, after
