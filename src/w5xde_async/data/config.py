"""How the dataset is read."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde_async.config import Config, setting, whole


@dataclass(frozen=True, kw_only=True)
class ReadersConfig(Config):
    """Who reads a dataset. With ``loader_processes`` these do, and no threads.

    Processes that read a Job object are forked, and share the files that its dataset holds open: a dataset that seeks
    opens its file in ``dataset[i]``, once in each process. Of a job given as FILE.py:NAME each loads its own.
    """

    loader_threads: int = setting(1, "threads that read the dataset", whole(0, 4096), "data")
    loader_processes: int = setting(0, "processes that read the dataset", whole(0, 4096), "data")


@dataclass(frozen=True, kw_only=True)
class DataConfig(ReadersConfig):
    """Settings of the coordinator's loader."""

    prefetch_leaves: int = setting(64, "microbatches that are read ahead", whole(1), "data")
    max_bad_samples: int = setting(
        0,
        "samples that may be left out because they cannot be read; one more ends the run, which names it",
        whole(0),
        "data",
    )
