"""The snippets of docs/jobset.md, trainjob.md and skypilot.md: objects by published models, commands by our parsers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from w5xde_async.errors import UsageError
from w5xde_async.settings import CoordinatorSettings, WorkerSettings, read

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page: str) -> list[dict[str, Any]]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


OBJECTS = [one for page in ("jobset.md", "trainjob.md") for one in snippets(page)]


def round_trip(one: dict[str, Any]) -> dict[str, Any]:
    """The models leave out what they do not know: it would be missing here."""
    from kubeflow_trainer_api import models  # seconds, for whoever collects the tests

    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    }
    return dict(kinds[one["kind"]].from_dict(one).to_dict())


@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: one["kind"])
def test_the_published_models_know_everything_that_is_said(one: dict[str, Any]) -> None:
    assert round_trip(one) == one


def test_the_round_trip_loses_what_is_wrong() -> None:
    job_set = snippets("jobset.md")[0]
    job_set["spec"]["replicatedJobs"][0]["replica"] = 1
    assert round_trip(job_set) != job_set
    job_set["spec"]["replicatedJobs"][0]["replicas"] = "one"
    with pytest.raises(ValueError, match="replicas"):
        round_trip(job_set)


def containers(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from inner if key == "containers" else containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from containers(inner)


def commands() -> Iterator[list[str]]:
    for one in OBJECTS:
        yield from (container["args"] for container in containers(one) if "args" in container)
        if one["kind"] == "TrainJob":
            yield one["spec"]["trainer"]["args"]
    for task in snippets("skypilot.md"):
        lines = [line.strip() for line in task["run"].splitlines()]
        yield from (shlex.split(line)[1:] for line in lines if line.startswith("w5xde "))


def test_the_commands_are_such_as_work() -> None:
    programs = {"coordinator": CoordinatorSettings, "worker": WorkerSettings}
    given = list(commands())
    assert [command[0] for command in given] == ["coordinator", "worker"] * 3
    for command in given:
        read(programs[command[0]], command[1:], prog="", environment={})
    with pytest.raises(UsageError):
        read(programs["worker"], [*given[1][1:], "--sever"], prog="", environment={})


def test_who_calls_whom() -> None:
    """A JobSet names a pod SET-JOB-0-0.SET, and a TrainJob's set has its name."""
    job_set, _, train_job = OBJECTS
    (args,) = (one["args"] for one in containers(job_set) if one["name"] == "worker")
    for one, command in ((job_set, args), (train_job, train_job["spec"]["trainer"]["args"])):
        name = one["metadata"]["name"]
        assert command[command.index("--server") + 1] == f"{name}-coordinator-0-0.{name}:5555"
    assert job_set["spec"]["successPolicy"]["targetReplicatedJobs"] == ["coordinator"]
    assert job_set["spec"]["coordinator"] == {"replicatedJob": "coordinator"}


@pytest.mark.parametrize("task", snippets("skypilot.md"), ids=lambda task: task["name"])
def test_sky_recovers_who_was_told_to_go(task: dict[str, Any]) -> None:
    if "job_recovery" in task["resources"]:
        assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
        assert task["resources"]["use_spot"]
