"""Prints a run's startup summary: the starting point, the processes, and the passes that it runs or skips."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema import Config
from megarl.data.offline import OfflineData
from megarl.data.prompts import PromptSet
from megarl.run.resume import ResumePoint
from megarl.step import logprob_check, passes, queue


def print_run_summary(
    config: Config, resume_point: ResumePoint, model_folder: Path, data: PromptSet | OfflineData, placement: str
) -> None:
    if resume_point.folder.moved is not None:
        print(f"moved the earlier run with this name to {resume_point.folder.moved}")
    print(f"run: {resume_point.folder.path}, {resume_point.describe()}")
    dropped = f" ({data.num_dropped} dropped because they are too long)" if data.num_dropped else ""
    print(f"model: {model_folder}\n{config.data.format}: {len(data)}{dropped}\nprocesses: {placement}")
    print("\n".join([*queue.describe(config), *passes.describe(config), *logprob_check.announce(config)]), flush=True)
