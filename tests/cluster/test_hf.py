"""A Job from a Trainer of transformers does what the Trainer does: held against ``Trainer.train()`` itself."""

from __future__ import annotations

import asyncio
import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import datasets
import pytest
import torch
from tests.support import reference
from tests.support.cluster import QUICK_WORKER, settings
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset, WeightedRandomSampler
from tqdm import tqdm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.tokenization_utils_base import BatchEncoding

from w5xde_async import hf
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import JobError
from w5xde_async.hf import job_of
from w5xde_async.job import Job
from w5xde_async.params.flat import named_digest
from w5xde_async.worker.service import Departure, Worker

SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # the bars of transformers would leave a thread behind


def samples(count: int) -> list[dict[str, Tensor]]:
    found = [torch.randint(32, (12,), generator=torch.Generator().manual_seed(n)) for n in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in found]


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZE))


def made(tmp_path: Path, kind: type[Trainer] = Trainer, *, arguments: Any = None, **given: Any) -> Trainer:
    """A small Trainer: 5 steps of 2 x 4 samples."""
    base = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 5, "learning_rate": 1e-2,
        "weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine", "report_to": [], "use_cpu": True,
        "train_sampling_strategy": "sequential", "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(tmp_path / "out"), **base | (arguments or {}))
    return kind(**{"model": language_model(), "args": args, "train_dataset": samples(40)} | given)


class Doubled(Trainer):
    """Another loss."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


class Logged(Doubled):
    """Reads what stays as it is, and logs."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        self.log({"something": 1.0})
        part = self.state.max_steps / 10 * self.state.train_batch_size * self.state.is_world_process_zero
        return super().compute_loss(model, inputs, return_outputs, **given) * part


def same(job: Job, trained: Trainer) -> None:
    model, _ = reference.train(job)
    trained.train()
    for (name, ours), theirs in zip(model.named_parameters(), trained.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_grad_norm": 0.0, "optim": "adafactor", "lr_scheduler_type": "constant_with_warmup"},
        {"max_steps": -1, "num_train_epochs": 1.5, "max_grad_norm": 0.05},
        {"bf16": True},
        {"label_smoothing_factor": 0.2},
        {"activation_checkpointing": True, "dataloader_drop_last": True},
        {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"every_n_layers": 2, "use_reentrant": False},
            "max_grad_norm": -1.0,  # does not clip
        },
    ],
    ids=str,
)
def test_it_comes_to_the_parameters_of_the_trainer_itself(arguments: dict[str, Any], tmp_path: Path) -> None:
    trainer = made(tmp_path, arguments=arguments)
    before = copy.deepcopy(trainer.model.state_dict())
    same(job_of(trainer), made(tmp_path, arguments=arguments))
    assert not all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())  # in place


def test_checkpointing_of_a_model_that_has_it_by_its_older_name(tmp_path: Path) -> None:
    class Older(nn.Linear):
        def gradient_checkpointing_enable(self, **given: Any) -> None:
            self.given = given

    arguments = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}
    trainer = made(tmp_path, model=Older(2, 2), arguments=arguments)
    job_of(trainer)
    assert trainer.model.given == {"gradient_checkpointing_kwargs": None, "every_n_layers": 2}


def test_an_own_loss_and_optimizer_are_taken_over(tmp_path: Path) -> None:
    given = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.5})}
    same(job_of(made(tmp_path, Doubled, **given)), made(tmp_path, Doubled, **given))


def test_an_own_loss_may_read_what_stays_as_it_is(tmp_path: Path) -> None:
    given = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.5})}
    same(job_of(made(tmp_path, Logged, **given)), made(tmp_path, Logged, **given))


@pytest.mark.parametrize("count", [15, 18, 26, 30, 32])
def test_the_last_batch_is_dropped_and_what_was_accumulated_before_it_is_a_step(count: int, tmp_path: Path) -> None:
    arguments = {
        "dataloader_drop_last": True, "gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2.0,
        "max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.5,
    }  # fmt: skip
    given = {"train_dataset": samples(count), "arguments": arguments}
    job, trained = job_of(made(tmp_path, **given)), made(tmp_path, **given)
    same(job, trained)
    assert job.max_steps == trained.state.global_step == 2 * -(-(count // 4) // 3)


def test_of_samples_in_random_order_it_is_said_which_are_dropped(tmp_path: Path) -> None:
    arguments = {"dataloader_drop_last": True, "gradient_accumulation_steps": 3, "train_sampling_strategy": "random"}
    with pytest.warns(UserWarning, match="of 30 samples no epoch has the last 2, and in the Trainer"):
        job_of(made(tmp_path, arguments=arguments, train_dataset=samples(30)))
    for count in (24, 25, 28):  # of 25 another one is left out in each epoch, as in the Trainer
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            job = job_of(made(tmp_path, arguments=arguments, train_dataset=samples(count)))
        assert (job.num_samples, job.drop_last) == (count, count == 25)


def test_where_dropping_leaves_nothing_or_would_cut_a_stream_it_is_refused(tmp_path: Path) -> None:
    arguments = {"dataloader_drop_last": True, "gradient_accumulation_steps": 3}
    with pytest.raises(JobError, match="dataloader_drop_last leaves nothing to train on: 3 samples, 4 a batch"):
        job_of(made(tmp_path, arguments=arguments, train_dataset=samples(3)))
    arguments["per_device_train_batch_size"] = 6
    with pytest.raises(JobError, match=r"the last 4 samples of an epoch.*make it a stream of 36 samples"):
        job_of(made(tmp_path, arguments=arguments | {"gradient_accumulation_steps": 4}, train_dataset=_Counted()))


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples(40))


class _Counted(_Stream):
    def __len__(self) -> int:
        return 40


def _streamed() -> Any:
    """Of ``datasets``, with a column that the model does not take."""
    rows = [{name: value.tolist() for name, value in one.items()} | {"unused": "x"} for one in samples(40)]
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.filterwarnings("ignore:of the Trainer not taken over")
@pytest.mark.parametrize(
    ("stream", "arguments"),
    [
        (_Stream, {}),
        (_streamed, {}),
        (_Counted, {"max_steps": -1, "num_train_epochs": 2, "train_sampling_strategy": "random"}),
    ],
    ids=["plain", "of datasets", "with a length"],
)
def test_a_stream_is_read_as_the_trainer_reads_it(stream: Any, arguments: Any, tmp_path: Path) -> None:
    given = {"train_dataset": stream(), "arguments": arguments, "data_collator": default_data_collator}
    job = job_of(made(tmp_path, **given))
    assert (job.streamed, job.max_steps) == (True, 10 if arguments else 5)
    same(job, made(tmp_path, **given))


def test_of_a_stream_without_a_length_no_epoch_is_seen(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the stream has no len\(\), and a step may hold the end of one epoch"):
        job_of(made(tmp_path, train_dataset=_Stream()))
    given = {"train_dataset": _Stream(), "eval_dataset": samples(4)}
    with pytest.raises(JobError, match="eval_strategy is epoch, and its stream has no len"):
        job_of(made(tmp_path, arguments={"eval_strategy": "epoch"}, **given))


def padded(count: int) -> list[dict[str, Tensor]]:
    """The same with fewer and fewer labels, as samples that were padded have them."""
    return [
        {**sample, "labels": sample["labels"].masked_fill(torch.arange(12) > 11 - n % 7, -100)}
        for n, sample in enumerate(samples(count))
    ]


@pytest.mark.filterwarnings("ignore:of the Trainer not taken over")
def test_tokens_of_one_microbatch_weigh_as_the_trainer_weighs_them(tmp_path: Path) -> None:
    arguments = {"gradient_accumulation_steps": 1}
    given = {"train_dataset": padded(40)}
    same(job_of(made(tmp_path, arguments=arguments, **given)), made(tmp_path, arguments=arguments, **given))


def test_that_several_microbatches_weigh_otherwise_is_said(tmp_path: Path) -> None:
    """The Trainer takes the mean over a step's tokens, of which a worker sees its own microbatch alone."""
    with pytest.warns(UserWarning, match="different numbers of tokens"):
        job = job_of(made(tmp_path, train_dataset=padded(40)))
    with pytest.raises(AssertionError, match="not close"):
        same(job, made(tmp_path, train_dataset=padded(40)))


class Mean(Trainer):
    """A loss that does not ask for the number of labels of the whole step."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Divided(Mean):
    loss_is_scaled_for_ga = False


def of_function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def unshifted() -> dict[str, Any]:
    """The Trainer does not know that its loss leaves out the first of 12 labels."""
    torch.manual_seed(0)
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    model = GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    model.loss_type = None  # as it is in transformers 5.24
    return {"model": model}


def classes() -> dict[str, Any]:
    torch.manual_seed(0)
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    dataset = [{"input_ids": one["input_ids"], "labels": torch.tensor(n % 2)} for n, one in enumerate(samples(40))]
    return {"model": BertForSequenceClassification(BertConfig(**SIZE, **drop)), "train_dataset": dataset}


@pytest.mark.parametrize(
    ("kind", "given", "ratio"),
    [
        (Mean, dict, 2.0),
        (Divided, dict, 1.0),
        (Trainer, lambda: {"compute_loss_func": of_function}, 2.0),
        (Trainer, classes, 2.0),
        (Trainer, unshifted, 11 / 12),
        (Trainer, dict, 1.0),
    ],
    ids=["own loss", "own loss that is divided", "loss function", "bert", "gpt2", "llama"],
)
@pytest.mark.filterwarnings("ignore:of the Trainer not taken over")
def test_how_large_its_gradients_would_be_is_said(kind: Any, given: Any, ratio: float, tmp_path: Path) -> None:
    arguments = {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0, "warmup_steps": 0, "weight_decay": 0.0}

    def trained(**changes: Any) -> tuple[dict[str, Tensor], Trainer]:
        trainer = made(tmp_path, kind, arguments=arguments | changes, **given())
        return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}, trainer

    before, trainer = trained()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job = job_of(trainer)
    said = [str(one.message) for one in told if "the size of gradients" in str(one.message)]
    if not math.isclose(ratio, 1.0):
        (text,) = said
        assert f"its gradients are {ratio:.3g} times the mean" in text
        assert all(module.training for module in trainer.model.modules())
    else:
        assert not said
    model, _ = reference.train(job)
    _, other = trained()
    other.train()
    for (name, ours), theirs in zip(model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(ratio * (ours - before[name]), theirs - before[name], rtol=2e-3, atol=1e-6)


def test_evaluation_gives_the_metrics_of_the_trainer(tmp_path: Path) -> None:
    def metrics(found: Any) -> dict[str, float]:
        return {"hits": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    arguments = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "hits"}
    trainer = made(tmp_path, arguments=arguments, eval_dataset=samples(10), compute_metrics=metrics)
    job = job_of(trainer)
    assert (job.evaluate_every, job.keep_best) == (2, "max:eval_hits")
    assert job.evaluate is not None
    other = LlamaForCausalLM(LlamaConfig(**SIZE)).eval()
    found = job.evaluate(other)
    assert trainer.state.log_history == []
    assert not trainer.accelerator._models
    expected = made(tmp_path, model=other, eval_dataset=samples(10), compute_metrics=metrics).evaluate()
    assert found == {name: expected[name] for name in ("eval_loss", "eval_hits")}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:of the Trainer not taken over")
def test_it_trains_with_a_worker_that_has_no_code(tmp_path: Path) -> None:
    """Batches of a tokenizer's collator are no plain dicts: they travel all the same."""

    def collate(found: list[dict[str, Tensor]]) -> BatchEncoding:
        return BatchEncoding({name: torch.stack([one[name] for one in found]) for name in found[0]})

    def model() -> nn.Module:
        torch.manual_seed(0)
        return LlamaForSequenceClassification(LlamaConfig(**SIZE, pad_token_id=0))

    dataset = [{"input_ids": one["input_ids"] % 31 + 1, "labels": torch.tensor(n % 2), "unused": torch.ones(1)}
               for n, one in enumerate(samples(40))]  # fmt: skip
    given = {"data_collator": collate, "train_dataset": dataset}

    async def train() -> str:
        job = job_of(made(tmp_path, model=model(), **given))
        async with Coordinator(job, config=settings(code_free=True)) as coordinator:
            worker = asyncio.create_task(Worker(coordinator.address, job=None, config=QUICK_WORKER).run())
            result = await coordinator.wait()
            assert await worker is Departure.FINISHED
        return result.digest

    assert asyncio.run(train()) == named_digest(reference.train(job_of(made(tmp_path, model=model(), **given)))[0])


def optimizers() -> dict[str, Any]:
    model = language_model()
    return {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}


@pytest.mark.parametrize(
    ("arguments", "given", "words"),
    [
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "steps"}, {"eval_dataset": samples(4)}, "greedy"),
        ({}, {"train_dataset": None}, "train_dataset"),
        ({}, {"optimizers": None}, "optimizer_cls_and_kwargs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_the_result_is_refused_by_name(
    arguments: dict[str, Any], given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    given = optimizers() if "optimizers" in given else given
    with pytest.raises(JobError, match=words):
        job_of(made(tmp_path, arguments=arguments, **given))


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(JobError, match=r"hf\.job_of: it is given a Linear; give a Trainer of transformers"):
        job_of(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_that_evaluations_are_made_at_other_steps_is_said(tmp_path: Path) -> None:
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 3, "eval_on_start": True}
    with pytest.warns(UserWarning, match="eval_delay 3: evaluations before it are made.*eval_on_start"):
        job_of(made(tmp_path, arguments=arguments, eval_dataset=samples(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job_of(made(tmp_path, arguments=arguments | {"eval_strategy": "no"}))


def test_that_workers_choose_deterministic_kernels_themselves_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.trainer.enable_full_determinism", lambda seed: None)  # in all of this process
    with pytest.warns(UserWarning, match="not taken over: full_determinism: start workers with --deterministic"):
        job_of(made(tmp_path, arguments={"full_determinism": True}))


def test_what_is_left_out_is_said_once(tmp_path: Path) -> None:
    class Mine(TrainerCallback):
        pass

    arguments = {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 1}
    trainer = made(tmp_path, arguments=arguments, callbacks=[Mine(), EarlyStoppingCallback(3)])
    with pytest.warns(UserWarning, match="Mine, EarlyStoppingCallback.*group_by_length.*one microbatch") as said:
        job_of(trainer)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job_of(made(tmp_path))


#: What the Trainer's gradients are to be: a step's mean, so that SGD tells them from others.
PLAIN = {
    "optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0, "warmup_steps": 0, "weight_decay": 0.0,
    "lr_scheduler_type": "constant",
}  # fmt: skip


def weighed(weigh: Callable[[Any, Any], Any]) -> type[Trainer]:
    """A Trainer whose loss is ``weigh(trainer, model)`` times the model's."""

    class Weighed(Divided):
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            loss = weigh(self, model) * outputs.loss
            return (loss, outputs) if return_outputs else loss

    return Weighed


CHANGING: dict[str, Callable[[Any, Any], Any]] = {
    "state.global_step": lambda self, model: self.state.global_step / 10,
    "state.epoch": lambda self, model: 1 + self.state.epoch,
    "state.log_history": lambda self, model: 1 + len(self.state.log_history),
    "state.best_metric": lambda self, model: self.state.best_metric or 1,
    "optimizer.param_groups": lambda self, model: self.optimizer.param_groups[0]["lr"],
    "lr_scheduler.get_last_lr": lambda self, model: self._get_learning_rate(),
}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_what_a_step_cannot_know_it_does_not_read(
    name: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small model at once, of a large one in its first step."""
    monkeypatch.setattr(hf, "_QUICK_PARAMETERS", 0 if large else 10_000_000)
    trainer = made(tmp_path, weighed(CHANGING[name]))
    with pytest.raises(
        JobError, match=rf"compute_loss reads self\.{name}, which is not known where a step is computed"
    ):
        reference.train(job_of(trainer))
    assert (trainer.state.global_step, trainer.optimizer) == (0, None)


def test_a_loss_function_that_has_the_trainer_reads_no_state_either(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        return trainer.state.global_step * of_function(outputs, labels)

    trainer = made(tmp_path, compute_loss_func=loss)
    with pytest.raises(JobError, match=r"reads self\.state\.global_step"):
        job_of(trainer)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_steps": 12, "logging_steps": 0.3, "eval_steps": 3},
        {"max_steps": -1, "num_train_epochs": 1.5, "save_steps": 0.25},
        {"max_steps": 8, "dataloader_drop_last": True, "gradient_accumulation_steps": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("dataset", [lambda: samples(30), _Stream, _Counted])
def test_of_its_state_a_step_reads_what_the_trainer_fixes(dataset: Any, arguments: Any, tmp_path: Path) -> None:
    if dataset is _Stream and arguments.get("max_steps") == -1:
        with pytest.raises(ValueError, match="max_steps"):
            made(tmp_path, train_dataset=dataset(), arguments=arguments)
        return
    seen: list[Any] = []
    names = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps")

    def weigh(self: Any, _: Any) -> int:
        seen.append(
            [getattr(self.state, name) for name in names] + [self.is_in_train, self.state.is_world_process_zero]
        )
        return 1

    given = {"train_dataset": dataset(), "arguments": arguments}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = job_of(made(tmp_path, weighed(weigh), **given))
    assert job.step is not None
    assert job.collate is not None
    job.step(language_model(), job.collate(samples(2)))
    ours = seen[-1]
    made(tmp_path, weighed(weigh), **given).train()
    assert ours == seen[-1]


def test_a_schedule_of_the_loss_counts_steps_in_a_buffer(tmp_path: Path) -> None:
    """What docs/finetune.md advises is what ``global_step`` is to a Trainer."""

    def counting() -> nn.Module:
        model = language_model()
        model.register_buffer("steps", torch.tensor(0))
        return model

    def by_buffer(_: Any, model: Any) -> Tensor:
        weight = (model.steps + 1) / 5
        if model.training:
            model.steps += 1
        return weight  # type: ignore[no-any-return]

    job = job_of(made(tmp_path, weighed(by_buffer), model=counting(), arguments=PLAIN))
    other = made(tmp_path, weighed(lambda self, _: (self.state.global_step + 1) / 5), model=counting(), arguments=PLAIN)
    same(job, other)
    assert isinstance(job.model, nn.Module)
    assert job.model.steps == 5


def test_a_loss_that_reads_the_trainers_model_reads_that_of_the_worker(tmp_path: Path) -> None:
    def penalty(self: Any, _: Any) -> Tensor:
        return (
            1
            + self.model.lm_head.weight.square().sum()
            + self.accelerator.unwrap_model(self.model_wrapped).lm_head.weight.sum()
        )

    job = job_of(made(tmp_path, weighed(penalty)))
    gradients = []
    for model in (job.model, copy.deepcopy(job.model)):
        assert isinstance(model, nn.Module)
        assert job.step is not None
        assert job.collate is not None
        job.step(model, job.collate(samples(2))).backward()
        gradients.append(model.get_parameter("lm_head.weight").grad)
    torch.testing.assert_close(*gradients)


def test_what_a_loss_logs_is_a_metric_of_the_step(tmp_path: Path) -> None:
    class Logs(Divided):
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            self.log({"half": 0.5, "note": "no number"})
            return model(**inputs).loss

    trainer = made(tmp_path, Logs)
    job = job_of(trainer)
    assert job.step is not None
    assert job.collate is not None
    assert job.step(language_model(), job.collate(samples(2)))[1] == {"half": 0.5}
    assert trainer.state.log_history == []
    reference.train(job)


def test_what_a_loss_keeps_for_its_next_call_is_said(tmp_path: Path) -> None:
    class Counts(Divided):
        calls, taught = 0, None

        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            self.calls += 1
            self.last = model(**inputs).loss
            self.taught = self.taught or [1]
            return min(1.0, self.calls / 20) * self.last

    with pytest.warns(UserWarning, match=r"keeps on the trainer from one call to the next \(calls\)"):
        job_of(made(tmp_path, Counts))


def test_a_loss_does_not_end_the_training(tmp_path: Path) -> None:
    def stop(self: Any, _: Any) -> int:
        self.control.should_training_stop = True
        return 1

    with pytest.raises(JobError, match=r"compute_loss ends the training; .* stop_when"):
        job_of(made(tmp_path, weighed(stop)))


@pytest.mark.parametrize(
    "name",
    [
        "training_step", "_prepare_inputs", "_prepare_input", "get_batch_samples", "_get_num_items_in_batch",
        "compute_loss_context_manager", "autocast_smart_context_manager", "_clip_grad_norm", "_wrap_model", "train",
        "_inner_training_loop", "_run_epoch", "_prepare_for_training", "set_initial_training_values",
    ],
)  # fmt: skip
def test_an_own_method_that_nobody_would_call_is_refused(name: str, tmp_path: Path) -> None:
    def own(self: Any, *given: Any, **named: Any) -> Any:
        return getattr(Trainer, name)(self, *given, **named)

    with pytest.raises(JobError, match=f"Mine overrides {name}, which nobody would call; "):
        job_of(made(tmp_path, type("Mine", (Trainer,), {name: own})))
    trainer = made(tmp_path)
    setattr(trainer, name, MethodType(own, trainer))
    with pytest.raises(JobError, match=f"Trainer overrides {name}, which nobody would call; "):
        job_of(trainer)


def test_that_evaluations_are_decided_otherwise_is_said(tmp_path: Path) -> None:
    class Decides(Trainer):
        def _maybe_log_save_evaluate(self, *given: Any, **named: Any) -> None:
            super()._maybe_log_save_evaluate(*given, **named)

    with pytest.warns(UserWarning, match="own _maybe_log_save_evaluate: give evaluate"):
        job_of(made(tmp_path, Decides))


def test_a_loss_that_was_set_on_the_trainer_is_taken_over(tmp_path: Path) -> None:
    def trainer() -> Trainer:
        found = made(tmp_path, arguments=PLAIN)
        found.loss_is_scaled_for_ga = False
        found.compute_loss = MethodType(Doubled.compute_loss, found)
        return found

    same(job_of(trainer()), trainer())


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset)


class OtherData(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(samples(32)[8:], batch_size=4, collate_fn=default_data_collator)


@pytest.mark.parametrize("kind", [InOrder, OtherData])
def test_an_own_loader_of_all_samples_is_taken_over(kind: type[Trainer], tmp_path: Path) -> None:
    arguments = PLAIN | {"train_sampling_strategy": "random", "max_steps": -1, "num_train_epochs": 2}
    job = job_of(made(tmp_path, kind, arguments=arguments))
    assert not job.shuffle
    same(job, made(tmp_path, kind, arguments=arguments))


def drawn(dataset: Any) -> WeightedRandomSampler:
    weights = [float(n % 2) for n in range(len(dataset))]
    return WeightedRandomSampler(weights, len(dataset), generator=torch.Generator().manual_seed(5))


class Drawn(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return drawn(train_dataset)


class Fewer(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(samples(40), batch_size=2, collate_fn=default_data_collator)


class Cut(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(samples(40), batch_size=4, collate_fn=default_data_collator, drop_last=True)


class Endless(Trainer):
    def get_train_dataloader(self) -> Any:
        return [{}]


class Part(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset[:20])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Drawn, r"Drawn overrides _get_train_sampler, which gives samples by a WeightedRandomSampler; .*Subset"),
        (Part, "gives samples by a SequentialSampler of its own number"),
        (Fewer, "get_train_dataloader, which gives batches of 2 samples, not of 4"),
        (Cut, "gives drop_last=True"),
        (Endless, "gives a list"),
    ],
)
def test_an_own_loader_of_other_batches_is_refused(kind: type[Trainer], words: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=words):
        job_of(made(tmp_path, kind))


def test_a_subset_gives_samples_in_an_order_of_ones_own(tmp_path: Path) -> None:
    """What the refusal of a sampler advises."""
    given = Subset(samples(40), list(drawn(samples(40))))
    same(job_of(made(tmp_path, train_dataset=given, arguments=PLAIN)), made(tmp_path, Drawn, arguments=PLAIN))


class ByEpoch(Subset[Any]):
    def set_epoch(self, epoch: int) -> None: ...


class StreamByEpoch(_Counted):
    """Other samples in each epoch, and others before the first."""

    epoch = 7

    def __iter__(self) -> Any:
        return iter(samples(40 * (self.epoch + 1))[-40:])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_epochs_are_told_to_a_stream_and_a_dataset_that_wants_them_is_refused(tmp_path: Path) -> None:
    for cut in (False, True):
        arguments = {"dataloader_drop_last": cut, "gradient_accumulation_steps": 3}
        with pytest.raises(JobError, match="never told the epoch; make it an IterableDataset"):
            job_of(made(tmp_path, train_dataset=ByEpoch(samples(30), range(30)), arguments=arguments))
    arguments, stream = PLAIN | {"max_steps": 12}, StreamByEpoch
    same(*(kind(made(tmp_path, train_dataset=stream(), arguments=arguments)) for kind in (job_of, lambda one: one)))


def test_own_optimizer_and_schedule_may_set_what_they_make_and_return_nothing(tmp_path: Path) -> None:
    class Sets(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)

        def create_scheduler(self, num_training_steps: int) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1, 0, num_training_steps)

    same(job_of(made(tmp_path, Sets)), made(tmp_path, Sets))


class Averaged(torch.optim.SGD):
    """As the optimizers of schedulefree are."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_optimizers_that_do_more_than_steps_are_refused(tmp_path: Path) -> None:
    job = job_of(made(tmp_path, optimizer_cls_and_kwargs=(Averaged, {"lr": 0.1})))
    assert isinstance(job.model, nn.Module)
    with pytest.raises(JobError, match="Averaged has other parameters in evaluation"):
        job.optimizer(job.model)
    with pytest.raises(JobError, match="optim is lomo"):
        job_of(made(tmp_path, arguments={"optim": "lomo"}))


@pytest.mark.parametrize("arguments", [{"bf16": True}, {"bf16_full_eval": True}], ids=str)
def test_each_evaluation_is_in_the_precision_of_training(arguments: dict[str, Any], tmp_path: Path) -> None:
    arguments = arguments | {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.0}
    given = {"arguments": arguments, "eval_dataset": samples(10)}
    job, trained = job_of(made(tmp_path, **given)), made(tmp_path, **given)
    assert job.evaluate is not None
    found = [job.evaluate(language_model().eval())["eval_loss"] for _ in range(3)]
    trained.train()
    assert found == [one["eval_loss"] for one in trained.state.log_history if "eval_loss" in one]


def test_the_precision_of_accelerate_launch_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert job_of(made(tmp_path)).precision == "bf16"


def test_special_tokens_of_the_tokenizer_are_those_of_the_model(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(32)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w3")
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZE))
    dataset = [{"input_ids": one["input_ids"], "labels": torch.tensor(n % 2)} for n, one in enumerate(samples(40))]
    given = {
        "processing_class": tokenizer, "train_dataset": dataset, "data_collator": default_data_collator,
        "arguments": PLAIN | {"gradient_accumulation_steps": 1},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = job_of(made(tmp_path, model=copy.deepcopy(model), **given))
    same(job, made(tmp_path, model=model, **given))
