"""What a model needs in memory, process by process, for every way to compute it: arithmetic on measured sizes.

Counted are tensors that grow with the model or the batch. Not counted: Python and torch themselves, a kernel's scratch
memory, what an allocator keeps or rounds up, frames that wait to be sent, scratch of codecs. Leases are taken
to hold two leaves for each process that computes them; each doubling adds one sum of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

#: Leases that a worker has at once: one that it computes, and one ahead, whose data is there.
_LEASES = 2
_LEAVES = 2  # of a lease, for each process that computes
_LEAVING = 1  # sums of gradients that are on their way out


class Activations(NamedTuple):
    """Bytes of one microbatch beside parameters, gradients and data. ``kept`` by forward for backward; ``peak``: the
    most in forward and backward together."""

    kept: int
    peak: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """Bytes of a model and of its data.

    parameters    with buffers that are saved, in their own dtypes
    buffers       that a replica writes into, beside those: of all kinds, whole on every rank
    unsaved       of them, those that are not persistent
    gradients     of a block's sum, in float32
    native        gradients that are made in other dtypes than float32
    largest_unit  of what a fully sharded rank has whole at a time: a unit and the next one, the first's gradient, and
                  what is sent and what is received of that
    activations   of one microbatch
    microbatch    its data; ``step``: a whole step's
    microbatches  how many a leaf sums
    """

    parameters: int
    gradients: int
    native: int
    largest_unit: int
    optimizer: int
    activations: Activations
    microbatch: int
    microbatches: int
    step: int
    buffers: int = 0
    unsaved: int = 0

    @property
    def sums(self) -> int:
        """Sums of gradients of a lease under way: one, where a leaf's gradients land on those of the leaf before."""
        return 1 if self.microbatches == 1 and not self.native else 2

    @property
    def leases(self) -> int:
        """Data of the leases that a worker has."""
        return _LEASES * _LEAVES * self.microbatches * self.microbatch


class Rule(NamedTuple):
    """What of an update rule takes memory. ``plain``: sync without codecs.

    Of a worker: ``local``: it runs the optimizer. ``streaming``: parts that were sent wait to be mixed in. ``lossy``:
    it keeps what its codec left out. ``outer``: what the rule itself keeps at the coordinator, in sums of gradients.
    """

    plain: bool = True
    local: bool = False
    streaming: bool = False
    lossy: bool = False
    outer: int = 0


SYNC = Rule()


class Stage(NamedTuple):
    """A run of atoms: bytes of its parameters and buffers (a replica's own too), of their gradients (as in Model), of a
    microbatch in it."""

    parameters: int
    gradients: int
    native: int
    activations: Activations


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that one process holds. ``exchange``: what ranks of an island send each other, and whole units."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    data: int = 0
    exchange: int = 0

    @property
    def together(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.data + self.exchange


def coordinator(model: Model, rule: Rule = SYNC) -> Need:
    """It holds the parameters and the optimizer's state, one sum that is added to and one that arrives, and the data of
    two steps. With many workers it holds more sums: ``run_started`` has the most."""
    return Need(
        parameters=model.parameters + model.unsaved,
        gradients=2 * model.gradients,
        optimizer=rule.outer * model.gradients + (0 if rule.local else model.optimizer),
        data=2 * model.step,
    )


def alone(model: Model) -> Need:
    """A worker of one process."""
    return Need(
        parameters=model.parameters + model.buffers,
        gradients=(model.sums + _LEAVING) * model.gradients + model.native,
        activations=model.activations.peak,
        data=model.leases,
    )


def dp(model: Model, ranks: int, bucket_bytes: int) -> list[Need]:
    """Every rank holds the model; a sum is exchanged, and sent in shards."""
    shards = (1 + _LEAVING) * _share(model.gradients, ranks)
    each = Need(
        parameters=model.parameters + model.buffers,
        gradients=model.sums * model.gradients + model.native + shards,
        activations=model.activations.peak,
        data=model.leases,
        exchange=min(bucket_bytes, model.gradients),
    )
    return [each] * ranks


def fsdp(model: Model, ranks: int) -> list[Need]:
    """Every rank holds its shards, as they come in and as they are computed with, and one unit after the other."""
    whole = 0 if model.microbatches == 1 else model.gradients  # leaves of several microbatches are summed first
    each = Need(
        parameters=2 * _share(model.parameters, ranks) + model.buffers,
        gradients=(_LEAVES + _LEAVING) * _share(model.gradients, ranks) + whole,
        activations=model.activations.peak,
        data=model.leases,
        exchange=model.largest_unit,
    )
    return [each] * ranks


def tp(model: Model, ranks: int, split: tuple[int, int], activations: Activations) -> list[Need]:
    """Every rank holds its part of what is ``split`` (bytes of parameters, and of their gradients) and all of the rest,
    beside an equal part of everything as it comes in and goes out. A leaf has its gradients and a sum of its own."""
    parameters, gradients = split
    each = Need(
        parameters=_share(model.parameters, ranks)
        + model.parameters
        - parameters
        + _share(parameters, ranks)
        + model.buffers,
        gradients=(_LEAVES + 1) * (model.gradients - gradients + _share(gradients, ranks))
        + _LEAVING * _share(model.gradients, ranks),
        activations=activations.peak,
        data=model.leases,
    )
    return [each] * ranks


def pp(model: Model, stages: Sequence[Stage]) -> list[Need]:
    """A rank holds one stage. As many microbatches are under way in it as there are stages from it on (1F1B): each
    keeps what it made, and one is in backward. Each leaf has a sum of its own first, and every rank has all data."""
    leaves = _LEAVES * len(stages)
    sums = leaves.bit_length() + _LEAVING  # of the tree's levels, a leaf's own among them
    found = []
    for number, stage in enumerate(stages):
        under_way = min(len(stages) - number, leaves * model.microbatches)
        found.append(
            Need(
                parameters=stage.parameters,
                gradients=sums * stage.gradients + stage.native,
                activations=(under_way - 1) * stage.activations.kept + stage.activations.peak,
                data=len(stages) * model.leases,
            )
        )
    return found


def fsdp_tp(model: Model, axes: tuple[int, int], split: tuple[int, int], activations: Activations) -> list[Need]:
    """Every rank holds a shard of its part under ``tp`` (``split`` as there), and one unit of that after the other."""
    sharded, ranks = axes
    parameters, gradients = split
    kept = model.parameters - parameters + _share(parameters, ranks)
    summed = model.gradients - gradients + _share(gradients, ranks)
    unit = model.largest_unit * summed // max(model.gradients, 1)  # taken to be split as the whole is
    each = Need(
        parameters=_share(model.parameters, sharded * ranks) + _share(kept, sharded) + model.buffers,
        gradients=(_LEAVES + 1) * _share(summed, sharded) + _LEAVING * _share(model.gradients, sharded * ranks),
        activations=activations.peak,
        data=model.leases,
        exchange=unit,
    )
    return [each] * (sharded * ranks)


def replicated(
    model: Model, row: Sequence[Need], number: int, gradients: Sequence[int], bucket_bytes: int
) -> list[Need]:
    """``number`` rows of ranks that each hold a model as ``row`` says (``gradients``: of each rank's part): what they
    have of a sum is exchanged, and leaves in shards."""
    found = [
        replace(
            need, gradients=need.gradients + (1 + _LEAVING) * _share(part, number),
            exchange=need.exchange + min(bucket_bytes, model.gradients),
        )
        for need, part in zip(row, gradients, strict=True)
    ]  # fmt: skip
    return found * number


def under(rule: Rule, model: Model, need: Need, part: int, *, of_island: bool = True) -> Need:
    """What a process needs under a rule. ``part``: bytes of its part's gradients.

    Beside what is published, an island's rank has its part once more to compute with, and its sum. What leaves is a
    pseudo-gradient, in place of a sum.
    """
    if rule.plain:
        return need
    return replace(
        need,
        parameters=need.parameters + (1 + of_island + rule.local) * part,  # published; computed with; as a round began
        gradients=need.gradients + (of_island + rule.streaming + rule.lossy) * part,
        optimizer=need.optimizer + (model.optimizer * part // max(model.gradients, 1) if rule.local else 0),
    )


def _share(nbytes: int, ranks: int) -> int:
    return -(-nbytes // ranks)
