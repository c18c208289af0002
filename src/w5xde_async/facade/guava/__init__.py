"""Guava's interface: ``DistributedConfig``, ``Orchestrator``, ``NetworkWorker`` (docs/migrating-from-guava.md)."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from w5xde_async.facade.guava.config import DistributedConfig
    from w5xde_async.facade.guava.orchestrator import Orchestrator
    from w5xde_async.facade.guava.workers.network_worker import NetworkWorker

__all__ = ["DistributedConfig", "NetworkWorker", "Orchestrator"]

_PACKAGE = "w5xde_async.facade.guava"
#: Modules that Guava's document lists, and what there is in their place.
_INSTEAD = {
    "core": f"write: from {_PACKAGE} import DistributedConfig",
    "orchestration": f"write: from {_PACKAGE} import Orchestrator",
    "network_worker": f"run: python -m {_PACKAGE}.workers.network_worker",
    "workers.base_worker": "a worker of your own is a w5xde_async.Worker (docs/embedding.md)",
    "communication": "there is another protocol, without pickle (docs/protocol.md)",
    "utils": "sockets are tuned by themselves, and checkpoints are the run directory's (docs/resume.md)",
    "examples": "examples lie in the repository, not in the package: examples/",
}


_HOMES = {"DistributedConfig": "config", "NetworkWorker": "workers.network_worker", "Orchestrator": "orchestrator"}


def __getattr__(name: str) -> Any:
    """When they are asked for: torch takes seconds to import, and the worker's program is to hear signals before that.
    Python also warns where a program's module was imported before it runs."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


class _Listed:
    """A last finder of modules: an import of one that is not here says what to write."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for those; finds nothing."""
        instead = _INSTEAD.get(name.removeprefix(f"{_PACKAGE}."))
        if instead is not None and name.startswith(_PACKAGE):
            raise ModuleNotFoundError(f"there is no {name}; {instead}", name=name)


sys.meta_path.append(_Listed)
