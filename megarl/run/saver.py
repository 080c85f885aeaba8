"""The saving of checkpoints: when one is due, when it is written, and when it is complete."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import join
from megarl.config.schema import Config
from megarl.run.checkpoints import Checkpoints
from megarl.run.folder import Models


class Saver:
    """Saves every checkpoint.every_steps steps and after the last one. At most one save is under way."""

    def __init__(self, folder: Path, config: Config, num_bytes: int, data_hash: str, models: Models):
        """num_bytes: the size of one checkpoint."""
        self._config, self._num_bytes = config, num_bytes
        self._checkpoints = Checkpoints(folder)
        self._fixed = {"config": config.model_dump(), "data_hash": data_hash, "models": models}
        self._unfinished: Unfinished | None = None
        self._metrics: dict[str, float] = {}

    def save(self, groups: Sequence[TrainerGroup], step: int, run: Mapping[str, Any]) -> dict[str, float]:
        """Copies everything to host memory if a checkpoint is due after `step`. run: the driver's state, as JSON
        values.

        Returns the metrics since the last call: the seconds that training waited and, of a checkpoint that was
        completed, its bytes and the seconds since its beginning.
        """
        if self._due(step):
            self.finish()
            with self._waiting():
                self._checkpoints.require_space(self._num_bytes, self._config.checkpoint.keep)
                folder = self._checkpoints.begin(step)
                self._unfinished = Unfinished(groups, step, run, folder, time.perf_counter())
                for copying in [group.save_checkpoint(folder) for group in groups]:
                    copying.result()
            print(f"checkpoint: copied after step {step}, and written to {folder.parent}", flush=True)
        metrics, self._metrics = self._metrics, {}
        return metrics

    def commit(self) -> None:
        """Completes the checkpoint if its files are written; without checkpoint.background it waits for that."""
        if self._unfinished and (not self._config.checkpoint.background or self._unfinished.is_written()):
            self.finish()

    def finish(self) -> None:
        """Waits until the checkpoint that is under way, if any, is complete, and removes the oldest beyond
        checkpoint.keep."""
        if self._unfinished is None:
            return
        unfinished, self._unfinished = self._unfinished, None
        with self._waiting():
            writing = [group.finish_checkpoint(unfinished.folder) for group in unfinished.groups]
            files = [record for pending in writing for record in pending.result()]
            checkpoint = self._checkpoints.commit(unfinished.step, {**self._fixed, "run": unfinished.run}, files)
            self.keep()
        self._metrics["checkpoint/seconds"] = seconds = time.perf_counter() - unfinished.start
        self._metrics["checkpoint/bytes"] = checkpoint.num_bytes
        size = f"{checkpoint.num_bytes / 1e9:.2f} GB"
        print(f"checkpoint: {checkpoint.path} is complete, {size} in {seconds:.1f} s", flush=True)

    def keep(self) -> None:
        """Removes the oldest checkpoints beyond checkpoint.keep."""
        self._checkpoints.keep(self._config.checkpoint.keep)

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
    """A checkpoint whose files are being written into the folder since start, a reading of perf_counter."""

    groups: Sequence[TrainerGroup]
    step: int
    run: Mapping[str, Any]
    folder: Path
    start: float

    def is_written(self) -> bool:
        """Returns whether all ranks of all groups have written their files, or failed to."""
        asked = [group.checkpoint_written() for group in self.groups]
        return all(join(asked).result())
