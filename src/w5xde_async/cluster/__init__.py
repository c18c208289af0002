"""A coordinator and its workers on one machine, as processes or in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from w5xde_async.cluster.local_cluster import LocalCluster

__all__ = ["LocalCluster"]


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: it imports torch, and worker processes are started before that."""
    if name != "LocalCluster":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from w5xde_async.cluster.local_cluster import LocalCluster

    return LocalCluster
