"""A loss that is no mean over samples is told of at the start, and no other one is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from w5xde_async import Job
from w5xde_async.compute import mean_over_samples
from w5xde_async.compute.mean_over_samples import _apart, what_is_no_mean
from w5xde_async.job import build_model

_LABELS = torch.arange(64) * 5 % 7 % 2
_DATA = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), _LABELS)
_WEIGHTS = torch.tensor([1.0, 10.0])


def _of_first(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, labels: loss(out[:, 0], labels.float())


def _smooth(model: nn.Module, batch: Any) -> Tensor:
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1) + 0.1 * penalty


def _contrastive(model: nn.Module, batch: Any) -> Tensor:
    rows = functional.normalize(model(batch[0]), dim=-1)
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def _noisy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0] + torch.randn_like(batch[0])), batch[1])


def _views(model: nn.Module, batch: Any) -> Tensor:
    """As SimCLR has it: each sample twice, in two augmentations."""
    one, other = (functional.normalize(model(batch[0] + 0.1 * torch.randn_like(batch[0])), dim=-1) for _ in range(2))
    return functional.cross_entropy(one @ other.T, torch.arange(len(one)))


def _very_noisy(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).square() * torch.randn(len(batch[0]), 1).exp()).mean()


_TOKENS = torch.randint(50, (64, 12), generator=torch.Generator().manual_seed(0))
_LENGTHS = torch.arange(64) * 5 % 9 + 3


class _Beginning(nn.Module):
    """A language model as it begins: to it every token is as likely as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens))  # type: ignore[no-any-return]


def _padded(samples: list[Any]) -> dict[str, Tensor]:
    """As transformers' collators do it, with no label on what is padded."""
    tokens, lengths = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(12) >= lengths[:, None], -100)}


def _over_tokens(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def _over_samples(model: nn.Module, batch: Any) -> Tensor:
    losses = functional.cross_entropy(model(batch["input_ids"]).transpose(1, 2), batch["labels"], reduction="none")
    return (losses.sum(1) / (batch["labels"] != -100).sum(1)).mean()


def _in_bf16(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _over_samples(model, batch)


def _language(step: Any, **changed: Any) -> Job:
    given = {"dataset": TensorDataset(_TOKENS, _LENGTHS), **changed}
    return _job(step=step, model=_Beginning, collate=_padded, **given)


def _failing(model: nn.Module, batch: Any) -> Tensor:
    raise ArithmeticError("not on this machine")


def _job(loss: Any = None, step: Any = None, **changed: Any) -> Job:
    job = Job(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)),
        dataset=_DATA, loss=loss, step=step, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=16, microbatch_size=4, epochs=1,
    )  # fmt: skip
    return replace(job, **changed)


def _told(job: Job) -> str | None:
    return what_is_no_mean(job, build_model(job), 1 << 20)


@pytest.mark.parametrize(
    "job",
    [
        _job(nn.CrossEntropyLoss(weight=_WEIGHTS)),
        _job(nn.CrossEntropyLoss(ignore_index=1)),
        _job(nn.CrossEntropyLoss(reduction="sum")),
        _job(lambda out, labels: functional.cross_entropy(out, labels, weight=_WEIGHTS)),
        _job(_of_first(lambda out, labels: functional.mse_loss(out, labels).sqrt())),
        _job(step=_contrastive),
        _job(step=_views),
        _job(step=_views, dataset=[_DATA[at] for at in range(64)]),
        _job(nn.CrossEntropyLoss(weight=_WEIGHTS), dataset=[_DATA[at] for at in range(64)]),
        _job(nn.CrossEntropyLoss(weight=_WEIGHTS), precision="bf16"),
    ],
    ids=[
        "weights",
        "ignored",
        "sum",
        "function",
        "root",
        "contrastive",
        "views",
        "views of samples",
        "samples",
        "bf16",
    ],
)
def test_what_is_no_mean_is_told(job: Job) -> None:
    told = _told(job)
    assert told is not None
    assert "the loss of the first 8 samples is" in told
    assert ("8 draws" in told) == (job.step is _views)
    assert "it is no mean over samples" in told
    assert "microbatch_size=16 keeps them whole" in told
    assert _told(replace(job, microbatch_size=16)) is None


@pytest.mark.parametrize(
    "job",
    [
        _job(nn.CrossEntropyLoss()),
        _job(_of_first(nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)))),
        _job(lambda out, labels: functional.kl_div(out.log_softmax(1), out.softmax(1).detach(), reduction="batchmean")),
        _job(lambda out, labels: out.sum() * 0.0 + 1e-9 * len(out)),
        _job(lambda out, labels: 1.0 + 1e-7 * len(out) * out.mean()),
        _job(step=_smooth),
        *[_job(step=_noisy, seed=seed) for seed in range(20)],
        *[_job(step=_very_noisy, seed=seed) for seed in range(20)],
        _job(step=_failing),
        _job(lambda out, labels: functional.cross_entropy(out, labels) * torch.nan),
        _job(nn.CrossEntropyLoss(), precision="bf16"),
    ],
    ids=[
        "mean",
        "weighted sample by sample",
        "batchmean",
        "rounding",
        "rounding of gradients",
        "penalty",
        *["noisy"] * 20,
        *["very noisy"] * 20,
        "failing",
        "not finite",
        "bf16",
    ],
)
def test_nothing_is_told_of_others(job: Job) -> None:
    assert _told(job) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", [functional.cross_entropy, functional.mse_loss])
def test_coarse_numbers_are_rounded_more(dtype: torch.dtype, loss: Any) -> None:
    for seed in range(20):
        chance = torch.Generator().manual_seed(seed)
        x = torch.randn(64, 16, generator=chance).to(dtype)
        y = _LABELS if loss is functional.cross_entropy else torch.randn(64, 2, generator=chance).to(dtype)
        job = _job(loss, model=lambda: nn.Linear(16, 2).to(dtype), dataset=TensorDataset(x, y), seed=seed)
        assert _told(job) is None
        summed = replace(job, loss=lambda out, target: loss(out, target, reduction="sum"))
        assert _told(summed) is not None


@pytest.mark.parametrize("number", range(1, 9))
def test_a_dataset_of_few_samples_is_looked_at_over_and_over(number: int) -> None:
    few = TensorDataset(*_DATA[:number])
    for dataset in (few, [few[at] for at in range(number)]):
        assert _told(_job(nn.CrossEntropyLoss(), dataset=dataset)) is None
        assert _told(_job(nn.CrossEntropyLoss(reduction="sum"), dataset=dataset)) is not None


def test_a_mean_over_tokens_is_told_where_every_token_costs_alike() -> None:
    """No loss shows it there, and the gradients do."""
    told = _told(_language(_over_tokens))
    assert told is not None
    assert re.search(
        r"the loss of the first 8 samples has a gradient that is \d+% off the mean of those of their", told
    )
    assert "a mean over tokens" in told
    assert "it is no mean over samples" in told


def test_gradients_as_large_as_a_vocabulary_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, grad = [], torch.autograd.grad

    def counted(loss: Any, of: Any, **options: Any) -> Any:
        sizes.append(sum(parameter.numel() for parameter in of))
        return grad(loss, of, **options)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    monkeypatch.setattr(mean_over_samples, "_MOST_VALUES", 100)
    assert "has a gradient that is" in str(_told(_language(_over_tokens)))  # the bias tells
    assert sizes == [50] * 5


@pytest.mark.parametrize("step", [_over_samples, _in_bf16])
def test_a_mean_over_samples_of_means_over_tokens_is_one(step: Any) -> None:
    assert _told(_language(step)) is None


def test_samples_of_as_many_tokens_each_are_a_mean() -> None:
    data = TensorDataset(_TOKENS, torch.full((64,), 7))
    assert _told(_language(_over_tokens, dataset=data)) is None


def test_gradients_in_fewer_bits_are_no_further_apart_than_their_rounding() -> None:
    model = _Beginning().bfloat16()
    job = _language(_over_samples)
    samples = [_padded([job.dataset[at] for at in range(begin, end)]) for begin, end in ((0, 8), (0, 4), (4, 8))]
    assert _apart(job, model, samples, torch.finfo(torch.bfloat16).eps) == 0.0
    assert _apart(_language(_over_tokens), _Beginning(), samples, torch.finfo(torch.float32).eps) > 0.03


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (nn.CrossEntropyLoss(weight=_WEIGHTS), "the job's CrossEntropyLoss divides by the weights of the classes"),
        (nn.NLLLoss(ignore_index=0), "the job's NLLLoss leaves out ignore_index=0"),
        (nn.MSELoss(reduction="sum"), "the job's MSELoss has reduction='sum'"),
        (nn.CrossEntropyLoss(), None),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), None),
        (nn.MSELoss(), None),
        (functional.cross_entropy, None),
    ],
)
def test_where_no_step_is_tried_a_loss_of_torchs_says_it_itself(loss: Any, says: str | None) -> None:
    job = _job(loss)
    told = what_is_no_mean(job, build_model(job), 0)
    assert (told or "").partition(":")[0] == (says or "")


def test_what_takes_long_is_not_looked_at() -> None:
    calls = 0

    def step(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += batch[0].device.type == "cpu"
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    job = _job(step=step)
    assert what_is_no_mean(job, build_model(job), 10**14) is None
    assert what_is_no_mean(job, build_model(job), 0) is None  # it was not tried
    assert calls == 0
    assert what_is_no_mean(job, build_model(job), 10**6) is not None
    assert calls == 5


def test_neither_the_model_nor_the_random_state_is_changed() -> None:
    job = _job(lambda out, labels: functional.cross_entropy(out, labels, weight=_WEIGHTS))
    model = build_model(job)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.rand(3)  # by whoever embeds the run
    state = torch.get_rng_state()
    assert what_is_no_mean(job, model, 1 << 20) is not None
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
