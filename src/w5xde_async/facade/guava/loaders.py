"""What of a DataLoader, or of what stands in its place, makes steps.

A step must know its samples from its number alone: then any worker can compute any part of it, again if need be, and a
run goes on where it was. Where the order is a sampler's own, the sampler is asked once, at the start, for the order of
all epochs.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from w5xde_async.errors import UsageError, in_one_line
from w5xde_async.facade.guava.config import DistributedConfig
from w5xde_async.randomness import random_state, seed_all

logger = logging.getLogger(__name__)

_MOST_BATCHES = 100_000_000
_ONCE = (
    "its batches come only once and in an order of their own, while a step must find its batch by number: give "
    "list(...) of it where memory holds that, or a DataLoader over a dataset with len() and dataset[i]"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What makes steps. ``steps_per_epoch``: where ``dataset`` holds the batches of all epochs."""

    dataset: Any
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    processes: int = 0
    steps_per_epoch: int | None = None


def reading_of(
    loader: Any, config: DistributedConfig, *, seed: int, epochs: int = 1, looks_ahead: bool = False
) -> Reading:
    """Of a DataLoader, a list of batches, or a map-style dataset, which is shuffled and read with the config's
    ``batch_size``. ``looks_ahead``: a sampler that draws from a generator of its own is left where it is.

    Raises UsageError for what can be read only once: iterable datasets, generators, loaders of one's own.
    """
    if isinstance(loader, list | tuple):
        logger.warning("a list is read as batches, as Guava read it: %d of them an epoch", len(loader))
        _check_batch_size(config, None)
        return Reading(dataset=loader, batch_size=1, seed=seed, shuffle=False, collate=_only)
    if not isinstance(loader, DataLoader):
        check_again_and_again(loader)
        if not hasattr(loader, "__getitem__"):
            raise UsageError(f"{type(loader).__name__} has no dataloader[i]: {_ONCE}")
        return Reading(dataset=loader, batch_size=config.batch_size, seed=seed)
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(f"the DataLoader's dataset is iterable: {_ONCE}")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(f"{type(loader).__name__} is a DataLoader that makes batches of its own: {_ONCE}")
    if loader.worker_init_fn is not None:
        logger.warning("the DataLoader's worker_init_fn is not called: random numbers are seeded for each batch")
    _check_batch_size(config, loader.batch_size)
    processes = loader.num_workers if hasattr(os, "fork") else 0
    seed = seed if loader.generator is None else loader.generator.initial_seed() & ((1 << 63) - 1)
    sampler: Any = loader.sampler
    data: Any = loader.dataset
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    plain = loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler
    whole = (shuffled or type(sampler) is SequentialSampler) and len(sampler) == len(data)
    if not plain or not whole:
        chosen = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if looks_ahead:
            chosen = _apart(chosen, loader.dataset)
        return _in_its_own_order(loader, chosen, seed, epochs, processes, config.batches_per_step)
    assert loader.batch_size is not None
    return Reading(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        shuffle=shuffled,
        drop_last=bool(loader.drop_last),  # which torch does not look at
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        processes=processes,
        seed=seed,
    )


def check_again_and_again(batches: Any) -> None:
    """Raises UsageError for a generator, or another iterator, which is at its end after one pass."""
    if isinstance(batches, Iterator) and iter(batches) is batches:  # of a DataLoader it would draw, and start processes
        raise UsageError(f"a {type(batches).__name__} is no loader: {_ONCE}")


def check_validation(batches: Any) -> None:
    """Raises UsageError for what gives no batches, or gives them only once."""
    if not hasattr(batches, "__iter__"):
        raise UsageError(f"val_dataloader is a {type(batches).__name__}; give a DataLoader or a list of batches")
    check_again_and_again(batches)
    if (
        not isinstance(getattr(batches, "dataset", None), IterableDataset)
        and hasattr(batches, "__len__")
        and not len(batches)
    ):
        raise UsageError("val_dataloader is empty: give one with batches, or leave it out")


def _check_batch_size(config: DistributedConfig, batch_size: int | None) -> None:
    """Say that the config's has no effect, where somebody has set it."""
    if config.batch_size not in (DistributedConfig.batch_size, batch_size):
        counts = (
            "batches are what they are" if batch_size is None else f"the DataLoader's batch_size {batch_size} counts"
        )
        logger.warning(
            "config.batch_size=%d has no effect: %s; give the DataLoader batch_size=%d", config.batch_size, counts,
            config.batch_size,
        )  # fmt: skip


def _apart(sampler: Any, dataset: Any) -> Any:
    """A copy, which moves on in the sampler's place; what it samples from is not copied."""
    data = (dataset, *(getattr(one, "data_source", None) for one in (sampler, getattr(sampler, "sampler", None))))
    try:
        return copy.deepcopy(sampler, {id(one): one for one in data})
    except Exception as error:
        logger.warning(
            "the DataLoader's %s cannot be copied (%s): asked for its order now, it may give another in training",
            type(sampler).__name__, in_one_line(error),
        )  # fmt: skip
        return sampler


def _in_its_own_order(
    loader: DataLoader[Any], chosen: Any, seed: int, epochs: int, processes: int, workers: int
) -> Reading:
    """The sampler says which samples make each batch, of every epoch. To the job all of them are one epoch.

    So a step of ``workers`` batches may go on from one into the next, which is said where it does.
    """
    order: list[Any] = []
    name = type(chosen).__name__
    per_epoch = 0
    with random_state():
        seed_all(seed)
        for _ in range(epochs):
            for batch in chosen:
                order.append(batch)
                if len(order) > _MOST_BATCHES:
                    raise UsageError(f"the DataLoader's {name} has no end: give it a number of samples")
            per_epoch = per_epoch or len(order)
    if epochs > 1 and per_epoch % workers:
        logger.warning(
            "the DataLoader's %s gives %d batches an epoch, of which no whole steps of %d can be made: one step holds "
            "the end of an epoch and the beginning of the next", name, per_epoch, workers,
        )  # fmt: skip
    if not order:
        raise UsageError(f"the DataLoader's {name} gives no batch")
    batches = Batches(loader.dataset, order, loader.collate_fn, single=loader.batch_sampler is None)
    steps = -(-per_epoch // workers)
    return Reading(
        dataset=batches, batch_size=1, seed=seed, shuffle=False, collate=_only, processes=processes,
        steps_per_epoch=steps,
    )  # fmt: skip


class Batches:
    """Batches by number: ``order[i]`` names the samples of each; with ``single`` it names one that is a batch."""

    def __init__(
        self, dataset: Any, order: Sequence[Any], collate: Callable[[Any], Any], *, single: bool = False
    ) -> None:
        self._dataset, self._order, self._collate, self._single = dataset, order, collate, single

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        named, dataset = self._order[index], self._dataset
        if self._single:
            return self._collate(dataset[named])
        several = getattr(dataset, "__getitems__", None)
        return self._collate([dataset[one] for one in named] if several is None else several(named))


def _only(batches: list[Any]) -> Any:
    return batches[0]
