"""How the dataset is read."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde_async.errors import need

__all__ = ["DataConfig"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the loader.

    loader_threads      threads that read the dataset
    loader_processes    processes that read it instead; 0: threads do
    prefetch_leaves     how many leaves are read ahead of need
    """

    loader_threads: int = 1
    loader_processes: int = 0
    prefetch_leaves: int = 64

    def __post_init__(self) -> None:
        need(self.prefetch_leaves >= 1, f"prefetch_leaves is {self.prefetch_leaves}; give a number >= 1")
        need(self.loader_threads >= 0 and self.loader_processes >= 0, "threads are >= 0")
