"""Reads the contents of a report from a run folder. The run may still be in progress."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from megarl.core.errors import UserError
from megarl.report.evaluations import read_evaluations
from megarl.report.history import read_history
from megarl.report.page import Contents
from megarl.report.viewer import read_rollouts
from megarl.run.folder import RunFolder


def read_contents(folder: Path) -> Contents:
    """Read the contents of a report from the run folder `folder`. The run may be unfinished or may have crashed. Raise
    a UserError if `folder` is not a run folder."""
    run_folder = RunFolder(Path(folder))
    if not (run_folder.metrics.exists() or run_folder.manifest.exists()):
        raise UserError(f"{folder}: not a run folder (no metrics.jsonl or manifest.json). Fix: pass a run folder")
    config_text, manifest_text = _text(run_folder.config), _text(run_folder.manifest)
    config = yaml.safe_load(config_text) or {}
    manifest = json.loads(manifest_text or "{}")
    return Contents(
        name=manifest.get("name", run_folder.path.resolve().name),
        subtitle=" · ".join(str(manifest[key]) for key in ("model", "started") if manifest.get(key)),
        target_steps=config.get("run", {}).get("steps"),
        config_text=config_text,
        manifest_text=manifest_text,
        history=read_history(run_folder.metrics),
        rollouts=read_rollouts(run_folder.rollout_files()),
        evaluations=read_evaluations(run_folder.evaluation_files()),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
