"""Guava's interface: every field, variable and argument; data-parallel training on this machine."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import logging
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.cluster import QUICK_WORKER
from tests.support.facade import no_secret_of_this_machine
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import w5xde_async.facade.guava.__main__ as program
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import CheckpointMismatch, ExitCode, LeafFailed, PortInUse, StoreError, UsageError
from w5xde_async.facade.guava import DistributedConfig, NetworkWorker, Orchestrator
from w5xde_async.facade.guava.loaders import check_validation, reading_of
from w5xde_async.facade.guava.workers import network_worker
from w5xde_async.plan.numerics import EXACT, FIRST
from w5xde_async.plan.sampler import Sampler
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.telemetry.events import Event, StepCommitted
from w5xde_async.worker.connection.connection import Departure
from w5xde_async.worker.connection.dialing import Dialer
from w5xde_async.worker.service import Worker

__all__ = ["no_secret_of_this_machine"]

DOCUMENTED = {  # field: (variable, its text, its value); the seed's own list, in its order
    "data_parallel": ("DATA_PARALLEL", "0", False),
    "model_parallel": ("MODEL_PARALLEL", "1", True),
    "pipeline_parallel": ("PIPELINE_PARALLEL", "1", True),
    "tensor_parallel": ("TENSOR_PARALLEL", "1", True),
    "micro_batches": ("MICRO_BATCHES", "8", 8),
    "tensor_parallel_size": ("TENSOR_PARALLEL_SIZE", "4", 4),
    "activation_timeout": ("ACT_TIMEOUT_SEC", "0", 0.0),
    "ack_timeout": ("ACK_TIMEOUT_SEC", "1.5", 1.5),
    "max_resends": ("RESENDS_MAX", "7", 7),
    "resend_probe_interval": ("RESEND_PROBE_SEC", "2", 2.0),
    "allow_activation_reuse": ("ALLOW_ACT_REUSE", "true", True),
    "activation_cache_steps": ("ACT_CACHE_STEPS", "1", 1),
    "compact_log": ("COMPACT_LOG", "0", False),
    "log_step_every": ("LOG_STEP_EVERY", "10", 10),
    "log_activations": ("LOG_ACT", "1", True),
    "master_ip": ("MASTER_IP", "10.0.0.1", "10.0.0.1"),
    "master_port": ("MASTER_PORT", "29501", 29501),
    "num_workers": ("NUM_WORKERS", "4", 4),
    "vocab_size": ("VOCAB_SIZE", "11", 11),
    "d_model": ("D_MODEL", "512", 512),
    "n_heads": ("N_HEADS", "7", 7),
    "n_layers": ("N_LAYERS", "3", 3),
    "d_ff": ("D_FF", "48", 48),
    "max_seq_len": ("MAX_SEQ_LEN", "9", 9),
    "dropout": ("DROPOUT", "0.5", 0.5),
    "batch_size": ("BATCH_SIZE", "5", 5),
    "learning_rate": ("LEARNING_RATE", "1e-2", 1e-2),
    "weight_decay": ("WEIGHT_DECAY", "0", 0.0),
    "max_grad_norm": ("MAX_GRAD_NORM", "2", 2.0),
    "use_amp": ("USE_AMP", "1", True),
}
DEFAULTS: dict[str, Any] = {  # as the seed shows them
    "vocab_size": 50257, "d_model": 768, "n_heads": 12, "n_layers": 12, "d_ff": 3072, "max_seq_len": 1024,
    "dropout": 0.1, "batch_size": 16, "learning_rate": 3e-4, "weight_decay": 0.01, "max_grad_norm": 1.0,
    "use_amp": False, "num_workers": 1, "master_ip": "localhost", "master_port": 29500, "data_parallel": True,
    "model_parallel": False, "pipeline_parallel": False, "tensor_parallel": False, "micro_batches": 4,
    "tensor_parallel_size": 2, "activation_timeout": 60.0, "ack_timeout": 30.0, "max_resends": 3,
    "resend_probe_interval": 5.0, "allow_activation_reuse": False, "activation_cache_steps": 256, "compact_log": True,
    "log_step_every": 100, "log_activations": False, "checkpoint_dir": "./checkpoints", "save_interval": 1000,
}  # fmt: skip
OURS: dict[str, Any] = {"codec": "raw", "downlink": ""}  # "use compression for slow networks"


@pytest.fixture(autouse=True)
def no_address_of_this_machine(no_secret_of_this_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_IP", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


# -- the configuration -------------------------------------------------------------------------------------


def test_fields_and_defaults() -> None:
    assert DistributedConfig().to_dict() == DEFAULTS | OURS
    assert set(DOCUMENTED) == set(DEFAULTS) - {"checkpoint_dir", "save_interval"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_variable(name: str) -> None:
    variable, text, value = DOCUMENTED[name]
    config = DistributedConfig.from_env({variable: text})
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(DEFAULTS[name])
    assert {key for key, now in config.to_dict().items() if now != (DEFAULTS | OURS)[key]} <= {name}


def test_compression_by_variables() -> None:
    config = DistributedConfig.from_env({"CODEC": "topk:0.01", "DOWNLINK": "fp16"})
    assert (config.codec, config.downlink) == ("topk:0.01", "fp16")
    update = config.coordinator_config().update
    assert (update.rule, update.codec, update.downlink) == ("sync", "topk:0.01", "fp16")
    chosen = DistributedConfig.from_env({"CODEC": "auto"}).coordinator_config()
    assert (chosen.auto, chosen.update.codec) == (True, "raw")
    assert not DistributedConfig().coordinator_config().auto
    for variable in ("CODEC", "DOWNLINK"):
        with pytest.raises(UsageError, match=f"{variable} is 'zip'; give "):
            DistributedConfig.from_env({variable: "zip"})
    with pytest.raises(UsageError, match=r"^codec is 'zip'; give auto, or one of raw, "):
        DistributedConfig(codec="zip")


def test_the_environment_is_this_processs_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_STEP_EVERY", "77")
    monkeypatch.setenv("USE_AMP", " ")
    assert DistributedConfig.from_env().log_step_every == 77


@pytest.mark.parametrize(
    ("variable", "text"), [("MASTER_PORT", "x"), ("USE_AMP", "maybe"), ("ACK_TIMEOUT_SEC", "soon"), ("N_HEADS", "1.5")]
)
def test_a_variable_that_cannot_be_read(variable: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{variable} is '{text}'; give "):
        DistributedConfig.from_env({variable: text})


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 0}, {"d_model": 0}, {"dropout": 1.0}, {"learning_rate": 0.0}, {"num_workers": -1},
     {"master_port": 65536}, {"resend_probe_interval": 0.0}, {"batch_size": "8"}, {"use_amp": 1}, {"max_resends": True},
     {"ack_timeout": -1.0}, {"ack_timeout": 1e7}, {"resend_probe_interval": 1e6}, {"activation_timeout": 1e10},
     {"save_interval": 0}, {"checkpoint_dir": ""}],
)  # fmt: skip
def test_a_field_that_cannot_be(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=f"^{name} is "):
        DistributedConfig(**wrong)
    config = DistributedConfig()
    setattr(config, name, wrong[name])  # it may change later, as it did
    with pytest.raises(UsageError, match=f"^{name} is "):
        Orchestrator(config)


def test_to_and_from_a_dict(caplog: pytest.LogCaptureFixture) -> None:
    config = DistributedConfig(d_model=64, n_heads=4, activation_timeout=120, checkpoint_dir="there")
    assert DistributedConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with caplog.at_level(logging.WARNING):
        of_the_original = config.to_dict() | {"tcp_nodelay": True, "layers_per_gpu": [12]}
        assert DistributedConfig.from_dict(of_the_original) == config
    assert "layers_per_gpu, tcp_nodelay" in caplog.text
    with pytest.raises(UsageError, match="has no batchsize"):
        DistributedConfig.from_dict({"batchsize": 3})


def test_adapting_to_gpus() -> None:
    config = DistributedConfig(pipeline_parallel=True, model_parallel=True, tensor_parallel=True, data_parallel=False)
    config.adapt_to_gpus(4)
    assert (config.num_workers, config.pipeline_parallel, config.data_parallel) == (4, True, False)
    config.adapt_to_gpus(1)
    config.require_possible()
    assert (config.num_workers, config.data_parallel, config.island) == (1, True, "")
    config.adapt_to_gpus(0)  # the CPU
    assert config.num_workers == 1
    with pytest.raises(UsageError, match="num_gpus is -1"):
        config.adapt_to_gpus(-1)


#: Fields that nothing here reads: they are the model's.
OF_THE_MODEL = {"vocab_size", "d_model", "n_heads", "n_layers", "d_ff", "max_seq_len", "dropout"}


@pytest.mark.parametrize("name", sorted(set(DOCUMENTED) - OF_THE_MODEL))
def test_no_knob_is_ignored_without_a_word(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Set to the documented example, each changes what is run, or is refused, or is named with what to do instead."""
    value = DOCUMENTED[name][2]
    base = {"data_parallel": {"num_workers": 2}}.get(name, {})
    config = DistributedConfig(**(base | {name: value}))

    def outcome(config: DistributedConfig) -> Any:
        orchestrator = Orchestrator(config)
        given = reading_of(dataset(), config, seed=0)
        job = orchestrator._job(linear(), given, 1, None, None)
        (optimizer,) = job.optimizer(linear()).param_groups
        says = (config.compact_log, config.log_step_every)
        of_job = (job.batch_size, job.microbatch_size, job.gradient_clip_val, job.precision)
        return config.coordinator_config(), of_job, optimizer["lr"], optimizer["weight_decay"], says

    try:
        with caplog.at_level(logging.WARNING):
            changed = outcome(config) != outcome(DistributedConfig(**base))
    except UsageError as error:
        assert f"{name}={value}" in str(error)  # noqa: PT017
        return
    assert changed or re.search(rf"{name} has no effect( without \w+)?: leave it out; ", caplog.text)


def test_without_data_parallelism_one_worker_computes() -> None:
    config = DistributedConfig(data_parallel=False).coordinator_config()
    assert (config.min_workers, config.max_workers) == (1, 1)
    assert DistributedConfig().coordinator_config().max_workers > 1
    with pytest.raises(UsageError, match=r"data_parallel=False with num_workers=3: .* give num_workers=1, or"):
        Orchestrator(DistributedConfig(data_parallel=False, num_workers=3))


def test_what_timeouts_and_intervals_come_to() -> None:
    config = DistributedConfig(
        master_ip="127.0.0.1", master_port=1, num_workers=3, save_interval=7, activation_timeout=120.0,
        ack_timeout=60.0, max_resends=5, resend_probe_interval=10.0,
    ).coordinator_config(token="t", resume="never", loader_processes=2)  # fmt: skip
    assert (config.host, config.port, config.token, config.min_workers) == ("127.0.0.1", 1, "t", 3)
    assert (config.checkpoint_every, config.resume, config.loader_processes) == (7, "never", 2)
    assert (config.silence_s, config.heartbeat_s, config.max_leaf_failures) == (60.0, 10.0, 6)
    assert (config.pacing.max_deadline_s, config.pacing.first_deadline_s) == (120.0, 120.0)
    short = DistributedConfig(activation_timeout=2.0, ack_timeout=3.0).coordinator_config()
    assert (short.pacing.min_deadline_s, short.heartbeat_s) == (2.0, 1.0)
    never = DistributedConfig(activation_timeout=0.0, ack_timeout=0.0, num_workers=0).coordinator_config()
    assert (never.pacing.max_deadline_s, never.silence_s, never.min_workers) == (86400.0, 86400.0, 1)


# -- a DataLoader ------------------------------------------------------------------------------------------


def dataset(count: int = 48) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def test_what_of_a_dataloader_counts() -> None:
    def collate(samples: list[Any]) -> Any:
        return default_collate(samples)

    config, data = DistributedConfig(batch_size=5), dataset()
    plain = reading_of(DataLoader(data, batch_size=8), config, seed=3)
    assert (plain.dataset, plain.batch_size, plain.shuffle, plain.drop_last) == (data, 8, False, False)
    assert (plain.collate, plain.processes, plain.seed) == (None, 0, 3)
    generator = torch.Generator().manual_seed(44)
    rich = reading_of(
        DataLoader(data, batch_size=8, shuffle=True, drop_last=True, collate_fn=collate, generator=generator,
                   num_workers=2), config, seed=3,
    )  # fmt: skip
    assert (rich.shuffle, rich.drop_last, rich.collate, rich.seed) == (True, True, collate, 44)
    assert rich.processes == (0 if sys.platform == "win32" else 2)
    bare = reading_of(data, config, seed=3)
    assert (bare.dataset, bare.batch_size, bare.shuffle) == (data, 5, True)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([1])


class Mine(SequentialSampler):
    pass


class Own:
    def __iter__(self) -> Any:
        return iter([1])


class OwnDataLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([1])


class Endless(Mine):
    def __iter__(self) -> Any:
        return iter(int, 1)


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (lambda: DataLoader(Stream()), "is iterable"),
        (lambda: DataLoader(Stream(), batch_size=None), "is iterable"),
        (lambda: (batch for batch in DataLoader(dataset())), "a generator is no loader"),
        (lambda: iter(DataLoader(dataset())), "is no loader"),
        (Own, r"Own has no dataloader\[i\]"),
        (lambda: OwnDataLoader(dataset()), "OwnDataLoader is a DataLoader that makes batches of its own"),
    ],
)
def test_batches_that_can_be_read_only_once(loader: Callable[[], Any], said: str) -> None:
    """One line, which says what to write."""
    orchestrator = Orchestrator(DistributedConfig())
    orchestrator.register_model(nn.Linear(4, 2))
    with pytest.raises(UsageError, match=said + r".*: give list\(\.\.\.\) of it"):
        orchestrator.start_training(loader())
    if "generator" in said:  # evaluation reads it again and again
        with pytest.raises(UsageError, match=said):
            orchestrator.start_training(dataset(), 1, loader())


def test_a_sampler_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w5xde_async.facade.guava.loaders._MOST_BATCHES", 100)
    with pytest.raises(UsageError, match="BatchSampler has no end"):
        reading_of(DataLoader(dataset(), batch_size=8, sampler=Endless(dataset())), DistributedConfig(), seed=0)


class Rows(torch.utils.data.Dataset[Any]):
    """Each sample is a batch."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        x, y = dataset().tensors
        return x[4 * index : 4 * index + 4], y[4 * index : 4 * index + 4]


BATCHES: dict[str, Callable[[], Any]] = {
    "list": lambda: list(DataLoader(dataset(), batch_size=4)),
    "tuple of dicts": lambda: tuple({"input_ids": x, "labels": y} for x, y in DataLoader(dataset(), batch_size=4)),
    "weighted": lambda: DataLoader(dataset(), batch_size=4, sampler=WeightedRandomSampler([1.0, 2.0] * 24, 48)),
    "subset": lambda: DataLoader(dataset(96), batch_size=4, sampler=SubsetRandomSampler(range(48))),
    "first half": lambda: DataLoader(dataset(96), batch_size=4, sampler=SequentialSampler(range(48))),
    "half, shuffled": lambda: DataLoader(dataset(96), batch_size=4, sampler=RandomSampler(range(48))),
    "replacement": lambda: DataLoader(dataset(), batch_size=4, sampler=RandomSampler(dataset(), replacement=True)),
    "own sampler": lambda: DataLoader(dataset(), batch_size=4, sampler=Mine(dataset())),
    "own batch sampler": lambda: DataLoader(dataset(), batch_sampler=BatchSampler(Mine(dataset()), 4, False)),
    "no batch_size": lambda: DataLoader(Rows(), batch_size=None),
    "no batch_size, shuffled": lambda: DataLoader(Rows(), batch_size=None, shuffle=True),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_step_is_a_batch_of_whatever_gives_batches(kind: str, tmp_path: Path) -> None:
    """The steps are what a plain loop over the same batches makes."""
    orchestrator, model = orchestrator_for(tmp_path), linear()
    orchestrator.register_model(model)
    result = orchestrator.start_training(BATCHES[kind](), 2)
    assert (result.outcome, result.step) == ("finished", 24)
    torch.manual_seed(0)
    loader = BATCHES[kind]()
    wanted = linear()
    optimizer = torch.optim.AdamW(wanted.parameters(), lr=0.05, weight_decay=0.01)
    given = reading_of(loader, DistributedConfig(), seed=0, epochs=2)
    rounds = 1 if given.steps_per_epoch else 2
    for batch in [given.dataset[index] for _ in range(rounds) for index in range(len(given.dataset))]:
        x, y = batch.values() if isinstance(batch, dict) else batch
        assert len(x) == 4
        optimizer.zero_grad()
        F.cross_entropy(wanted(x), y).backward()
        nn.utils.clip_grad_norm_(wanted.parameters(), 1.0)
        optimizer.step()
    assert same(model, wanted)


@pytest.mark.parametrize(("workers", "epochs", "said"), [(5, 2, True), (4, 2, False), (5, 1, False)])
def test_that_a_step_holds_the_end_of_one_epoch_and_the_next_is_said(
    workers: int, epochs: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given = DataLoader(dataset(), batch_size=4, sampler=Mine(dataset()))
    reading = reading_of(given, DistributedConfig(num_workers=workers, batch_size=4), seed=0, epochs=epochs)
    assert len(reading.dataset) == 12 * epochs
    told = [record.getMessage() for record in caplog.records]
    if said:
        (text,) = told
        assert text.startswith("the DataLoader's BatchSampler gives 12 batches an epoch, of which no whole steps of 5")
    else:
        assert not told


def test_a_samplers_order_is_another_each_epoch_and_the_same_each_time() -> None:
    def order(seed: int) -> list[Any]:
        loader = BATCHES["weighted"]()
        return list(reading_of(loader, DistributedConfig(num_workers=5), seed=seed, epochs=2).dataset._order)

    assert order(0) == order(0) != order(1)
    assert order(0)[:12] != order(0)[12:]
    given = reading_of(BATCHES["weighted"](), DistributedConfig(num_workers=5), seed=0, epochs=2)
    assert given.steps_per_epoch == 3  # evaluated as often as there are epochs


class Turning(Mine):
    """What it gives next depends on what it has given, of whatever kind that is."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.data_source = data
        self.rng, self.epoch, self.indices = random.Random(0), 0, list(range(len(data)))

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        self.rng.shuffle(self.indices)
        return iter([index for index in self.indices if (index + self.epoch) % 4])


class Held(Turning):
    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.lock = threading.Lock()  # has no copy


class Uncopied(TensorDataset):
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the data was copied")


@pytest.mark.parametrize("sampler", [
    lambda data: WeightedRandomSampler([1.0] * len(data), 16, generator=torch.Generator().manual_seed(3)), Turning,
])  # fmt: skip
@pytest.mark.parametrize("batched", [False, True])
def test_a_prediction_leaves_the_order_of_the_training_that_follows_as_it_is(
    sampler: Callable[[Any], Any], batched: bool
) -> None:
    data = Uncopied(*dataset(16).tensors)
    orchestrator = Orchestrator(DistributedConfig())
    orchestrator.register_model(linear())

    def orders(predicts: bool) -> Iterator[list[Any]]:
        loader = DataLoader(data, batch_size=4 if batched else None, sampler=sampler(data))
        for _ in range(2):
            if predicts:
                orchestrator.predict(loader, 2)
            yield orchestrator._job_of(loader, 2)[1].dataset._order

    once, again = orders(False)
    assert once != again  # each training goes on with the sampler
    assert list(orders(True)) == [once, again]


def test_a_sampler_that_a_prediction_cannot_copy_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    given = reading_of(
        DataLoader(dataset(), batch_size=4, sampler=Held(dataset())), DistributedConfig(), seed=0, looks_ahead=True
    )
    assert len(given.dataset) == 9
    assert "the DataLoader's BatchSampler cannot be copied (TypeError: cannot pickle" in caplog.text


def test_a_loader_for_validation_is_not_begun_to_be_looked_at() -> None:
    """That would draw from torch's generator, and start its processes."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    check_validation(DataLoader(dataset(), batch_size=4))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["plain", "list", "no batch_size"])
def test_a_batch_size_that_has_no_effect_is_told(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The documents' advice against lack of memory is ``config.batch_size = 8``."""
    loaders = {"plain": lambda: DataLoader(dataset(), batch_size=32)} | BATCHES
    with caplog.at_level(logging.WARNING):
        reading_of(loaders[kind](), DistributedConfig(), seed=0)
        assert "no effect" not in caplog.text  # nobody has set it
        config = DistributedConfig()
        config.batch_size = 8
        reading_of(loaders[kind](), config, seed=0)
    assert "config.batch_size=8 has no effect" in caplog.text
    assert "give the DataLoader batch_size=8" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        reading_of(DataLoader(dataset(), batch_size=8), config, seed=0)
        reading_of(dataset(), config, seed=0)
    assert not caplog.text


def test_a_list_is_said_to_be_batches(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        reading_of(BATCHES["list"](), DistributedConfig(), seed=0)
    assert "read as batches, as Guava read it: 12 of them" in caplog.text


# -- training ----------------------------------------------------------------------------------------------


def linear() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(4, 2)


def orchestrator_for(directory: Path, **kwargs: Any) -> Orchestrator:
    given = {"master_port": 0, "checkpoint_dir": str(directory), "learning_rate": 0.05, "log_step_every": 0}
    return Orchestrator(DistributedConfig(**(given | kwargs)))


def plain_loop(batch_size: int, epochs: int, *, clip: float = 1.0, decay: float = 0.01, amp: bool = False) -> nn.Module:
    trained, (x, y) = linear(), dataset().tensors
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05, weight_decay=decay)
    sampler = Sampler(num_samples=len(x), batch_size=batch_size, leaf_samples=batch_size, seed=0)
    for step in range(epochs * sampler.steps_per_epoch):
        rows = sampler.plan(step).indices.tolist()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(trained(x[rows]), y[rows])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(trained.parameters(), clip)
        optimizer.step()
    return trained


def same(left: nn.Module, right: nn.Module, atol: float = 1e-6) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.allclose(a, b, atol=atol) for a, b in pairs)


def test_it_trains_on_this_machine_as_a_plain_loop_would(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    orchestrator, model, events = orchestrator_for(tmp_path, save_interval=4, log_step_every=5), linear(), []
    orchestrator.bus.subscribe(events.append)
    orchestrator.register_model(model)
    val = DataLoader(dataset(), batch_size=20)
    result = orchestrator.start_training(DataLoader(dataset(), batch_size=8, shuffle=True), 2, val, val_interval=3)
    assert (result.outcome, result.step) == ("finished", 12)
    assert same(model, plain_loop(8, 2))
    x, y = dataset().tensors
    assert result.metrics["val_loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)
    kinds = [type(event).__name__ for event in events]
    saved = [event.step for event in events if type(event).__name__ == "CheckpointSaved"]
    assert (saved[0], saved[-1]) == (4, 12)  # one that falls due while another is written comes later
    assert 2 <= kinds.count("Evaluated") <= 4  # one that falls due while another runs is left out
    said = capfd.readouterr().err
    assert "step 5 loss " in said
    assert "step 10 loss " in said
    assert "step 6 loss " not in said


@pytest.mark.parametrize(
    ("kwargs", "loop"),
    [
        ({"max_grad_norm": 0.01}, {"clip": 0.01}),
        ({"max_grad_norm": 0.0, "weight_decay": 0.5}, {"clip": 0.0, "decay": 0.5}),
        ({"use_amp": True}, {"amp": True}),
    ],
)
def test_clipping_decay_and_amp(kwargs: dict[str, Any], loop: dict[str, Any], tmp_path: Path) -> None:
    orchestrator, model = orchestrator_for(tmp_path, **kwargs), linear()
    orchestrator.register_model(model)
    orchestrator.start_training(DataLoader(dataset(), batch_size=8, shuffle=True), 1)
    assert same(model, plain_loop(8, 1, **loop), atol=1e-3 if "amp" in loop else 1e-6)
    assert not same(model, plain_loop(8, 1), atol=1e-6)


@pytest.mark.parametrize("codec", ["lz4-shuffle", "bf16", "int8", "topk:0.1", "sparseloco", "auto"])
def test_compressed_it_learns_too(codec: str, tmp_path: Path) -> None:
    orchestrator = orchestrator_for(tmp_path, codec=codec, downlink="" if codec == "auto" else "bf16")
    orchestrator.register_model(linear())
    events: list[Event] = []
    orchestrator.bus.subscribe(events.append)
    result = orchestrator.start_training(DataLoader(dataset(), batch_size=8, shuffle=True), 8)
    assert result.outcome == "finished"
    losses = [event.loss for event in events if isinstance(event, StepCommitted)]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    if codec in ("bf16", "int8"):
        assert result.encoded_bytes < 0.8 * result.raw_bytes


def test_a_step_is_a_batch_for_each_worker_and_clients_need_no_code(tmp_path: Path) -> None:
    """The orchestrator waits for its workers; they are any worker of this package, without the model's code."""
    config = DistributedConfig(num_workers=2, master_port=0, checkpoint_dir=str(tmp_path), learning_rate=0.05)
    orchestrator, model = Orchestrator(config, mode="orchestrator"), linear()
    orchestrator.register_model(model)
    events: list[Event] = []
    orchestrator.bus.subscribe(events.append)
    ended: list[Any] = []
    training = threading.Thread(
        target=lambda: ended.append(orchestrator.start_training(DataLoader(dataset(), batch_size=8, shuffle=True), 2))
    )
    training.start()
    assert orchestrator.listening.wait(60)

    async def two() -> None:
        address = f"localhost:{orchestrator.port}"
        await asyncio.gather(*[Worker(address, config=QUICK_WORKER).run() for _ in range(2)])

    asyncio.run(two())
    training.join(10)
    assert ended[0].outcome == "finished"
    steps = [event for event in events if isinstance(event, StepCommitted)]
    assert [(event.samples, event.leaves) for event in steps] == [(16, 2)] * 6
    assert same(model, plain_loop(16, 2))


def trained(orchestrator: Orchestrator, model: nn.Module, batch_size: int = 8) -> Any:
    orchestrator.register_model(model)
    return orchestrator.start_training(DataLoader(dataset(), batch_size=batch_size, shuffle=True), 1)


@pytest.mark.slow
def test_every_start_trains_anew_and_keeps_what_was_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same orchestrator again, another model of the same shape, a smaller batch, mixed precision."""
    directory = tmp_path / "run"
    first, model = orchestrator_for(directory), linear()
    assert trained(first, model).step == 6
    kept = load_file(directory / "model.safetensors")
    before = copy.deepcopy(model)
    again = trained(first, model)
    assert (again.outcome, again.step) == ("finished", 6)
    assert again.loss is not None
    assert not same(model, before)  # trained on, from the weights that it has
    assert torch.equal(load_file(tmp_path / "run.old-1" / "model.safetensors")["weight"], kept["weight"])
    said = capfd.readouterr().err
    assert said.count("trains anew") == 1
    assert 'resume="auto"' in said
    other = nn.Linear(4, 2)
    nn.init.zeros_(other.weight)
    zero = copy.deepcopy(other)
    assert trained(orchestrator_for(directory), other).step == 6
    assert (other.weight - zero.weight).abs().max() < 0.5  # six steps of 0.05 from where it was, not another's weights
    assert trained(orchestrator_for(directory, use_amp=True), linear()).step == 6
    assert trained(orchestrator_for(directory), linear(), batch_size=4).step == 12
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run", *(f"run.old-{n}" for n in range(1, 5))]


@pytest.mark.slow
def test_resumed_when_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = linear()
    assert trained(orchestrator_for(tmp_path), model).step == 6
    more = Orchestrator(orchestrator_for(tmp_path).config, resume="auto")
    more.register_model(linear())
    result = more.start_training(DataLoader(dataset(), batch_size=8, shuffle=True), 2)
    assert result.step == 12
    assert same(more._model, plain_loop(8, 2))  # type: ignore[arg-type]
    assert "goes on from step 6 of the run in" in capfd.readouterr().err
    over = Orchestrator(more.config, resume="auto")
    over.register_model(linear())
    ended = over.start_training(DataLoader(dataset(), batch_size=8, shuffle=True), 2)
    assert ended.reason == 'it was complete already; raise num_epochs, or start afresh with resume="never"'
    smaller = Orchestrator(more.config, resume="auto")
    smaller.register_model(linear())
    with pytest.raises(CheckpointMismatch, match=r'batch_size was 8 .* is 4 now; resume="never" starts afresh'):
        smaller.start_training(DataLoader(dataset(), batch_size=4, shuffle=True), 2)


def test_a_file_that_cannot_be_written_is_told_by_whose_name_it_is(tmp_path: Path) -> None:
    orchestrator = orchestrator_for(tmp_path / ("n" * 300))
    orchestrator.register_model(linear())
    with pytest.raises(StoreError, match=r"the name is too long; choose a shorter checkpoint_dir$"):
        orchestrator.save_checkpoint()
    with pytest.raises(StoreError, match=r"the name is too long; choose a shorter path$"):
        orchestrator.save_checkpoint(tmp_path / ("n" * 300))


def test_batch_norm_of_one_sample_is_told_what_to_give(tmp_path: Path) -> None:
    orchestrator = orchestrator_for(tmp_path / "run", num_workers=1)
    orchestrator.register_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.raises(LeafFailed, match="has 1 sample: give the DataLoader drop_last=True, or another batch_size"):
        orchestrator.start_training(DataLoader(dataset(17), batch_size=8))
    result = orchestrator.start_training(DataLoader(dataset(17), batch_size=8, drop_last=True))
    assert (result.outcome, result.step) == ("finished", 2)


def test_checkpoints_on_demand(tmp_path: Path) -> None:
    orchestrator, model = orchestrator_for(tmp_path / "run"), linear()
    with pytest.raises(UsageError, match="call register_model"):
        orchestrator.save_checkpoint()
    orchestrator.register_model(model)
    before = orchestrator.save_checkpoint(tmp_path / "before.safetensors")
    assert torch.equal(load_file(before)["weight"], linear().weight)
    found: dict[str, Any] = {}
    refused: list[str] = []
    begun = threading.Event()

    def watch(event: Event) -> None:
        if isinstance(event, StepCommitted) and event.step == 3:
            try:
                orchestrator.save_checkpoint()
            except UsageError as error:
                refused.append(str(error))
            begun.set()

    def ask() -> None:
        assert begun.wait(60)
        found["whole"] = orchestrator.save_checkpoint()
        found["alone"] = orchestrator.save_checkpoint(tmp_path / "alone.safetensors")
        orchestrator.stop("seen enough")

    orchestrator.bus.subscribe(watch)
    asking = threading.Thread(target=ask)
    asking.start()
    result = orchestrator.start_training(DataLoader(dataset(), batch_size=8, shuffle=True), 100_000)
    asking.join(10)
    assert (result.outcome, result.reason) == ("stopped", "seen enough")
    assert "another thread than its callbacks" in refused[0]
    record = CheckpointStore(found["whole"].parent).load(found["whole"])
    assert 3 < record.step <= result.step
    assert set(load_file(found["alone"])) == {"weight", "bias"}
    after = orchestrator.save_checkpoint()
    assert after == tmp_path / "run" / "model.safetensors"
    assert torch.equal(load_file(after)["weight"], model.weight)


def asking(orchestrator: Orchestrator, ask: Callable[[], None]) -> Any:
    """Train until ``ask`` has run in another thread; how the run ended."""
    begun, raised = threading.Event(), []
    orchestrator.bus.subscribe(lambda event: begun.set() if isinstance(event, StepCommitted) else None)

    def run() -> None:
        try:
            assert begun.wait(60)
            ask()
        except BaseException as error:
            raised.append(error)
        orchestrator.stop()

    thread = threading.Thread(target=run)
    thread.start()
    result = orchestrator.start_training(DataLoader(dataset(), batch_size=8, shuffle=True), 300)
    thread.join(10)
    assert not raised, raised
    return result


def test_workers_on_this_machine_that_are_islands_are_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def trained(_: Orchestrator, job: Any, settings: CoordinatorConfig) -> None:
        asked.append(settings.numerics)
        raise UsageError("that is all")

    monkeypatch.setattr(Orchestrator, "_train", trained)
    orchestrator = orchestrator_for(tmp_path / "run", num_workers=2)
    orchestrator.register_model(linear())
    for island in ("", "tp=2"):
        monkeypatch.setenv("W5XDE_ISLAND", island)
        with pytest.raises(UsageError, match="that is all"):
            orchestrator.start_training(DataLoader(dataset(), batch_size=8))
    assert asked == [EXACT, FIRST]


def test_a_stop_while_the_run_is_prepared_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = orchestrator_for(tmp_path / "run")

    class Asking(torch.optim.AdamW):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            assert not orchestrator.listening.is_set()
            orchestrator.stop("seen enough")
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(torch.optim, "AdamW", Asking)
    orchestrator.register_model(linear())
    orchestrator.listening.set()  # as a run that failed leaves it
    result = orchestrator.start_training(DataLoader(dataset(), batch_size=8, shuffle=True), 10)
    assert (result.outcome, result.reason, result.step) == ("stopped", "seen enough", 0)


def test_a_ctrl_c_while_its_workers_are_started_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def interrupted(*_: Any) -> AsyncIterator[None]:
        raise asyncio.CancelledError
        yield

    monkeypatch.setattr("w5xde_async.facade.guava.orchestrator.local_workers", interrupted)
    orchestrator = orchestrator_for(tmp_path / "run")
    orchestrator.register_model(linear())
    result = orchestrator.start_training(DataLoader(dataset(), batch_size=8, shuffle=True), 10)
    assert (result.outcome, result.reason, result.step) == ("stopped", "Ctrl-C", 0)
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_checkpoint_that_the_disk_does_not_take_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = orchestrator_for(tmp_path / "run")
    orchestrator.register_model(linear())
    saving = CheckpointStore.save

    def fail(store: CheckpointStore, record: Any) -> Any:
        raise StoreError("there", "no space left")

    def ask() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointStore, "save", fail)
            monkeypatch.setattr("w5xde_async.coordinator.durability.checkpointing.REMIND_S", 1e9)
            for _ in range(2):  # the second time the run has said so already
                with pytest.raises(StoreError, match=r"no checkpoint of step \d+: there: no space left"):
                    orchestrator.save_checkpoint()
        assert CheckpointStore.save is saving
        assert orchestrator.save_checkpoint().exists()

    assert asking(orchestrator, ask).outcome == "stopped"


def test_a_save_from_before_the_call_is_not_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = orchestrator_for(tmp_path / "run", save_interval=1)
    orchestrator.register_model(linear())
    begun, asked = threading.Event(), threading.Event()
    steps: list[int] = []
    saving, requesting = CheckpointStore.save, Coordinator.request_checkpoint

    def save(store: CheckpointStore, record: Any) -> Any:
        steps.append(record.step)
        begun.set()
        assert asked.wait(60)
        return saving(store, record)

    def request(coordinator: Coordinator) -> None:
        requesting(coordinator)
        asked.set()

    monkeypatch.setattr(CheckpointStore, "save", save)
    monkeypatch.setattr(Coordinator, "request_checkpoint", request)

    def ask() -> None:
        assert begun.wait(60)
        saved = orchestrator.save_checkpoint()
        step = int(re.findall(r"\d+", saved.name)[-1])
        assert step > steps[0]

    asking(orchestrator, ask)


def test_a_report_that_the_disk_does_not_take_costs_no_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    orchestrator = orchestrator_for(tmp_path / "run")
    orchestrator.register_model(linear())
    orchestrator.enable_memory_profiling(tmp_path / "file" / "memory")
    assert orchestrator.start_training(DataLoader(dataset(), batch_size=24), 1).outcome == "finished"
    assert "no memory report: " in capfd.readouterr().err
    assert not tracemalloc.is_tracing()


def test_memory_is_profiled_while_it_trains(tmp_path: Path) -> None:
    orchestrator = orchestrator_for(tmp_path / "run")
    orchestrator.register_model(linear())
    with pytest.raises(UsageError, match="enable_memory_profiling"):
        orchestrator.memory_report()
    orchestrator.enable_memory_profiling(tmp_path / "memory")
    orchestrator.start_training(DataLoader(dataset(), batch_size=24), 1)
    (report,) = (tmp_path / "memory").iterdir()
    told = json.loads(report.read_text())
    assert told["resident_bytes"] > 1 << 20
    assert told["traced_bytes"] > 0


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (lambda: Orchestrator(DistributedConfig(), mode="both"), UsageError, "give local or orchestrator"),  # type: ignore[arg-type]
        (lambda: Orchestrator(DistributedConfig()).start_training(dataset()), UsageError, "call register_model"),
        (
            lambda: Orchestrator(DistributedConfig()).register_model("gpt"),
            UsageError,
            "^model is 'gpt'; give a ",
        ),  # type: ignore[arg-type]
        (lambda: NetworkWorker(-1), UsageError, "gpu_id is -1"),
        (lambda: NetworkWorker("0"), UsageError, "gpu_id is '0'"),  # type: ignore[arg-type]
        (lambda: NetworkWorker(0, DistributedConfig(), sandbox="maybe"), UsageError, "sandbox is 'maybe'"),
        (lambda: NetworkWorker(0, DistributedConfig(), master_port="29500"), UsageError, "^master_port is '29500'"),  # type: ignore[arg-type]
        (lambda: NetworkWorker(0, DistributedConfig(), timeout_s=-1.0), UsageError, "^timeout_s is -1.0"),
        (lambda: NetworkWorker(0, DistributedConfig(), log="loud"), UsageError, "log is 'loud'"),  # type: ignore[arg-type]
        (lambda: started(num_epochs=0), UsageError, "num_epochs is 0"),
        (lambda: started(val_dataloader=[]), UsageError, "^val_dataloader is empty"),
        (lambda: started(val_dataloader=DataLoader(TensorDataset(torch.zeros(0)))), UsageError, "is empty"),
        (lambda: started(val_dataloader=5), UsageError, "^val_dataloader is a int"),
    ],
)
def test_what_cannot_be_is_said_at_once(wrong: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        wrong()


class NoBatches(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_validation_that_measures_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """No ``val_loss`` of 0, and no silence."""
    orchestrator = Orchestrator(DistributedConfig())
    orchestrator.register_model(linear())
    orchestrator._job_of(dataset(), 1, None, 3)
    assert "val_interval=3 has no effect without a val_dataloader" in caplog.text
    job, _ = orchestrator._job_of(dataset(), 1, DataLoader(NoBatches()))  # nobody knows before it is read
    assert job.evaluate is not None
    with pytest.raises(ValueError, match="val_dataloader gives no batch"):
        job.evaluate(linear())


def test_a_part_in_eval_mode_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    Orchestrator(DistributedConfig()).register_model(nn.Sequential(nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)))
    assert "0 is in eval mode, and a step begins in training mode" in caplog.text


def test_a_number_first_in_a_batch_for_validation_is_no_count_of_samples() -> None:
    orchestrator = Orchestrator(DistributedConfig())
    orchestrator.register_model(linear(), F.mse_loss)
    x = torch.randn(6, 4)
    batches = [
        {"scale": torch.tensor(2.0), "input_ids": part, "labels": torch.zeros(len(part), 2)} for part in (x[:4], x[4:])
    ]
    job, _ = orchestrator._job_of(dataset(), 1, batches)
    assert job.evaluate is not None
    with torch.no_grad():
        wanted = F.mse_loss(linear()(x), torch.zeros(6, 2)).item()
        assert job.evaluate(linear())["val_loss"] == pytest.approx(wanted)


def started(**kwargs: Any) -> Any:
    orchestrator = Orchestrator(DistributedConfig(master_port=0))
    orchestrator.register_model(linear())
    return orchestrator.start_training(dataset(), **kwargs)


# -- the worker's program ----------------------------------------------------------------------------------


def test_workers_are_told_apart_over_machines() -> None:
    assert NetworkWorker(0, DistributedConfig())._config.name == f"{socket.gethostname()}-gpu-0"


@pytest.mark.usefixtures("as_a_program")
def test_the_workers_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    class Recorded(NetworkWorker):
        def connect_and_train(self) -> None:
            made.append((self.gpu_id, self._place.server, self._config.sandbox, self._interface))

    monkeypatch.setattr("w5xde_async.facade.guava.workers.network_worker.NetworkWorker", Recorded)
    assert program.main(["--gpu-id", "1", "--master-ip", "10.0.0.9", "--master-port", "29501"]) == 0
    monkeypatch.setenv("MASTER_IP", "there")
    monkeypatch.setenv("MASTER_PORT", "7")
    assert program.main(["--sandbox", "off", "--interface", "lo"]) == 0
    assert made == [(1, "10.0.0.9:29501", "auto", ""), (0, "there:7", "off", "lo")]
    assert program.main(["--interface", "nothing0"]) == 2
    assert "nothing0" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        program.main(["--gpu-id", "first"])
    assert ended.value.code == 2


@pytest.mark.usefixtures("as_a_program")
def test_what_the_workers_program_warns_of_as_it_begins_waits_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a handler of the package's own, Python would write it, and wait where nobody reads."""
    shown: list[int] = []

    class Warns(NetworkWorker):
        def __init__(self, *_: Any, **__: Any) -> None:
            shown.append(len(logging.getLogger("w5xde_async").handlers))

        def connect_and_train(self) -> None: ...

    monkeypatch.setattr("w5xde_async.facade.guava.workers.network_worker.NetworkWorker", Warns)
    assert program.main([]) == 0
    assert shown == [1]
    assert not logging.getLogger("w5xde_async").handlers


@pytest.mark.usefixtures("as_a_program")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 75)])
def test_a_worker_that_is_told_to_leave_ends_as_every_worker_does(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(self: NetworkWorker) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(NetworkWorker, "connect_and_train", told)
    assert program.main([]) == code


@pytest.mark.usefixtures("as_a_program")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_a_worker_that_is_told_to_leave_finishes_what_is_under_way(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[str] = []

    async def working(worker: Worker) -> Departure:
        signal.raise_signal(number)
        try:
            await asyncio.Event().wait()
        finally:
            left.append(worker.name)
        raise AssertionError

    async def island(dialer: Dialer) -> str:
        return ""

    monkeypatch.setattr(network_worker, "working", working)
    monkeypatch.setattr(network_worker.Dialer, "island", island)
    assert (program.main(["--master-port", "7"]), len(left)) == (code, 1)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"{name}: the piece of a batch under way is finished" in capsys.readouterr().err


@pytest.mark.usefixtures("as_a_program")
@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_ends_a_worker_at_once(
    numbers: tuple[signal.Signals, signal.Signals], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it finishes what is under way."""
    ended: list[int] = []
    over = asyncio.Event()

    def end(code: int) -> None:
        ended.append(code)
        over.set()

    async def working(worker: Worker) -> Departure:
        signal.raise_signal(numbers[0])
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        signal.raise_signal(numbers[1])
        await over.wait()
        return Departure.DRAINED

    async def island(dialer: Dialer) -> str:
        return ""

    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr(network_worker, "working", working)
    monkeypatch.setattr(network_worker.Dialer, "island", island)
    program.main(["--master-port", "7"])
    assert ended == [ExitCode.INTERRUPTED_TWICE]


def test_the_workers_program_hears_signals_before_torch_is_imported() -> None:
    script = (
        "import sys, os, signal, w5xde_async.facade.guava.__main__ as program\n"
        "assert 'torch' not in sys.modules\n"
        "class Torch:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'torch': os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Torch)\n"
        "sys.exit(program.main([]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.partition(": ")[2]) == (75, "stopped before it began\n")


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        ("core.config", "import DistributedConfig"),
        ("communication.protocol", "docs/protocol.md"),
        ("orchestration.orchestrator", "import Orchestrator"),
        ("workers.base_worker", "docs/embedding.md"),
        ("utils.socket_utils", "tuned by themselves"),
        ("utils.checkpoint", "docs/resume.md"),
        ("examples.transformer", "examples/"),
        ("network_worker", "python -m w5xde_async.facade.guava.workers.network_worker"),
    ],
)
def test_a_module_that_guava_had_says_what_there_is_instead(module: str, instead: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=re.escape(instead)):
        importlib.import_module(f"w5xde_async.facade.guava.{module}")


def test_another_module_is_missing_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'w5xde_async\.facade\.guava\.banana'"):
        importlib.import_module("w5xde_async.facade.guava.banana")


def test_who_waits_for_an_orchestrator_that_cannot_listen_is_let_go(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = DistributedConfig(master_ip="127.0.0.1", master_port=port, checkpoint_dir=str(tmp_path))
        orchestrator = Orchestrator(config, mode="orchestrator")
        orchestrator.register_model(nn.Linear(8, 4))
        data = DataLoader(TensorDataset(torch.randn(32, 8), torch.arange(32) % 4), batch_size=8)
        failed: list[BaseException] = []

        def train() -> None:
            try:
                orchestrator.start_training(data, 1)
            except PortInUse as error:
                failed.append(error)

        training = threading.Thread(target=train)
        training.start()
        assert orchestrator.listening.wait(20)
        training.join(5)
        assert len(failed) == 1
