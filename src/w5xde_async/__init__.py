"""w5xde_async: train one PyTorch model on whatever machines are at hand, to the same bits."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from w5xde_async.cluster.local_cluster import LocalCluster
    from w5xde_async.coordinator.config import CoordinatorConfig
    from w5xde_async.coordinator.run_result import RunResult
    from w5xde_async.coordinator.service import Coordinator
    from w5xde_async.data.sharded import ShardedStream
    from w5xde_async.errors import W5xdeError
    from w5xde_async.job import Job
    from w5xde_async.telemetry.events import Bus
    from w5xde_async.updates.config import UpdateConfig
    from w5xde_async.worker.config import WorkerConfig
    from w5xde_async.worker.service import Worker

__version__ = "0.1.0"

__all__ = [
    "Bus",
    "Coordinator",
    "CoordinatorConfig",
    "Job",
    "LocalCluster",
    "RunResult",
    "ShardedStream",
    "UpdateConfig",
    "W5xdeError",
    "Worker",
    "WorkerConfig",
    "__version__",
]

_HOMES = {
    "Bus": "telemetry.events",
    "Coordinator": "coordinator.service",
    "CoordinatorConfig": "coordinator.config",
    "Job": "job",
    "LocalCluster": "cluster.local_cluster",
    "RunResult": "coordinator.run_result",
    "ShardedStream": "data.sharded",
    "UpdateConfig": "updates.config",
    "W5xdeError": "errors",
    "Worker": "worker.service",
    "WorkerConfig": "worker.config",
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: --help and a wrong flag should not wait for it.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
