"""What a worker can be told, beside the job and the coordinator's address."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from w5xde_async.compute.machine import machine_memory_bytes
from w5xde_async.config import (
    FOLDER,
    NAME,
    THREADS,
    TIME,
    TIME_OR_0,
    YES_OR_NO,
    number,
    one_of,
    same_as,
    setting,
    size,
    size_bytes,
    text,
)
from w5xde_async.data.config import ReadersConfig
from w5xde_async.errors import need
from w5xde_async.net.tls import SecurityConfig

_DEVICE = text("auto, cpu, cuda, cuda:N or mps", "DEVICE", r"auto|(?:cpu|cuda|mps)(?::\d{1,4})?")
_SHORT = TIME._replace(
    accepts="a time from 0 to 100ms", in_python="seconds from 0 to 0.1", holds=number("", lambda x: 0 <= x <= 0.1).holds
)
_MEMORY = size("auto, or a size like 512KiB, 4MiB or 1GB, at least 1MiB", lambda n: n >= 1 << 20)._replace(
    read=lambda told: None if told == "auto" else size_bytes(told)
)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(SecurityConfig):
    """Settings of one worker.

    ``token`` is needed where the coordinator has one; ``identity`` is the name that it belongs to, empty where it is
    the run's. ``certificate``: SHA-256 of the coordinator's certificate, which then must be that one. ``tls.ca``:
    authorities that it must have. On loopback there is no TLS unless these ask for it. ``gather_frames``: frames that
    are ready together share one write. ``inline_block_s`` avoids the way to a thread and back, which takes longer than
    a small block does; 0 befits a guest in somebody's loop. Several workers may share a ``data_dir``; without one, what
    would be kept there is dropped, and the log says how much.
    """

    identity: str = ""
    certificate: bytes = b""
    gather_frames: bool = True
    name: str = setting("", "shown in the coordinator's list", NAME, "the run", shown="host and process")
    connect_timeout_s: float = setting(
        300.0, "how long to look for the coordinator, at the start and when it was lost", TIME, "the run",
        flag="connect_timeout",
    )  # fmt: skip
    lifetime_s: float | None = setting(None, "leave in good order after that long", TIME, "the run", flag="lifetime")
    grace_s: float = setting(
        25.0, "asked to leave, finish the lease under way within that long or give it back", TIME_OR_0, "the run",
        flag="grace",
    )  # fmt: skip
    device: str = setting("auto", _DEVICE.accepts, _DEVICE, "machine")
    threads: int | None = setting(
        None,
        "torch's threads",
        THREADS,
        "machine",
        shown="torch's choice, at most the container's cores; 1 for short leaves where microbatch_size is open",
    )
    compile: bool = setting(False, "torch.compile the step where that pays; gives other bits", YES_OR_NO, "machine")
    deterministic: bool = setting(
        False, "kernels that give the same bits each time, for CUDA: slower; an operator that has none fails its leaf",
        YES_OR_NO, "machine",
    )  # fmt: skip
    sandbox: str = setting(
        "auto", "run the coordinator's program in a process without files, network and secrets (Linux): on, off, or "
        "auto, which is on off loopback; it does not touch --job", one_of("auto", "on", "off"), "machine",
    )  # fmt: skip
    link: str = setting(
        "auto", "how parameters and results travel: shm, memory that it has together with a coordinator of the same "
        "user on this machine (Linux), tcp, or auto, which is shm where that can be", one_of("auto", "tcp", "shm"),
        "machine",
    )  # fmt: skip
    inline_block_s: float = setting(
        0.0, "blocks expected to take no longer are computed on the event loop; 0: none", _SHORT, "machine",
        flag="inline_block", shown="5ms",
    )  # fmt: skip
    memory_limit_bytes: int = setting(
        0, "most memory for batches that it holds; a run whose leases need more ends it, exit code 2", _MEMORY,
        "machine", flag="memory_limit", shown="auto",
    )  # fmt: skip
    local_data: str = setting(
        "", "the worker's own copy of the dataset, as the job's local_data opens it: a directory, an address",
        text("a text", "WHERE"), "data",
    )  # fmt: skip
    loader_threads: int = same_as(ReadersConfig, "loader_threads")
    loader_processes: int = same_as(ReadersConfig, "loader_processes")
    data_dir: Path | None = setting(
        None, "what a lossy codec has left out is kept there when the worker leaves in good order", FOLDER, "machine"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        need(len(self.certificate) in (0, 32), "certificate is a SHA-256 hash of 32 bytes")

    @property
    def asks_for_tls(self) -> bool:
        return super().asks_for_tls or bool(self.certificate)

    @property
    def batch_bytes(self) -> int:
        """``memory_limit_bytes``, or a quarter of the machine's memory where it is not set."""
        return self.memory_limit_bytes or max(64 << 20, _MEMORY_BYTES // 4)


_MEMORY_BYTES: int = machine_memory_bytes()  # read here, since it reads files and configs are made on event loops
