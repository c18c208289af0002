"""Guava's worker: one device, an orchestrator's address, no model code.

python -m w5xde_async.facade.guava.workers.network_worker --gpu-id 0 --master-ip HOST --master-port PORT
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from w5xde_async.errors import ExitCode, UsageError, W5xdeError
from w5xde_async.facade.calling import (
    LogMode,
    NodeLines,
    block_on,
    check_log,
    token_of,
    where_to_join,
    working,
)
from w5xde_async.facade.guava.config import WORDS, DistributedConfig
from w5xde_async.wire.messages import Welcome
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.hooks import WorkerHooks
from w5xde_async.worker.service import Worker

logger = logging.getLogger(__name__)


class NetworkWorker:
    """A worker on GPU ``gpu_id`` (on the CPU where there is no CUDA) for the orchestrator at that address.

    The address defaults to the config's. The secret of an orchestrator of this machine and user is found; another's
    is ``join_file``, or ``token``, or W5XDE_JOIN_FILE, W5XDE_JOIN, W5XDE_TOKEN, W5XDE_TOKEN_FILE,
    ~/.config/w5xde/token. ``timeout_s``: how long an orchestrator is looked for, at the start and whenever it was lost.
    ``sandbox``: whether what an orchestrator sends runs in a process without files, network and secrets (Linux): on,
    off, or auto, which is on where it is another machine. ``log``: normal, or silent: nothing but warnings.
    """

    @WORDS.said()
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
        sandbox: str = "auto",
        log: LogMode = "normal",
    ) -> None:
        """Raises UsageError: a device that is not there, a bad address or join file; ParallelismMissing."""
        if type(gpu_id) is not int or gpu_id < 0:
            raise UsageError(f"gpu_id is {gpu_id!r}; give a whole number >= 0")
        check_log(log)
        config = config or DistributedConfig.from_env()
        config.require_data_parallel()
        self.gpu_id, self.config = gpu_id, config
        address = (master_ip or config.master_ip, config.master_port if master_port is None else master_port)
        self._log: LogMode = log
        self._place = where_to_join(address, address, join_file=join_file, secure=False)
        cuda = torch.cuda.is_available()
        if not cuda:
            logger.warning("there is no CUDA on this machine: worker %d computes on the CPU", gpu_id)
        self._config = WorkerConfig(
            name=f"{socket.gethostname()}-gpu-{gpu_id}",  # every machine has a GPU 0
            token=token_of(token),
            device=f"cuda:{gpu_id}" if cuda else "cpu",
            connect_timeout_s=timeout_s,
            sandbox=sandbox,
        )

    def connect_and_train(self) -> None:
        """Work until the orchestrator has finished; a lost one is looked for again. Blocks.

        Ctrl-C finishes the work under way, then raises KeyboardInterrupt. Raises Unreachable, Refused, RunFailed.
        """

        lines = NodeLines(self._log, WORDS)
        worker: Worker

        def on_welcome(welcome: Welcome) -> Welcome:
            lines.joined(worker, welcome)
            return welcome

        async def work() -> None:
            nonlocal worker
            worker = make()
            lines.ended((await working(worker)).value, worker)

        with lines.shown(), WORDS.said():
            lines.looking(self._place)
            hooks = WorkerHooks(on_welcome=on_welcome, on_answered=lines.answered)
            make = self._place.worker(self._config, hooks=hooks)
            block_on(work, instead="w5xde_async.Worker", words=WORDS)


# -- the program


_PROG = "python -m w5xde_async.facade.guava.workers.network_worker"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=_PROG,
        description="Compute for an orchestrator. Everything else of DistributedConfig is read from the environment, "
        "the secret from W5XDE_JOIN_FILE, W5XDE_JOIN, W5XDE_TOKEN or ~/.config/w5xde/token; that of an orchestrator of "
        "this machine is found.",
    )
    made.add_argument("--gpu-id", type=int, default=0, metavar="N", help="CUDA device; the CPU where there is none")
    made.add_argument("--master-ip", metavar="HOST", help="the orchestrator's host (default: MASTER_IP, localhost)")
    made.add_argument("--master-port", type=int, metavar="PORT", help="its port (default: MASTER_PORT, 29500)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Work until the orchestrator has finished; the result is the exit code."""
    given = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # both leave in good order
    try:
        config = DistributedConfig.from_env()
        NetworkWorker(given.gpu_id, config, given.master_ip, given.master_port).connect_and_train()
    except KeyboardInterrupt:
        return ExitCode.OK
    except W5xdeError as error:
        sys.stderr.write(f"{_PROG}: {error}\n")
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
