"""``python -m w5xde_async.facade.guava --gpu-id 0 --master-ip HOST --master-port PORT``: one NetworkWorker."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from w5xde_async.errors import ExitCode, W5xdeError

_PROG = "python -m w5xde_async.facade.guava"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=_PROG,
        description="Compute for an orchestrator. Everything else of DistributedConfig is read from the environment, "
        "the secret from W5XDE_JOIN_FILE, W5XDE_JOIN, W5XDE_TOKEN or ~/.config/w5xde/token.",
    )
    made.add_argument("--gpu-id", type=int, default=0, metavar="N", help="CUDA device; the CPU where there is none")
    made.add_argument("--master-ip", metavar="HOST", help="the orchestrator's host (default: MASTER_IP, localhost)")
    made.add_argument("--master-port", type=int, metavar="PORT", help="its port (default: MASTER_PORT, 29500)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Work until the orchestrator has finished; the result is the exit code."""
    given = parser().parse_args(arguments)

    from w5xde_async.facade.guava.config import DistributedConfig
    from w5xde_async.facade.guava.network_worker import NetworkWorker

    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # both leave in good order
    try:
        NetworkWorker(
            given.gpu_id, DistributedConfig.from_env(), given.master_ip, given.master_port
        ).connect_and_train()
    except KeyboardInterrupt:
        return ExitCode.OK
    except W5xdeError as error:
        sys.stderr.write(f"{_PROG}: {error}\n")
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
