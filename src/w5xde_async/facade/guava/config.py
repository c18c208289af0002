"""Guava's configuration: every documented field and environment variable, and what each has become.

Mutable, as it was: it is checked where it is made and again where it is used. Each field says below what it does
here; those of model, pipeline and tensor parallelism, which this project does not have yet, are kept and do nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.errors import UsageError
from w5xde_async.plan.pacing import PacingConfig

__all__ = ["DistributedConfig", "ParallelismMissing"]

logger = logging.getLogger(__name__)

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
#: Of a field's type: what its values are, how a variable is read, and what is wanted.
_KINDS: dict[str, tuple[tuple[type, ...], Callable[[str], Any], str]] = {
    "int": ((int,), int, "a whole number"),
    "float": ((int, float), float, "a number"),
    "bool": ((bool,), lambda text: _BOOLEANS[text.lower()], "1 or 0"),
    "str": ((str,), str, "a text"),
}
#: Undocumented fields of the original, which its ``to_dict`` wrote: sockets tune themselves, a model needs no source.
_GONE = frozenset({
    "socket_buffer_size", "tcp_nodelay", "enable_keepalive", "max_message_size_gb", "layers_per_gpu", "layer_ranges",
    "model_source_code", "model_class_name", "model_init_kwargs",
})  # fmt: skip
_SPLIT = ("model_parallel", "pipeline_parallel", "tensor_parallel")
#: Fields that mean something to a model in pieces alone.
_FOR_SPLIT = ("micro_batches", "tensor_parallel_size", "activation_cache_steps", "allow_activation_reuse",
              "log_activations")  # fmt: skip
_NEVER_S = 86400.0  # a timeout of 0 was none
#: Where it stands what is missing and what is planned.
_MODELS_IN_PIECES = '"Models in pieces" in docs/migrating-from-guava.md'


class ParallelismMissing(UsageError):
    """A kind of parallelism that this project does not have yet. Field: ``kinds``."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        named = ", ".join(f"{kind}=True" for kind in kinds)
        super().__init__(
            f"{named}: splitting one model over several devices (model, pipeline and tensor parallelism) is not built "
            f"yet: see {_MODELS_IN_PIECES}; data parallelism is: set data_parallel=True and leave the others out"
        )


def _knob(default: Any, env: str = "", *, least: int | None = None) -> Any:
    """A field, the environment variable that ``from_env`` reads it from, and the least that it can be."""
    return field(default=default, metadata={"env": env, "least": least})


@dataclass
class DistributedConfig:
    """One run, for the orchestrator and its workers.

    vocab_size ... dropout  the model's shape: for your own model code to read (``MyModel(config.vocab_size)``)
    batch_size            samples of a worker's batch, where ``start_training`` gets a dataset; a DataLoader has its own
    learning_rate, weight_decay  of AdamW
    max_grad_norm         global norm to clip to; 0: no clipping
    use_amp               mixed precision: bfloat16 autocast
    num_workers           workers that a step is made for, and waited for before the first; 0: one
    master_ip, master_port  where the orchestrator listens; port 0 picks a free one
    data_parallel ... tensor_parallel  data parallelism is what there is; the others raise ParallelismMissing when used
    activation_timeout    seconds that a worker's result may take before its work is given to another; 0: no limit
    ack_timeout           seconds of silence after which a peer counts as gone; 0: a day
    max_resends           times that work whose code failed is given out again
    resend_probe_interval seconds between two signs of life
    log_step_every        steps between two lines of log; 0: none
    compact_log           False shows where each step's time went
    checkpoint_dir, save_interval  the run's directory, and steps between checkpoints
    """

    vocab_size: int = _knob(50257, "VOCAB_SIZE", least=1)
    d_model: int = _knob(768, "D_MODEL", least=1)
    n_heads: int = _knob(12, "N_HEADS", least=1)
    n_layers: int = _knob(12, "N_LAYERS", least=1)
    d_ff: int = _knob(3072, "D_FF", least=1)
    max_seq_len: int = _knob(1024, "MAX_SEQ_LEN", least=1)
    dropout: float = _knob(0.1, "DROPOUT")
    batch_size: int = _knob(16, "BATCH_SIZE", least=1)
    learning_rate: float = _knob(3e-4, "LEARNING_RATE")
    weight_decay: float = _knob(0.01, "WEIGHT_DECAY", least=0)
    max_grad_norm: float = _knob(1.0, "MAX_GRAD_NORM", least=0)
    use_amp: bool = _knob(False, "USE_AMP")
    num_workers: int = _knob(1, "NUM_WORKERS", least=0)
    master_ip: str = _knob("localhost", "MASTER_IP")
    master_port: int = _knob(29500, "MASTER_PORT")
    data_parallel: bool = _knob(True, "DATA_PARALLEL")
    model_parallel: bool = _knob(False, "MODEL_PARALLEL")
    pipeline_parallel: bool = _knob(False, "PIPELINE_PARALLEL")
    tensor_parallel: bool = _knob(False, "TENSOR_PARALLEL")
    micro_batches: int = _knob(4, "MICRO_BATCHES", least=1)
    tensor_parallel_size: int = _knob(2, "TENSOR_PARALLEL_SIZE", least=1)
    activation_timeout: float = _knob(60.0, "ACT_TIMEOUT_SEC", least=0)
    ack_timeout: float = _knob(30.0, "ACK_TIMEOUT_SEC", least=0)
    max_resends: int = _knob(3, "RESENDS_MAX", least=0)
    resend_probe_interval: float = _knob(5.0, "RESEND_PROBE_SEC")
    allow_activation_reuse: bool = _knob(False, "ALLOW_ACT_REUSE")
    activation_cache_steps: int = _knob(256, "ACT_CACHE_STEPS", least=0)
    compact_log: bool = _knob(True, "COMPACT_LOG")
    log_step_every: int = _knob(100, "LOG_STEP_EVERY", least=0)
    log_activations: bool = _knob(False, "LOG_ACT")
    checkpoint_dir: str = _knob("./checkpoints")
    save_interval: int = _knob(1000, least=1)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises UsageError for the first field that cannot be."""

        def need(holds: bool, name: str, wanted: str) -> None:
            if not holds:
                raise UsageError(f"{name} is {getattr(self, name)!r}; give {wanted}")

        for knob in fields(self):
            value, fits, least = getattr(self, knob.name), _KINDS[str(knob.type)][0], knob.metadata["least"]
            need(isinstance(value, fits) and (not isinstance(value, bool) or bool in fits), knob.name, f"a {knob.type}")
            need(least is None or value >= least, knob.name, f"a number >= {least}")
        need(0 <= self.dropout < 1, "dropout", "a number from 0, below 1")
        need(self.learning_rate > 0, "learning_rate", "a number > 0")
        need(self.resend_probe_interval > 0, "resend_probe_interval", "seconds > 0")
        need(0 <= self.master_port <= 65535, "master_port", "a number from 0 to 65535")

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> Self:
        """The defaults, and what the environment (default: this process's) says of them. Raises UsageError."""
        environment = os.environ if environment is None else environment
        given: dict[str, Any] = {}
        for knob in fields(cls):
            variable = knob.metadata["env"]
            if text := environment.get(variable, "").strip():
                _, parse, wanted = _KINDS[str(knob.type)]
                try:
                    given[knob.name] = parse(text)
                except (ValueError, KeyError):
                    raise UsageError(f"{variable} is {text!r}; give {wanted}") from None
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Every field by its name; JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From ``to_dict``, the original's too, whose undocumented fields are left out. Raises UsageError."""
        known = {knob.name for knob in fields(cls)}
        if unknown := sorted(set(values) - known - _GONE):
            raise UsageError(f"DistributedConfig has no {', '.join(unknown)}")
        if gone := sorted(set(values) & _GONE):
            logger.warning("fields without a meaning here are left out: %s", ", ".join(gone))
        return cls(**{name: value for name, value in values.items() if name in known})

    def adapt_to_gpus(self, num_gpus: int) -> None:
        """Make the run one of ``num_gpus`` workers, at least one: data parallel unless another kind was asked for.

        One device has nothing to split a model over: then those kinds are switched off.
        """
        if num_gpus < 0:
            raise UsageError(f"num_gpus is {num_gpus}; give a number >= 0")
        self.num_workers = max(num_gpus, 1)
        if self.num_workers == 1:
            self.model_parallel = self.pipeline_parallel = self.tensor_parallel = False
        if not any(getattr(self, kind) for kind in _SPLIT):
            self.data_parallel = True

    # -- for this project ----------------------------------------------------------------------------------

    def require_data_parallel(self) -> None:
        """Raises ParallelismMissing where a model in pieces is asked for; says what has no effect without one."""
        if kinds := tuple(kind for kind in _SPLIT if getattr(self, kind)):
            raise ParallelismMissing(kinds)
        changed = [name for name in _FOR_SPLIT if getattr(self, name) != getattr(type(self), name)]
        if changed:
            logger.warning("without a model in pieces these have no effect: %s", ", ".join(changed))

    def coordinator_config(
        self, *, token: str = "", resume: str = "auto", loader_processes: int = 0, code_free: bool = True
    ) -> CoordinatorConfig:
        """What the timeouts, retries and intervals come to. Raises UsageError."""
        limit_s = self.activation_timeout or _NEVER_S
        silence_s = self.ack_timeout or _NEVER_S
        return CoordinatorConfig(
            host=self.master_ip,
            port=self.master_port,
            token=token,
            min_workers=max(self.num_workers, 1),
            checkpoint_every=self.save_interval,
            resume=resume,
            heartbeat_s=min(self.resend_probe_interval, silence_s / 3),
            silence_s=silence_s,
            max_leaf_failures=self.max_resends + 1,
            loader_processes=loader_processes,
            code_free=code_free,
            pacing=PacingConfig(min_deadline_s=min(5.0, limit_s), max_deadline_s=limit_s, first_deadline_s=limit_s),
        )
