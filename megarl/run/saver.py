"""Saves checkpoints: decides when a checkpoint is due, tracks its background writes and completes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl.cluster.failure import LostRanks
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import Pending, join
from megarl.cluster.trained_models import TrainedModels
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.core.checkpoint import NAME, Checkpoint, FileRecord
from megarl.models.paths import Models
from megarl.run import events
from megarl.run.checkpoints import Checkpoints

POLL_S = 0.05
"""Interval in seconds for polling a checkpoint's files after an interrupt."""

Write = Callable[[Path], Sequence[FileRecord]]
"""A function that writes files to a checkpoint folder and returns their records."""


def no_files(_: Path) -> Sequence[FileRecord]:
    return ()


class Saver:
    """Saves checkpoints every checkpoint.every_steps steps, after the last step, and on request, one at a time."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        num_bytes: int,
        data_hash: str,
        models: Models,
        evaluated: Mapping[int, float] | None = None,
        sealed: Callable[[Checkpoint], object] = lambda _: None,
    ):
        """`num_bytes` is the size of one checkpoint, which also stores `data_hash` and the identities `models`.
        `evaluated` maps earlier steps to their values of evaluation.best.metric. `sealed`: see Checkpoints.commit."""
        self._sealed = sealed
        self._evaluated = dict(evaluated or {})
        self._config, self._num_bytes = config, num_bytes
        self._checkpoints = Checkpoints(folder)
        self._fixed = {"config": config.model_dump(), "data_hash": data_hash, "models": models}
        self._unfinished: Unfinished | None = None
        self._metrics: dict[str, float] = {}

    def save(
        self, trained: TrainedModels, step: int, run: Mapping[str, Any], at_once: bool = False, write: Write = no_files
    ) -> dict[str, float]:
        """Start saving a checkpoint if one is due after `step` or, with `at_once`, if this step is not saved yet. The
        training state is copied to host memory first. `run` is the driver's state as JSON values, and `write` writes
        additional files. Return the metrics since the last call: the seconds for which training was blocked, and the
        size and duration of a completed checkpoint."""
        if not self._has(step) if at_once else self._due(step):
            self.finish()
            with self._waiting():
                self._checkpoints.await_space(self._num_bytes, self._config.checkpoint.keep)
                for attempt in trained.attempts():
                    with attempt:
                        self._unfinished = self._begin(trained, step, run, write)
            print(f"checkpoint: copied step {step} to host memory, writing it to {self._checkpoints.path}", flush=True)
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _begin(self, trained: TrainedModels, step: int, run: Mapping[str, Any], write: Write) -> Unfinished:
        """Start writing a checkpoint, and return when all ranks have copied their state."""
        start, groups, folder = time.perf_counter(), trained.groups, self._checkpoints.begin(step)
        launches = [group.num_launches for group in groups.values()]
        unfinished = Unfinished([*groups.values()], step, run, folder, start, launches, write(folder))
        saving: dict[Role, Callable[[], Pending]] = {
            role: partial(group.save_checkpoint, folder) for role, group in groups.items()
        }
        trained.run(saving, parts=("parameters",))
        return unfinished

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the value of evaluation.best.metric after `step` if `metrics` contains it."""
        name = self._config.evaluation.best.metric
        if name is not None and name in metrics:
            self._evaluated[step] = metrics[name]

    def commit(self) -> None:
        """Complete the checkpoint in progress if its files are written or checkpoint.background is not set."""
        if self._unfinished and (not self._config.checkpoint.background or self._unfinished.is_written()):
            self.finish()

    def finish(self) -> bool:
        """Wait for the checkpoint in progress, if any, complete it, and remove checkpoints beyond checkpoint.keep.
        Return False if a rank was lost before its files were on disk. The checkpoint is then abandoned."""
        if self._unfinished is None:
            return True
        unfinished = self._unfinished
        with self._waiting():
            records = unfinished.finish()
            if records is None:
                self._unfinished = None
                print(
                    f"checkpoint: abandoned step {unfinished.step}, because a rank was lost before it had written its "
                    "files",
                    flush=True,
                )
                return False
            self._complete(unfinished, records)
        return True

    def finish_written(self, done: int, left_s: Callable[[], float]) -> None:
        """Wait for the files of the checkpoint in progress, if any, until `left_s` returns 0, and complete it if they
        are written by then. The files are polled, because the ranks may be in the middle of a step. A checkpoint of a
        step after `done`, the last step with metrics, is not completed, because the run could not resume from it."""
        unfinished = self._unfinished
        # The folder is renamed once the checkpoint is complete.
        if unfinished is None or unfinished.step > done or not unfinished.folder.exists():
            return
        while (files := unfinished.files()) is None:
            if left_s() <= 0:
                grace = f"checkpoint.grace_s={self._config.checkpoint.grace_s:g}"
                print(f"checkpoint: writing step {unfinished.step} did not finish within {grace} s", flush=True)
                return
            time.sleep(POLL_S)
        self._complete(unfinished, files)

    def _complete(self, unfinished: Unfinished, files: Sequence[FileRecord]) -> None:
        checkpoint = self._checkpoints.commit(
            unfinished.step, {**self._fixed, "run": unfinished.run}, files, self._sealed
        )
        self._unfinished = None
        events.send("checkpoint", step=unfinished.step, path=str(checkpoint.path))
        self.keep()
        self._metrics["checkpoint/seconds"] = seconds = time.perf_counter() - unfinished.start
        self._metrics["checkpoint/bytes"] = checkpoint.num_bytes
        size = f"{checkpoint.num_bytes / 1e9:.2f} GB"
        print(f"checkpoint: completed {checkpoint.path} ({size} in {seconds:.1f} s)", flush=True)

    def keep(self) -> None:
        """Remove the oldest checkpoints beyond checkpoint.keep, except for the checkpoint with the best evaluation
        result. Ties are resolved in favor of the earliest checkpoint."""
        sign = 1 if self._config.evaluation.best.mode == "max" else -1
        judged = [step for step in self._checkpoints.steps() if step in self._evaluated]
        self._checkpoints.point_to_best(max(judged, key=lambda step: sign * self._evaluated[step], default=None))
        self._checkpoints.keep(self._config.checkpoint.keep)

    def _has(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is in progress or complete."""
        latest = self._checkpoints.latest()
        is_in_progress = self._unfinished is not None and self._unfinished.step == step
        return is_in_progress or (latest is not None and latest.name == NAME.format(step))

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
    """A checkpoint whose files are being written to a hidden folder.

    Attributes:
        run: the driver's state as JSON values.
        start: value of time.perf_counter() at the start of the save.
        launches: each group's number of launches, which identifies its ranks.
        others: records of additional files, which are already written.
    """

    groups: Sequence[TrainerGroup]
    step: int
    run: Mapping[str, Any]
    folder: Path
    start: float
    launches: Sequence[int]
    others: Sequence[FileRecord] = ()

    def is_written(self) -> bool:
        """Return whether each rank has either written its files or failed."""
        if self._lost_ranks:
            return True
        try:
            return all(join([group.checkpoint_written() for group in self.groups]).result())
        except LostRanks:
            return True

    def finish(self) -> list[FileRecord] | None:
        """Wait until all files are on disk, and return their records; None if a rank was lost in the meantime."""
        if self._lost_ranks:
            return self.files()
        try:
            writing = [group.finish_checkpoint(self.folder) for group in self.groups]
            return [*self.others, *(record for pending in writing for record in pending.result())]
        except LostRanks:
            return self.files()

    @property
    def _lost_ranks(self) -> bool:
        """Whether the ranks that began the checkpoint have since been replaced."""
        return [group.num_launches for group in self.groups] != self.launches

    def files(self) -> list[FileRecord] | None:
        """Return the records of all files without remote calls, or None if some files are not yet written."""
        parts = [part for group in self.groups if (part := group.written_files(self.folder)) is not None]
        is_complete = len(parts) == len(self.groups)
        return [*self.others, *(record for part in parts for record in part)] if is_complete else None
