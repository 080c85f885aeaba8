"""Checks the run folder before models and data are loaded."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from megarl.config import document
from megarl.config.continuation import check_continues
from megarl.config.saved import complete, invalid_value
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint, checked_format
from megarl.core.errors import UserError
from megarl.core.files import read_object, read_text, shown
from megarl.models.folder import model_paths
from megarl.models.paths import Models, moved_models, reuse_earlier_folders, update_moved_paths
from megarl.models.weights_hash import weights_hash
from megarl.run.folder import RunFolder, models_in


def check_beginning(config: Config) -> str | None:
    """Return a message if resume=auto is set and the run has already finished, else None. Raise UserError if the name
    belongs to an earlier run, or the finished run used an incompatible recipe."""
    folder = RunFolder.of(config)
    RunFolder.require_free(config)
    step = folder.finished_after if config.resume == "auto" else None
    if step is None or config.run.steps > step or not folder.config.exists():
        return None
    saved = document.parse(read_text(folder.config), str(folder.config)).values
    if (invalid := invalid_value(saved)) is not None:
        key, value, problem = invalid
        raise UserError(f"{folder.config}: {key}={shown(value)} {problem}. Fix: restore or remove the file")
    manifest = read_object(folder.manifest)
    config = resolve(config)
    saved = complete(saved, checked_format(manifest, folder.manifest))
    moved = moved_models(config, _identities(config), saved, models_in(manifest, folder.manifest))
    check_continues(config, update_moved_paths(config, saved, moved), step, str(folder.path))
    done = f"the run has already finished step {step} of {config.run.steps}"
    return f"{folder.path}: {done}. Increase run.steps to continue it"


def resolve(config: Config) -> Config:
    """Return the config with resolved model paths and date. Values that an earlier attempt resolved are reused."""
    folders = {} if config.resume == "never" else RunFolder.of(config).resolved_models
    config = reuse_earlier_folders(config, folders)
    day = config.data.date or _earlier_date(config) or datetime.date.today().isoformat()
    return config.model_copy(update={"data": config.data.model_copy(update={"date": day})})


def _earlier_date(config: Config) -> str | None:
    """Return the date of the run that `resume` continues, or None if there is no earlier run."""
    if config.resume == "never":
        return None
    if config.resume != "auto":
        path = Path(config.resume).expanduser()
        return _date_in(Checkpoint.open(path).state.get("config"), path) if path.is_dir() else None
    folder = RunFolder.of(config)
    file = folder.newest(folder.config)
    return None if file is None else _date_in(document.parse(read_text(file), str(file)).values, file)


def _date_in(config: Any, path: Path) -> str | None:
    """Return data.date from a saved config. Raise a UserError that names `path` if the config is malformed."""
    data = config.get("data", {}) if isinstance(config, dict) else None
    day = data.get("date") if isinstance(data, dict) else 0
    if not isinstance(day, str | None):
        raise UserError(f"{path}: its config is malformed. Fix: restore or remove the file")
    return day


def _identities(config: Config) -> Models:
    """Return the folder and the weights hash of each local model, keyed by the config key of its path."""
    folders = {key: Path(path) for key, path in model_paths(config).items() if Path(path).is_dir()}
    return {key: {"folder": str(folder), "hash": weights_hash(folder)} for key, folder in folders.items()}
