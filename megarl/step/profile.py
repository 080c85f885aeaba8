"""Profiling of selected steps on selected ranks that train models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.cluster.pending import join
from megarl.cluster.trained_models import TrainedModels
from megarl.config.schema import Config


@contextmanager
def profiled(config: Config, trained: TrainedModels, number: int, folder: Path) -> Iterator[None]:
    """Profile the body on the ranks in run.profile, if step `number` is one of its steps. Create the folder and write
    one file per rank to it. In any other step, do nothing."""
    settings = config.run.profile
    if number not in settings.steps:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    join([group.start_profile(settings.ranks) for group in trained.groups.values()]).result()
    yield
    join([group.stop_profile(settings.ranks, folder) for group in trained.groups.values()]).result()
    print(f"profile: wrote the profile of step {number} to {folder}", flush=True)
