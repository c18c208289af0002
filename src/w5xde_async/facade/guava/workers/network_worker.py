"""Guava's worker: one device, an orchestrator's address, no model code.

python -m w5xde_async.facade.guava.workers.network_worker --gpu-id 0 --master-ip HOST --master-port PORT
"""

from __future__ import annotations

import runpy

if __name__ == "__main__":  # before torch is imported, which takes seconds: signals are heard before
    runpy.run_module("w5xde_async.facade.guava", run_name="__main__")

import argparse
import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from w5xde_async.cluster.island_processes import IslandProcesses
from w5xde_async.compute.machine import usable_cores
from w5xde_async.config import NAME, PATH, TIME, one_of, whole
from w5xde_async.errors import ExitCode, UsageError, W5xdeError
from w5xde_async.facade import arguments
from w5xde_async.facade.arguments import of_type, takes
from w5xde_async.facade.calling import (
    LogMode,
    NodeLines,
    block_on,
    token_of,
    where_to_join,
    working,
)
from w5xde_async.facade.guava.config import WORDS, DistributedConfig
from w5xde_async.net.interfaces import address_of
from w5xde_async.net.token import JOINING
from w5xde_async.parallel.shape import IslandShape
from w5xde_async.runtime import Runtime
from w5xde_async.wire.messages import Rendezvous, Volunteer, Welcome
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.dialing import Dialer
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

    Where the orchestrator's model is in pieces, it brings NetworkWorkers together, each with some of the layers: a
    process that this one starts then computes, without a sandbox, and speaks to the others by ``interface``, a network
    interface that is trusted with it (loopback where the orchestrator is on this machine).
    """

    @takes(
        gpu_id=whole(0, 1023), config=of_type(DistributedConfig, "a DistributedConfig"), master_ip=arguments.HOST,
        master_port=arguments.PORT, join_file=PATH, timeout_s=TIME, sandbox=one_of("auto", "on", "off"),
        interface=NAME, log=arguments.LOG,
    )  # fmt: skip
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
        interface: str = "",
        log: LogMode = "normal",
    ) -> None:
        """Raises UsageError: a device that is not there, a bad address or join file."""
        config = config or DistributedConfig.from_env()
        self.gpu_id, self.config = gpu_id, config
        address = (master_ip or config.master_ip, config.master_port if master_port is None else master_port)
        arguments.PORT.check("master_port", address[1])
        self._log: LogMode = log
        self._host = address_of(interface) if interface else ""
        self._interface = interface
        #: Of the program: until its end, what cancels the call is called for a signal.
        self.stopped_by: Callable[[Callable[[], object]], AbstractContextManager[None]] = lambda _: nullcontext()
        self._place = where_to_join(address, address, join_file=join_file, secure=False, argument="master_ip")
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
            task = asyncio.current_task()
            assert task is not None
            with self.stopped_by(task.cancel):
                await until_the_end()

        async def until_the_end() -> None:
            nonlocal worker
            dialer = Dialer(server, self._config, Runtime(), join_file=self._place.found)
            if island := await dialer.island():
                await self._as_member(IslandShape.parse(island), dialer, lines)
                return
            worker = make()
            lines.ended((await working(worker)).value, worker)

        with lines.shown(), WORDS.said():
            lines.looking(self._place, self._config)
            hooks = WorkerHooks(on_welcome=on_welcome, on_answered=lines.answered)
            server = self._place.now(self._config)
            make = self._place.worker(self._config, hooks=hooks)
            block_on(work, instead="w5xde_async.Worker", words=WORDS)

    async def _as_member(self, shape: IslandShape, dialer: Dialer, lines: NodeLines) -> None:
        """One rank of an island, computed by a process of its own: when another rank is lost, it must go too."""
        what = f"the orchestrator's model is in pieces, {shape.ranks} workers together ({shape})"
        if self._config.sandbox == "on" or (self._config.sandbox == "auto" and not dialer.is_here):
            raise UsageError(
                f'{what}, and such workers have no sandbox: give sandbox="off" where you trust the orchestrator'
            )
        if not self._interface and not dialer.is_here:
            raise UsageError(
                f"{what}, which speak to each other without any protection: name the network interface that you trust "
                'with it (interface="NAME")'
            )

        async def meet(volunteer: Volunteer) -> Rendezvous:
            lines.meeting(str(shape))
            return await dialer.meet(volunteer)

        server = await asyncio.to_thread(self._place.now, self._config)  # it may not have been there before
        arguments, environment = self._of_rank(shape, server)
        cores = await asyncio.to_thread(usable_cores)
        processes = IslandProcesses(
            shape, arguments, threads=cores, meet=meet, host=self._host, environment=environment
        )  # fmt: skip
        running = asyncio.create_task(processes.run(), name="island")
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            processes.leave("Ctrl-C")
            await asyncio.wait([running])
            raise
        if code := running.result():
            raise RankFailed(code)

    def _of_rank(self, shape: IslandShape, server: str) -> tuple[list[str], dict[str, str]]:
        """The arguments of the process that computes, and its environment."""
        config = self._config
        arguments = [
            "--island-member", str(shape), "--name", config.name, "--device", config.device,
            "--sandbox", config.sandbox, "--connect-timeout", f"{config.connect_timeout_s}s", "--log", self._log,
        ]  # fmt: skip
        if self._interface:
            arguments += ["--island-interface", self._interface]
        environment = {name: value for name, value in os.environ.items() if name not in JOINING}
        if self._place.found is not None and (not server or "://" in server):
            arguments += ["--join-file", str(self._place.found)]
        elif "://" in server:
            environment["W5XDE_JOIN"] = server
        else:
            arguments += ["--server", server]
            environment |= {"W5XDE_TOKEN": config.token} if config.token else {}
        return arguments, environment


class RankFailed(W5xdeError):
    """The process that computed for a NetworkWorker could not; it has said why. Field: ``exit_code``."""

    def __init__(self, code: int) -> None:
        self.exit_code = ExitCode(code)
        super().__init__(f"this worker's part of the model could not be computed: see above (exit code {code})")


# -- the program


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m w5xde_async.facade.guava.workers.network_worker",
        description="Compute for an orchestrator. Everything else of DistributedConfig is read from the environment, "
        "the secret from W5XDE_JOIN_FILE, W5XDE_JOIN, W5XDE_TOKEN or ~/.config/w5xde/token; that of an orchestrator of "
        "this machine is found.",
    )
    made.add_argument("--gpu-id", type=int, default=0, metavar="N", help="CUDA device; the CPU where there is none")
    made.add_argument("--master-ip", metavar="HOST", help="the orchestrator's host (default: MASTER_IP, localhost)")
    made.add_argument("--master-port", type=int, metavar="PORT", help="its port (default: MASTER_PORT, 29500)")
    made.add_argument("--sandbox", choices=("on", "off", "auto"), default="auto", help="compute in a process without "
                      "files, network and secrets (default: where the orchestrator is another machine)")  # fmt: skip
    made.add_argument("--interface", metavar="NAME", default="", help="network interface to trust with what workers "
                      "tell each other where the model is in pieces (default: loopback)")  # fmt: skip
    return made
