"""The end of a run: who is told what, what is still saved, and how long that may take.

Workers are told first, unless the run is finished: a worker that is told so exits, and until the last step is on the
disk there may be steps to be done again. Everything at the end that may hang (the disk, a dataset's reads, the job's
optimizer) shares one ``ShutdownDeadline``. When it has passed, the end goes on without what hangs, and the run fails
with ``DiskHangs``. A thread that hangs stays. The programs end their process all the same; in an application that
embeds the coordinator the thread is the caller's to bear. Only the plot has a time of its own: a run is what it is
without one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from w5xde_async.coordinator.run.run import Run, gone
from w5xde_async.coordinator.run.spec import Prepared
from w5xde_async.coordinator.run_result import RunResult
from w5xde_async.errors import DiskHangs, StoreError, in_one_line
from w5xde_async.job import shown_end
from w5xde_async.store.rundir import RunDir, Superseded, export_model
from w5xde_async.telemetry.events import Bus, RunFinished, Warned
from w5xde_async.telemetry.plot import draw_loss
from w5xde_async.telemetry.recorder import Recorder
from w5xde_async.wire.messages import ByeCode

_T = TypeVar("_T")

#: A disk that is slower than this counts as one that hangs.
_SLOWEST_BYTES_S = 10e6
#: What does not hang gets so long when something else has used up the time.
LEAST_S = 1.0
#: Checkpoint and journal hold parameters, two moments and a gradient; the model is written once more.
_COPIES = 5
#: A plot that takes longer is not waited for; of a million steps it takes some seconds.
DRAWING_S = 30.0


def deadline_s(grace_s: float, vector_bytes: int) -> float:
    """How long everything at the end may wait, in all: six times the grace, and as long as a slow disk would take."""
    return max(30.0, 6 * grace_s) + _COPIES * vector_bytes / _SLOWEST_BYTES_S


class ShutdownDeadline:
    """What is left of the one deadline. ``error`` is there once it has passed."""

    def __init__(self, left_s: float, on_overdue: Callable[[DiskHangs], None]) -> None:
        self.left_s = left_s
        self.error: DiskHangs | None = None
        self._on_overdue = on_overdue
        self.culprit: Callable[[], str] = str  #: what of the job's code holds up all else, whatever is waited for

    async def wait(self, waiting: Awaitable[_T], what: str, where: object = "the run directory") -> _T | None:
        """The result; None where it hangs and nobody waits any more (a thread is left to itself)."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(waiting)
        began = loop.time()
        try:
            await asyncio.wait([task], timeout=max(self.left_s, LEAST_S))
        except asyncio.CancelledError:
            task.cancel()
            raise
        self.left_s -= loop.time() - began
        if not task.done():
            task.cancel()
            self.give_up(what, where)
            return None
        return task.result()

    def give_up(self, what: str, where: object = "the run directory") -> None:
        """``what`` hangs. Said once: what follows usually hangs too."""
        if self.error is None:
            if culprit := self.culprit():
                what, where = culprit, "the job"
            self.left_s, self.error = 0.0, DiskHangs(str(where), what)
            self._on_overdue(self.error)


class Shutdown:
    """The last things that are done for one run, while its links are still there."""

    def __init__(
        self, prepared: Prepared, run: Run, bus: Bus, deadline: ShutdownDeadline, recorder: Recorder | None,
        elapsed: Callable[[], float], stopped: asyncio.Event, look: Callable[[], None],
    ) -> None:  # fmt: skip
        """``elapsed``: seconds since the run began. ``stopped`` is set once a stop is asked for. ``look`` publishes how
        the run and its members stand."""
        self._prepared, self._run, self._bus, self._deadline = prepared, run, bus, deadline
        self._recorder, self._elapsed, self._stopped, self._look = recorder, elapsed, stopped, look
        self.export_error: StoreError | None = None  #: why a finished run has no model

    async def finish(
        self, failure: BaseException | None, stopped: str, *, say_goodbye: Callable[[ByeCode, str], Awaitable[None]]
    ) -> RunResult:
        """``failure``: what ended the run, if it failed; ``stopped``: why it was stopped, if it was."""
        (spec, _, resume), training = self._prepared, self._run.training
        checkpointing, evaluation = self._run.checkpointing, self._run.evaluation
        early = evaluation.ended_at >= 0 and training.progress < training.total_steps
        finished = failure is None and (early or training.progress >= training.total_steps)
        outcome = "failed" if failure is not None else "finished" if finished else "stopped"
        if finished:
            await self._save()
        problem = failure or (checkpointing.save_error if finished else None) or self._deadline.error
        reason = str(failure) if failure is not None else "" if finished else stopped
        if finished and early:
            reason = f"stop_when, at the evaluation of step {evaluation.ended_at:,}"
        if finished and checkpointing.save_error is not None:
            reason = f"the last checkpoint could not be written: {checkpointing.save_error}"
        if finished and resume.step >= spec.total_steps:
            reason = "it was complete already; raise --max-steps or --epochs, or start afresh with --resume never"
        if problem is None:
            code = ByeCode.FINISHED if finished else ByeCode.STOPPING
        else:  # after a failure of the disk another may go on, or this one again
            code = ByeCode.STOPPING if isinstance(problem, StoreError) else ByeCode.FAILED
        said = str(problem) if problem is not None else reason
        try:
            self._look()  # while there are members
            await say_goodbye(code, said.splitlines()[0][:300] if said else f"the run is {outcome}")
        except Exception as error:  # what is saved does not depend on it
            self._bus.publish(Warned(text=f"the workers could not be told of the end: {in_one_line(error)}"))
        if not finished:
            await self._save()
        failed = failure or checkpointing.save_error
        applied = training.aggregator.submit(lambda: None)
        await self._deadline.wait(applied, "the update under way", "the job")
        if self._deadline.error is not None:
            self._run.abandon()
        model_path = await self._export_model(failed, finished=finished)  # before evaluations, which may hang
        await self._evaluate(finished=finished)
        await gone(training)
        digest = await self._deadline.wait(training.aggregator.submit(spec.state.digest), "the digest", "the job") or ""
        metrics_path, plot_path = await self._draw(failed)
        self._look()  # the same figures as in RunFinished
        seconds = self._elapsed()
        contributions = training.roster.contributions
        sent, received = contributions.traffic(training.roster.sessions.values())
        counts = training.phase.totals()
        downlink, shares = training.downlink_bytes(), contributions.shares()
        self._bus.publish(
            RunFinished(
                outcome=outcome,
                reason=reason,
                step=training.progress,
                total_steps=shown_end(max(training.total_steps, training.progress)),
                samples=training.phase.samples_applied,
                session_samples=training.phase.samples_applied - resume.samples,
                loss=training.phase.last_loss,
                metrics=evaluation.metrics,
                seconds=seconds,
                trained_s=training.phase.trained_s,
                bytes_sent=sent,
                bytes_received=received,
                digest=digest,
                model_path=str(model_path or ""),
                metrics_path=str(metrics_path or ""),
                plot_path=str(plot_path or ""),
                leaves=counts.leaves,
                leaves_in_vain=counts.leaves_wasted,
                leases_stale=counts.stale,
                leases_duplicate=counts.duplicate,
                leases_backed_up=counts.backed_up,
                shares=shares,
                downlink_raw_bytes=downlink[0],
                downlink_encoded_bytes=downlink[1],
                residuals_lost=contributions.residuals_lost,
                steps_skipped=contributions.steps_skipped,
                short_steps=contributions.short_steps,
                bad_samples=len(spec.bad),
                best=self._run.best,
            )
        )
        return RunResult(
            outcome=outcome, reason=reason, step=training.progress, loss=training.phase.last_loss,
            metrics=evaluation.metrics, digest=digest, seconds=seconds,
            model_path=model_path, metrics_path=metrics_path, plot_path=plot_path,
            shares=shares, downlink_raw_bytes=downlink[0], downlink_encoded_bytes=downlink[1],
            residuals_lost=contributions.residuals_lost, steps_skipped=contributions.steps_skipped,
            bad_samples=len(spec.bad), best=self._run.best,
        )  # fmt: skip

    async def _save(self) -> None:
        await self._deadline.wait(self._run.checkpointing.save_last(), "the last checkpoint")
        if self._deadline.error is not None:
            self._run.abandon()

    async def _evaluate(self, *, finished: bool) -> None:
        """The last evaluation of a finished run takes what it takes; a stop waits only so long for one."""
        run = self._run
        if finished:
            last = run.evaluation.evaluate_last(run.training.progress, run.training.aggregator)
            await self._until_stopped(last, "the last evaluation")
        else:
            await self._deadline.wait(run.evaluation.settle(), "an evaluation", "the job")
            await self._deadline.wait(run.evaluation.keep_best(), "the best model")
        run.checkpointing.abandon()
        run.evaluation.abandon()

    async def _until_stopped(self, waiting: Awaitable[None], what: str) -> None:
        """Wait for the job's own code for as long as it takes; once a stop was asked for, so long and no longer."""
        task, stop = asyncio.ensure_future(waiting), asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._bus.publish(Warned(text=f"stopping: waits for {what}, {self._deadline.left_s:.0f} s at most"))
                await self._deadline.wait(task, what, "the job")
            else:
                task.result()
        finally:
            stop.cancel()
            task.cancel()

    async def _export_model(self, problem: BaseException | None, *, finished: bool) -> Path | None:
        """Write the model, where it is of this run: parameters that no step ended with are not exported."""
        run_dir = self._own_directory(problem)
        if run_dir is None or self._run.training.aggregator.torn:
            return None
        model, filesystem = self._prepared.spec.model, run_dir.filesystem

        def write() -> str:
            """Why not."""
            try:
                filesystem.fence()
                export_model(model, run_dir.model_path, filesystem=filesystem)
            except Superseded:
                raise
            except (StoreError, OSError) as error:
                return str(error)
            except Exception as error:  # of a state_dict() of the model's own
                return in_one_line(error)
            return ""

        writing = asyncio.get_running_loop().run_in_executor(None, write)
        try:
            reason = await self._deadline.wait(writing, "the model's export", run_dir.path)
        except Superseded:
            return None
        if reason and finished:  # what the run was for
            kept = "the last checkpoint has it, and the same command writes it once that is mended"
            if self._run.checkpointing.save_error is not None:
                kept = "nor was a checkpoint of it: once that is mended the same command goes on from what was kept"
            self.export_error = StoreError(str(run_dir.model_path), f"the model was not written: {reason}; {kept}")
        elif reason:
            self._bus.publish(Warned(text=f"the model was not written: {reason}"))
        return run_dir.model_path if reason == "" else None

    async def _draw(self, problem: BaseException | None) -> tuple[Path | None, Path | None]:
        """Metrics and plot."""
        run_dir, recorder = self._own_directory(problem), self._recorder
        if run_dir is None:
            return None, None
        metrics_path, plot_path = run_dir.metrics_path, run_dir.plot_path

        def flush() -> bool:
            if recorder is not None:
                recorder.flush()
            return metrics_path.exists()  # unless somebody has deleted it

        loop = asyncio.get_running_loop()
        there = await self._deadline.wait(loop.run_in_executor(None, flush), "metrics.jsonl", run_dir.path)
        drawn = False
        if recorder is not None and there is not None and self._run.training.progress:
            given_up = threading.Event()
            drawing = loop.run_in_executor(None, draw_loss, metrics_path, plot_path, given_up.is_set)
            try:
                await asyncio.wait([drawing], timeout=DRAWING_S)
            finally:
                given_up.set()  # nothing is put there once the directory may be another's
            if drawing.done():
                drawn = drawing.result()
            else:
                self._bus.publish(Warned(text=f"no plot: it was not drawn within {DRAWING_S:.0f} s"))
        return metrics_path if there else None, plot_path if drawn else None

    def _own_directory(self, problem: BaseException | None) -> RunDir | None:
        """Where results may be written; None where nothing is kept, nothing would end in time, or it is another's."""
        files = self._prepared.spec.files
        if files is None or self._deadline.error is not None or isinstance(problem, Superseded):
            return None
        return files.directory
