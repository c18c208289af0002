"""Guava's interface: ``DistributedConfig``, ``Orchestrator``, ``NetworkWorker`` (docs/migrating-from-guava.md)."""

from __future__ import annotations

from w5xde_async.facade.guava.config import DistributedConfig, ParallelismMissing
from w5xde_async.facade.guava.orchestrator import Orchestrator
from w5xde_async.facade.guava.workers.network_worker import NetworkWorker

__all__ = ["DistributedConfig", "NetworkWorker", "Orchestrator", "ParallelismMissing"]
