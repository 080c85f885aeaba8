"""The loop of a run, whatever a step of it is: data, metrics and checkpoints, until the last step."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.failure import RunFailure
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.model_folders import ModelFolders
from megarl.cluster.placement import Placement, place
from megarl.cluster.supervision.memory import MemorySampler
from megarl.config.schema import Config
from megarl.core import device
from megarl.data.offline import OfflineData
from megarl.data.prompts import PromptSet
from megarl.planning.checkpoint_size import checkpoint_bytes
from megarl.run.folder import RunFolder
from megarl.run.lock import run_lock
from megarl.run.loggers import ConsoleSink, JsonlSink
from megarl.run.resume import ResumePoint, RunState, start
from megarl.run.saver import Saver
from megarl.run.summary import print_run_summary

Step = Callable[[], dict[str, float]]
"""Learns; returns the step's metrics. Its number is then state.step."""


def exit_status(run: Callable[[Config, Path], None], config: Config, scratch: Path) -> int:
    """Runs it, with temporary files in scratch. Returns 0 only if the last step was reached and the model written."""
    try:
        run(config, scratch)
    except RunFailure as failure:
        print(f"megarl: error: {failure}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class Loop:
    """resume_point: where the run begins; its state is that of the step that is done."""

    config: Config
    data: PromptSet | OfflineData
    resume_point: ResumePoint
    saver: Saver
    placement: Placement

    @classmethod
    @contextmanager
    def prepare(cls, config: Config, models: ModelFolders, data: PromptSet | OfflineData) -> Iterator[Loop]:
        """Opens the run's folder, which is this run's alone inside, and says what will be run, before any process is
        started. Raises ValueError for a folder in use, for a checkpoint to go on from that is not one, and for a disk
        without room for the next."""
        num_bytes = checkpoint_bytes(config, models.trained(config))
        placement = place(config, on_gpus=device.on_cuda())
        with run_lock(RunFolder.of(config).path):
            resume_point = start(config, data, num_bytes)
            saver = Saver(resume_point.folder.checkpoints, config, num_bytes, data.data_hash)
            print_run_summary(config, resume_point, models.actor, data, placement.describe())
            yield cls(config, data, resume_point, saver, placement)

    @property
    def state(self) -> RunState:
        return self.resume_point.state

    @property
    def folder(self) -> RunFolder:
        return self.resume_point.folder

    def take(self, n: int) -> list[Any]:
        """The next n rows of the data."""
        return [self.data[i] for i in self.state.cursor.take(n)]

    def run(self, trained: Sequence[TrainerGroup], step: Step) -> None:
        """Steps until run.steps. trained: what checkpoints hold; what they resume_point with is loaded and checked."""
        state, folder, saver = self.state, self.folder, self.saver
        saver.keep()  # a killed run may not have come to it
        sinks = (JsonlSink(folder.metrics), ConsoleSink(self.config.run.steps, given=self.config.is_offline))
        with MemorySampler() as memory:
            while state.step < self.config.run.steps:
                state.step += 1
                metrics = step() | {"data/dropped_rows": self.data.num_dropped}
                metrics["memory/peak_rss_gb"], metrics["memory/peak_pss_gb"] = memory.peak_gb()
                metrics |= saver.save(trained, state.step, state.dump())
                for sink in sinks:
                    sink.write(state.step, metrics)
                saver.commit()  # after the step's metrics: a run that goes on from here has them
            saver.finish()

    def export(self, write: Callable[[Path], None]) -> None:
        """Has the trained model written, if run.export asks for it. None of an earlier step is left in its place."""
        if self.config.run.export:
            with self.folder.new_model() as path:
                write(path)
        elif self.folder.model.exists():
            shutil.rmtree(self.folder.model)
