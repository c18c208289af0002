"""Runs with a journal: what was told is never computed again, and what a crash leaves gives the same bits."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, BinaryIO

import pytest
import torch
from tests.simulator.disk import Disk as MachineDisk
from tests.simulator.disk import HostFilesystem
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, Commits, settings, train

from w5xde_async.coordinator.durability import checkpointing, journal_writer
from w5xde_async.coordinator.run import resume
from w5xde_async.coordinator.run.spec import Prepared
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.errors import CheckpointCorrupt, CheckpointMismatch, UsageError
from w5xde_async.hub.work.verdicts import Counted
from w5xde_async.job import Job, build_model
from w5xde_async.plan.numerics import EXACT
from w5xde_async.runtime import Runtime
from w5xde_async.store.filesystem import Filesystem
from w5xde_async.store.rundir import Superseded
from w5xde_async.telemetry.events import (
    Bus,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    JournalFailed,
    JournalRestored,
    RunStarted,
    StepCommitted,
    Warned,
)
from w5xde_async.telemetry.recorder import Recorder
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.sync import LossScale
from w5xde_async.worker.service import Worker


@cache
def expected(name: str, steps: int | None = None) -> str:
    return reference.digest(jobs.ALL[name](), steps)


def copy(run: Path, left: Path) -> None:
    """What lies in ``run``; again where something that was under way put it in other places meanwhile."""
    for _ in range(100):
        with suppress(shutil.Error, FileNotFoundError):
            shutil.copytree(run, left)
            return
        shutil.rmtree(left)
    raise AssertionError("it does not hold still")


async def crash(
    make: Callable[[], Job],
    run: Path,
    *,
    at: int,
    left: Path,
    events: list[Event] | None = None,
    saves: int = 0,
    after: type[Event] | None = None,
    **config: Any,
) -> int:
    """Train in ``run``; ``left`` is what a ``kill -9`` after the commit of step ``at`` would leave of it.

    It comes later where so many checkpoints have not been saved, or an event has not been seen; the result is the last
    step that was told before. The worker goes first, so that the rest holds still.
    """
    loop = asyncio.get_running_loop()
    reached = loop.create_future()
    step = saved = 0
    seen: set[type[Event]] = set()

    def see(event: Event) -> None:
        nonlocal step, saved
        step = event.step if isinstance(event, StepCommitted) else step
        saved += isinstance(event, CheckpointSaved)
        seen.add(type(event))
        if step >= at and saved >= saves and (after is None or after in seen) and not reached.done():
            reached.set_result(step)
            worker.cancel()

    bus = Bus()
    bus.subscribe(see)
    if events is not None:
        bus.subscribe(events.append)
    config = {"durability": "journal", "max_steps": 5000, **config}
    async with Coordinator(make(), run_dir=run, config=settings(**config), bus=bus) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=make(), config=QUICK_WORKER).run())
        told: int = await reached
        await asyncio.gather(worker, return_exceptions=True)
        assert coordinator._run is not None
        saving = coordinator._run.checkpointing._saving
        if saving is not None:
            await asyncio.wait([saving])
        if coordinator._journal is not None:
            await coordinator._journal.flush()
        await asyncio.to_thread(copy, run, left)
    return told


def prepared(make: Callable[[], Job], run: Path, **config: Any) -> Prepared:
    """What a start would begin with; its directory is let go of."""
    found = prepare(make(), settings(**{"durability": "journal", **config}), run, lambda: "0" * 16)
    assert found.spec.files is not None
    found.spec.files.close()
    return found


async def go_on(make: Callable[[], Job], run: Path, **config: Any) -> tuple[RunResult, list[Event]]:
    events: list[Event] = []
    result = await train(make, run_dir=run, events=events, **{"durability": "journal", **config})
    return result, events


def run_id_of(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["run_id"])


def lines(run: Path) -> list[dict[str, Any]]:
    """The steps of metrics.jsonl."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == "step_committed"]


def texts(events: list[Event]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Warned))


@pytest.mark.parametrize(
    "name",
    [
        "mlp_sgd",
        "odd",
        "fp16",
        "noisy",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("mlp_adamw", "cnn_adamw", "gpt_adamw", "words")),
    ],
)
async def test_after_a_crash_it_goes_on_from_the_last_committed_step(tmp_path: Path, name: str) -> None:
    """SGD, AdamW, a scheduler, clipping, batch norm, integer buffers, absent gradients, a loss scale that falls."""
    make, left = jobs.ALL[name], tmp_path / "left"
    told: list[Event] = []
    await crash(make, tmp_path / "run", at=5, left=left, events=told)
    shutil.copytree(left, tmp_path / "again")
    found = await asyncio.to_thread(prepared, make, tmp_path / "again")
    assert found.resume.step >= 5
    assert found.spec.state.digest() == expected(name, found.resume.step)
    assert "came from the journal" in "".join(found.resume.notes)
    assert "another gradient norm" not in "".join(found.resume.notes)

    result, events = await go_on(make, left)
    assert result.digest == expected(name, result.step)
    (started,) = (event for event in events if isinstance(event, RunStarted))
    assert started.resumed_step == found.resume.step
    steps = lines(left)
    assert [line["step"] for line in steps] == list(range(1, result.step + 1))
    before = {event.step: event for event in told if isinstance(event, StepCommitted)}
    for line in steps[:5]:
        assert line["loss"] == before[line["step"]].loss
        assert line["phases_s"]["journal"] >= 0
    last = json.loads((left / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "run_finished"
    assert last["samples"] == sum(line["samples"] for line in steps)


@pytest.mark.parametrize(("every", "saves"), [(500, 0), (3, 1)])
async def test_a_loss_scale_that_fell_is_replayed(tmp_path: Path, every: int, saves: int) -> None:
    def make() -> Job:
        return replace(jobs.fp16(), loss=_Huge())

    left = tmp_path / "left"
    await crash(make, tmp_path / "run", at=5, left=left, saves=saves, checkpoint_every=every)
    found = await asyncio.to_thread(prepared, make, left)
    assert found.strategy.rule.scale is not None
    assert found.strategy.rule.scale.value < LossScale.of_sums(make().batch_size).value
    assert found.spec.state.digest() == reference.digest(make(), found.resume.step)


class _Huge(torch.nn.CrossEntropyLoss):
    """Overflows in float16 until the scale has fallen."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input, target) * 4096


@pytest.mark.parametrize(("codec", "durability"), [("int4", "journal"), ("int4", "checkpoint"), ("raw", "journal")])
async def test_after_a_kill_it_is_known_which_results_had_counted(tmp_path: Path, codec: str, durability: str) -> None:
    """Else their workers would take them for refused, and with them what their codec had left out."""
    make, left = jobs.mlp_sgd, tmp_path / "left"
    config = {"durability": durability, "update": UpdateConfig(codec=codec)}
    every = 1 if durability == "checkpoint" else 500
    noted: list[tuple[int, int]] = []
    note = Counted.note

    def see(self: Counted, lease: int, buckets: tuple[int, ...], version: int) -> None:
        noted.append((lease, version))
        note(self, lease, buckets, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Counted, "note", see)
        await crash(make, tmp_path / "run", at=5, left=left, saves=5 // every, checkpoint_every=every, **config)
    found = await asyncio.to_thread(prepared, make, left, **config)
    assert found.resume.step >= 5
    last = [[lease] for lease, version in noted if version == found.resume.step]
    assert bool(last) == (codec == "int4")
    assert found.spec.counted.records(0, found.resume.step)[len(last) * -1 :] == last
    found.spec.counted.note(7, (), found.resume.step + 1)  # promised, and of no step that is done
    kept = resume.KeptState(found.spec, found.strategy).record(found.resume.step, found.resume.samples)
    assert kept.meta.get("counted", [])[len(last) * -1 :] == last
    assert (await go_on(make, left, **config))[0].outcome == "finished"


async def test_checkpoints_end_segments_and_an_older_one_replays_all(tmp_path: Path) -> None:
    """The newest two checkpoints are damaged: the one before them and the journal lead to the last commit."""
    make, left = jobs.mlp_adamw, tmp_path / "left"
    told = await crash(make, tmp_path / "run", at=5, left=left, saves=4, checkpoint_every=2, keep_checkpoints=3)
    steps = sorted(path.name for path in (left / "checkpoints").glob("step-*"))
    assert len(steps) >= 3
    assert steps[0] != "step-000000000"
    for name in steps[-2:]:
        (left / "checkpoints" / name / "manifest.json").write_text("{}")
    found = await asyncio.to_thread(prepared, make, left)
    assert found.resume.step >= told
    assert found.resume.saved_step == int(steps[-3].rpartition("-")[2])
    assert found.spec.state.digest() == expected("mlp_adamw", found.resume.step)
    notes = "\n".join(found.resume.notes)
    assert "manifest.json is damaged" in notes
    assert (
        f"the run goes on from the checkpoint of step {found.resume.saved_step}, the newest whole one of this run"
        in notes
    )
    segments = sorted((left / "journal").glob("segment-*"))
    assert segments[0].name != "segment-000000001"  # those before the oldest kept checkpoint are gone


async def test_after_a_kill_it_is_known_on_what_the_steps_of_the_journal_were_computed(tmp_path: Path) -> None:
    """Else nobody is told that those who compute now have other last bits."""
    left = tmp_path / "left"
    await crash(jobs.mlp_sgd, tmp_path / "run", at=5, left=left, checkpoint_every=500)
    numerics = (await asyncio.to_thread(prepared, jobs.mlp_sgd, left)).spec.numerics
    (device,) = numerics.devices
    assert device.endswith((" with 1 thread", " threads"))
    assert numerics.past == [EXACT]
    assert "workers differ" in numerics.note_device("another", 3)


@pytest.mark.parametrize("durability", ["journal", "checkpoint"])
async def test_an_older_copy_of_run_json_hands_no_term_out_again(durability: str, tmp_path: Path) -> None:
    """Workers that have served a later term would refuse the run, whoever asks them."""
    run, old = tmp_path / "run", b""
    for started, steps in enumerate((4, 8, 12), 1):
        result = await train(jobs.mlp_sgd, run_dir=run, durability=durability, max_steps=steps)
        assert result.step == steps
        old = old or (run / "run.json").read_bytes()
        assert json.loads((run / "run.json").read_text())["term"] == started
    (run / "run.json").write_bytes(old)
    found = await asyncio.to_thread(prepared, jobs.mlp_sgd, run, durability=durability)
    assert found.spec.term == 4


async def test_an_older_copy_of_run_json_hands_out_no_term_that_the_journal_names(tmp_path: Path) -> None:
    """After a kill: there is no checkpoint of that term."""
    left = tmp_path / "left"
    await crash(jobs.mlp_sgd, tmp_path / "run", at=5, left=left, checkpoint_every=500)
    old = (left / "run.json").read_bytes()
    assert (await asyncio.to_thread(prepared, jobs.mlp_sgd, left)).spec.term == 2
    (left / "run.json").write_bytes(old)
    assert (await asyncio.to_thread(prepared, jobs.mlp_sgd, left)).spec.term == 3


async def test_a_journal_without_the_checkpoint_that_it_begins_at_says_what_is_lost(tmp_path: Path) -> None:
    left = tmp_path / "left"
    await crash(jobs.mlp_sgd, tmp_path / "run", at=5, left=left, checkpoint_every=500)
    shutil.rmtree(left / "checkpoints")
    with pytest.raises(
        CheckpointCorrupt, match=r"no checkpoint to begin at; put that back from a copy, or .* at step 0"
    ):
        await asyncio.to_thread(prepared, jobs.mlp_sgd, left)
    found = await asyncio.to_thread(prepared, jobs.mlp_sgd, left, durability="checkpoint")
    assert found.resume.step == 0
    (said,) = [note for note in found.resume.notes if "journal" in note]
    assert said.startswith("the journal was set aside in")


async def test_terms_go_on_in_one_chain_and_other_buckets_do_not_matter(tmp_path: Path) -> None:
    make, run = jobs.cnn_adamw, tmp_path / "run"
    for number, size in enumerate((64 << 10, 1 << 20, 128 << 10)):
        left = tmp_path / f"left-{number}"
        await crash(make, run, at=6 * (number + 1), left=left, bucket_bytes=size)
        run = left
    found = await asyncio.to_thread(prepared, make, run, bucket_bytes=256 << 10)
    assert found.resume.step >= 18
    assert len(found.resume.replayed) == found.resume.step
    assert found.spec.state.digest() == expected("cnn_adamw", found.resume.step)


async def test_a_damaged_journal_is_refused_and_checkpoint_durability_sets_it_aside(tmp_path: Path) -> None:
    make, left = jobs.metrics, tmp_path / "left"
    await crash(make, tmp_path / "run", at=3, left=left)
    (segment,) = (left / "journal").iterdir()
    content = bytearray(segment.read_bytes())
    content[content.index(b"W5XJ") + 60] ^= 1  # the first record is always a batch of its own
    segment.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=r"start with --durability checkpoint .* of step 0: all") as caught:
        await asyncio.to_thread(prepared, make, left)
    assert "are whole" not in str(caught.value)
    result, events = await go_on(make, left, durability="checkpoint")
    assert result.digest == expected("metrics")
    assert "journal is damaged and was set aside in" in texts(events)
    assert "the steps after 0 are computed again" in texts(events)
    assert (left / "abandoned-journal" / segment.name).exists()
    assert not (left / "journal").exists()
    assert [line["step"] for line in lines(left)] == list(range(1, result.step + 1))


@pytest.mark.parametrize("name", ["mlp_adamw", "cnn_adamw", "fp16", "noisy", "odd"])
async def test_whatever_was_replayed_of_a_damaged_journal_leaves_no_trace(name: str, tmp_path: Path) -> None:
    make, left = jobs.ALL[name], tmp_path / "left"
    await damaged_after_9(make, tmp_path / "run", left)
    applied: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            resume, "apply_entry", lambda entry, *rest: (applied.append(1), journal_writer.apply_entry(entry, *rest))[1]
        )
        result, events = await go_on(make, left, durability="checkpoint")
    assert applied  # before the damage was found
    assert result.digest == expected(name, result.step)
    assert "journal is damaged and was set aside in" in texts(events)


async def test_of_a_damaged_journal_it_is_told_how_far_it_is_whole(tmp_path: Path) -> None:
    left = tmp_path / "left"
    await damaged_after_9(jobs.mlp_sgd, tmp_path / "run", left)
    with pytest.raises(
        CheckpointCorrupt, match=r"before that, the steps up to (\d+) are whole; .* of step 9: "
    ) as found:
        await asyncio.to_thread(prepared, jobs.mlp_sgd, left)
    (whole,) = re.findall(r"up to (\d+) are", str(found.value))
    assert f"the record after step {whole}, at byte " in str(found.value)


async def damaged_after_9(make: Callable[[], Job], run: Path, left: Path, **config: Any) -> None:
    """``crash``, and a journal that can be replayed for some steps only after the checkpoint of step 9."""
    await crash(make, run, at=16, left=left, saves=1, checkpoint_every=9, keep_checkpoints=500, **config)
    for checkpoint in (left / "checkpoints").glob("step-*"):
        if checkpoint.name > "step-000000009":
            shutil.rmtree(checkpoint)
    segment = sorted((left / "journal").glob("segment-*"))[1]  # of the steps after the 9th
    content = bytearray(segment.read_bytes())
    batches = [found.start() for found in re.finditer(b"W5XJ", content)]
    content[batches[1] + 60] ^= 1  # known to have been durable by the last, which is more than ``MOST_AHEAD`` later
    segment.write_bytes(content)


async def test_nor_do_results_count_that_were_replayed_of_it(tmp_path: Path) -> None:
    update = UpdateConfig(codec="int4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Counted, "known", lambda self, lease: None)  # no worker has said yet that it has heard
        await damaged_after_9(jobs.mlp_sgd, tmp_path / "run", tmp_path / "left", update=update)
    with pytest.MonkeyPatch.context() as patch:
        restored: list[int] = []
        restore = Counted.restore

        def see(self: Counted, records: Any, version: int) -> None:
            restored.append(version)
            restore(self, records, version)

        patch.setattr(Counted, "restore", see)
        found = await asyncio.to_thread(
            prepared, jobs.mlp_sgd, tmp_path / "left", durability="checkpoint", update=update
        )
    assert found.resume.step == 9
    assert max(restored) > 9
    assert found.spec.counted.records(10, 99) == []
    assert found.spec.counted.records(0, 9)


@pytest.mark.parametrize("missing", ["journal", "last segment"])
async def test_a_journal_that_is_gone_is_missed(tmp_path: Path, missing: str) -> None:
    make, left = jobs.mlp_sgd, tmp_path / "left"
    await crash(make, tmp_path / "run", at=12, left=left, saves=2, checkpoint_every=5)
    found = await asyncio.to_thread(prepared, make, left)  # a second term, with a segment of its own
    assert found.spec.term == 2
    if missing == "journal":
        shutil.rmtree(left / "journal")
    else:
        max((left / "journal").glob("segment-*")).unlink()
    with pytest.raises(CheckpointCorrupt, match="missing"):
        await asyncio.to_thread(prepared, make, left)
    found = await asyncio.to_thread(prepared, make, left, durability="checkpoint")
    assert found.resume.step == found.resume.saved_step >= 5


async def test_without_a_journal_from_now_on_its_steps_are_kept(tmp_path: Path) -> None:
    make, left = jobs.metrics, tmp_path / "left"
    await crash(make, tmp_path / "run", at=3, left=left)
    found = await asyncio.to_thread(prepared, make, left, durability="checkpoint")
    assert found.resume.step == found.resume.saved_step >= 3
    assert not (left / "journal").exists()
    assert found.spec.state.digest() == expected("metrics", found.resume.step)
    result, _ = await go_on(make, left)  # and with one again
    assert result.digest == expected("metrics")


async def test_a_start_that_is_refused_for_what_it_was_told_leaves_all_where_it_is(tmp_path: Path) -> None:
    make, run = jobs.mlp_sgd, tmp_path / "run"
    await train(make, run_dir=run, max_steps=8, checkpoint_every=4, durability="journal")
    before = sorted(map(str, run.rglob("*")))
    chosen = str(run / "checkpoints" / "step-000000004")
    with pytest.raises(UsageError, match=r"--override optimizer\.speed: SGD has"):
        await asyncio.to_thread(prepared, make, run, resume=chosen, override="optimizer.speed=1")
    assert sorted(map(str, run.rglob("*"))) == before
    assert (await asyncio.to_thread(prepared, make, run)).resume.step == 8


class Killed(BaseException):
    """A process ends, and with it all that it would do."""


class Mortal:
    """A process of the simulator's."""

    dead = superseded = False


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
@pytest.mark.parametrize("power", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["killed", "power cut"])
async def test_a_start_that_is_killed_on_its_way_to_another_course_is_on_one_of_both(
    tmp_path: Path, durability: str, power: bool
) -> None:
    """Wherever that is: with its journal or said where it lies, and with no best model of the course that was left."""
    values = itertools.count(0.0, -1.0)

    def make() -> Job:
        return replace(jobs.mlp_sgd(), evaluate=lambda model: {"val_loss": next(values)}, evaluate_every=2,
                       keep_best="val_loss")  # fmt: skip

    run = tmp_path / "run"

    def killed(dies_in: int) -> str:
        """How the next start ends; empty where this one came to its end."""
        disk, process = MachineDisk(tmp_path / "disk", random.Random(dies_in)), Mortal()
        left, filesystem = disk.root / "run", HostFilesystem(disk, process)
        shutil.copytree(run, left)

        def die() -> None:
            process.dead = True
            raise Killed

        filesystem.dies_in, filesystem.die = dies_in, die
        told = settings(durability=durability, resume=str(left / "checkpoints" / "step-000000004"))
        with suppress(Killed):
            prepare(make(), told, left, lambda: "0" * 16, filesystem=filesystem).spec.close()
        filesystem.discard()
        if power:
            disk.power_cut()
        end = "as it was told"
        try:
            found = prepared(make, left, durability=durability)
        except CheckpointCorrupt as error:
            end = "with what was moved back"
            advice = re.compile("has left it as (.*?): move that back, and nothing is lost; or start with")
            os.rename(*advice.findall(str(error)), left / "journal")
            found = prepared(make, left, durability=durability)
            assert found.resume.step == 8
        assert found.resume.step in (4, 8)
        assert found.spec.state.digest() == expected("mlp_sgd", found.resume.step)
        assert found.resume.best is None or found.resume.best.step <= found.resume.step
        shutil.rmtree(disk.root)
        return f"at {found.resume.step} {end}" if process.dead else ""

    await train(make, run_dir=run, max_steps=8, checkpoint_every=4, durability=durability)
    ends = set()
    for dies_in in itertools.count(1):
        if not (end := await asyncio.to_thread(killed, dies_in)):
            break
        ends.add(end)
    moved = {"at 8 with what was moved back"} if durability == "journal" else set()
    assert ends == {"at 4 as it was told", "at 8 as it was told", *moved}


@pytest.mark.parametrize("back", [4, 8])
async def test_what_a_start_that_was_killed_half_way_has_left_is_all_named(
    tmp_path: Path, back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved back it goes on where the run was: where the checkpoints that follow the journal's were left too."""
    make, run = jobs.mlp_sgd, tmp_path / "run"

    def chosen(step: int) -> str:
        (path,) = (run / "checkpoints").glob(f"step-{step:09d}*")
        return str(path)

    kept = {"run_dir": run, "checkpoint_every": 4, "durability": "journal", "keep_checkpoints": 2}
    await train(make, max_steps=8, **kept)
    await train(make, max_steps=12, resume=chosen(4), **kept)
    assert len(list((run / "checkpoints").glob("step-*"))) == 3  # what was gone on from is kept

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("w5xde_async.store.checkpoint.CheckpointStore.save", die)
        with pytest.raises(Killed):
            await asyncio.to_thread(prepared, make, run, resume=chosen(back))
    with pytest.raises(CheckpointCorrupt) as told:
        await asyncio.to_thread(prepared, make, run)
    left = r"has left it as (?P<aside>.*?): move that back(, and (?P<lies>.*?) as (?P<name>.*?))?, and nothing is lost;"
    found = re.search(left, str(told.value))
    assert found is not None
    os.rename(found["aside"], run / "journal")
    assert (found["lies"] is None) is (back == 8)
    if found["lies"]:
        os.rename(found["lies"], run / "checkpoints" / found["name"])
    resumed = await asyncio.to_thread(prepared, make, run)
    assert resumed.resume.step == 12
    assert resumed.spec.state.digest() == expected("mlp_sgd", 12)


async def test_another_course_of_the_run_leaves_the_journal_aside(tmp_path: Path) -> None:
    make, left = jobs.mlp_sgd, tmp_path / "left"
    await crash(make, tmp_path / "run", at=13, left=left, checkpoint_every=5)
    chosen = left / "checkpoints" / "step-000000005"
    found = await asyncio.to_thread(prepared, make, left, resume=str(chosen))
    assert found.resume.step == 5
    assert "another course of the run" in "".join(found.resume.notes)
    assert (left / "abandoned-journal").is_dir()
    found = await asyncio.to_thread(prepared, make, left, resume="never")
    assert found.resume.step == 0
    assert (tmp_path / "left.old-1" / "abandoned-journal").is_dir()
    assert (tmp_path / "left.old-1" / "journal").is_dir()


@pytest.mark.parametrize("changed", [{}, {"override": "optimizer.lr=0.01"}], ids=["as it was", "with another rate"])
@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_the_same_command_goes_back_to_the_same_checkpoint_each_time(
    tmp_path: Path, durability: str, changed: dict[str, Any]
) -> None:
    """As an engine gives it that starts a run again; and without the path the newest course is gone on with."""
    make, run = jobs.mlp_sgd, tmp_path / "run"
    await train(make, run_dir=run, max_steps=8, checkpoint_every=4, durability="journal")
    chosen = run / "checkpoints" / "step-000000004"
    rates = []
    for told in (changed, changed, {}):
        for config in ({"resume": str(chosen), **told}, {}):
            found = await asyncio.to_thread(prepared, make, run, durability=durability, **config)
            assert found.resume.step == 4
            rates.append(found.strategy.rule.optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1] == rates[2] == rates[3]
    assert rates[4] == rates[5] == make().optimizer(build_model(make())).param_groups[0]["lr"]
    await train(make, run_dir=run, max_steps=12, checkpoint_every=2, durability=durability, resume=str(chosen))
    found = await asyncio.to_thread(prepared, make, run, durability=durability, resume=str(chosen))
    assert found.spec.state.digest() == expected("mlp_sgd", 4)


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_a_run_that_began_at_another_runs_checkpoint_goes_on_after_a_crash(
    tmp_path: Path, durability: str
) -> None:
    """Before it has saved one of its own, too, whatever it was given as the place."""
    make, old, new = jobs.mlp_sgd, tmp_path / "old", tmp_path / "new"
    await train(make, run_dir=old, max_steps=9, checkpoint_every=4)
    chosen = old / "checkpoints" / "step-000000004"
    left = tmp_path / "left"
    told = await crash(make, new, at=7, left=left, durability=durability, resume=str(chosen), checkpoint_every=500)
    found = await asyncio.to_thread(prepared, make, left, durability=durability)
    if durability == "journal":  # the step after what was told of may be on the disk already
        assert found.resume.step >= told
    else:
        assert found.resume.step == 4
    assert found.spec.state.digest() == expected("mlp_sgd", found.resume.step)
    assert "written by run" not in "".join(found.resume.notes), "it has become this run's own"


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_an_abandoned_checkpoint_that_is_resumed_counts_again(tmp_path: Path, durability: str) -> None:
    make, run = jobs.mlp_sgd, tmp_path / "run"
    for steps in (4, 8):  # each ends with its checkpoint, however slow the disk
        await train(make, run_dir=run, max_steps=steps)
    checkpoints = run / "checkpoints"
    await asyncio.to_thread(prepared, make, run, resume=str(checkpoints / "step-000000004"), durability="checkpoint")
    chosen = checkpoints / "abandoned-step-000000008"
    found = await asyncio.to_thread(prepared, make, run, resume=str(chosen), durability=durability)
    assert found.resume.step == 8
    left = tmp_path / "left"
    told = await crash(make, run, at=12, left=left, durability=durability, checkpoint_every=500)
    found = await asyncio.to_thread(prepared, make, left, durability=durability)
    if durability == "journal":  # the step after what was told of may be on the disk already
        assert found.resume.step >= told
    else:
        assert found.resume.step == 8
    assert found.spec.state.digest() == expected("mlp_sgd", found.resume.step)


async def test_a_checkpoint_of_another_run_is_named(tmp_path: Path) -> None:
    make, old = jobs.metrics, tmp_path / "old"
    await train(make, run_dir=old, max_steps=3)
    (chosen,) = (old / "checkpoints").iterdir()
    whose = json.loads((old / "run.json").read_text())["run_id"]
    found = await asyncio.to_thread(prepared, make, tmp_path / "new", resume=str(chosen), durability="checkpoint")
    assert f"its checkpoint was written by run {whose}" in "".join(found.resume.notes)
    assert "with it from there again" in "".join(found.resume.notes)


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_a_checkpoint_of_another_run_is_taken_only_where_it_is_asked_for(tmp_path: Path, durability: str) -> None:
    make, run, other = jobs.mlp_sgd, tmp_path / "run", tmp_path / "other"
    await train(make, run_dir=other, max_steps=9)
    told = await crash(make, run, at=4, left=tmp_path / "left", durability=durability, saves=1, checkpoint_every=4)
    for known in (tmp_path / "left" / "checkpoints").glob("step-*"):
        if int(known.name.rpartition("-")[2]) >= 9:  # one that fell due while another was saved
            shutil.rmtree(known)
    foreign = "checkpoints/step-000000009"
    shutil.copytree(other / foreign, tmp_path / "left" / foreign)
    shutil.copytree(tmp_path / "left", tmp_path / "again")
    found = await asyncio.to_thread(prepared, make, tmp_path / "left", durability=durability)
    notes = "\n".join(found.resume.notes)
    whose = run_id_of(other)
    assert f"step-000000009 was passed over: run {whose} has written it, and this is run {run_id_of(run)}" in notes
    assert found.resume.step >= told if durability == "journal" else found.resume.saved_step < 9
    assert found.spec.state.digest() == expected("mlp_sgd", found.resume.step)

    asked = tmp_path / "again" / foreign
    found = await asyncio.to_thread(prepared, make, tmp_path / "again", durability=durability, resume=str(asked))
    assert found.resume.step == 9
    found = await asyncio.to_thread(prepared, make, tmp_path / "again", durability=durability)
    assert found.resume.step == 9, "it has become this run's own"
    assert "passed over" not in "".join(found.resume.notes)
    found = await asyncio.to_thread(prepared, make, tmp_path / "again", durability=durability, resume=str(asked))
    assert found.resume.step == 9, "it is there each time that it is asked for"


async def test_damaged_checkpoints_beside_one_of_another_run_do_not_accuse_run_json(tmp_path: Path) -> None:
    make, left = jobs.mlp_sgd, tmp_path / "left"
    await train(
        make, run_dir=tmp_path / "other", max_steps=10
    )  # at which the run itself saves nothing, however far it comes
    await crash(make, tmp_path / "run", at=4, left=left, saves=1, checkpoint_every=3)
    for manifest in (left / "checkpoints").glob("step-*/manifest.json"):
        manifest.write_bytes(b"")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-000000010", left / "checkpoints" / "step-000000010")
    with pytest.raises(CheckpointMismatch, match=r"checkpoints is whole.*--resume never") as caught:
        await asyncio.to_thread(prepared, make, left)
    assert caught.value.path == str(left / "checkpoints")
    assert f"step-000000010 is of run {run_id_of(tmp_path / 'other')}" in str(caught.value)


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_a_run_json_of_another_run_is_told_of_and_nothing_is_set_aside(tmp_path: Path, durability: str) -> None:
    make, left = jobs.mlp_sgd, tmp_path / "left"
    await train(make, run_dir=tmp_path / "other", max_steps=2)
    await crash(make, tmp_path / "run", at=4, left=left, saves=1, checkpoint_every=3)
    own = (left / "run.json").read_bytes()
    shutil.copy(tmp_path / "other" / "run.json", left / "run.json")
    before = sorted(map(str, left.rglob("*")))
    with pytest.raises(CheckpointMismatch) as caught:
        await asyncio.to_thread(prepared, make, left, durability=durability)
    assert caught.value.path == str(left / "run.json")
    whose, this = run_id_of(tmp_path / "other"), run_id_of(tmp_path / "run")
    assert f"it is of run {whose}, and the checkpoints are of run {this}: put run.json of that" in str(caught.value)
    assert "journal" not in str(caught.value)
    assert sorted(map(str, left.rglob("*"))) == before
    (left / "run.json").write_bytes(own)
    assert (await asyncio.to_thread(prepared, make, left)).resume.step >= 4


@pytest.mark.parametrize("chosen", [False, True])
async def test_no_checkpoint_outlives_the_journal_that_it_names(tmp_path: Path, chosen: bool) -> None:
    make, run = jobs.metrics, tmp_path / "run"
    result, _ = await go_on(make, run)  # its last checkpoint says where the journal goes on
    last = max((run / "checkpoints").iterdir())
    if chosen:
        found = await asyncio.to_thread(prepared, make, run, resume=str(last))  # which sets the journal aside
    else:
        found = await asyncio.to_thread(prepared, make, run, durability="checkpoint")
    assert found.resume.step == result.step
    for _ in range(2):
        found = await asyncio.to_thread(prepared, make, run)
        assert found.spec.state.digest() == result.digest


async def test_a_run_without_files_has_no_journal() -> None:
    with pytest.raises(UsageError, match="there is no run directory"):
        await train(jobs.metrics, durability="journal")


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_a_coordinator_whose_run_was_taken_over_ends_and_tells_nothing_more(
    tmp_path: Path, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a shared disk whose locks do not reach the other machine: a later term is stored while it runs."""
    run, events = tmp_path / "run", []
    loop = asyncio.get_running_loop()
    reached = loop.create_future()

    def see(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepCommitted) and event.step == 3:
            reached.set_result(None)

    def take_over() -> int:
        identity = json.loads((run / "run.json").read_text())
        (run / "another").write_text(json.dumps(identity | {"term": 9}))
        os.replace(run / "another", run / "run.json")
        for name in ("model.safetensors", "loss.png", "metrics.jsonl"):
            (run / "another").write_text("the successor's")
            os.replace(run / "another", run / name)
        return len([event for event in events if isinstance(event, StepCommitted)])

    bus = Bus()
    bus.subscribe(see)
    config = settings(durability=durability, checkpoint_every=4)
    monkeypatch.setattr("w5xde_async.coordinator.run.shutdown.draw_loss", lambda _, path, __: path.write_text("drawn"))
    monkeypatch.setattr("w5xde_async.coordinator.service.Recorder", partial(Recorder, flush_s=1000.0))  # opens it late
    async with Coordinator(jobs.mlp_sgd(), run_dir=run, config=config, bus=bus) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER).run())
        await reached
        told = await asyncio.to_thread(take_over)
        with pytest.raises(Superseded, match="a coordinator of term 9 has taken the run over"):
            await coordinator.wait()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    if durability == "journal":
        assert len([event for event in events if isinstance(event, StepCommitted)]) - told <= journal_writer.MOST_AHEAD
    else:  # at the next checkpoint, however many steps the disk takes to come to it; one may have been in the writing
        steps = [event for event in events if isinstance(event, StepCommitted | CheckpointSaved)]
        assert len([event for event in steps[told:] if isinstance(event, CheckpointSaved)]) <= 1
    assert not any(isinstance(event, JournalFailed | CheckpointFailed) for event in events)
    for name in ("model.safetensors", "loss.png", "metrics.jsonl"):
        assert (run / name).read_text() == "the successor's"


class _Unlocked(Filesystem):
    """A shared disk whose locks do not reach the other machine."""

    def lock(self, file: IO[str]) -> None: ...

    def unlock(self, file: IO[str]) -> None: ...


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_of_two_coordinators_of_a_run_the_later_alone_commits(tmp_path: Path, durability: str) -> None:
    """Each has a worker, and goes on as it can."""
    runtime = Runtime(filesystem=_Unlocked())
    run, reached = tmp_path / "run", asyncio.Event()
    begun = False
    told: list[int] = []  # steps that the earlier told of after the later had begun

    def see(event: Event) -> None:
        if isinstance(event, StepCommitted):
            if event.step == 6:
                reached.set()
            if begun:
                told.append(event.step)

    bus = Bus()
    bus.subscribe(see)
    config = settings(durability=durability, checkpoint_every=3)
    async with Coordinator(jobs.mlp_sgd(), run_dir=run, config=config, bus=bus, runtime=runtime) as earlier:
        one = asyncio.create_task(Worker(earlier.address, job=jobs.mlp_sgd(), config=QUICK_WORKER).run())
        await reached.wait()
        async with Coordinator(jobs.mlp_sgd(), run_dir=run, config=config, runtime=runtime) as later:
            begun = True
            with pytest.raises(Superseded):
                await earlier.wait()
            other = asyncio.create_task(Worker(later.address, job=jobs.mlp_sgd(), config=QUICK_WORKER).run())
            result = await later.wait()
            await other
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
    assert result.digest == expected("mlp_sgd")
    assert [line["step"] for line in lines(run)] == list(range(1, result.step + 1)), "0 of its commits stay"
    if durability == "journal":
        assert told == [], "what is told has to be durable first, and that can no longer be"
    found = await asyncio.to_thread(prepared, jobs.mlp_sgd, run, durability=durability)
    assert (found.resume.step, found.spec.state.digest()) == (result.step, result.digest)


async def test_the_steps_that_are_done_again_are_counted(tmp_path: Path) -> None:
    left = tmp_path / "left"
    told = await crash(jobs.mlp_sgd, tmp_path / "run", at=7, left=left, durability="checkpoint", checkpoint_every=500)
    with (left / "metrics.jsonl").open("a") as file:  # its last lines are not there after a kill
        file.write(json.dumps({"event": "step_committed", "step": told}) + "\n")
    found = await asyncio.to_thread(prepared, jobs.mlp_sgd, left, durability="checkpoint")
    assert f"steps 1 to {told}, at least, were done before; they are done again" in found.resume.notes


async def test_steps_beyond_the_end_that_is_asked_for_now_are_not_said_to_be_done_again(tmp_path: Path) -> None:
    left = tmp_path / "left"
    step = await crash(
        jobs.mlp_sgd, tmp_path / "run", at=7, left=left, saves=1, durability="checkpoint", checkpoint_every=3
    )
    saved = max(int(path.name.rpartition("-")[2]) for path in (left / "checkpoints").glob("step-*"))
    told = max(step, saved) + 1  # a step may have been committed, and saved, before the worker was gone
    with (left / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "step_committed", "step": told}) + "\n")
    found = await asyncio.to_thread(prepared, jobs.mlp_sgd, left, durability="checkpoint", max_steps=saved - 1)
    first = found.resume.step
    assert first == saved
    gone = "what they made is gone, and the run is to go no further"
    assert f"steps {first + 1} to {told}, at least, were done before; {gone}" in found.resume.notes


async def test_a_checkpoint_counts_when_the_lines_of_its_steps_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("w5xde_async.coordinator.service.Recorder", partial(Recorder, flush_s=1000.0))
    left = tmp_path / "left"
    await crash(jobs.mlp_sgd, tmp_path / "run", at=6, left=left, saves=1, durability="checkpoint", checkpoint_every=3)
    saved = max(int(path.name.rpartition("-")[2]) for path in (left / "checkpoints").glob("step-*"))
    assert saved >= 3
    assert [line["step"] for line in lines(left)][:saved] == list(range(1, saved + 1))


# -- disks that fail


class Disk:
    """Lets writes of some files fail while ``full``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.full = False
        write = Filesystem.write

        def limited(filesystem: Filesystem, file: BinaryIO, data: bytes | memoryview) -> None:
            if self.full and any(name in str(file.name) for name in names):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(filesystem, file, data)

        monkeypatch.setattr(Filesystem, "write", limited)


async def test_a_full_disk_stops_the_journal_loudly_and_a_checkpoint_brings_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.0)
    monkeypatch.setattr(checkpointing, "RETRY_S", 0.0)
    disk = Disk(monkeypatch, "segment-", "probe", "checkpoints")
    events: list[Event] = []
    free_at = 0

    def see(event: Event) -> None:
        nonlocal free_at
        events.append(event)
        if isinstance(event, StepCommitted):
            seen = {type(event) for event in events}
            if event.step == 5:
                disk.full = True
            elif disk.full and event.step >= 15 and {JournalFailed, CheckpointFailed} <= seen:
                disk.full, free_at = False, event.step
            elif JournalRestored in seen:
                coordinator.request_stop("seen enough")

    bus = Bus()
    bus.subscribe(see)
    config = settings(durability="journal", checkpoint_every=8, max_steps=5000)
    async with Coordinator(jobs.mlp_adamw(), run_dir=tmp_path / "run", config=config, bus=bus) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=jobs.mlp_adamw(), config=QUICK_WORKER).run())
        result = await coordinator.wait()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    assert result.digest == expected("mlp_adamw", result.step)
    steps = [event.step for event in events if isinstance(event, StepCommitted)]
    assert steps == list(range(1, result.step + 1))
    (failed,) = (event for event in events if isinstance(event, JournalFailed))  # one, not one a step
    assert "disk is full" in failed.reason
    assert failed.step in range(4, 10)
    assert failed.safe_step == failed.step
    (missed,) = (event for event in events if isinstance(event, CheckpointFailed))
    assert missed.safe_step == failed.step  # the checkpoint of step 0, and the journal
    (restored,) = (event for event in events if isinstance(event, JournalRestored))
    assert restored.step >= free_at
    assert any(isinstance(event, CheckpointSaved) and event.step == restored.step for event in events)


async def test_a_crash_while_the_disk_is_full_goes_back_to_where_it_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "RETRY_S", 0.0)
    disk, events = Disk(monkeypatch, "segment-", "probe", "checkpoints"), list[Event]()

    class Watching(list[Event]):
        def append(self, event: Event) -> None:
            events.append(event)
            disk.full |= isinstance(event, StepCommitted) and event.step >= 5

    more = {"max_steps": 5000, "after": CheckpointFailed, "checkpoint_every": 8}
    await crash(jobs.mlp_sgd, tmp_path / "run", at=12, left=tmp_path / "left", events=Watching(), **more)
    disk.full = False
    (failed,) = (event for event in events if isinstance(event, JournalFailed))
    missed = [event.safe_step for event in events if isinstance(event, CheckpointFailed)]
    found = await asyncio.to_thread(prepared, jobs.mlp_sgd, tmp_path / "left")
    assert {failed.safe_step, *missed} == {found.resume.step}


async def test_a_crash_after_the_disk_came_back_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.0)
    disk = Disk(monkeypatch, "segment-", "probe")
    left = tmp_path / "left"
    events: list[Event] = []

    class Watching(list[Event]):
        def append(self, event: Event) -> None:
            events.append(event)
            if isinstance(event, StepCommitted):
                failed = any(isinstance(event, JournalFailed) for event in events)
                disk.full = event.step >= 5 and not (failed and event.step >= 9)

    more = {"max_steps": 5000, "after": JournalRestored}
    told = await crash(jobs.mlp_adamw, tmp_path / "run", at=12, left=left, events=Watching(), **more)
    disk.full = False
    (restored,) = (event for event in events if isinstance(event, JournalRestored))
    found = await asyncio.to_thread(prepared, jobs.mlp_adamw, left)
    assert found.resume.saved_step >= restored.step
    assert found.resume.step >= told
    assert found.spec.state.digest() == expected("mlp_adamw", found.resume.step)
    # From the checkpoint before the failure the journal leads up to the gap; the rest is computed again, and said.
    for path in (left / "checkpoints").glob("step-*"):
        if path.name != "step-000000000":
            shutil.rmtree(path)
    found = await asyncio.to_thread(prepared, jobs.mlp_adamw, left)
    assert 4 <= found.resume.step < 12
    assert "are not in the journal (the disk failed) and are computed again" in "".join(found.resume.notes)
    assert found.spec.state.digest() == expected("mlp_adamw", found.resume.step)
    result, _ = await go_on(jobs.mlp_adamw, left)
    assert result.digest == expected("mlp_adamw")


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_a_run_directory_that_is_moved_is_made_anew_with_all_that_a_start_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """A kill some steps later costs no more than one at any time."""
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.0)
    run, left, commits, safe = tmp_path / "run", tmp_path / "left", Commits(), asyncio.Event()
    saved: list[int] = []

    def see(event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            saved.append(event.step)
        if isinstance(event, JournalRestored if durability == "journal" else CheckpointSaved):
            safe.set()

    def move() -> None:
        shutil.move(run, tmp_path / "elsewhere")
        assert coordinator._prepared is not None
        assert coordinator._prepared.spec.files is not None
        coordinator._prepared.spec.files.directory.filesystem.fence()  # as whoever writes there next

    given = replace(jobs.mlp_sgd(), max_steps=10**6, epochs=None)
    config = settings(durability=durability, checkpoint_every=10**6)
    coordinator = Coordinator(given, run_dir=run, config=config, bus=commits.bus, callbacks=[see])
    async with coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=given, config=QUICK_WORKER).run())
        await commits.reach(5)
        assert not saved
        await asyncio.to_thread(move)
        await safe.wait()
        await asyncio.to_thread(copy, run, left)
        coordinator.request_stop()
        await coordinator.wait()
        worker.cancel()
    assert saved[0] >= 5
    started: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, RunStarted):
            started.append(event.resumed_step)

    async with Coordinator(given, run_dir=left, config=config, callbacks=[note]) as again:
        again.request_stop()
        await again.wait()
    assert started[0] >= saved[0]
