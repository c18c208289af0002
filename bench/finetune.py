"""Fine-tuning beside transformers' own Trainer, on the same two cores.

Ours is a coordinator and two worker processes of one torch thread, which train ``job_of(trainer)``; the peer is that
Trainer's ``train()`` in one process of two threads. Model (a Llama of 4.5M parameters), initial weights, samples of 128
tokens and their order, microbatches (four of 8 a step), optimizer and schedule are the same, and both must come to the
same loss. They take turns (A B A B) in processes that stay; a figure is the median of the rounds' ratios.

Figures: ``over_trainer_2`` (samples/s of ours over the Trainer's: aim 1.0); samples/s and the last loss of both;
``*_cpu_ms``: processor time a sample, of all processes, start of the run included, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from models import JOBS, Reply, Rig, coordinate, cpu_seconds, serve, text, work
from report import Report, parser
from w5xde_async.hf import job_of
from w5xde_async.job import Job

LENGTH, VOCABULARY = 128, 1024
MICROBATCH, ACCUMULATED, WARM = 8, 4, 3
#: Sums are added in another order, by kernels that divide the work otherwise.
TOLERANCE = 2e-3
WORKERS = ("worker-0", "worker-1")


def made(steps: int) -> Trainer:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4
        )
    )
    arguments = TrainingArguments(
        "runs/trainer", per_device_train_batch_size=MICROBATCH, gradient_accumulation_steps=ACCUMULATED,
        max_steps=WARM + steps, learning_rate=1e-3, train_sampling_strategy="sequential", use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    tokens = text(1024, LENGTH, VOCABULARY).tensors[0]
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": one, "labels": one} for one in tokens])
    trainer.remove_callback(PrinterCallback)
    return trainer


def job(*, steps: int) -> Job:
    return job_of(made(steps))


JOBS["finetune"] = job  # type: ignore[index]


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def train(reply: Reply, *, steps: int) -> None:
    """The peer's child: answers the steps' rate and the last loss."""
    torch.set_num_threads(2)
    trainer, clock = made(steps), Clock()
    trainer.add_callback(clock)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    reply(rate=steps / (clock.ends[-1] - clock.ends[WARM - 1]), loss=losses[-1])


def ours(rig: Rig, steps: int) -> dict[str, Any]:
    options = {"steps": steps}
    rig["coordinator"].tell("coordinate", job="finetune", options=options, workers=2, warm_steps=WARM)
    port = rig["coordinator"].answer()["port"]
    for worker in WORKERS:
        rig[worker].tell("work", port=port, job="finetune", options=options)
    rig["coordinator"].answer()  # it is warm
    passed, ended = rig["coordinator"].answer(600.0), rig["coordinator"].answer()
    for worker in WORKERS:
        rig[worker].answer()
    return {"rate": passed["steps"] / passed["seconds"], "loss": ended["loss_last"]}


def theirs(rig: Rig, steps: int) -> dict[str, Any]:
    rig["trainer"].tell("train", steps=steps)
    return rig["trainer"].answer(timeout_s=600.0)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=0, help="rounds of both (5; 2 with --quick)")
    flags.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.child:
        serve({"coordinate": coordinate, "work": work, "train": train})
        return
    steps, rounds = (10 if args.quick else 30), args.rounds or (2 if args.quick else 5)
    report = Report({"rounds": rounds, "steps": steps, "workers": 2, "threads": 1})
    samples = MICROBATCH * ACCUMULATED
    rates: dict[str, list[float]] = {"ours": [], "trainer": []}
    losses: dict[str, list[float]] = {"ours": [], "trainer": []}
    cpu: dict[str, list[float]] = {"ours": [], "trainer": []}
    with Rig(__file__, ["coordinator", *WORKERS, "trainer"]) as rig:
        taking_part = {"ours": ("coordinator", *WORKERS), "trainer": ("trainer",)}
        for _ in range(rounds):
            for kind, run in (("ours", ours), ("trainer", theirs)):
                before = sum(cpu_seconds(rig[name].pid) for name in taking_part[kind])
                found = run(rig, steps)
                used = sum(cpu_seconds(rig[name].pid) for name in taking_part[kind]) - before
                cpu[kind].append(1e3 * used / (samples * (WARM + steps)))
                rates[kind].append(found["rate"] * samples)
                losses[kind].append(found["loss"])
            print({kind: round(found[-1], 1) for kind, found in rates.items()}, "samples/s", flush=True)
            a, b = losses["ours"][-1], losses["trainer"][-1]
            if abs(a - b) > TOLERANCE * abs(b):
                raise SystemExit(f"the last loss is {a:.6f} of ours, {b:.6f} of the Trainer")
    report.add("over_trainer_2", [a / b for a, b in zip(rates["ours"], rates["trainer"], strict=True)])
    for kind in rates:
        report.add(f"{kind}_samples_per_s", rates[kind])
        report.add(f"{kind}_last_loss", losses[kind])
        report.add(f"{kind}_cpu_ms", cpu[kind])
    report.show()
    report.write(args.json)


if __name__ == "__main__":
    main()
