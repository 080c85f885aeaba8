"""What a run says before it starts: where it begins, on what, and which passes its algorithm leaves out."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema import Config
from megarl.data.offline import GivenData
from megarl.data.prompts import PromptSet
from megarl.run.resume import Start
from megarl.step import passes


def announce(config: Config, begin: Start, model_folder: Path, data: PromptSet | GivenData, placement: str) -> None:
    if begin.folder.moved is not None:
        print(f"an earlier run of this name is now at {begin.folder.moved}")
    print(f"run: {begin.folder.path}, {begin.describe()}")
    dropped = f" ({data.num_dropped} too long ones are dropped)" if data.num_dropped else ""
    print(f"model: {model_folder}\n{config.data.rows}: {len(data)}{dropped}\nprocesses: {placement}")
    print("\n".join(passes.describe(config)), flush=True)
