"""What a coordinator trains, and by which rule."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from w5xde_async.codecs.names import NAMES
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.settings.flags import Program, setting
from w5xde_async.settings.kinds import (
    FROM_0,
    FROM_1,
    SECONDS,
    AtLeast0,
    AtLeast1,
    Average,
    Batch,
    Part,
    Rule,
    Text,
    Time,
)
from w5xde_async.updates.config import AVERAGES, RULES, UpdateConfig

__all__ = ["TrainingSettings"]

_COORDINATOR, _UPDATE = CoordinatorConfig(), UpdateConfig()
_ABOVE_0 = "a number above 0"
_CODECS = f"one of {', '.join(NAMES)}"


class TrainingSettings(Program):
    """The part of ``CoordinatorSettings`` that decides what is computed."""

    job: Text | None = setting(
        None, "what to train: FILE.py:NAME or MODULE:NAME, a Job or a function that returns one", group="the run",
        metavar="JOB", accepts="FILE.py:NAME or MODULE:NAME", positional=True,
    )  # fmt: skip
    max_steps: AtLeast1 | None = setting(
        None, "end at that step; with --epochs in place of what the job says", group="the run", accepts=FROM_1,
        shown="the job's",
    )  # fmt: skip
    epochs: AtLeast1 | None = setting(
        None, "end after so many passes over the data", group="the run", accepts=FROM_1, shown="the job's"
    )
    max_time: Time | None = setting(
        None, "stop in good order after that long", group="the run", metavar="TIME", accepts=SECONDS
    )
    code_free: bool = setting(
        True, "make a program of the job's step, for workers without --job", group="the run", accepts="true or false"
    )
    evaluate: bool = setting(
        True, "run the job's evaluate, on the coordinator", group="the run", accepts="true or false"
    )
    max_leaf_failures: AtLeast1 = setting(
        _COORDINATOR.max_leaf_failures, "attempts on a leaf whose code raises before the run stops", group="the run",
        accepts=FROM_1,
    )  # fmt: skip

    update: Rule = setting(
        _UPDATE.rule, "how results become parameters: sync waits for every part of a step, async takes gradients as "
        "they come; under local, streaming and async-local workers make steps of their own; auto chooses rule, codec "
        "and steps by the links", group="updates", metavar="RULE", accepts=f"one of auto, {', '.join(RULES)}",
    )  # fmt: skip
    codec: Text = setting(
        _UPDATE.codec, "how workers write what they send", group="updates", metavar="CODEC", accepts=_CODECS
    )
    downlink: Text | None = setting(
        None, "how changes of the parameters are written for workers", group="updates", metavar="CODEC",
        accepts=_CODECS, shown="as --codec where that keeps every value, else int8",
    )  # fmt: skip
    feedback: bool = setting(
        _UPDATE.feedback, "add what a codec leaves out to the next gradient", group="updates", accepts="true or false"
    )
    inner_steps: AtLeast1 = setting(
        _UPDATE.inner_steps, "steps that the fastest worker makes of its own; others fewer, by speed", group="updates",
        accepts=FROM_1,
    )  # fmt: skip
    outer_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = setting(
        None, "learning rate of the outer step under rules of own steps", group="updates", metavar="X",
        accepts=_ABOVE_0, shown="0.7; streaming 0.4",
    )  # fmt: skip
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] | None = setting(
        None, "its Nesterov momentum", group="updates", metavar="X",
        accepts="a number from 0 to less than 1", shown="0.5; 0.9 from 100 inner steps on",
    )  # fmt: skip
    fragments: AtLeast1 = setting(
        _UPDATE.fragments, "streaming: parts of the model that take turns", group="updates", accepts=FROM_1
    )
    overlap: AtLeast0 = setting(
        _UPDATE.overlap, "streaming: own steps until a part that was sent is mixed in", group="updates", accepts=FROM_0
    )
    mixing: Annotated[float, Field(ge=0, lt=1)] = setting(
        _UPDATE.mixing, "streaming: part that is kept of the worker's own values then", group="updates", metavar="X",
        accepts="a number from 0 to less than 1",
    )  # fmt: skip
    results_per_step: AtLeast1 | None = setting(
        None, "async: results that make a step; async-local: results that make a step of momentum", group="updates",
        accepts=FROM_1, shown="1; async-local the workers that are there",
    )  # fmt: skip
    max_staleness: AtLeast0 | None = setting(
        None, "results older than that many versions are computed again", group="updates", accepts=FROM_0,
        shown="async 16, local and streaming 1, async-local without bound",
    )  # fmt: skip
    staleness_exponent: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = setting(
        None, "a result N versions old counts (1 + N)^-X", group="updates", metavar="X", accepts="a number >= 0",
        shown="0.5; async-local 0",
    )  # fmt: skip
    average: Average = setting(
        _UPDATE.average, "how results of one step are averaged", group="updates", metavar="HOW",
        accepts=f"one of {', '.join(AVERAGES)}",
    )  # fmt: skip
    quorum: Part = setting(
        _UPDATE.quorum, "local, streaming: part of the workers after which a round closes, with a learned grace",
        group="updates", metavar="X", accepts="a number above 0, at most 1",
    )  # fmt: skip

    target_batch: Batch | None = setting(
        None, "sync: double the batch as the gradient noise scale asks for it, up to N samples; auto: the dataset",
        group="updates", metavar="N", accepts=f"auto or {FROM_1}",
    )  # fmt: skip
    batch_patience: AtLeast1 = setting(
        _COORDINATOR.batch_patience, "steps before each time that it doubles", group="updates", accepts=FROM_1
    )

    def update_config(self) -> UpdateConfig:
        """Raises UsageError for what does not go together."""
        return UpdateConfig(
            rule="sync" if self.update == "auto" else self.update, codec=self.codec, downlink=self.downlink or "",
            feedback=self.feedback, inner_steps=self.inner_steps, outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum, fragments=self.fragments, overlap=self.overlap, mixing=self.mixing,
            results_per_step=self.results_per_step or 0, max_staleness=self.max_staleness,
            staleness_exponent=self.staleness_exponent, average=self.average,
            quorum=self.quorum,
        )  # fmt: skip
