"""What is known of a run before anything is loaded: whether its name is free, and whether it is finished."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.config import document
from megarl.config.continuation import check_continues
from megarl.config.saved import complete
from megarl.config.schema import Config
from megarl.data.model_folder import with_real_paths
from megarl.run.folder import RunFolder


def check_beginning(config: Config) -> str | None:
    """Returns a line where resume=auto finds the run finished, so that there is nothing to do; else None. Raises
    UserError where an earlier run has the name, or the finished one is of another recipe."""
    folder = RunFolder.of(config)
    if not Path(config.resume).expanduser().resolve().is_relative_to(folder.path.resolve()):  # a checkpoint of this run
        RunFolder.require_free(config)
    step = folder.finished_after if config.resume == "auto" else None
    if step is None or config.run.steps > step or not folder.config.exists():
        return None
    saved = document.parse(folder.config.read_text(encoding="utf-8"), str(folder.config)).values
    version = json.loads(folder.manifest.read_text(encoding="utf-8"))["format"]
    check_continues(with_real_paths(config), complete(saved, version), step, str(folder.path))
    return f"{folder.path}: already at step {step} of {config.run.steps}"
