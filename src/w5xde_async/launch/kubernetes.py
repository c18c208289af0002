"""Kubernetes: a coordinator with a volume and a service, workers as a Job whose parallelism may change.

A pod of either that is told to go ends with 75 and is replaced, however often; the codes after which another start ends
in the same way fail the Job at once.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence

from w5xde_async.errors import ExitCode, UsageError
from w5xde_async.launch.health import DASHBOARD_PORT
from w5xde_async.launch.plan import HOPELESS, PORT, Plan, fill, refuse
from w5xde_async.process import note

_TOKEN = "/etc/w5xde/token"
_HALF = (
    "what it has named above is there: the same command adds the rest, and kubectl delete job,service "
    "--selector=app.kubernetes.io/instance={name} ends it"
)


def objects(plan: Plan, image: str) -> str:
    """The objects as YAML. The image's entry point is ``w5xde``, and the job is where it stands in it.

    Raises UsageError for a --run-dir: it is on the volume.
    """
    refuse(plan.options, ("--run-dir",), "after --")
    memory, cpus = json.dumps(str(plan.memory_bytes)), json.dumps(str(plan.cpus))
    coordinator: list[str | int] = [
        "coordinator", *plan.train, "--host", "0.0.0.0", "--port", PORT, "--token-file", _TOKEN, "--run-dir",
        f"/runs/{plan.name}", "--dashboard-address", f"0.0.0.0:{DASHBOARD_PORT}",
    ]  # fmt: skip
    worker = ["worker", "--server", f"{plan.name}:{PORT}", "--token-file", _TOKEN, *plan.compute]
    limits = {"memory": str(plan.memory_bytes)} | ({"nvidia.com/gpu": str(plan.gpus)} if plan.gpus else {})
    return fill(
        "kubernetes.yaml", name=plan.name, image=_quoted(image), port=PORT, dashboard_port=DASHBOARD_PORT,
        workers=plan.workers, cpus=cpus, memory=memory, limits=json.dumps(limits),
        coordinator=_strings(coordinator), worker=_strings(worker), drained=int(ExitCode.DRAINED),
        hopeless=json.dumps([int(code) for code in HOPELESS]), coordinator_grace=plan.coordinator_grace_s,
        worker_grace=plan.worker_grace_s,
    )  # fmt: skip


def start(plan: Plan, image: str) -> int:
    """Apply the objects in kubectl's present context; the secret is made where there is none. The exit code."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UsageError("kubectl is not here: install it, or take what --print writes to where it is")
    written = objects(plan, image)
    known = subprocess.run(
        [kubectl, "get", "secret", plan.name, "--ignore-not-found", "--output=name"], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if known.returncode:
        raise UsageError(f"kubectl get secret: {known.stderr.strip()[:500]}")
    try:
        if not known.stdout.strip():
            token = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": plan.name}, "type": "Opaque"}
            _kubectl(kubectl, "create", json.dumps(token | {"stringData": {"token": secrets.token_hex(32)}}), plan.name)
        _kubectl(kubectl, "apply", written, plan.name)
    except KeyboardInterrupt:
        note(f"kubectl was interrupted; {_HALF.format(name=plan.name)}")
        return ExitCode.ERROR
    return ExitCode.OK


def _kubectl(kubectl: str, verb: str, text: str, name: str) -> None:
    ended = subprocess.run([kubectl, verb, "--filename=-"], input=text, encoding="utf-8", check=False)
    if ended.returncode:
        raise UsageError(f"kubectl {verb} ended with exit code {ended.returncode}; {_HALF.format(name=name)}")


def _strings(words: Sequence[str | int]) -> str:
    """As YAML takes them. Kubernetes would put a variable in the place of $(NAME), and one $ in that of two."""
    return _quoted([str(word).replace("$", "$$") for word in words])


def _quoted(value: str | list[str]) -> str:
    """As JSON without its pairs of surrogates, which YAML has not, and without what YAML has by its number alone."""
    text = json.dumps(value, ensure_ascii=False)
    other = r"[\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]"
    return re.sub(other, lambda found: f"\\u{ord(found[0]):04x}", text)
