"""The summary that a run prints before it starts: its beginning, its processes, the passes that it makes, and what it
leaves out."""

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
        print(f"an earlier run of this name is now at {resume_point.folder.moved}")
    print(f"run: {resume_point.folder.path}, {resume_point.describe()}")
    dropped = f" ({data.num_dropped} too long ones are dropped)" if data.num_dropped else ""
    print(f"model: {model_folder}\n{config.data.format}: {len(data)}{dropped}\nprocesses: {placement}")
    print("\n".join([*queue.describe(config), *passes.describe(config), *logprob_check.announce(config)]), flush=True)
