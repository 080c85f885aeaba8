"""The loop of a run, whatever its steps do: data, metrics and checkpoints, until the last step."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.failure import RunFailure
from megarl.cluster.machine import place_here
from megarl.cluster.nodes.rendezvous import NodeRendezvous
from megarl.cluster.placement import Placement
from megarl.cluster.supervision.interrupts import interrupts
from megarl.cluster.supervision.memory import MemorySampler
from megarl.cluster.trace import Trace
from megarl.cluster.trained_models import TrainedModels
from megarl.config.schema import Config
from megarl.core.timing import Stopwatch
from megarl.data.offline import OfflineData
from megarl.data.prompts import PromptSet
from megarl.data.weighted_cursor import WeightedCursor
from megarl.models.paths import note_given_paths
from megarl.models.run_models import ModelFolders
from megarl.run.checkpoint_size import checkpoint_bytes
from megarl.run.effective_time import ALLOCATED, EffectiveShare
from megarl.run.folder import RunFolder
from megarl.run.lock import run_lock
from megarl.run.loggers import ConsoleSink, JsonlSink
from megarl.run.resume import ResumePoint, start
from megarl.run.saver import Saver, Write, no_files
from megarl.run.summary import print_run_summary
from megarl.run.trackers.tracker import Tracker, open_trackers
from megarl.step.state import RunState

LOCK_S = 180.0
"""The time that an attempt of a job waits for the lock of the one before, whose node may be lost."""

NONE_GIVEN: Mapping[str, str] = {}
NO_SETS: Mapping[str, PromptSet] = {}

Step = Callable[[], dict[str, float]]
"""A function that does one step, whose number is state.step, and returns its metrics."""

Evaluate = Callable[[], dict[str, float]]
"""A function that evaluates what is due after state.step, and returns the metrics."""


def exit_status(run: Callable[[Config, Path], None], config: Config, scratch: Path) -> int:
    """Call `run`, with temporary files in scratch. Return 0 only if the last step was reached and the model
    written."""
    try:
        run(config, scratch)
    except RunFailure as failure:
        print(f"megarl: error: {failure}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class RunContext:
    """The loop of a run.

    resume_point   the point where the run begins, whose state moves on with the steps
    evaluation     the prompts of each evaluation set, by its name
    """

    config: Config
    data: PromptSet | OfflineData
    resume_point: ResumePoint
    saver: Saver
    placement: Placement
    evaluation: Mapping[str, PromptSet]

    @classmethod
    @contextmanager
    def prepare(
        cls,
        config: Config,
        models: ModelFolders,
        data: PromptSet | OfflineData,
        given: Mapping[str, str] = NONE_GIVEN,
        evaluation: Mapping[str, PromptSet] = NO_SETS,
    ) -> Iterator[RunContext]:
        """Lock and opens the run's folder and prints the run's summary, before any process is started. Raise UserError
        for a folder in use, for a `resume` that is no checkpoint, and for a disk without room for the next checkpoint.

        given        the paths of models as the user gave them, by key, where they may not be the config's
        evaluation   the prompts of the evaluation sets, by name
        """
        num_bytes = checkpoint_bytes(config, models.trained(config))
        placement = place_here(config)
        with run_lock(RunFolder.of(config).path, LOCK_S if ALLOCATED in os.environ else 0.0):
            identities = note_given_paths(models.identify(), config, given)
            resume_point = start(config, data, num_bytes, identities)
            folder, best = resume_point.folder, config.evaluation.best.metric
            evaluated = {} if best is None else folder.values_of(best)
            saver = Saver(folder.checkpoints, config, num_bytes, data.data_hash, identities, evaluated)
            print_run_summary(config, resume_point, models.actor, data, placement.describe())
            yield cls(config, data, resume_point, saver, placement, evaluation)

    @property
    def state(self) -> RunState:
        return self.resume_point.state

    @property
    def folder(self) -> RunFolder:
        return self.resume_point.folder

    def stopwatch(self) -> Stopwatch:
        """Return the clock of a step that begins, whose phases are in the run's trace."""
        return Stopwatch(Trace(self.folder.logs).record)

    def take(self, n: int) -> list[Any]:
        """Return the next n rows of the data."""
        return [self.data[i] for i in self.state.cursor.take(n)]

    def note_solved(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Take up the share of samples that solved each prompt of a step, by its id, where prompts are drawn by it.
        Return metrics of it."""
        cursor = self.state.cursor
        if not isinstance(cursor, WeightedCursor):
            return {}
        cursor.note({i: rates[name] for i in range(len(self.data)) if (name := self.data[i].id) in rates})
        return cursor.metrics()

    def run(self, trained: TrainedModels, step: Step, evaluate: Evaluate = dict, write: Write = no_files) -> None:
        """Do all steps up to run.steps, and evaluates before the first and after each what is due then.

        trained: the models that checkpoints hold, with their weights loaded. write: writes what else checkpoints hold
        beside the driver's state.

        Told to end by a signal, it finishes the checkpoint whose state is in host memory; with checkpoint.on_signal it
        saves one at the end of the step under way. Both are tried for checkpoint.grace_s seconds."""
        saver, settings, done = self.saver, self.config.checkpoint, self.state.step
        saver.keep()  # a run that was killed may not have removed the oldest
        if self.state.step == 0 and (metrics := evaluate()):
            JsonlSink(self.folder.metrics).write(0, metrics)
        with (
            MemorySampler() as memory,
            open_trackers(self.config, self.folder, done) as trackers,
            interrupts.grace(settings.grace_s, settings.on_signal),
        ):
            try:
                for number in self._steps(trained, step, evaluate, write, memory, trackers):
                    done = number
                    self._end_if_told(trained, write)
                    saver.commit()  # after the step's metrics: a run that goes on from here has them
                saver.finish()
                self._end_if_told(trained, write)
            except RunFailure as failure:
                if not interrupts.is_told:
                    raise
                print(f"the step under way did not come to its end: {failure}", flush=True)
                saver.finish_after_interrupt(done, left_s=lambda: 0.0)
                raise KeyboardInterrupt from failure
            except KeyboardInterrupt:
                saver.finish_after_interrupt(done, left_s=lambda: interrupts.left_s)
                raise

    def _steps(
        self,
        trained: TrainedModels,
        step: Step,
        evaluate: Evaluate,
        write: Write,
        memory: MemorySampler,
        trackers: Sequence[Tracker],
    ) -> Iterator[int]:
        """Yield the number of each step when its metrics are written, those of its evaluation among them."""
        state, effective_share = self.state, EffectiveShare(self.folder.path)
        trace = Trace(self.folder.logs)
        console = ConsoleSink(self.config.run.steps, is_offline=self.config.is_offline)
        sinks = (JsonlSink(self.folder.metrics), console, *trackers)
        while state.step < self.config.run.steps:
            state.step += 1
            begin = time.time()
            metrics = step() | {"data/dropped_rows": self.data.num_dropped} | evaluate()
            others = NodeRendezvous(self.folder.nodes).reports() if self.config.cluster.nodes > 1 else []
            peaks = [memory.peak_gb(), *(node.peak_gb for node in others)]
            metrics["memory/peak_rss_gb"], metrics["memory/peak_pss_gb"] = map(max, zip(*peaks, strict=True))
            metrics |= effective_share.metrics(metrics)
            self.saver.note(state.step, metrics)
            stepped = time.time()
            metrics |= self.saver.save(trained, state.step, state.dump(), write=write)
            trace.record("save", stepped, time.time())
            for sink in sinks:
                sink.write(state.step, metrics)
            trace.record(f"step {state.step}", begin, time.time())
            yield state.step

    def _end_if_told(self, trained: TrainedModels, write: Write) -> None:
        """End the run between two steps, saved, if a signal has told it to."""
        if interrupts.is_told:
            self.saver.save(trained, self.state.step, self.state.dump(), at_once=True, write=write)
            self.saver.finish()
            raise KeyboardInterrupt

    def export(self, write: Callable[[Path], None]) -> None:
        """End the run after its last step: writes the trained model by `write`, if run.export asks for it; else
        removes the one of an earlier step."""
        if self.config.run.export:
            with self.folder.new_model() as path:
                write(path)
        elif self.folder.model.exists():
            shutil.rmtree(self.folder.model)
        self.folder.finish(self.state.step)
