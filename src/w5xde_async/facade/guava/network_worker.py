"""Guava's worker: one device, an orchestrator's address, no model code."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import torch

from w5xde_async.errors import UsageError
from w5xde_async.facade.calling import block_on, token_of, where_to_join, working
from w5xde_async.facade.guava.config import DistributedConfig
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker

logger = logging.getLogger(__name__)


class NetworkWorker:
    """A worker on GPU ``gpu_id`` (on the CPU where there is no CUDA) for the orchestrator at that address.

    The address defaults to the config's. Off loopback it needs the orchestrator's secret: ``join_file``, or ``token``,
    or W5XDE_JOIN_FILE, W5XDE_JOIN, W5XDE_TOKEN, W5XDE_TOKEN_FILE, ~/.config/w5xde/token. ``timeout_s``: how long an
    orchestrator is looked for, at the start and whenever it was lost.
    """

    def __init__(
        self,
        gpu_id: int,
        config: DistributedConfig | None = None,
        master_ip: str | None = None,
        master_port: int | None = None,
        *,
        token: str = "",
        join_file: Path | str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Raises UsageError: a device that is not there, a bad address or join file; ParallelismMissing."""
        if gpu_id < 0:
            raise UsageError(f"gpu_id is {gpu_id}; give a number >= 0")
        config = config or DistributedConfig.from_env()
        config.require_data_parallel()
        self.gpu_id, self.config = gpu_id, config
        address = (master_ip or config.master_ip, config.master_port if master_port is None else master_port)
        self._server = where_to_join(address, address, join_file=join_file, secure=False)
        cuda = torch.cuda.is_available()
        if not cuda:
            logger.warning("there is no CUDA on this machine: worker %d computes on the CPU", gpu_id)
        self._config = WorkerConfig(
            name=f"{socket.gethostname()}-gpu-{gpu_id}",  # every machine has a GPU 0
            token=token_of(token),
            device=f"cuda:{gpu_id}" if cuda else "cpu",
            connect_timeout_s=timeout_s,
        )

    def connect_and_train(self) -> None:
        """Work until the orchestrator has finished; a lost one is looked for again. Blocks.

        Ctrl-C finishes the work under way, then raises KeyboardInterrupt. Raises Unreachable, Refused, RunFailed.
        """

        async def work() -> None:
            await working(Worker(self._server, config=self._config))

        block_on(work, instead="w5xde_async.Worker")
