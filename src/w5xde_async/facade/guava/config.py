"""Guava's configuration: every documented field and environment variable, and what each has become.

Mutable, as it was: it is checked where it is made and again where it is used. Each field says below what it does
here. Under model and pipeline parallelism the workers are an island, with some of the model's layers each; under tensor
parallelism with a part of each layer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from w5xde_async.codecs.names import NAMES, is_codec
from w5xde_async.config import TIME_OR_0, YES_OR_NO, Config, Kind, Setting, number, whole
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.errors import UsageError, need
from w5xde_async.facade.arguments import CODEC, SETTINGS, SILENCE, TEXT, takes
from w5xde_async.facade.words import ADVICE, Words
from w5xde_async.parallel.shape import IslandShape
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.messages import HEARTBEAT_S

logger = logging.getLogger(__name__)

_FLAGS = {
    "run-dir": "checkpoint_dir", "resume": "resume", "host": "master_ip", "port": "master_port",
    "epochs": "num_epochs", "max-steps": "num_epochs", "silence": "ack_timeout", "codec": "codec",
    "downlink": "downlink", "heartbeat": "resend_probe_interval", "min-workers": "num_workers", "sandbox": "sandbox",
    "dashboard-address": "dashboard", "island-interface": "interface",
}  # fmt: skip
_FIELDS = {
    "host": "master_ip", "port": "master_port", "connect_timeout_s": "timeout_s", "epochs": "num_epochs",
    "dataset": "dataloader", "gradient_clip_val": "max_grad_norm", "evaluate_every": "val_interval",
    "silence_s": "ack_timeout",
}  # fmt: skip
_ALONE = {ADVICE: "give the DataLoader drop_last=True, or another batch_size"}
WORDS = Words(_FLAGS, _FIELDS, _ALONE | {
    "start the worker with the coordinator's --job": "an Orchestrator of mode=\"local\" needs none",
    "workers need --job: ": "NetworkWorkers cannot compute it, mode=\"local\" can: ",
})  # fmt: skip
#: Of ``save_checkpoint(path)``, whose file lies where the caller has said.
WORDS_OF_PATH = Words({"run-dir": "path"})
#: Of an orchestrator whose model is in pieces.
WORDS_IN_PIECES = Words(_FLAGS, _FIELDS, _ALONE | {
    "start the worker with the coordinator's --job": "leave out model_parallel, pipeline_parallel and tensor_parallel",
    "workers need --job: ": "it cannot be divided, leave out model_parallel, pipeline_parallel "
    "and tensor_parallel: ",
})  # fmt: skip
_FROM_0, _ABOVE_0 = number(">= 0", lambda x: x >= 0), number("> 0", lambda x: x > 0)
_BEATS = number("from {:g} to {:.0f}".format(*HEARTBEAT_S), lambda x: HEARTBEAT_S[0] <= x <= HEARTBEAT_S[1])
_SILENCE = SILENCE._replace(
    accepts=f"0, or {SILENCE.accepts}", holds=lambda x: _FROM_0.holds(x) and (x == 0 or SILENCE.holds(x))
)
_DOWNLINK = Kind(f"one of {', '.join(NAMES)}", "CODEC", str, is_codec)
_DIRECTORY = TEXT._replace(accepts="a path")
#: Undocumented fields of the original, which its ``to_dict`` wrote: sockets tune themselves, a model needs no source.
_GONE = frozenset({
    "socket_buffer_size", "tcp_nodelay", "enable_keepalive", "max_message_size_gb", "layers_per_gpu", "layer_ranges",
    "model_source_code", "model_class_name", "model_init_kwargs",
})  # fmt: skip
_SPLIT = ("model_parallel", "pipeline_parallel", "tensor_parallel")
#: Fields without an effect: where, and what there is instead.
_IDLE = {
    "micro_batches": (" without pipeline_parallel", "num_workers says how many batches make a step"),
    "tensor_parallel_size": ("", "tensor_parallel without model_parallel makes islands of so many workers"),
    "activation_cache_steps": ("", "no activation outlives its step: a step that is lost is computed again"),
    "allow_activation_reuse": ("", "no activation outlives its step; gradient checkpointing in the model saves memory"),
    "log_activations": ("", "compact_log=False shows where each step's time went"),
}
_NEVER_S = 86400.0  # a timeout of 0 was none


def _knob(default: Any, kind: Kind, env: str = "") -> Any:
    """A field, what it accepts, and the environment variable that ``from_env`` reads it from."""
    return field(default=default, metadata={"setting": Setting("", kind), "env": env})


@dataclass
class DistributedConfig(Config):
    """One run, for the orchestrator and its workers.

    vocab_size ... dropout  the model's shape: for your own model code to read (``MyModel(config.vocab_size)``)
    batch_size            samples of a worker's batch, where ``start_training`` gets a dataset; a DataLoader has its own
    learning_rate, weight_decay  of AdamW
    max_grad_norm         global norm to clip to; 0: no clipping
    use_amp               mixed precision: bfloat16 autocast
    num_workers           workers that a step is made for, and waited for before the first; 0: one. Of a model in
                          pieces: the pieces; as many again share the batches
    master_ip, master_port  where the orchestrator listens; port 0 picks a free one
    data_parallel         False: one worker (one island) computes every batch, and no second is let in
    model_parallel        the workers are an island of num_workers, with some of the model's layers each
    pipeline_parallel     the same; a step is micro_batches batches, which go through the workers one behind the other
    micro_batches         batches in a step of a pipeline
    tensor_parallel       islands of tensor_parallel_size, with a part of each large layer each; num_workers is a
                          multiple, and the islands share the batches. With model_parallel or pipeline_parallel: one
                          island of num_workers, with a part of each layer, not some of the layers
    activation_timeout    seconds that a worker's result may take before its work is given to another; 0: a day
    ack_timeout           seconds of silence after which a peer counts as gone; 0: a day
    max_resends           times that work whose code failed is given out again
    resend_probe_interval seconds between two signs of life
    log_step_every        steps between two lines of log; 0: none
    compact_log           False shows where each step's time went
    checkpoint_dir, save_interval  the run's directory, and steps between checkpoints
    codec, downlink       how gradients and the parameters' changes travel: names of docs/codecs.md; codec ``auto``
                          chooses codec and rule by the links. Without ``downlink`` it goes by the codec
    """

    vocab_size: int = _knob(50257, whole(1), "VOCAB_SIZE")
    d_model: int = _knob(768, whole(1), "D_MODEL")
    n_heads: int = _knob(12, whole(1), "N_HEADS")
    n_layers: int = _knob(12, whole(1), "N_LAYERS")
    d_ff: int = _knob(3072, whole(1), "D_FF")
    max_seq_len: int = _knob(1024, whole(1), "MAX_SEQ_LEN")
    dropout: float = _knob(0.1, number("from 0 to less than 1", lambda x: 0 <= x < 1), "DROPOUT")
    batch_size: int = _knob(16, whole(1), "BATCH_SIZE")
    learning_rate: float = _knob(3e-4, _ABOVE_0, "LEARNING_RATE")
    weight_decay: float = _knob(0.01, _FROM_0, "WEIGHT_DECAY")
    max_grad_norm: float = _knob(1.0, _FROM_0, "MAX_GRAD_NORM")
    use_amp: bool = _knob(False, YES_OR_NO, "USE_AMP")
    num_workers: int = _knob(1, whole(0), "NUM_WORKERS")
    master_ip: str = _knob("localhost", TEXT, "MASTER_IP")
    master_port: int = _knob(29500, whole(0, 65535), "MASTER_PORT")
    data_parallel: bool = _knob(True, YES_OR_NO, "DATA_PARALLEL")
    model_parallel: bool = _knob(False, YES_OR_NO, "MODEL_PARALLEL")
    pipeline_parallel: bool = _knob(False, YES_OR_NO, "PIPELINE_PARALLEL")
    tensor_parallel: bool = _knob(False, YES_OR_NO, "TENSOR_PARALLEL")
    micro_batches: int = _knob(4, whole(1), "MICRO_BATCHES")
    tensor_parallel_size: int = _knob(2, whole(1), "TENSOR_PARALLEL_SIZE")
    activation_timeout: float = _knob(60.0, TIME_OR_0._replace(read=_FROM_0.read), "ACT_TIMEOUT_SEC")
    ack_timeout: float = _knob(30.0, _SILENCE, "ACK_TIMEOUT_SEC")
    max_resends: int = _knob(3, whole(0), "RESENDS_MAX")
    resend_probe_interval: float = _knob(5.0, _BEATS, "RESEND_PROBE_SEC")
    allow_activation_reuse: bool = _knob(False, YES_OR_NO, "ALLOW_ACT_REUSE")
    activation_cache_steps: int = _knob(256, whole(0), "ACT_CACHE_STEPS")
    compact_log: bool = _knob(True, YES_OR_NO, "COMPACT_LOG")
    log_step_every: int = _knob(100, whole(0), "LOG_STEP_EVERY")
    log_activations: bool = _knob(False, YES_OR_NO, "LOG_ACT")
    checkpoint_dir: str = _knob("./checkpoints", _DIRECTORY)
    save_interval: int = _knob(1000, whole(1))
    codec: str = _knob("raw", CODEC, "CODEC")
    downlink: str = _knob("", _DOWNLINK, "DOWNLINK")

    def validate(self) -> None:
        """Raises UsageError for the first field that cannot be."""
        self.__post_init__()

    @classmethod
    @takes(environment=SETTINGS)
    def from_env(cls, environment: Mapping[str, str] | None = None) -> Self:
        """The defaults, and what the environment (default: this process's) says of them. Raises UsageError."""
        environment = os.environ if environment is None else environment
        given: dict[str, Any] = {}
        for knob in fields(cls):
            variable = knob.metadata["env"]
            if text := str(environment.get(variable, "")).strip():
                kind = knob.metadata["setting"].kind
                try:
                    given[knob.name] = kind.value(text)
                except ValueError:
                    raise UsageError(f"{variable} is {text!r}; give {kind.accepts}") from None
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Every field by its name; JSON can hold it."""
        return asdict(self)

    @classmethod
    @takes(values=SETTINGS)
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From ``to_dict``, the original's too, whose undocumented fields are left out. Raises UsageError."""
        known = {knob.name for knob in fields(cls)}
        if unknown := sorted(map(str, set(values) - known - _GONE)):
            raise UsageError(f"DistributedConfig has no {', '.join(unknown)}")
        if gone := sorted(set(values) & _GONE):
            logger.warning("fields without a meaning here are left out: %s", ", ".join(gone))
        return cls(**{name: value for name, value in values.items() if name in known})

    @takes(num_gpus=whole(0))
    def adapt_to_gpus(self, num_gpus: int) -> None:
        """Make the run one of ``num_gpus`` workers, at least one: data parallel unless another kind was asked for.

        One device has nothing to split a model over: then those kinds are switched off. Raises UsageError for a
        negative number.
        """
        self.num_workers = max(num_gpus, 1)
        if self.num_workers == 1:
            self.model_parallel = self.pipeline_parallel = self.tensor_parallel = False
        if not any(getattr(self, kind) for kind in _SPLIT):
            self.data_parallel = True

    # -- for this project ----------------------------------------------------------------------------------

    def require_possible(self) -> None:
        """Check what an orchestrator is asked for, and say what of it has no effect.

        Raises UsageError for workers that are to share and must not, or have nothing to.
        """
        if kinds := [kind for kind in _SPLIT if getattr(self, kind)]:
            named = ", ".join(f"{kind}=True" for kind in kinds)
            need(
                self.num_workers > 1,
                f"{named} with num_workers={self.num_workers}: each worker holds a part of the model: give "
                f"num_workers=2 or more, or leave out {' and '.join(kinds)}",
            )
            size = self._of_an_island
            need(
                size > 1 and self.num_workers % size == 0,
                f"num_workers={self.num_workers} with tensor_parallel_size={size}: each layer is divided among "
                "tensor_parallel_size workers, 2 or more: give a num_workers that is a multiple of it",
            )
            need(
                self.data_parallel or self.num_workers == size,
                f"data_parallel=False with num_workers={self.num_workers} and tensor_parallel_size={size}: without it "
                f"one island computes every batch; give num_workers={size}, or data_parallel=True",
            )
            for name, value in (("codec", self.codec), ("downlink", self.downlink)):
                need(
                    value in ("", "raw"),
                    f"{name}={value!r} with {named}: workers that hold a model in pieces send everything as it is: "
                    f"leave out {name}",
                )
        else:
            need(
                self.data_parallel or self.num_workers <= 1,
                f"data_parallel=False with num_workers={self.num_workers}: without it one worker computes every batch; "
                "give num_workers=1, or data_parallel=True",
            )
        for name, (where, instead) in _IDLE.items():
            if (name == "micro_batches" and self.pipeline_parallel) or (
                name == "tensor_parallel_size" and self.tensor_parallel and not self._in_stages
            ):
                continue
            if getattr(self, name) != getattr(type(self), name):
                logger.warning("%s has no effect%s: leave it out; %s", name, where, instead)

    @property
    def _in_stages(self) -> bool:
        return self.model_parallel or self.pipeline_parallel

    @property
    def _of_an_island(self) -> int:
        """Workers that hold one model."""
        return self.tensor_parallel_size if self.tensor_parallel and not self._in_stages else self.num_workers

    @property
    def island(self) -> str:
        """What the workers form, as ``IslandShape`` reads it; empty where each computes by itself."""
        if self.tensor_parallel:
            return f"tp={self._of_an_island}"
        return f"pp={self.num_workers}" if self._in_stages else ""

    @property
    def island_of_all(self) -> str:
        """The same where one island is made of all of them."""
        copies = self.num_workers // self._of_an_island if self.island else 1
        return self.island if copies == 1 else f"dp={copies},{self.island}"

    @property
    def batches_per_step(self) -> int:
        """Batches of the DataLoader in a step: one for each worker or island, or those under way in a pipeline."""
        if self.pipeline_parallel:
            return self.micro_batches
        return max(self.num_workers, 1) // (self._of_an_island if self.island else 1)

    def coordinator_config(
        self,
        *,
        token: str = "",
        resume: str = "never",
        loader_processes: int = 0,
        code_free: bool = True,
        dashboard: str = "",
        island: str | None = None,
    ) -> CoordinatorConfig:
        """What the timeouts, retries and intervals come to. ``island``: what the workers form (default: ``island``).

        Raises UsageError.
        """
        island = self.island if island is None else island
        ranks = IslandShape.parse(island).ranks if island else 1
        limit_s = self.activation_timeout or _NEVER_S
        silence_s = self.ack_timeout or _NEVER_S
        pacing = PacingConfig(min_deadline_s=min(5.0, limit_s), max_deadline_s=limit_s, first_deadline_s=limit_s)
        if island.startswith("pp"):  # between two leases a pipeline is empty
            pacing = replace(pacing, target_lease_s=_NEVER_S)
        return CoordinatorConfig(
            host=self.master_ip,
            port=self.master_port,
            token=token,
            min_workers=max(self.num_workers // ranks, 1),
            max_workers=CoordinatorConfig.max_workers if self.data_parallel else 1,
            auto=self.codec == "auto",
            update=UpdateConfig(codec="raw" if self.codec == "auto" else self.codec, downlink=self.downlink),
            checkpoint_every=self.save_interval,
            resume=resume,
            heartbeat_s=min(self.resend_probe_interval, silence_s / 3),
            silence_s=silence_s,
            max_leaf_failures=self.max_resends + 1,
            loader_processes=loader_processes,
            code_free=code_free,
            dashboard=dashboard,
            pacing=pacing,
            island=island,
        )
