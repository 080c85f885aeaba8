"""The training loop for all kinds of runs: it handles data, metrics, evaluation and checkpoints."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.machine import place_here
from megarl.cluster.nodes.rendezvous import NodeRendezvous
from megarl.cluster.placement import Placement
from megarl.cluster.supervision.interrupts import interrupts
from megarl.cluster.supervision.memory import MemorySampler
from megarl.cluster.trace import Trace
from megarl.cluster.trained_models import TrainedModels
from megarl.config.schema import Config
from megarl.core.errors import DamagedCheckpoint, InfrastructureFailure, RunFailure, UserError, print_error
from megarl.core.files import DISK_FULL
from megarl.core.jsonl import read_objects
from megarl.core.timing import Stopwatch
from megarl.data.offline import OfflineData
from megarl.data.prompts import PromptSet
from megarl.data.weighted_cursor import WeightedCursor
from megarl.models.paths import add_config_paths
from megarl.models.run_models import ModelFolders
from megarl.run import events
from megarl.run.attempts import ALLOCATED
from megarl.run.checkpoint_size import saved_bytes
from megarl.run.folder import RunFolder
from megarl.run.health import Finding, Health
from megarl.run.lock import run_lock
from megarl.run.loggers import ConsoleSink, JsonlSink
from megarl.run.resume import ResumePoint, fall_back, start
from megarl.run.sample_ledger import SampleLedger
from megarl.run.saver import Saver, Write, no_files
from megarl.run.time_causes import SAVE
from megarl.run.time_ledger import read_ledger
from megarl.run.time_recorder import TimeRecorder
from megarl.run.time_records import ENDED, FAILED
from megarl.run.trackers.tracker import Tracker, open_trackers
from megarl.step import logprob_check, passes, queue
from megarl.step.state import PendingPrompt, RunState

LOCK_S = 180.0
"""Seconds that an attempt of a Slurm job waits for the lock of the previous attempt. That attempt's node may have
failed."""

NO_PATHS: Mapping[str, str] = {}
NO_SETS: Mapping[str, PromptSet] = {}

Step = Callable[[], dict[str, float]]
"""A function that runs the training step with the number state.step and returns its metrics."""

Evaluate = Callable[[], dict[str, float]]
"""A function that runs the evaluations that are due after state.step and returns their metrics."""


def print_run_summary(
    config: Config, resume_point: ResumePoint, model_folder: Path, data: PromptSet | OfflineData, placement: str
) -> None:
    """Print the starting point, the processes, and the forward-only passes that the run needs or skips."""
    if resume_point.folder.moved is not None:
        print(f"moved the earlier run with this name to {resume_point.folder.moved}")
    print(f"run: {resume_point.folder.path}, {resume_point.describe()}")
    dropped = f" ({data.num_dropped} dropped because they are too long)" if data.num_dropped else ""
    print(f"model: {model_folder}\n{config.data.format}: {len(data)}{dropped}\nprocesses: {placement}")
    print("\n".join([*queue.describe(config), *passes.describe(config), *logprob_check.announce(config)]), flush=True)


def exit_status(run: Callable[[Config, Path], None], config: Config, scratch: Path) -> int:
    """Call `run` with the config and a scratch folder. Return the exit code: 0 on success, otherwise the RunFailure's.
    A full disk always counts as an infrastructure failure."""
    try:
        run(config, scratch)
    except RunFailure as failure:
        print_error(failure)
        return failure.exit_code
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        print_error(f"{error}. Fix: free disk space, then resume with resume=auto")
        return InfrastructureFailure.exit_code
    return 0


@contextmanager
def _recorded_end(times: TimeRecorder, resume_point: ResumePoint) -> Iterator[None]:
    """Record the end of the attempt. Print the run's time ledger, except in a Slurm job, because the job prints it for
    all of its attempts."""
    outcome = FAILED
    try:
        yield
        outcome = ENDED
    except KeyboardInterrupt:
        outcome = ENDED
        raise
    finally:
        times.end(resume_point.state.step, outcome)
        if ALLOCATED not in os.environ:
            print(read_ledger(resume_point.folder.path).describe(), flush=True)


@dataclass(frozen=True, slots=True)
class RunContext:
    """The state and the training loop of one run. The state in `resume_point` advances with each step. `evaluation`
    maps the name of each evaluation set to its prompts."""

    config: Config
    data: PromptSet | OfflineData
    resume_point: ResumePoint
    saver: Saver
    placement: Placement
    evaluation: Mapping[str, PromptSet]
    times: TimeRecorder
    ledger: SampleLedger

    @classmethod
    @contextmanager
    def prepare(
        cls,
        config: Config,
        models: ModelFolders,
        data: PromptSet | OfflineData,
        config_paths: Mapping[str, str] = NO_PATHS,
        evaluation: Mapping[str, PromptSet] = NO_SETS,
    ) -> Iterator[RunContext]:
        """Lock and open the run folder, and print the run summary. No process is started. Raise UserError if the folder
        is in use, `resume` does not name a valid checkpoint, or the disk has no space for a checkpoint. `config_paths`
        maps config keys to the model paths that the user wrote, if the config contains resolved paths."""
        num_bytes = saved_bytes(config, models.trained(config))
        placement = place_here(config)
        with run_lock(RunFolder.of(config).path, LOCK_S if ALLOCATED in os.environ else 0.0):
            identities = add_config_paths(models.identify(), config, config_paths)
            resume_point = start(config, data, num_bytes, identities)
            folder, best = resume_point.folder, config.evaluation.best.metric
            evaluated = {} if best is None else folder.values_of(best)
            ledger = SampleLedger(folder.samples)
            saver = Saver(
                folder.checkpoints, config, num_bytes, data.data_hash, identities, evaluated, ledger.checkpoint
            )
            print_run_summary(config, resume_point, models.actor, data, placement.describe())
            samples_ahead = config.rollout.max_staleness > 0 and not config.is_colocated
            times = TimeRecorder(folder, placement, resume_point.state.step, samples_ahead)
            checkpoint, state = resume_point.checkpoint, resume_point.state
            ledger.begin(config, state, folder.attempt, data.data_hash, checkpoint, resume_point.continues)
            try:
                with _recorded_end(times, resume_point), events.connected():
                    yield cls(config, data, resume_point, saver, placement, evaluation, times, ledger)
            except DamagedCheckpoint as damage:  # raised by a rank, which verifies the files that it loads
                loaded = resume_point.checkpoint
                line = None if loaded is None else fall_back(config, loaded.path, damage)
                if line is None:
                    raise
                raise RunFailure(f"{line} in its next attempt") from None

    @property
    def state(self) -> RunState:
        return self.resume_point.state

    @property
    def folder(self) -> RunFolder:
        return self.resume_point.folder

    def stopwatch(self) -> Stopwatch:
        """Start and return a stopwatch for a step. Its phases are recorded in the run's trace."""
        return Stopwatch(Trace(self.folder.logs).record)

    def take(self, n: int) -> list[PendingPrompt]:
        """Draw the next n rows from the data for the current step."""
        drawn = self.state.draw(n, self.state.step)
        self.state.under_way.clear()
        return drawn

    def note_solved(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Update the sampling weights of prompts, given their solve rates by prompt id. Return metrics on the weights,
        or an empty mapping if prompts are not drawn by weight."""
        cursor = self.state.cursor
        if not isinstance(cursor, WeightedCursor) or not isinstance(self.data, PromptSet):
            return {}
        cursor.note({i: rates[name] for i in range(len(self.data)) if (name := self.data[i].id) in rates})
        return cursor.metrics()

    def run(self, trained: TrainedModels, step: Step, evaluate: Evaluate = dict, write: Write = no_files) -> None:
        """Run all steps up to run.steps. Evaluations that are due run before the first step and after each step. After
        a termination signal or a failure, the run completes the checkpoint whose state is already in host memory. If
        checkpoint.on_signal is set, a signal lets the run finish the current step and save a checkpoint. Each is
        limited to checkpoint.grace_s seconds."""
        saver, settings, done = self.saver, self.config.checkpoint, self.state.step
        self.times.begin_steps()
        health = Health(self.config, self._earlier_rows(), [warning["name"] for warning in self.folder.warnings])
        saver.keep()  # a killed attempt may have left more than checkpoint.keep checkpoints
        if self.state.step == 0 and (metrics := self._evaluated(evaluate)):
            JsonlSink(self.folder.metrics).write(0, metrics)
            events.send("evaluation", step=0, metrics=metrics)
        with (
            MemorySampler() as memory,
            open_trackers(self.config, self.folder, done) as trackers,
            interrupts.grace(settings.grace_s, settings.on_signal),
        ):
            try:
                for number, metrics in self._steps(trained, step, evaluate, write, memory, trackers):
                    done = number
                    findings = self._check_health(health, number, metrics)
                    self._end_if_signaled(trained, write)
                    with self._saving():
                        saver.commit()  # after the step's metrics are written, since a resumed run needs them
                    self._stop_on(findings, trained, write)
                with self._saving():
                    is_complete = saver.finish()
                if not is_complete:
                    self._save_now(trained, write)
                self._end_if_signaled(trained, write)
            except (RunFailure, UserError) as failure:
                is_signaled = interrupts.is_signaled and isinstance(failure, RunFailure)
                if is_signaled:
                    print(f"the signal interrupted the current step: {failure}", flush=True)
                end = time.monotonic() + (0 if interrupts.is_signaled else settings.grace_s)
                try:
                    saver.finish_written(done, left_s=lambda: end - time.monotonic())
                except (Exception, KeyboardInterrupt) as later:  # the first failure determines how the run ends
                    print(f"checkpoint: not completed after the failure: {later!r}", flush=True)
                if is_signaled:
                    raise KeyboardInterrupt from failure
                raise
            except KeyboardInterrupt:
                saver.finish_written(done, left_s=lambda: interrupts.left_s)
                raise

    def _steps(
        self,
        trained: TrainedModels,
        step: Step,
        evaluate: Evaluate,
        write: Write,
        memory: MemorySampler,
        trackers: Sequence[Tracker],
    ) -> Iterator[tuple[int, Mapping[str, float]]]:
        """Run the steps. Yield the number and the metrics of each step after the metrics, including evaluation metrics,
        are written."""
        state, config, trace = self.state, self.config, Trace(self.folder.logs)
        console = ConsoleSink(config.run.steps, is_offline=config.is_offline, has_images=config.samples_images)
        sinks = (JsonlSink(self.folder.metrics), console, *trackers, events.EventSink())
        while state.step < self.config.run.steps:
            state.step += 1
            begin = time.time()
            metrics = step() | {"data/dropped_rows": self.data.num_dropped} | self._evaluated(evaluate)
            others = NodeRendezvous(self.folder.nodes).reports() if self.config.cluster.nodes > 1 else []
            peaks = [memory.peak_gb(), *(node.peak_gb for node in others)]
            metrics["memory/peak_rss_gb"], metrics["memory/peak_pss_gb"] = map(max, zip(*peaks, strict=True))
            metrics |= self.times.end_step(state.step, metrics)
            self.saver.note(state.step, metrics)
            with self._saving():
                metrics |= self.saver.save(trained, state.step, state.dump(), write=write)
            for sink in sinks:
                sink.write(state.step, metrics)
            trace.record(f"step {state.step}", begin, time.time())
            yield state.step, metrics

    def _earlier_rows(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps before this attempt."""
        rows = read_objects(self.folder.metrics)[0] if self.folder.metrics.exists() else []
        return [row for row in rows if row.get("step") != 0]

    def _check_health(self, health: Health, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Print and record the new warnings about the run."""
        findings = health.check(metrics)
        for finding in findings:
            print(f"megarl: warning: step {step}: {finding.name}: {finding.message}", file=sys.stderr, flush=True)
            with suppress(UserError, OSError):  # the user may have edited or deleted the manifest
                self.folder.warn(step, finding.name, finding.message)
        return findings

    def _stop_on(self, findings: Sequence[Finding], trained: TrainedModels, write: Write) -> None:
        """If run.stop_on lists one of the warnings, save a checkpoint (unless the run saves none) and raise a
        UserError."""
        stopping = [finding for finding in findings if finding.name in self.config.run.stop_on]
        if stopping:
            if self.config.checkpoint.may_be_saved:
                self._save_now(trained, write)
            raise UserError("\n".join(f"run.stop_on: {finding.name}: {finding.message}" for finding in stopping))

    def _end_if_signaled(self, trained: TrainedModels, write: Write) -> None:
        """Save a checkpoint and raise KeyboardInterrupt if the run has received a termination signal."""
        if interrupts.is_signaled:
            self._save_now(trained, write)
            raise KeyboardInterrupt

    def _save_now(self, trained: TrainedModels, write: Write) -> None:
        """Save a checkpoint of the current step, unless there is one, and wait until it is complete."""
        is_complete = False
        with self._saving():
            while not is_complete:
                self.saver.save(trained, self.state.step, self.state.dump(), at_once=True, write=write)
                is_complete = self.saver.finish()

    def _evaluated(self, evaluate: Evaluate) -> dict[str, float]:
        """Run the evaluations that are due, record their time in the trace, and return their metrics."""
        begin = time.time()
        if metrics := evaluate():
            Trace(self.folder.logs).record("evaluation", begin, time.time())
        return metrics

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Record the duration of the body in the trace as time spent waiting for a checkpoint."""
        begin = time.time()
        yield
        Trace(self.folder.logs).record(SAVE, begin, time.time())

    def export(self, write: Callable[[Path], None]) -> None:
        """Export the model with `write` if run.export is set, else remove an earlier export. Mark the run as
        finished."""
        if self.config.run.export:
            with self.folder.new_model() as path:
                write(path)
        elif self.folder.model.exists():
            shutil.rmtree(self.folder.model)
        self.ledger.end(self.state.step)
        self.folder.finish(self.state.step)
