"""What a worker can be told, beside the job and the coordinator's address."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from w5xde_async.compute.machine import machine_memory_bytes
from w5xde_async.errors import UsageError
from w5xde_async.net.tls import TlsFiles

__all__ = ["WorkerConfig"]


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Settings of one worker.

    name              shown in the coordinator's lists; default: host name and process id
    token             the shared secret; needed where the coordinator has one
    identity          the name that the token belongs to; empty where it is the run's
    certificate       SHA-256 of the coordinator's certificate; it then must be that one
    tls               authorities that the coordinator's certificate must have; this worker's own certificate and key
    insecure          no TLS off loopback either. On loopback there is none unless certificate or tls ask for it
    device            auto, cpu, cuda, cuda:N or mps
    threads           torch's threads for one operation on the CPU; None leaves torch's own choice
    connect_timeout_s how long to try to reach the coordinator, at the start and after it was lost
    gather_frames     frames that are ready together share one write; False: each is sent by itself
    inline_block_s    blocks expected to take no longer are computed on the event loop itself, since the way to a thread
                      and back takes longer than they do; 0: never, as befits a guest in somebody's loop
    sandbox           whether a coordinator's program runs in a process without files, network and secrets: auto (off
                      loopback), on or off. A job of one's own never does
    compile           ``torch.compile`` the step where that pays; other bits then than without
    lifetime_s        leave in good order after that long (a spot instance's hour)
    grace_s           asked to leave, it finishes the lease under way within that long or gives it back
    data_dir          where what a lossy codec has left out is kept when the worker leaves in good order, for the next
                      that joins the same run with this directory, which several workers may share; None: it is dropped,
                      and the log says how much
    memory_limit_bytes  most bytes of batches that the coordinator may have it hold at once
    """

    name: str = ""
    token: str = field(default="", repr=False)
    identity: str = ""
    certificate: bytes = b""
    tls: TlsFiles = field(default_factory=TlsFiles)
    insecure: bool = False
    device: str = "auto"
    threads: int | None = None
    connect_timeout_s: float = 300.0
    gather_frames: bool = True
    inline_block_s: float = 0.0
    sandbox: str = "auto"
    compile: bool = False
    lifetime_s: float | None = None
    grace_s: float = 25.0
    data_dir: Path | None = None
    memory_limit_bytes: int = field(default_factory=lambda: max(64 << 20, _MEMORY_BYTES // 4))

    def __post_init__(self) -> None:
        def need(holds: bool, text: str) -> None:
            if not holds:
                raise UsageError(text)

        need(len(self.certificate) in (0, 32), "certificate is a SHA-256 hash of 32 bytes")
        need((self.tls.cert is None) == (self.tls.key is None), "a TLS certificate and its key go together")
        need(
            not (self.insecure and (self.certificate or self.tls.cert or self.tls.ca)),
            "--insecure and TLS's settings contradict each other; leave out one of them",
        )
        need(self.threads is None or self.threads >= 1, f"threads is {self.threads}; give a number >= 1")
        need(self.connect_timeout_s > 0, f"connect_timeout is {self.connect_timeout_s}; give seconds > 0")
        need(0 <= self.inline_block_s <= 0.1, f"inline_block is {self.inline_block_s}; give 0 to 0.1 seconds")
        need(self.lifetime_s is None or self.lifetime_s > 0, f"lifetime is {self.lifetime_s}; give seconds > 0")
        need(self.grace_s >= 0, f"grace is {self.grace_s}; give seconds >= 0")
        need(self.memory_limit_bytes >= 1 << 20, "memory_limit is less than 1 MiB")
        need(self.sandbox in ("auto", "on", "off"), f"sandbox is {self.sandbox!r}; give auto, on or off")
        kind = self.device.partition(":")[0]
        need(kind in ("auto", "cpu", "cuda", "mps"), f"device is {self.device!r}; give auto, cpu, cuda, cuda:N or mps")


_MEMORY_BYTES: int = machine_memory_bytes()  # read here, since it reads files and configs are made on event loops
