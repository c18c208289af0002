"""Models of transformers as people train them can be traced: workers need no code, and compute the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from w5xde_async.compute.program.tracing import trace_job
from w5xde_async.job import Job, build_model
from w5xde_async.params.layout import Layout

SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = SIZE | {"vocab_size": 32}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
QWEN2 = WORDS | {"num_key_value_heads": 1, "use_cache": False}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32, "use_cache": False}

Sample = dict[str, Tensor]


def text(number: int) -> Sample:
    tokens = torch.randint(1, 32, (12,), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens}


def padded(number: int) -> Sample:
    return text(number) | {"attention_mask": (torch.arange(12) < 12 - number % 4).long()}


def classed(number: int) -> Sample:
    return padded(number) | {"labels": torch.tensor(number % 2)}


def image(number: int) -> Sample:
    pixels = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(number))
    return {"pixel_values": pixels, "labels": torch.tensor(number % 2)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Sample]]] = {
    # Without a cache, as a Trainer has it, the mask is made by another way.
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**WORDS, use_cache=False)), text),
    "llama with a cache": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**WORDS)), text),
    "llama, padded": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**WORDS, use_cache=False)), padded),
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, use_cache=False)), padded),
    # Heads that share keys: scaled_dot_product_attention adds their gradients in an order of its own where it is not
    # traced, which has other bits on some processors.
    "qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**QWEN2, attn_implementation="eager")), text),
    "bert": (lambda: hf.BertForSequenceClassification(hf.BertConfig(**WORDS)), classed),
    "t5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)), padded),
    "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**SIZE, image_size=16, patch_size=4)), image),
}
QUICK = ("llama", "bert")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow][name in QUICK :]) for name in MODELS])
def test_it_can_be_traced(name: str) -> None:
    make, sample = MODELS[name]
    torch.set_num_threads(1)
    job = Job(
        model=make, dataset=[sample(number) for number in range(16)], batch_size=8, microbatch_size=2, max_steps=2,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip
    model = build_model(job)
    document: Any = trace_job(job, model, Layout.of(model))
    assert document
