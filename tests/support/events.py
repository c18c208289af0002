"""Events of a small run, with what matters in a test changed: ``committed(3, loss=0.5)``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from w5xde_async.telemetry.events import (
    RunFinished,
    RunReported,
    RunStarted,
    StepCommitted,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)

STARTED = RunStarted(
    version="0.1.0", run_name="digits", run_dir="runs/digits", run_id="r1", term=1, model="MLP", num_parameters=10,
    fingerprint="abcd", dataset="Digits", num_samples=100, batch_size=10, leaves_per_step=2, update_rule="sync",
    codec="raw", precision="fp32", address="127.0.0.1:5555", worker_command="secret command", security="none",
    resumed_step=0, total_steps=100, steps_per_epoch=10, memory_bound_bytes=1, dashboard="http://127.0.0.1:5556/",
    dashboard_link="http://127.0.0.1:5556/?token=hush",
)  # fmt: skip
FINISHED = RunFinished(
    outcome="finished", reason="", step=100, total_steps=100, samples=1000, session_samples=1000, loss=0.1, metrics={},
    seconds=10.0, bytes_sent=1, bytes_received=2, digest="d", model_path="", metrics_path="", plot_path="",
)  # fmt: skip


def committed(step: int, **changes: Any) -> StepCommitted:
    event = StepCommitted(
        step=step, epoch=0, loss=0.5, metrics={}, samples=10, leaves=2, learning_rate=0.1, gradient_norm=1.5,
        loss_scale=1.0, skipped=False, seconds=0.1, num_workers=1, bytes_sent=100, bytes_received=200,
        phases_s={"wait": 0.08, "apply": 0.02},
    )  # fmt: skip
    return replace(event, **changes)


def joined(worker: str, **changes: Any) -> WorkerJoined:
    event = WorkerJoined(
        worker_id=worker, name=f"name-{worker}", peer="127.0.0.1:9", device="cpu", threads=1, num_workers=1
    )
    return replace(event, **changes)


def left(worker: str, **changes: Any) -> WorkerLeft:
    event = WorkerLeft(
        worker_id=worker, name=f"name-{worker}", reason="killed", clean=False, leases_returned=1, num_workers=0
    )
    return replace(event, **changes)


def reported(worker: str, member_s: float, **changes: Any) -> WorkerReported:
    event = WorkerReported(
        worker_id=worker, name=f"name-{worker}", peer="127.0.0.1:9", device="cpu", threads=1, state="ready",
        activity="step 1", waits_for="", member_s=member_s, leases_held=1, leaves=4, samples=20, share=1.0,
        leaves_per_s=2.0, compute_s=0.0, wait_s=0.0, network_s=0.0, encode_s=0.0, bytes_sent=1000, bytes_received=2000,
        raw_bytes=0, encoded_bytes=0,
    )  # fmt: skip
    return replace(event, **changes)


def run_reported(**changes: Any) -> RunReported:
    event = RunReported(
        step=1, total_steps=100, samples=10, num_workers=1, num_joining=0, leases_stale=0, leases_duplicate=0,
        leases_rejected=0, leases_backed_up=0, leaves=2, leaves_in_vain=0, bytes_sent=1, bytes_received=2, uptime_s=1.0,
        host_bytes=1000,
    )  # fmt: skip
    return replace(event, **changes)
