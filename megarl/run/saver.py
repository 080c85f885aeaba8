"""The saving of checkpoints: when one is due, when it is written, and when it is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import join
from megarl.cluster.trained_models import TrainedModels
from megarl.config.schema import Config
from megarl.core.checkpoint import NAME, FileRecord
from megarl.models.paths import Models
from megarl.run.checkpoints import Checkpoints

POLL_S = 0.05
"""The interval at which the files of a checkpoint are looked for after an interrupt."""

Write = Callable[[Path], Sequence[FileRecord]]
"""Writes files into the folder of a checkpoint, and returns their records."""


def no_files(_: Path) -> Sequence[FileRecord]:
    return ()


class Saver:
    """Saves every checkpoint.every_steps steps and after the last one, and where it is asked to. At most one save is
    under way."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        num_bytes: int,
        data_hash: str,
        models: Models,
        evaluated: Mapping[int, float] | None = None,
    ):
        """num_bytes   the size of one checkpoint
        evaluated   the values of evaluation.best.metric so far, by the step of their evaluation
        """
        self._evaluated = dict(evaluated or {})
        self._config, self._num_bytes = config, num_bytes
        self._checkpoints = Checkpoints(folder)
        self._fixed = {"config": config.model_dump(), "data_hash": data_hash, "models": models}
        self._unfinished: Unfinished | None = None
        self._metrics: dict[str, float] = {}

    def save(
        self,
        trained: TrainedModels,
        step: int,
        run: Mapping[str, Any],
        at_once: bool = False,
        write: Write = no_files,
    ) -> dict[str, float]:
        """Copy everything to host memory if a checkpoint is due after `step`, or at_once if there is none of it yet.
        run: the driver's state, as JSON values. write: writes what else belongs to it into its folder, at once.

        Return the metrics since the last call: the seconds that training waited and, of a checkpoint that was
        completed, its bytes and the seconds since its beginning.
        """
        if not self._has(step) if at_once else self._due(step):
            self.finish()
            with self._waiting():
                self._checkpoints.require_space(self._num_bytes, self._config.checkpoint.keep)
                folder = self._checkpoints.begin(step)
                groups = trained.groups
                start = time.perf_counter()
                self._unfinished = Unfinished([*groups.values()], step, run, folder, start, write(folder))
                saving = {role: partial(group.save_checkpoint, folder) for role, group in groups.items()}
                trained.run(saving, parts=("parameters",))
            print(f"checkpoint: copied after step {step}, and written to {folder.parent}", flush=True)
        metrics, self._metrics = self._metrics, {}
        return metrics

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of the value of an evaluation by which its checkpoint may be the best."""
        name = self._config.evaluation.best.metric
        if name is not None and name in metrics:
            self._evaluated[step] = metrics[name]

    def commit(self) -> None:
        """Complete the checkpoint if its files are written; without checkpoint.background it waits for that."""
        if self._unfinished and (not self._config.checkpoint.background or self._unfinished.is_written()):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is under way, if any, is complete, and removes the oldest beyond
        checkpoint.keep."""
        if self._unfinished is None:
            return
        unfinished = self._unfinished
        with self._waiting():
            writing = [group.finish_checkpoint(unfinished.folder) for group in unfinished.groups]
            records = [record for pending in writing for record in pending.result()]
            self._complete(unfinished, [*unfinished.others, *records])

    def finish_after_interrupt(self, done: int, left_s: Callable[[], float]) -> None:
        """Complete the checkpoint that is under way, if any, if its files are written while left_s is above 0. The
        ranks may be in the middle of a step, and are not waited for.

        done: the last step whose metrics are written; a run that goes on from a checkpoint needs those of its step."""
        unfinished = self._unfinished
        # Its folder has another name from the moment on that it is complete.
        if unfinished is None or unfinished.step > done or not unfinished.folder.exists():
            return
        while (files := unfinished.files()) is None:
            if left_s() <= 0:
                grace = f"checkpoint.grace_s={self._config.checkpoint.grace_s:g}"
                print(f"checkpoint: that of step {unfinished.step} was not written within {grace}", flush=True)
                return
            time.sleep(POLL_S)
        self._complete(unfinished, files)

    def _complete(self, unfinished: Unfinished, files: Sequence[FileRecord]) -> None:
        checkpoint = self._checkpoints.commit(unfinished.step, {**self._fixed, "run": unfinished.run}, files)
        self._unfinished = None
        self.keep()
        self._metrics["checkpoint/seconds"] = seconds = time.perf_counter() - unfinished.start
        self._metrics["checkpoint/bytes"] = checkpoint.num_bytes
        size = f"{checkpoint.num_bytes / 1e9:.2f} GB"
        print(f"checkpoint: {checkpoint.path} is complete, {size} in {seconds:.1f} s", flush=True)

    def keep(self) -> None:
        """Remove the oldest checkpoints beyond checkpoint.keep, but for that of the best evaluation; of equally good
        ones, of the first."""
        sign = 1 if self._config.evaluation.best.mode == "max" else -1
        judged = [step for step in self._checkpoints.steps() if step in self._evaluated]
        self._checkpoints.point_to_best(max(judged, key=lambda step: sign * self._evaluated[step], default=None))
        self._checkpoints.keep(self._config.checkpoint.keep)

    def _has(self, step: int) -> bool:
        """Return whether the checkpoint of this step is under way or complete."""
        latest = self._checkpoints.latest()
        is_under_way = self._unfinished is not None and self._unfinished.step == step
        return is_under_way or (latest is not None and latest.name == NAME.format(step))

    def _due(self, step: int) -> bool:
        every = self._config.checkpoint.every_steps
        return every is not None and (step % every == 0 or step == self._config.run.steps)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._metrics["time/checkpoint"] = self._metrics.get("time/checkpoint", 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A checkpoint whose files are being written into the folder since start, a reading of perf_counter. others: the
    files that are no rank's, which are written."""

    groups: Sequence[TrainerGroup]
    step: int
    run: Mapping[str, Any]
    folder: Path
    start: float
    others: Sequence[FileRecord] = ()

    def is_written(self) -> bool:
        """Return whether all ranks of all groups have written their files, or failed to."""
        asked = [group.checkpoint_written() for group in self.groups]
        return all(join(asked).result())

    def files(self) -> list[FileRecord] | None:
        """Return the records of all files once they are written, without asking the ranks; until then None."""
        parts = [group.written_files(self.folder) for group in self.groups]
        return None if None in parts else [*self.others, *(record for part in parts for record in part)]
