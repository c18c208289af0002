"""A run on Ray, which is really run: it begins with one worker, grows, and loses an actor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support import jobs
from tests.support.chaos import show
from tests.support.cluster import train
from tests.support.processes import HURRY, LEAF_DELAY, ROOT

from w5xde_async.launch.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PLAN = Plan(
    job=f"{ROOT / 'tests/support/jobs.py'}:mlp_sgd", name="grows", workers=3, cpus=1, gpus=0, memory_bytes=64 << 20,
    options=("--no-code-free",), worker_options=("--log", "verbose"),
)  # fmt: skip

# A cluster with room for one worker, then for three; the first worker's actor is killed, and a worker told to leave.
SCRIPT = """
import json, os, signal, sys, time
began = time.monotonic()
import ray
from pathlib import Path
from ray.cluster_utils import Cluster
from w5xde_async.launch.on_ray import Fleet
from w5xde_async.launch.plan import Plan

plan = Plan(**json.loads(sys.argv[1]))
room = dict(include_dashboard=False, object_store_memory=80 << 20)
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1, **room))
os.environ["RAY_ADDRESS"] = cluster.address
found = {}

def until(kind, count):
    deadline = time.monotonic() + 100
    while True:
        path = plan.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\\n")]
        seen = [event for event in events if event["event"] == kind]
        if len(seen) >= count:
            return seen
        assert time.monotonic() < deadline, (kind, count, lines)
        time.sleep(0.05)

with Fleet(plan) as fleet:
    fleet.start()
    until("step_committed", 1)
    found["first_step_s"] = time.monotonic() - began
    assert len(until("worker_joined", 1)) == 1
    cluster.add_node(num_cpus=2, **room)
    until("worker_joined", 3)
    found["three_s"] = time.monotonic() - began
    actor, program = ray.get(fleet.workers[0].pids.remote())
    os.kill(actor, signal.SIGKILL)
    until("worker_joined", 4)
    found["again_s"] = time.monotonic() - began
    fleet.scale(2)
    found["left"] = [event["clean"] for event in until("worker_left", 2)]
    found["step"] = until("step_committed", 1)[-1]["step"]
    Path(os.environ["W5XDE_TEST_HURRY"]).touch()
    found["code"] = fleet.wait()
    (finished,) = until("run_finished", 1)
    found |= {key: finished[key] for key in ("digest", "outcome", "total_steps")}
    found["actors"] = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
cluster.shutdown()
print(json.dumps(found))
"""


@pytest.fixture
def short() -> Iterator[str]:
    """A folder with a short name: Ray's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


def test_a_run_on_ray_grows_loses_an_actor_and_has_the_same_bits(tmp_path: Path, short: str) -> None:
    torch.set_num_threads(1)
    expected = asyncio.run(train(jobs.mlp_sgd)).digest
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("W5XDE_", "RAY_"))}
    environment |= {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", LEAF_DELAY: "1", HURRY: str(tmp_path / "hurry"),
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": short, "W5XDE_DASHBOARD": "false",
    }  # fmt: skip
    began = time.monotonic()
    plan = json.dumps({name: getattr(PLAN, name) for name in Plan.__dataclass_fields__})
    running = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, plan], cwd=tmp_path, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, said = running.communicate(timeout=220)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, said[-6000:]
    found = json.loads(output.splitlines()[-1])
    show(f"{found}, {time.monotonic() - began:.0f} s in all")
    assert (found["outcome"], found["code"], found["digest"]) == ("finished", 0, expected)
    assert found["first_step_s"] < 60 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1)  # others have the machine
    assert found["step"] < found["total_steps"]  # the fourth came to do something
    assert found["left"] == [False, True]  # who was killed, and who was one too many
    assert found["actors"] == []
