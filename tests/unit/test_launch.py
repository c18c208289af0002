"""What ``w5xde launch`` writes: objects that Kubernetes takes, a script for Slurm, commands that parse."""

from __future__ import annotations

import ast
import json
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from w5xde_async.__main__ import main
from w5xde_async.config import PATH
from w5xde_async.coordinator.__main__ import _goes_on
from w5xde_async.errors import ExitCode, UsageError
from w5xde_async.launch import kubernetes
from w5xde_async.launch.plan import Plan, fill, name_of
from w5xde_async.launch.program import parse
from w5xde_async.settings import CoordinatorSettings, WorkerSettings, read

ISLANDS = ("--gpus", "2", "--worker-options=--island fsdp=2")
OPTIONS = ("--", "--epochs", "3", "--update", "local")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(capsys: pytest.CaptureFixture[str], engine: str, *more: str) -> str:
    assert main(["launch", engine, "train.py:job", "--workers", "3", "--print", *more]) == ExitCode.OK
    return capsys.readouterr().out


def told(command: Sequence[str]) -> dict[str, Any]:
    """The settings that a program would have of its command line."""
    program = CoordinatorSettings if command[0] == "coordinator" else WorkerSettings
    return dict(read(program, command[1:], prog="", environment={})[0].values)


# -- plans


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--name", "Über"), "--name"),
        (("--name", "a; rm -rf"), "--name"),
        (("--name", "x" * 41), "--name"),
        (("--workers", "0"), "--workers"),
        (("--memory", "1MB"), "--memory"),
        (("--worker-options", "--iland fsdp=2"), "did you mean --island?"),
        (("--worker-options", "--island nope"), "nope"),
        (("--worker-options", "--server elsewhere"), "--worker-options: --server is for"),
        (("--worker-options=--join_file=x",), "--worker-options: --join-file is for"),
        (("--worker-options", "--threads 3"), "--worker-options: --threads is for w5xde launch to say"),
        (("--worker-options", "--log 'x"), '--worker-options: "--log \'x": No closing quotation'),
        (("--", "--epochs", "many"), "--epochs"),
        (("--", "--port", "1"), "after --: --port is for w5xde launch to say"),
        (("--", "--workers", "1"), "after --: --workers is for w5xde launch to say"),
        (("--image", "x"), "--image is for k8s"),
        (("--", "--update", "local", "--durability", "journal"), "durability"),
        (("--worker-options", "--island-member foo"), "foo"),
        (("--worker-options", "--island-member auto"), "auto"),
        (
            ("--", "--help"),
            "after --: --help, --version and --print-config start no run; give them to w5xde coordinator",
        ),
        (("--", "-h"), "after --: --help"),
        (("--", "--help-all"), "after --: --help"),
        (("--", "--version"), "after --: --help"),
        (("--", "--print_config"), "after --: --help"),
        (("--", "--exit-with-stdin"), "after --: --exit-with-stdin is for w5xde launch to say"),
        (("--worker-options=--help",), "--worker-options: --help, --version and --print-config start no run"),
        (("--worker-options=--exit-with-stdin",), "--worker-options: --exit-with-stdin is for"),
        (("--workers", "500"), "--workers 500 is more than --max-workers 256"),
    ],
)
def test_what_the_programs_would_refuse_is_refused_first(arguments: Sequence[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(["slurm", "train.py:job", "--workers", "3", *arguments], "launch")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        ("launch slurm train.py:job --wokers 3", "--workers"),
        ("launch slurm train.py:job --wokers=3", "--workers"),
        ("memory --islnd fsdp=2", "--island"),
        ("status --jsn", "--json"),
    ],
)
def test_a_flag_that_is_none_is_told_before_what_is_missing(
    capsys: pytest.CaptureFixture[str], arguments: str, near: str
) -> None:
    assert main(arguments.split()) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert f"; did you mean {near}?" in said


def test_a_run_is_named_after_its_job() -> None:
    names = [name_of(job) for job in ("train.py:job", "a/b/My Model_2.py:job", "pack.age:job", "42.py:job")]
    assert names == ["train", "my-model-2", "age", "42"]
    with pytest.raises(UsageError, match="--name"):
        plan(name="42")


def plan(**more: Any) -> Plan:
    given: dict[str, Any] = {"job": "train.py:job", "name": "train", "workers": 3, "cpus": 2, "gpus": 0}
    return Plan(**given | {"memory_bytes": 1 << 30} | more)


def test_jobs_of_two_files_have_two_names() -> None:
    long = "an-experiment-with-all-that-it-is-about-in-its-name"
    names = [name_of(f"{stem}.py:job") for stem in ("a.b", "c.b", f"{long}-1", f"{long}-2")]
    assert names[:2] == ["a-b", "c-b"]
    assert len(set(names)) == 4
    assert max(map(len, names)) <= 40
    assert name_of("here.jobs.train:job") == "train"


def test_the_environment_of_who_launches_is_not_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W5XDE_JOIN_FILE", "elsewhere")
    monkeypatch.setenv("W5XDE_PORT", "nonsense")
    assert plan().run_dir == Path.cwd() / "runs" / "train"


@pytest.mark.parametrize("engine", ["slurm", "ray", "k8s"])
def test_variables_that_a_run_does_not_heed_are_named(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ("RESUME", "never"), ("GRACE", "600"), ("ADVERTISE", "10.0.0.1"), ("CODEC", ""):
        monkeypatch.setenv(f"W5XDE_{name}", value)
    image = ["--image", "x"] if engine == "k8s" else []
    assert main(["launch", engine, "train.py:job", "--workers", "3", "--print", *image]) == ExitCode.OK
    said = capsys.readouterr().err.strip()
    also = ", W5XDE_ADVERTISE" if engine == "k8s" else ""  # the others' programs have it of who launches
    assert said == (
        f"w5xde launch: the run does not heed W5XDE_GRACE, W5XDE_RESUME{also} of this environment: give flags, but "
        "for what launch says itself"
    )


# -- Kubernetes


def objects(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}


@pytest.mark.parametrize("more", [(), ISLANDS, OPTIONS, ("--name", "null")])
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_takes_the_objects(capsys: pytest.CaptureFixture[str], version: str, more: Sequence[str]) -> None:
    found = objects(written(capsys, "k8s", "--image", "here/train:1", *more))
    assert [kind for kind, _ in found] == ["PersistentVolumeClaim", "Service", "Job", "Job"]
    for one in found.values():
        kubernetes_validate.validate(one, version, strict=True)


def test_the_validator_refuses_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    job = objects(written(capsys, "k8s", "--image", "x"))["Job", "train-workers"]
    job["spec"]["parallel"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


def test_workers_of_kubernetes_come_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    """One that is told to go, or loses its node, is replaced for ever; one that could never work ends the Job."""
    found = objects(written(capsys, "k8s", "--image", "here/train:1", *ISLANDS, *OPTIONS))
    job = found["Job", "train-workers"]["spec"]
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 30
    assert job["parallelism"] == 3
    assert "completions" not in job  # parallelism could not be changed beyond it
    container = job["template"]["spec"]["containers"][0]
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}
    assert [(rule["action"], rule["onExitCodes"]["values"]) for rule in rules] == [
        ("Ignore", [75]), ("FailJob", [2, 4, 5]),
    ]  # fmt: skip
    worker = told(container["args"])
    assert (worker["server"], worker["job"], worker["threads"], worker["island"]) == (
        "train:5555", "train.py:job", 2, "fsdp=2",
    )  # fmt: skip
    assert worker["grace"] < job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert found["Service", "train"]["spec"]["ports"][0]["port"] == 5555


def test_kubernetes_waits_for_a_grace_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    longer = ("--worker-options", "--grace 10m", "--", "--grace", "2m")
    found = objects(written(capsys, "k8s", "--image", "here/train:1", *longer))
    waits = {
        program: found["Job", f"train-{program}"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for program in ("workers", "coordinator")
    }
    assert waits == {"workers": 605, "coordinator": 7 * 120 + 170}


def test_the_coordinator_of_kubernetes_goes_on_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(written(capsys, "k8s", "--image", "here/train:1", *OPTIONS))
    job = found["Job", "train-coordinator"]["spec"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    given = told(container["args"])
    assert (given["exit_on_drain"], given["epochs"], given["update"], given["resume"]) == (75, 3, "local", "auto")
    assert str(given["run_dir"]).startswith(container["volumeMounts"][0]["mountPath"])
    claim = pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert ("PersistentVolumeClaim", claim) in found
    assert job["podReplacementPolicy"] == "Failed"
    assert pod["terminationGracePeriodSeconds"] > 7 * given["grace"]
    selector = found["Service", "train"]["spec"]["selector"].items()
    assert selector <= job["template"]["metadata"]["labels"].items()
    assert not selector <= found["Job", "train-workers"]["spec"]["template"]["metadata"]["labels"].items()
    probe = container["livenessProbe"]["httpGet"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert f"0.0.0.0:{ports[probe['port']]}" == given["dashboard_address"]
    for one in (container, found["Job", "train-workers"]["spec"]["template"]["spec"]["containers"][0]):
        assert (one["args"][one["args"].index("--token-file") + 1]) == "/etc/w5xde/token"
        assert {"name": "token", "mountPath": "/etc/w5xde", "readOnly": True} in one["volumeMounts"]


def fake(folder: Path, **programs: str) -> None:
    """Programs on the path, each a shell script."""
    folder.mkdir(exist_ok=True)
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("known", [True, False])
def test_kubectl_gets_the_objects_and_a_secret_where_there_is_none(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "echo secret/train" if known else ":"
    fake(tmp_path / "bin", kubectl=f'case $1 in get) {answer};; *) cat > "{tmp_path}/$1.yaml";; esac')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert main(["launch", "k8s", "train.py:job", "--workers", "3", "--image", "x"]) == ExitCode.OK
    assert len(objects((tmp_path / "apply.yaml").read_text())) == 4
    assert (tmp_path / "create.yaml").exists() != known
    if not known:
        secret = json.loads((tmp_path / "create.yaml").read_text())
        kubernetes_validate.validate(secret, "1.37", strict=True)
        assert len(secret["stringData"]["token"]) == 64


def test_where_a_run_on_kubernetes_lies_is_not_to_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["launch", "k8s", "train.py:job", "--workers", "3", "--image", "x", "--print", "--", "--run-dir", "here"]
    assert main(command) == ExitCode.USAGE
    assert "after --: --run-dir is for w5xde launch to say" in capsys.readouterr().err


def test_kubernetes_replaces_nothing_in_what_the_programs_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """It has $(NAME) be a variable of the container's, and $$ be $."""
    options = ("--worker-options", "--local-data '$(HOME)/a$b'", "--", "--init-from", "$(HOME)/$$.safetensors")
    found = objects(written(capsys, "k8s", "--image", "x", *options))
    for program, said in (("workers", "$$(HOME)/a$$b"), ("coordinator", "$$(HOME)/$$$$.safetensors")):
        assert said in found["Job", f"train-{program}"]["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("at", ["create", "apply"])
def test_ctrl_c_in_the_middle_says_what_is_there_on_kubernetes(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(tmp_path / "bin", kubectl=f"[ $1 != {at} ] || kill -INT $PPID; exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert main(["launch", "k8s", "train.py:job", "--workers", "3", "--image", "x"]) == ExitCode.ERROR
    said = capsys.readouterr().err
    assert "the same command adds the rest" in said
    assert "kubectl delete job,service --selector=app.kubernetes.io/instance=train ends it" in said


def test_kubectl_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "bin", kubectl="exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert main(["launch", "k8s", "train.py:job", "--workers", "3", "--image", "x"]) == ExitCode.USAGE


# -- Slurm


def test_bash_and_shellcheck_take_the_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "it's here" / "train.sh"
    script.parent.mkdir()
    os.chdir(script.parent)
    script.write_text(written(capsys, "slurm", *ISLANDS, "--", "--override", "optimizer.lr=1"))
    for checker in (["bash", "-n"], [str(Path(sys.executable).with_name("shellcheck"))]):
        ended = subprocess.run([*checker, script], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm that notes what it is asked for; ``codes``: what its steps end with."""
    note = f'printf "%s\\n" "$(basename "$0") ${{*@Q}}" >> {tmp_path}/asked'
    fake(
        tmp_path / "bin", sbatch=note, scontrol=note, scancel=note, sleep=note,
        srun=f"{note}\ncode=$(head -n 1 {tmp_path}/codes); sed -i 1d {tmp_path}/codes; exit $code",
    )  # fmt: skip
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return tmp_path


def asked(slurm: Path) -> list[list[str]]:
    path = slurm / "asked"
    found = [shlex.split(line) for line in path.read_text().splitlines()]
    path.unlink()
    return found


def program_of(step: list[str]) -> list[str]:
    """A step's program and arguments; its flags of srun's are dropped."""
    start = step.index("-m")
    assert step[start - 1] == sys.executable
    return [step[start + 1].removeprefix("w5xde_async."), *step[start + 2 :]]


def test_slurm_has_a_coordinator_and_an_array_of_workers(slurm: Path) -> None:
    assert main(["launch", "slurm", "train.py:job", "--workers", "3", *ISLANDS, *OPTIONS]) == ExitCode.OK
    script = slurm / "runs" / "train" / "train.sh"
    assert stat.S_IMODE(script.parent.stat().st_mode) == 0o700  # parameters and secrets are to lie there
    (first, second) = asked(slurm)
    assert first[-2:] == [str(script), "coordinator"]
    assert second[-2:] == [str(script), "worker"]
    for job in (first, second):
        assert {"--requeue", "--open-mode=append", "--mem=4096M"} <= set(job)
    assert {"--array=1-3", "--gpus-per-task=2", "--cpus-per-task=2", "--signal=USR1@90"} <= set(second)
    assert "--signal=TERM@300" in first  # to a coordinator SIGUSR1 means a checkpoint

    subprocess.run(["bash", script, "grow", "8"], check=True)
    (third,) = asked(slurm)
    assert "--array=1-8" in third


def test_slurm_gets_no_workers_where_it_takes_no_coordinator(slurm: Path) -> None:
    fake(slurm / "bin", sbatch=f'printf "%s\\n" "sbatch ${{*@Q}}" >> {slurm}/asked; exit 3')
    assert main(["launch", "slurm", "train.py:job", "--workers", "3", *OPTIONS]) == 3
    (only,) = asked(slurm)
    assert only[-1] == "coordinator"


@pytest.mark.parametrize("ends", ["exit 3", "kill -INT {}"], ids=["it fails", "Ctrl-C"])
def test_slurm_that_has_half_of_a_run_is_said(slurm: Path, ends: str, capsys: pytest.CaptureFixture[str]) -> None:
    fake(
        slurm / "bin",
        sbatch=f"case $* in *--array*) {ends.format(os.getpid())};; *) echo Submitted batch job 17;; esac",
    )
    assert main(["launch", "slurm", "train.py:job", "--workers", "3"]) == (3 if ends == "exit 3" else ExitCode.ERROR)
    said = capsys.readouterr().err
    assert "Where Slurm has named a job above, that is the coordinator (scancel NUMBER ends it)" in said
    assert f"bash {slurm}/runs/train/train.sh grow 3 submits the workers" in said
    assert "If it has named none, nothing is in its queue: give this command again" in said


def test_slurm_has_the_patience_that_grace_asks_for(slurm: Path) -> None:
    patient = ["--worker-options=--grace 10m", "--", "--grace", "20m"]
    assert main(["launch", "slurm", "train.py:job", "--workers", "3", *patient]) == ExitCode.OK
    first, second = asked(slurm)
    assert "--signal=TERM@8630" in first
    assert "--signal=USR1@665" in second


def test_the_script_alone_makes_its_directory_for_its_user_alone(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a name with what Slurm replaces in the names of outputs is that name."""
    script = slurm / "train.sh"
    script.write_text(written(capsys, "slurm", "--", "--run-dir", str(slurm / "50%a")))
    subprocess.run(["bash", script], check=True, env={**os.environ, "HOME": str(slurm)})
    assert stat.S_IMODE((slurm / "50%a").stat().st_mode) == 0o700
    first, second = asked(slurm)
    assert f"--output={slurm}/50%%a/coordinator.log" in first
    assert f"--output={slurm}/50%%a/worker-%A-%a.log" in second


def test_two_runs_of_one_name_have_workers_of_two_names(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one is not to end those of the other."""
    found = set()
    for folder in ("a", "b"):
        (slurm / folder).mkdir()
        monkeypatch.chdir(slurm / folder)
        main(["launch", "slurm", "train.py:job", "--workers", "3", *OPTIONS])
        _, array = asked(slurm)
        found |= {word for word in array if word.startswith("--job-name=train-worker-")}
    assert len(found) == 2


@pytest.mark.parametrize("role", ["coordinator", "worker"])
@pytest.mark.parametrize("code", [0, 1, 75])
def test_slurm_has_who_was_told_to_go_again_in_its_queue(
    slurm: Path, role: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if role == "worker":  # the number of the array: to requeue that is to requeue all of its tasks
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    main(["launch", "slurm", "train.py:job", "--workers", "3", *OPTIONS])
    _, array = asked(slurm)
    (slurm / "codes").write_text(f"{code}\n")
    ended = subprocess.run(["bash", slurm / "runs/train/train.sh", role], check=False)
    assert ended.returncode == code
    step, *rest = asked(slurm)
    given = told(program_of(step))
    if role == "coordinator":
        assert (given["exit_on_drain"], given["epochs"]) == (75, 3)
        assert given["run_dir"] == slurm / "runs" / "train"
        if code != 75:  # who waits in the queue, or has not heard of the end, would look for it in vain
            waiting, pause, running = rest.pop(0), rest.pop(0), rest.pop(0)
            assert (waiting[0], running[0]) == ("scancel", "scancel")
            name = next(word for word in array if word.startswith("--job-name=")).replace("--job", "-")
            assert {name, "--state=PENDING"} <= set(waiting)
            assert pause == ["sleep", "60"]
            assert set(waiting) - set(running) == {"--state=PENDING"}
    else:
        assert given["join_file"] == slurm / "runs" / "train" / "join"
    job = "17" if role == "coordinator" else "17_3"
    assert rest == ([["scontrol", "requeue", job]] if code == 75 else [])


@pytest.mark.parametrize("role", ["coordinator", "worker"])
def test_what_no_engine_lets_flags_say_no_variable_says(
    slurm: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch gives a job the environment of who submits it: --resume never would begin anew at each start."""
    main(["launch", "slurm", "train.py:job", "--workers", "3"])
    fake(slurm / "bin", srun=f"env > {slurm}/environment")
    for name in ("RESUME", "GRACE", "CONFIG", "TOKEN", "ADVERTISE", "OTHER"):
        monkeypatch.setenv(f"W5XDE_{name}", "never")
    subprocess.run(["bash", slurm / "runs/train/train.sh", role], check=True)
    found = [line for line in (slurm / "environment").read_text().splitlines() if line.startswith("W5XDE_")]
    assert sorted(found) == ["W5XDE_ADVERTISE=never", "W5XDE_OTHER=never", "W5XDE_TOKEN=never"]  # one is the job's


# -- names with anything in them

NASTY = st.text(
    st.sampled_from("aZ9 '\"`$\\%*?~#&;|<>(){}[]!=@,:.-\n\t\r\x01\x7f\x85\u2028\ufeffé\U0001f600"),
    min_size=1,
    max_size=9,
)
PATHS = NASTY.filter(lambda text: PATH.holds(f"./{text}/x") and text.strip(".") == text)


def nasty(engine: str, folder: str, value: str, *more: str) -> tuple[list[str], list[str], list[str]]:
    """A command line, and what its programs are to be told of these texts."""
    job, path = f"./{folder}/train.py:job", f"./{value}/x"
    options = ["--init-from", path]
    given = ["launch", engine, job, "--workers", "3", f"--worker-options={shlex.join(['--local-data', path])}", *more]
    return [*given, "--", *options], [job, "--init-from", path], ["--job", job, "--local-data", path]


def told_words(words: Sequence[str], expected: Sequence[str]) -> None:
    assert [word for word in words if word in expected] == list(expected)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run=PATHS, folder=NASTY, value=PATHS)
def test_programs_of_slurm_get_every_name_as_it_was_given(
    slurm: Path, capsys: pytest.CaptureFixture[str], run: str, folder: str, value: str
) -> None:
    run_dir = slurm / "runs" / run
    command, *expected = nasty("slurm", folder, value)
    fake(
        slurm / "bin", srun=f"printf '%s\\0' \"$@\" > {slurm}/words", sbatch=f"printf '%s\\0' \"$@\" >> {slurm}/words"
    )  # fmt: skip
    assert main([*command, "--run-dir", str(run_dir)]) == ExitCode.OK
    capsys.readouterr()
    submitted = (slurm / "words").read_bytes().decode().split("\0")
    script = run_dir / "train.sh"
    outputs = [f"--output={str(run_dir).replace('%', '%%')}/{name}.log" for name in ("coordinator", "worker-%A-%a")]
    told_words(submitted, [outputs[0], str(script), outputs[1], str(script)])
    (slurm / "words").unlink()
    for role, words in zip(("coordinator", "worker"), expected, strict=True):
        subprocess.run(["bash", script, role], check=True, env={**os.environ, "HOME": str(slurm)})
        told_words((slurm / "words").read_bytes().decode().split("\0"), words)
        (slurm / "words").unlink()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(folder=NASTY, value=PATHS, image=NASTY)
def test_programs_of_kubernetes_get_every_name_as_it_was_given(folder: str, value: str, image: str) -> None:
    command, *expected = nasty("k8s", folder, value, f"--image={image}")
    given, plan = parse(command[1:], "launch")
    found = objects(kubernetes.objects(plan, given.image))
    for program, words in zip(("coordinator", "workers"), expected, strict=True):
        container = found["Job", f"train-{program}"]["spec"]["template"]["spec"]["containers"][0]
        assert container["image"] == image
        told_words([word.replace("$$", "$") for word in container["args"]], words)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(folder=NASTY, value=PATHS)
def test_the_script_for_ray_has_every_name_as_it_was_given(folder: str, value: str) -> None:
    _, plan = parse(nasty("ray", folder, value)[0][1:], "launch")
    assert plan_of(ray_script(plan)) == plan


# -- Ray


def ray_script(plan: Plan) -> str:
    return fill("ray.template", **{field: repr(getattr(plan, field)) for field in Plan.__dataclass_fields__})


def plan_of(script: str) -> Plan:
    (call,) = [
        node for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Plan"
    ]  # fmt: skip
    return Plan(**{word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg})


def test_the_script_for_ray_says_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Run with actors: tests/process/test_ray.py."""
    assert plan_of(written(capsys, "ray", *ISLANDS, *OPTIONS)) == plan(
        gpus=2, memory_bytes=4 << 30, options=OPTIONS[1:], worker_options=("--island", "fsdp=2")
    )


def test_no_run_on_ray_takes_the_actors_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose name begins as those of its workers, or is one."""
    pytest.importorskip("ray")
    from w5xde_async.launch import on_ray

    made: list[str] = []

    def actor(name: str, *_: object, **__: object) -> mock.MagicMock:
        assert name not in made
        made.append(name)
        return mock.MagicMock()

    ray = mock.MagicMock()
    ray.util.list_named_actors = lambda **_: [{"name": name, "namespace": "w5xde"} for name in made]
    monkeypatch.setattr(on_ray, "ray", ray)
    monkeypatch.setattr(on_ray, "_actor", actor)
    for name in ("mnist-worker-lr3", "mnist-worker-0", "mnist"):
        with on_ray.Fleet(plan(name=name, workers=2)) as fleet:
            fleet.start()
            assert len(fleet.workers) == 2
    assert len(made) == 9


def test_a_coordinator_that_an_engine_keeps_tells_nobody_its_own_command() -> None:
    """It has flags of the engine's; the command that goes on is the one that started the engine."""
    assert _goes_on("w5xde coordinator", ["t.py:job", "--exit-with-stdin"], "auto", kept=True, environment={}) == ""


@pytest.mark.parametrize(
    ("arguments", "resume", "environment", "told"),
    [
        (["t.py:job", "--port", "0"], "auto", {}, "w5xde coordinator t.py:job --port 0"),
        (["t.py:job", "--resume", "never", "--port", "0"], "never", {},
         "w5xde coordinator t.py:job --port 0 --resume auto"),
        (["t.py:job", "--resume", "it's/step-1"], "it's/step-1", {}, "w5xde coordinator t.py:job --resume auto"),
        (["--resume", "never", "--", "t.py:job"], "never", {}, "w5xde coordinator --resume auto -- t.py:job"),
        (["t.py:job", "--resume=a b"], "a b", {}, "w5xde coordinator t.py:job --resume auto"),
        (["t.py:job", "--name", "a --resume b"], "auto", {}, "w5xde coordinator t.py:job --name 'a --resume b'"),
        (["t.py:job"], "auto", {"W5XDE_NAME": "my run"}, "W5XDE_NAME='my run' w5xde coordinator t.py:job"),
        (["t.py:job"], "never", {"W5XDE_RESUME": "never"}, "w5xde coordinator t.py:job --resume auto"),
    ],
)  # fmt: skip
def test_the_command_that_goes_on(arguments: list[str], resume: str, environment: dict[str, str], told: str) -> None:
    assert _goes_on("w5xde coordinator", arguments, resume, kept=False, environment=environment) == told


@pytest.mark.parametrize("resume", ["never", "runs/x/checkpoints/step-000000003"])
def test_what_would_begin_anew_at_each_start_is_refused(resume: str) -> None:
    with pytest.raises(UsageError, match="--resume would begin anew each time"):
        plan(options=("--resume", resume))
    plan(options=("--resume", "auto"))


def test_the_engines_are_imported_by_their_own_modules_alone() -> None:
    script = "import sys; from w5xde_async.launch import program, kubernetes, slurm; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
