"""Guava's interface: ``DistributedConfig``, ``Orchestrator``, ``NetworkWorker`` (docs/migrating-from-guava.md)."""

from __future__ import annotations

from w5xde_async.facade.guava.config import DistributedConfig, ParallelismMissing
from w5xde_async.facade.guava.network_worker import NetworkWorker
from w5xde_async.facade.guava.orchestrator import Orchestrator

__all__ = ["DistributedConfig", "NetworkWorker", "Orchestrator", "ParallelismMissing"]
