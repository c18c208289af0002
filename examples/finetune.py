"""Fine-tune a causal language model of transformers, all of it or by LoRA (peft), and save it as transformers does.

    python -m w5xde_async.coordinator finetune.py:job --workers 2
    python finetune.py runs/finetune/best.safetensors tuned

    BASE=tuned python -m w5xde_async.coordinator finetune.py:lora --workers 2 --name lora
    BASE=tuned python finetune.py runs/lora/best.safetensors adapted --lora

BASE is the model to begin with: a folder, or a name of the hub such as HuggingFaceTB/SmolLM2-135M. Without it, nothing
is downloaded: a tiny model begins with random weights. The text is the source of Python's own library: put yours into
``texts``. Workers on other machines need neither this file nor transformers nor the model.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import warnings
from functools import cache
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_model
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from w5xde_async import Job

BASE = os.environ.get("BASE", "")
LENGTH = 128  # tokens of a sample
STEPS = 200


def texts() -> tuple[list[str], list[str]]:
    """Texts to train on, and texts to evaluate with."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    found = [path.read_text(encoding="utf-8") for path in files]
    return found[6:], found[:6]


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    if BASE:
        return AutoTokenizer.from_pretrained(BASE)
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(texts()[0], vocab_size=1024, special_tokens=["<eos>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token="<eos>", pad_token="<eos>")


def base() -> nn.Module:
    """The model before training, in float32. For bf16 autocast give the job ``precision="bf16"``."""
    if BASE:
        return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer()), **size))


def adapted() -> nn.Module:
    """The same with LoRA: only its small matrices are trained, and sent."""
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # peft 0.21 asks transformers by an old name
    return get_peft_model(base(), LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear"))


def samples(texts: list[str]) -> list[dict[str, Tensor]]:
    """All texts, one after the other, cut into samples of LENGTH tokens. The model shifts the labels itself."""
    end = tokenizer().eos_token
    tokens = torch.tensor(tokenizer()(end.join(texts))["input_ids"])
    return [{"input_ids": part, "labels": part} for part in tokens[: len(tokens) // LENGTH * LENGTH].split(LENGTH)]


def make(model=base, rate: float = 1e-3) -> Job:  # type: ignore[no-untyped-def]
    train, held_out = (samples(part) for part in texts())
    some = torch.stack([sample["input_ids"] for sample in held_out[:32]])

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"val_loss": model(input_ids=some, labels=some).loss.item()}

    return Job(
        model=model,
        dataset=train,
        optimizer=lambda model: torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad], lr=rate, fused=True
        ),
        scheduler=lambda optimizer: get_cosine_schedule_with_warmup(optimizer, STEPS // 20, STEPS),
        batch_size=16,
        microbatch_size=4,
        max_steps=STEPS,
        gradient_clip_val=1.0,
        evaluate=evaluate,
        evaluate_every=50,
        keep_best="val_loss",
    )


def job() -> Job:
    return make()


def lora() -> Job:
    return make(adapted, rate=3e-3)


def save(weights: str, folder: str, *, lora: bool) -> None:
    """Save a run's ``weights`` as a folder that ``from_pretrained`` loads; of LoRA also the adapter by itself."""
    model = adapted() if lora else base()
    load_model(model, weights)
    if lora:
        model.save_pretrained(Path(folder) / "adapter")
        model = model.merge_and_unload()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Save what a run has trained as a folder of transformers.")
    arguments.add_argument("weights", help="model.safetensors or best.safetensors of the run")
    arguments.add_argument("folder")
    arguments.add_argument("--lora", action="store_true", help="the run was finetune.py:lora")
    given = arguments.parse_args()
    save(given.weights, given.folder, lora=given.lora)
