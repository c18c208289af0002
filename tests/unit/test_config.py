"""Declared settings: what they accept, ranges of configs, and everything that a declaration alone gives a program."""

from __future__ import annotations

import runpy
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec import msgpack

from w5xde_async.config import TIME, Config, Kind, duration_s, setting, setting_of, size_bytes, whole
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.errors import UsageError
from w5xde_async.net.tls import TlsFiles
from w5xde_async.settings import Answer, flag_names, read
from w5xde_async.settings.flags import Program
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.messages import HEARTBEAT_S, SILENCE_S, Drain, Welcome
from w5xde_async.worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1h30m", 5400), ("250ms", 0.25), ("1D", 86400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 m", "5m3", "-5", "1e3", "5y", "nan", "True", "٣s", "٣"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        duration_s(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("512KiB", 512 << 10), ("4MiB", 4 << 20), ("4mib", 4 << 20), ("1GB", 10**9), ("2k", 2000),
     ("1.5 GiB", 3 << 29), ("8B", 8)],
)  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    assert size_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "4iB", "4XB", "-1", "1e6", "True", "٣k", "9" * 400, "9" * 307 + "T"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        size_bytes(text)


# -- ranges


@pytest.mark.parametrize(
    ("kind", "wrong", "said"),
    [
        (CoordinatorConfig, {"port": 65536}, "port is 65536; give a whole number from 0 to 65535"),
        (CoordinatorConfig, {"port": "80"}, "port is '80'; give a whole number"),
        (CoordinatorConfig, {"checkpoint_every": True}, "checkpoint_every is True; give a whole number >= 1"),
        (CoordinatorConfig, {"silence_s": 0.0}, "silence_s is 0.0; give seconds from 0.001 to 1000000"),
        (CoordinatorConfig, {"max_time_s": float("nan")}, "max_time_s is nan; give seconds > 0"),
        (CoordinatorConfig, {"durability": "none"}, "durability is 'none'; give checkpoint or journal"),
        (CoordinatorConfig, {"min_workers": 3, "max_workers": 2}, "--min-workers 3 is more than --max-workers 2"),
        (CoordinatorConfig, {"insecure": True, "join_file": Path("j")}, "contradict each other"),
        (CoordinatorConfig, {"max_steps": 2**63}, "give a whole number >= 1"),
        (CoordinatorConfig, {"trackers": ("foo",)}, "give one text of trackers with commas between them: tensorboard"),
        (CoordinatorConfig, {"dashboard": "here:x"}, "--dashboard-address 'here:x' has no valid port"),
        (CoordinatorConfig, {"tls": TlsFiles(cert=Path("c"))}, "give --tls-cert and --tls-key, or neither"),
        (UpdateConfig, {"codec": "foo"}, "codec is 'foo'; give one of raw, bf16"),
        (UpdateConfig, {"mixing": 1.0}, "mixing is 1.0; give a number from 0 to less than 1"),
        (UpdateConfig, {"rule": "auto"}, "auto=True"),
        (WorkerConfig, {"memory_limit_bytes": 1}, "memory_limit_bytes is 1; give "),
        (WorkerConfig, {"insecure": True, "certificate": bytes(32)}, "contradict each other"),
    ],
)
def test_a_config_says_what_is_out_of_range(kind: type[Any], wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        kind(**wrong)
    assert said in str(caught.value)


def _configs(kind: type[Config]) -> Iterator[type[Config]]:
    for one in kind.__subclasses__():
        yield from (one, *_configs(one))


DURATIONS = sorted({
    (kind, one.name, declared.kind)
    for kind in _configs(Config) if kind.__module__.startswith("w5xde_async.")
    for one in fields(kind)  # type: ignore[arg-type]
    if one.name.endswith(("_s", "_timeout", "probe_interval")) and (declared := setting_of(one)) is not None
}, key=str)  # fmt: skip


@pytest.mark.parametrize(("config", "name", "kind"), DURATIONS, ids=[f"{c.__name__}.{n}" for c, n, _ in DURATIONS])
def test_every_duration_has_an_end(config: type[Any], name: str, kind: Kind) -> None:
    """Neither messages nor clocks hold any number."""
    for value in (1e10, float("inf"), 10**400, -1.0, "90", True):
        with pytest.raises(UsageError, match=rf"^{name} is "):
            config(**{name: value})
    assert kind.holds(1.0) or name == "inline_block_s"


def test_a_duration_is_declared() -> None:
    """Else nothing looks at it."""
    bare = [
        f"{kind.__name__}.{one.name}"
        for kind in _configs(Config) if kind.__module__.startswith("w5xde_async.")
        for one in fields(kind)  # type: ignore[arg-type]
        if one.name.endswith("_s") and setting_of(one) is None
    ]  # fmt: skip
    assert not bare


def test_messages_hold_the_longest_durations_that_configs_take() -> None:
    config = CoordinatorConfig(heartbeat_s=HEARTBEAT_S[1], silence_s=SILENCE_S[1])
    welcome = Welcome("0" * 16, "r", 1, 0, "fp32", 1, 1, 64, b"0" * 16, config.heartbeat_s, config.silence_s)
    drain = Drain("r", WorkerConfig(grace_s=864e6).grace_s)
    for message in (welcome, drain):
        assert type(message).parse(msgpack.encode(message)) == message
    with pytest.raises(UsageError, match="heartbeat_s is 200000"):
        CoordinatorConfig(heartbeat_s=2e5, silence_s=1e6)


def test_a_field_of_another_type_is_not_its_default() -> None:
    with pytest.raises(UsageError, match=r"^port is 5555\.0; give a whole number"):
        CoordinatorConfig(port=5555.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"update is 'async'; give UpdateConfig\(...\)"):
        CoordinatorConfig(update="async")  # type: ignore[arg-type]


def test_a_default_that_would_not_be_accepted_stands_for_not_set() -> None:
    config = WorkerConfig()
    assert (config.name, config.memory_limit_bytes, config.lifetime_s) == ("", 0, None)
    assert config.batch_bytes >= 64 << 20
    assert replace(config, memory_limit_bytes=1 << 20).batch_bytes == 1 << 20


# -- one declaration, everywhere


@dataclass(frozen=True, kw_only=True)
class Nap(Config):
    """How it sleeps."""

    nap_s: float = setting(2.0, "how long it sleeps", TIME, "sleep", flag="nap")
    dreams: int | None = setting(None, "dreams that it has", whole(1), "sleep", shown="as they come")
    depth: int = setting(3, "how deep", whole(0))


@dataclass(frozen=True, kw_only=True)
class Day(Config):
    """A config with another in it."""

    nap: Nap = field(default_factory=Nap)


@dataclass(frozen=True, kw_only=True)
class Sleeper(Program):
    """A program with these settings."""

    table: ClassVar = "worker"
    usage: ClassVar = "[options]"
    about: ClassVar = "Sleep."
    ending: ClassVar = "Nothing else."
    parts: ClassVar = (Day,)
    first: ClassVar = "nap"


def told(*arguments: str) -> Day:
    return read(Sleeper, arguments, prog="sleeper")[0].make(Day)


def answer(*arguments: str) -> str:
    with pytest.raises(Answer) as caught:
        read(Sleeper, arguments, prog="sleeper")
    return caught.value.text


@pytest.fixture
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "NAP", "DREAMS", "LOOP", "PROFILE_MEMORY", "TOKEN_FILE"):
        monkeypatch.delenv(f"W5XDE_{name}", raising=False)


@pytest.mark.usefixtures("_no_settings_of_this_machine")
def test_a_declared_setting_is_in_arguments_environment_toml_help_and_documents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert told() == Day()
    file = tmp_path / "settings.toml"
    file.write_text('[worker]\nnap = "4m"\ndreams = 7\n')
    assert told("--config", str(file)).nap == Nap(nap_s=240.0, dreams=7)
    monkeypatch.setenv("W5XDE_NAP", "3s")
    assert told("--config", str(file)).nap == Nap(nap_s=3.0, dreams=7)
    assert told("--config", str(file), "--nap", "1m").nap == Nap(nap_s=60.0, dreams=7)
    with pytest.raises(UsageError, match=r"^--nap: 'never' will not do; give a time above 0"):
        told("--nap", "never")
    with pytest.raises(UsageError, match=r"^nap_s is -1; give seconds > 0, at most 864000000$"):
        Nap(nap_s=-1)
    with pytest.raises(UsageError, match=r"^depth is -1; give a whole number >= 0$"):
        Nap(depth=-1)
    assert tomllib.loads(answer("--print-config", "--dreams", "2"))["worker"]["dreams"] == 2
    text = " ".join(answer("--help").split())
    assert "--nap TIME how long it sleeps [2s; W5XDE_NAP] --dreams N dreams that it has [as they come" in text
    assert "depth" not in text  # it has no group: Python alone can give it
    assert {"--nap", "--dreams"} <= set(flag_names(Sleeper))
    assert "nap_s  how long it sleeps" in (Nap.__doc__ or "")
    page = "".join(runpy.run_path(str(ROOT / "docs" / "make_settings.py"))["tables"]((Sleeper,)))
    accepts = "a time above 0, like 90, 90s, 5m or 2h, at most 10000d"
    row = f"| `--nap TIME`<br>`W5XDE_NAP`<br>`nap` | 2s | how long it sleeps | {accepts} |"
    assert row in page


def test_bytes_that_are_no_text_are_refused_where_they_are_given() -> None:
    name = b"\xff\xfe".decode("utf-8", "surrogateescape")  # what Python makes of such an argument
    with pytest.raises(UsageError, match="name is"):
        WorkerConfig(name=name)
