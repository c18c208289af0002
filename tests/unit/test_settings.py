"""Settings: precedence, durations and sizes, messages of one line, help, token files."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tomllib
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from w5xde_async.config import FOLDER, PATH
from w5xde_async.errors import ExitCode, UsageError
from w5xde_async.net.token import find_token
from w5xde_async.settings import (
    PROGRAMS,
    Answer,
    CoordinatorSettings,
    WorkerSettings,
    flag_names,
    misspelt_variables,
    read,
    to_mapping,
)
from w5xde_async.settings.flags import Program, declared
from w5xde_async.worker.config import WorkerConfig


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("W5XDE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def coordinator(*arguments: str) -> CoordinatorSettings:
    return read(CoordinatorSettings, arguments, prog="coordinator")[0]


def worker(*arguments: str) -> WorkerSettings:
    return read(WorkerSettings, ("--server", "here:1", "--job", "train.py:job", *arguments), prog="worker")[0]


def answer(program: type[Program], *arguments: str) -> str:
    with pytest.raises(Answer) as caught:
        read(program, arguments, prog="it")
    return caught.value.text


def configure(program: type[Program], arguments: tuple[str, ...]) -> None:
    """As far as a program gets before it imports torch."""
    settings = read(program, arguments, prog="it")[0]
    if isinstance(settings, CoordinatorSettings):
        settings.coordinator_config("")


def complaint(*arguments: str, program: type[Program] = CoordinatorSettings) -> str:
    with pytest.raises(UsageError) as caught:
        configure(program, arguments)
    assert caught.value.exit_code == ExitCode.USAGE
    text = str(caught.value)
    assert "\n" not in text
    return text


# -- precedence


def test_arguments_before_environment_before_toml_before_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "w5xde.toml"
    file.write_text("[coordinator]\nport = 1\nmax_steps = 1\nmin-workers = 3\n[worker]\nthreads = 9\n")
    monkeypatch.setenv("W5XDE_PORT", "2")
    monkeypatch.setenv("W5XDE_MAX_STEPS", "2")
    settings = coordinator("train.py:job", "--port", "3", "--config", str(file))
    assert itemgetter("port", "max_steps", "min_workers", "keep_checkpoints")(settings.values) == (3, 2, 3, 3)
    assert worker("--config", str(file)).values["threads"] == 9
    monkeypatch.setenv("W5XDE_CONFIG", str(file))
    assert coordinator("train.py:job").values["min_workers"] == 3


def test_underscores_equals_signs_and_empty_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W5XDE_PORT", "")
    given = ("train.py:job", "--min_workers=2", "--no_evaluate", "--max_time", "2h", "--name", "a_b")
    values = coordinator(*given).values
    assert itemgetter("min_workers", "evaluate", "max_time")(values) == (2, False, 7200)
    assert itemgetter("port", "name")(values) == (5555, "a_b")


def test_what_follows_from_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = coordinator("some/where/train.py:make.job", "--workers", "2")
    assert (settings.name, settings.run_dir, settings.values["min_workers"]) == ("train", Path("runs/train"), 2)
    assert settings.worker_threads is not None
    assert settings.worker_threads >= 1
    assert coordinator("package.module:job").name == "module"
    assert coordinator("train.py:job", "--run-dir", "there/deep").name == "deep"
    here = Path.cwd()
    for directory, name in (
        (".", here.name),
        ("..", here.parent.name),
        ("/x/y/..", "x"),
        ("/", "train"),
        ("/..", "train"),
    ):
        assert coordinator("train.py:job", "--run-dir", directory).name == name, directory
    assert coordinator("train.py:job").values["min_workers"] == 1
    assert coordinator("train.py:job", "--workers", "4", "--min-workers", "1").values["min_workers"] == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert coordinator("train.py:job", "--workers", "2").worker_threads == 5
    for number in ("99999", "9" * 5000):
        monkeypatch.setenv("OMP_NUM_THREADS", number)
        text = complaint("train.py:job")
        assert text == f"OMP_NUM_THREADS: {number!r} will not do; give a whole number from 1 to 4096"
    for other in ("0", "000", "4,2", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", other)
        assert coordinator("train.py:job", "--workers", "999999").worker_threads == 1


def test_the_config_objects() -> None:
    config = coordinator("j.py:j", "--grace", "0", "--bucket-size", "1MiB", "--silence", "1m").coordinator_config("t")
    assert (config.grace_s, config.bucket_bytes, config.silence_s, config.token) == (0, 1 << 20, 60, "t")
    settings = worker("--memory-limit", "64MiB", "--lifetime", "1h", "--device", "cpu")
    assert settings.make(WorkerConfig).batch_bytes == 64 << 20
    assert settings.make(WorkerConfig).lifetime_s == 3600
    assert worker("--memory-limit", "auto").values["memory_limit"] is None


def test_what_came_from_the_environment_is_known_but_for_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "W5XDE_NAME": "mine", "W5XDE_PORT": "6000", "W5XDE_TRACKER": "mlflow:http://me:hunter2@host",
        "W5XDE_TOKEN": "x", "W5XDE_LOG": "",
    }  # fmt: skip
    settings, _ = read(CoordinatorSettings, ["t.py:job", "--port", "7000"], prog="", environment=told)
    assert settings.environment == {"W5XDE_NAME": "mine"}
    assert "hunter2" not in repr(settings)


def test_print_config_can_be_read_back_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("W5XDE_TOKEN", "hush")
    given = ("train.py:job", "--max-time", "90", "--bucket-size", "1MiB", "--workers", "2", "--no-evaluate")
    text = answer(CoordinatorSettings, *given, "--print-config")
    assert "hush" not in text
    assert tomllib.loads(text)["coordinator"]["max_time"] == 90.0
    file = tmp_path / "w5xde.toml"
    file.write_text(text)
    assert to_mapping(coordinator("--config", str(file))) == to_mapping(coordinator(*given))
    assert "exit_with_stdin" not in answer(WorkerSettings, "--print-config")


def test_what_follows_from_other_settings_is_not_written_as_if_it_had_been_given(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(answer(CoordinatorSettings, "some/train.py:job", "--name", "A", "--workers", "2", "--print-config"))
    text = file.read_text()
    for name in ("run_dir", "min_workers", "worker_threads", "bulk_threads"):
        assert f"\n# {name} is not set\n" in text
    assert 'name = "A"' in text
    assert "bucket_size = 4194304" in text  # a plain default
    again = coordinator("--config", str(file), "--name", "B", "--workers", "3")
    assert (again.run_dir, again.values["min_workers"]) == (Path("runs/B"), 3)
    told = coordinator("j.py:j", "--run-dir", "there", "--bulk-threads", "1")
    assert to_mapping(told)["coordinator"] == to_mapping(told)["coordinator"] | {  # type: ignore[operator]
        "run_dir": Path("there"), "bulk_threads": 1, "name": None,
    }  # fmt: skip


def test_a_misspelt_variable_is_named_with_the_near_one() -> None:
    known = dict.fromkeys(("W5XDE_PORT", "W5XDE_TOKEN", "W5XDE_DASHBOARD_LINK", "W5XDE_FAILPOINTS", "W5XDE_JOIN"), "1")
    assert list(misspelt_variables(known | {"W5XDE_TEST_LEAF_S": "1", "W5XDE_PROT": "", "PROT": "1"})) == []
    said = list(misspelt_variables(known | {"W5XDE_PROT": "1", "W5XDE_MY_OWN_THING": "1"}))
    assert said == ["no program reads W5XDE_PROT; did you mean W5XDE_PORT?"]


# -- messages


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ("JOB is missing", "train.py:job")),
        (("j.py:j", "--port", "70000"), ("--port", "'70000'", "from 0 to 65535")),
        (("j.py:j", "--port", "http"), ("--port", "'http'")),
        (("j.py:j", "--port"), ("--port", "expected one argument")),
        (("j.py:j", "--prot", "1"), ("--prot", "did you mean --port?")),
        (("j.py:j", "--min_wokers=1"), ("--min-wokers", "did you mean --min-workers?")),
        (("j.py:j", "--xyzzy"), ("--xyzzy", "see --help")),
        (("j.py:j", "-p", "1"), ("-p",)),
        (("j.py:j", "k.py:k"), ("'k.py:k'", "too many")),
        (("j.py:j", "--max-time", "soon"), ("--max-time", "'soon'", "2h")),
        (("j.py:j", "--max-time", "0"), ("--max-time", "above 0")),
        (("j.py:j", "--bucket-size", "1KiB"), ("--bucket-size", "64KiB to 1GiB")),
        (("j.py:j", "--name", "a/b"), ("--name", "'a/b'")),
        (("j.py:j", "--log", "loud"), ("--log", "'loud'", "silent, normal or verbose")),
        (("j.py:j", "--min-workers", "9", "--max-workers", "3"), ("--min-workers 9", "--max-workers 3")),
        (("j.py:j", "--silence", "2"), ("--silence 2s", "--heartbeat 3s")),
        (("j.py:j", "--data-dir", __file__), ("--data-dir", "a directory")),
        (("j.py:j", "--profile-memory", f"{__file__}/x"), ("--profile-memory", "a directory")),
        (("j.py:j", "--tracker", "x:http://me:hush@h"), ("--tracker: 'x:http://...@h' will not do",)),
        (("j.py:j", "--config", "none.toml"), ("none.toml", "No such file")),
        (("j.py:j", "--config", "/dev/zero"), ("/dev/zero", "larger than 1 MiB")),
        (("j.py:j", "--token", "hush"), ("W5XDE_TOKEN", "--token-file")),
        (("j.py:j", "--token=hush"), ("W5XDE_TOKEN",)),
        (("j.py:j", "--codec", "foo"), ("--codec: 'foo' will not do; give one of raw, bf16",)),
        (("j.py:j", "--codec", "topk", "--print-config"), ("--codec: 'topk' will not do", "topk:FRACTION")),
        (("j.py:j", "--codec", "topk:2"), ("--codec: 'topk:2' will not do", "at most 0.5")),
        (("j.py:j", "--downlink", "foo"), ("--downlink: 'foo' will not do; give one of raw",)),
        (("j.py:j", "--tracker", "wandb,foo"), ("--tracker: 'wandb,foo' will not do", "tensorboard, wandb")),
        (("j.py:j", "--max-steps", "9" * 20), ("--max-steps", "whole number >= 1")),
        (("j.py:j", "--max-steps", "٣"), ("--max-steps", "whole number")),
        (("j.py:j", "--no-quarantine=yes"), ("--no-quarantine takes no value",)),
        (("j.py:j", "--threads", "100000"), ("--threads", "'100000'", "from 1 to 4096")),
        (("j.py:j", "--outer-lr", "1e308"), ("--outer-lr", "at most 1e30")),
        (("j.py:j", "--override", "optimizer.lr=1,scheduler.a=1e999"), ("--override", "1e999' will not do", "finite")),
        (("j.py:j", "--max-time", "-1ms"), ("--max-time: '-1ms' will not do", "2h")),
        (("j.py:j", "--loader-processes", "99999"), ("--loader-processes", "from 0 to 4096")),
        (("j.py:j", "--name", "  "), ("--name", "not blank")),
        (("j.py:j", "--run-dir", "runs/x\udcff"), ("--run-dir: 'runs/x\\udcff' will not do", "in UTF-8")),
        (("j.py:j", "--run-dir", "runs/x\udcff", "--name", "x"), ("--run-dir",)),
    ],
)  # fmt: skip
def test_one_line_says_what_is_wrong(arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    text = complaint(*arguments)
    assert all(part in text for part in parts), text
    assert "hush" not in text


@pytest.mark.parametrize("program", [CoordinatorSettings, WorkerSettings])
def test_no_path_is_empty(program: type[Program], tmp_path: Path) -> None:
    """``--run-dir "$DIR"`` where that is not set would be the working directory."""
    paths = {one for one in declared(program).values() if one.setting.kind.read in (PATH.read, FOLDER.read)}
    assert len(paths) > 5
    for one in paths:
        with pytest.raises(UsageError, match=f"^{one.option}: '' will not do; give a "):
            read(program, (one.option, ""), prog="p", environment={})
        if one.in_toml:
            file = tmp_path / "w5xde.toml"
            file.write_text(f'[{program.table}]\n{one.name} = ""\n')
            with pytest.raises(UsageError, match=f"{one.name}: '' will not do"):
                read(program, ("--config", str(file)), prog="p", environment={})


@pytest.mark.parametrize("program", [CoordinatorSettings, WorkerSettings])
def test_every_path_may_begin_with_the_home_directory(program: type[Program], tmp_path: Path) -> None:
    """No shell expands ``--run-dir=~/run``, or what stands in a file. Nobody's home is a name."""
    (tmp_path / "w5xde.toml").write_text("")
    paths = {one for one in declared(program).values() if one.setting.kind.read in (PATH.read, FOLDER.read)}
    needed = ("train.py:job",) if program is CoordinatorSettings else ("--server", "here:1")
    for one in paths:
        words = () if one.name == "join_file" and program is WorkerSettings else needed
        name = "w5xde.toml" if one.name == "config" else "new"
        told, _ = read(program, (*words, f"{one.option}=~/{name}"), prog="p", environment={})
        assert told.values[one.name] == tmp_path / name
    told, _ = read(program, (*needed, "--token-file=~nobody-has-it/x"), prog="p", environment={})
    assert told.values["token_file"] == Path("~nobody-has-it/x")


@pytest.mark.parametrize("program", [CoordinatorSettings, WorkerSettings])
def test_so_may_a_jobs_file_and_a_checkpoint(program: type[Program], tmp_path: Path) -> None:
    home, place = str(tmp_path), ("--server", "here:1") if program is WorkerSettings else ()
    told, _ = read(program, place, prog="p", environment={"W5XDE_JOB": "~/train.py:job"})
    assert told.values["job"] == f"{home}/train.py:job"
    file = tmp_path / "w5xde.toml"
    file.write_text(f'[{program.table}]\njob = "~/train.py:job"\n')
    told, _ = read(program, (*place, "--config", str(file)), prog="p", environment={})
    assert told.values["job"] == f"{home}/train.py:job"
    if program is CoordinatorSettings:
        for resume in ("auto", "never", "runs/a~b", "~/runs/step-1"):
            told, _ = read(program, ("j:job", f"--resume={resume}"), prog="p", environment={})
            assert told.values["resume"] == resume.replace("~/", f"{home}/")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pp-stages", "a,b"), "--pp-stages: there is no island; give --island or"),
        (("--pp-schedule", "gpipe", "--island-interface", "lo"), "--island-interface and --pp-schedule: there is no"),
        (("--checkpoint-activations",), "--checkpoint-activations: there is no island"),
        (("--device", "cuda:-1"), "--device: 'cuda:-1' will not do"),
        (("--device", "cpu:x"), "--device: 'cpu:x' will not do"),
        (("--inline-block", "-1ms"), "--inline-block: '-1ms' will not do"),
    ],
)
def test_what_a_worker_has_no_use_for_is_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(said)}"):
        read(WorkerSettings, ("--server", "h:1", *arguments), prog="p", environment={})


def test_of_what_says_where_the_coordinator_is_the_stronger_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[worker]\njoin_file = "of the file"\n')

    def told(*arguments: str, **environment: str) -> tuple[Any, ...]:
        settings, _ = read(WorkerSettings, ("--config", str(file), *arguments), prog="p", environment=environment)
        return settings.server, settings.join, settings.join_file, sorted(settings.environment)

    assert told() == (None, None, Path("of the file"), [])
    assert told(W5XDE_JOIN="w5xde://h:1") == (None, "w5xde://h:1", None, [])
    assert told("--server", "h:1", W5XDE_JOIN_FILE="x") == ("h:1", None, None, [])
    with pytest.raises(UsageError, match="join and server both say where"):
        told(W5XDE_JOIN="w5xde://h:1", W5XDE_SERVER="h:1")
    with pytest.raises(UsageError, match="join_file and server both say where"):
        told("--server", "h:1", "--join-file", "x")


def test_a_run_is_named_after_its_directory_however_long_that_is_called() -> None:
    assert coordinator("j.py:j", "--run-dir", "a/there").name == "there"
    assert coordinator("j.py:j", "--run-dir", "a/" + "n" * 250).name == "n" * 100
    assert "--name" in complaint("j.py:j", "--name", "n" * 101)


def test_where_a_wrong_value_came_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "w5xde.toml"
    file.write_text('[coordinator]\nepochs = "many"\n')
    text = complaint("j.py:j", "--config", str(file))
    assert "[coordinator] epochs" in text
    assert "'many'" in text
    monkeypatch.setenv("W5XDE_EPOCHS", "few")
    assert complaint("j.py:j", "--config", str(file)).startswith("W5XDE_EPOCHS: 'few'")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[coordinator]\nprot = 1\n", ("no prot", "did you mean port?")),
        ("[coordinator]\ntoken = 'hush'\n", ("token_file", "W5XDE_TOKEN")),
        ("port = 1\n", ("'port'", "[coordinator]")),
        ("[corodinator]\n", ("'corodinator'",)),
        ("coordinator = 1\n", ("[coordinator]",)),
        ("[coordinator\n", ("not TOML",)),
        ("[coordinator]\nport = true\n", (": [coordinator] port: true will not do; give a whole number",)),
        ("[coordinator]\nmax_time = 00:10:00\n", ("max_time: 00:10:00 will not do; give a time",)),
        ('[coordinator]\ntracker = ["a", 1]\n', ('tracker: ["a", 1] will not do; give one text of trackers',)),
        ("[coordinator]\nepochs = {a = 1}\n", ("epochs: {a = 1} will not do",)),
        ("[coordinator]\nport = " + "[" * 5000, ("not TOML",)),
        ("[coordinator]\nrun-dir = 'a'\nrun_dir = 'b'\n", ("[coordinator] has run_dir twice",)),
    ],
)
def test_mistakes_in_the_toml_file(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    file = tmp_path / "w5xde.toml"
    file.write_text(text)
    complained = complaint("j.py:j", "--config", str(file))
    assert all(part in complained for part in (*parts, str(file))), complained
    assert "hush" not in complained


def test_a_toml_file_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    file = tmp_path / "w5xde.toml"
    file.write_text("[coordinator]\nport = 7\n", encoding="utf-8-sig")
    assert coordinator("j.py:j", "--config", str(file)).values["port"] == 7


def test_a_worker_needs_a_server() -> None:
    assert "--server is missing" in complaint(program=WorkerSettings)


def test_a_join_string_is_no_server() -> None:
    """Whoever lists the machine's processes would read its secret."""
    told = f"w5xde://the-secret@here:1?cert=sha256:{'0' * 64}"
    with pytest.raises(UsageError, match="--join-file") as caught:
        read(WorkerSettings, ("--server", told), prog="worker")[0].where()
    assert "the-secret" not in str(caught.value)
    assert worker().where() == "here:1"
    with pytest.raises(UsageError, match=r"^--server 'here:99999' has no valid port"):
        read(WorkerSettings, ("--server", "here:99999"), prog="worker")[0].where()
    assert complaint("--compile=maybe", program=WorkerSettings) == "--compile takes no value"


# -- help


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_names_every_flag_its_variable_and_fits_80_columns(program: type[Program]) -> None:
    text = answer(program, "--help-all" if program.everyday else "--help")
    assert all(len(line) <= 80 for line in text.splitlines())
    flat = " ".join(text.split())
    for name, one in declared(program).items():
        shown = not one.setting.hidden
        assert (f"W5XDE_{name.upper()}]" in flat) == shown, name
        if not one.setting.positional:
            assert (f"--{name.replace('_', '-')}" in flat) == shown, name
    assert set(flag_names(program)) >= {"--help", "--version", "--print-config"}


@pytest.mark.parametrize("program", [program for program in PROGRAMS if program.everyday])
def test_help_shows_what_most_runs_need_on_one_screen(program: type[Program]) -> None:
    text = answer(program, "--help")
    shown = set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE))
    wanted = {declared(program)[name].option for name in program.everyday.split() if name != "job"}
    always = {"--print-config", "--version", "--help", "--help-all"}
    assert shown - {"--job"} == wanted | always
    assert len(text.splitlines()) <= 70


def test_version() -> None:
    assert answer(WorkerSettings, "--version").startswith("w5xde-async ")


_SIGNALLED = """
import signal, sys

class Slow:  # the first import that takes long: signals come while it does
    def find_spec(self, name, path=None, target=None):
        if name == "w5xde_async.settings":
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGHUP)

sys.meta_path.insert(0, Slow())
from w5xde_async.coordinator.__main__ import main
code = main(["--help"])
sys.exit(code or "torch" in sys.modules)
"""


def test_help_does_not_wait_for_torch() -> None:
    """And whoever starts the coordinator may send it signals at once."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-c", _SIGNALLED], check=True, stdout=subprocess.DEVNULL)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < 2.0  # 0.25 s on an idle machine


# -- tokens


def _token_file(path: Path, text: str = "hush\n", mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_where_the_token_is_looked_for(tmp_path: Path) -> None:
    file = _token_file(tmp_path / "token", "from file\n")
    variable = {"W5XDE_TOKEN": " from variable "}
    assert find_token(None, given_as_argument=False, environment={}) == ""
    assert find_token(None, given_as_argument=False, environment=variable) == "from variable"
    assert find_token(file, given_as_argument=False, environment=variable) == "from variable"
    assert find_token(file, given_as_argument=True, environment=variable) == "from file"
    assert find_token(file, given_as_argument=False, environment={}) == "from file"
    _token_file(tmp_path / ".config" / "w5xde" / "token", "from home")
    assert find_token(None, given_as_argument=False, environment={}) == "from home"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = _token_file(tmp_path / "my token", mode=mode)
    with pytest.raises(UsageError, match=r"chmod 600 '.*my token'"):
        find_token(file, given_as_argument=True, environment={})


@pytest.mark.parametrize(
    ("text", "what"), [("", "is empty"), (" \n", "is empty"), ("one\ntwo\n", "does not hold one line")]
)
def test_a_token_file_without_a_token_is_refused(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"token {what}; copy it once more"):
        find_token(_token_file(tmp_path / "token", text), given_as_argument=True, environment={})


LONG = "n" * 300  # more than a file may be called


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("j.py:j", "--profile-memory", LONG), "--profile-memory: "),
        (("j.py:j", "--data-dir", f"{LONG}/below"), "--data-dir: "),
    ],
)
def test_a_name_that_is_too_long_for_a_directory_is_refused(arguments: tuple[str, ...], said: str) -> None:
    assert complaint(*arguments).startswith(said)


@pytest.mark.parametrize(
    ("path", "said"), [(LONG, "cannot be read: File name too long"), ("~nosuchuser/x", "no.*such a home directory")]
)
def test_files_of_secrets_that_can_be_nowhere(path: str, said: str) -> None:
    settings, _ = read(WorkerSettings, ("--join-file", path), prog="p", environment={})
    with pytest.raises(UsageError, match=f"^join file {path}.*{said}"):
        settings.where()
    with pytest.raises(UsageError, match=f"^token file {path}.*{said}"):
        find_token(Path(path), given_as_argument=True, environment={})


def test_a_token_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        find_token(tmp_path / "none", given_as_argument=True, environment={})


def told_useless(*arguments: str) -> str:
    return coordinator("train.py:job", *arguments).without_effect()


def test_what_the_rule_has_no_use_for_is_named() -> None:
    said = told_useless(*"--update sync --quorum 0.3 --outer-lr 3 --inner-steps 9 --fragments 2 --mixing 0.1".split())
    assert said == (
        "--update sync has no use for --inner-steps, --outer-lr (local, streaming, async-local); "
        "--fragments, --mixing (streaming); --quorum (local, streaming)"
    )
    said = told_useless(*"--update local --fragments 9 --overlap 3 --results-per-step 3 --inner-steps 9".split())
    assert said == (
        "--update local has no use for --fragments, --overlap (streaming); --results-per-step (async, async-local)"
    )
    assert told_useless(*"--update local --average median --results-per-step 3".split()) == ""
    assert told_useless("--batch-patience", "5") == "--batch-patience does nothing without --target-batch"
    assert told_useless("--batch-patience", "5", "--target-batch", "64") == ""
    assert told_useless("--max-staleness", "2", "--batch-patience", "5").count(";") == 1
    assert told_useless("--codec", "int8") == told_useless() == ""
    local = ("--worker-threads", "3", "--data-dir", "/data")
    said = "--worker-threads does nothing without --workers; --data-dir does nothing without --workers"
    assert sorted(told_useless(*local).split("; ")) == sorted(said.split("; "))
    assert sorted(told_useless("--update", "auto", *local).split("; ")) == sorted(said.split("; "))
    assert told_useless("--workers", "1", *local) == ""
    assert told_useless("--no-feedback") == "--no-feedback does nothing under --codec raw, which leaves nothing out"
    assert told_useless("--no-feedback", "--codec", "int8") == told_useless("--feedback") == ""


def test_auto_may_use_everything() -> None:
    assert told_useless("--update", "auto", "--fragments", "9", "--quorum", "0.3") == ""


def test_what_variables_and_files_say_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W5XDE_OVERLAP", "7")
    Path("it.toml").write_text("[coordinator]\nmixing = 0.25\nfragments = 4\n")  # four are the default
    assert told_useless("--config", "it.toml") == "--update sync has no use for --overlap, --mixing (streaming)"
    monkeypatch.delenv("W5XDE_OVERLAP")
    Path("all.toml").write_text(answer(CoordinatorSettings, "train.py:job", "--print-config"))
    assert told_useless("--config", "all.toml") == ""
