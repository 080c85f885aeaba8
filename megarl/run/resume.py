"""Finds the starting point of a run: the first step or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.continuation import Change, allowed_changes, check_continues
from megarl.config.saved import complete, invalid_value
from megarl.config.schema import Config
from megarl.core.checkpoint import NAME, Checkpoint, intact_before
from megarl.core.errors import DamagedCheckpoint, UserError
from megarl.data.cursor import PromptCursor
from megarl.data.offline import OfflineData
from megarl.data.prompts import PromptSet
from megarl.data.weighted_cursor import WeightedCursor
from megarl.models.folder import is_hub_id, model_paths
from megarl.models.paths import Models, moved_models, update_moved_paths
from megarl.run.checkpoints import BEST, POINTER, Checkpoints
from megarl.run.folder import LAUNCH, RunFolder
from megarl.step.state import RunState, saved_state, weights_of


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The starting point of an attempt: the run folder, the state, and the checkpoint to resume from, if any.

    Attributes:
        changes: the keys in run.allow_changes that have changed since the checkpoint.
        continues: whether the checkpoint belongs to this run.
    """

    folder: RunFolder
    state: RunState
    checkpoint: Checkpoint | None
    changes: Sequence[Change] = ()
    continues: bool = False

    def describe(self) -> str:
        if self.checkpoint is None:
            return "starting at the first step"
        changes = "".join(f"\n{change.describe()} (run.allow_changes)" for change in self.changes)
        return f"resuming after step {self.state.step} from {self.checkpoint.path}{changes}"


def start(config: Config, data: PromptSet | OfflineData, num_bytes: int, models: Models) -> ResumePoint:
    """Open the run folder and return the starting point that the key `resume` selects. Raise UserError if the
    checkpoint is missing, is corrupt or belongs to a different run, or the disk has no space for further checkpoints.
    After an error, the folder is unchanged, except that incomplete checkpoints may have been removed and a Slurm job
    sets damaged ones aside. `num_bytes` is the size of one checkpoint, and `models` are the models' identities."""
    try:
        return _start(config, data, num_bytes, models)
    except DamagedCheckpoint as damage:
        path = _checkpoint_path(config)
        if path is None or (line := fall_back(config, path, damage)) is None:
            raise
        print(f"megarl: warning: {line}", flush=True)
        return start(config, data, num_bytes, models)


def _start(config: Config, data: PromptSet | OfflineData, num_bytes: int, models: Models) -> ResumePoint:
    path = _checkpoint_path(config)
    checkpoint = None if path is None else _open(path, config, data, models)
    checkpoints = Checkpoints(RunFolder.of(config).checkpoints)
    changes = [] if checkpoint is None else allowed_changes(config, _saved_config(checkpoint))
    state = _fresh(config, data)
    if checkpoint is not None:
        state = RunState.restore(saved_state(checkpoint, config, len(data)), config, data)
    own = checkpoint if checkpoint is not None and _is_of_this_run(checkpoint, checkpoints) else None
    if checkpoint is not None:
        for key, earlier in _moved_models(config, checkpoint, models).items():
            print(f"{key}={model_paths(config)[key]}: same weights as {earlier}, the model that the run started from")
    if own is not None:
        RunFolder.of(config).metrics_until(own.step)  # raises an error for invalid lines, before the folder is modified
        if checkpoints.steps()[-1] > own.step:
            own.verify(own.files)  # later checkpoints, which are removed below, may be the only valid ones
        checkpoints.sweep()
    if config.checkpoint.may_be_saved:
        keep, most = config.checkpoint.keep, config.max_checkpoints
        # Existing checkpoints beyond `keep` also count, because the oldest ones are removed to free disk space.
        checkpoints.require_space(num_bytes, keep, number=max(0, most + 1 - (0 if own is None else len(checkpoints))))
    if own is not None:
        # The order matters: if the run is killed between these calls, it can still be resumed from the same checkpoint.
        # Later checkpoints are removed last, after the folder is ready.
        checkpoints.point_to(own.path)
        folder = RunFolder.reopen(config, own.step, data.data_hash, models, changes)
        checkpoints.roll_back_to(own.step)
    else:
        folder = RunFolder.create(config, data.data_hash, models, state.step, changes)
    return ResumePoint(folder, state, checkpoint, changes, own is not None)


def find_checkpoint(config: Config, data: PromptSet | OfflineData, models: Models) -> Checkpoint | None:
    """Return the checkpoint from which `start` would resume, or None if the run starts at the first step. Raise
    UserError if the checkpoint is missing, is corrupt or belongs to a different run."""
    path = _checkpoint_path(config)
    try:
        return None if path is None else _open(path, config, data, models)
    except DamagedCheckpoint:
        if path is None or (earlier := _fallback(config, path)) is None:
            raise
        return _open(earlier, config, data, models)


def _fallback(config: Config, checkpoint: Path) -> Path | None:
    """Return the checkpoint from which a Slurm job resumes instead of a damaged one, because no user can choose one for
    the job. Return None outside a job, or if no earlier checkpoint is intact."""
    in_a_job = "SLURM_JOB_ID" in os.environ or (RunFolder.of(config).path / LAUNCH).exists()
    return intact_before(checkpoint) if config.resume == "auto" and in_a_job else None


def fall_back(config: Config, checkpoint: Path, damage: DamagedCheckpoint) -> str | None:
    """Set a damaged checkpoint aside and return a log line, or return None if the job cannot resume from another."""
    earlier = _fallback(config, checkpoint)
    if earlier is None:
        return None
    aside = Checkpoints(RunFolder.of(config).checkpoints).set_aside(checkpoint, earlier)
    reason = str(damage).partition(". Fix: ")[0]
    moved = f" moved it to {aside} and" if aside.exists() else ""
    return f"{reason}. The job{moved} resumes from the last intact checkpoint {earlier}"


def _fresh(config: Config, data: PromptSet | OfflineData) -> RunState:
    seed = config.run.seed
    if config.data.draws_by_weight:
        return RunState(0, WeightedCursor(len(data), seed, weights_of(data), config.data.solved_weight))
    return RunState(0, PromptCursor(len(data), seed, config.data.shuffle))


def _is_of_this_run(checkpoint: Checkpoint, checkpoints: Checkpoints) -> bool:
    """Return whether the checkpoint belongs to this run. Raise UserError if the checkpoint is inside the run folder but
    not at its expected path, because the folder would be moved aside."""
    path, name = checkpoint.path.resolve(), NAME.format(checkpoint.step)
    if path == checkpoints.path.resolve() / name:
        return True
    if path.is_relative_to(checkpoints.path.parent.resolve()):
        raise UserError(
            f"resume={checkpoint.path}: the checkpoint is in this run's folder, but its name is not checkpoints/{name}"
            ". Fix: rename it, or move it out of the run folder"
        )
    return False


def _open(path: Path, config: Config, data: PromptSet | OfflineData, models: Models) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    _check_state(checkpoint)
    saved_config = update_moved_paths(config, _saved_config(checkpoint), _moved_models(config, checkpoint, models))
    check_continues(config, saved_config, checkpoint.step, str(path))
    _check_models(config, checkpoint, models)
    if (saved := checkpoint.state["data_hash"]) != data.data_hash:
        keys = [change.key for change in allowed_changes(config, saved_config)]
        cause = " The columns that reward functions read are part of the data." if "rewards.functions" in keys else ""
        raise UserError(
            f"data.source={config.data.source}: the {config.data.format} have changed since {path} was saved (hash "
            f"{data.data_hash[:8]}… instead of {saved[:8]}…).{cause} Fix: restore the data, or start a new run with "
            "resume=never and a different run.name"
        )
    return checkpoint


def _check_state(checkpoint: Checkpoint) -> None:
    """Raise DamagedCheckpoint if a value that `_open` reads is missing or has the wrong type."""
    config, models, data_hash = (checkpoint.state.get(key) for key in ("config", "models", "data_hash"))
    if not isinstance(data_hash, str):
        raise checkpoint.malformed("data_hash", data_hash, "is not a string")
    if not isinstance(models, dict):
        raise checkpoint.malformed("models", models, "is not an object")
    for key, model in models.items():
        if not isinstance(model, dict) or not all(isinstance(model.get(name), str) for name in ("folder", "hash")):
            raise checkpoint.malformed(f"models.{key}", model, "has no folder and hash")
    if (invalid := invalid_value(config)) is not None:
        raise checkpoint.malformed(*invalid)


def _moved_models(config: Config, checkpoint: Checkpoint, models: Models) -> dict[str, str]:
    return moved_models(config, models, _saved_config(checkpoint), _saved_models(checkpoint))


def _saved_models(checkpoint: Checkpoint) -> Models:
    return checkpoint.state["models"]


def _saved_config(checkpoint: Checkpoint) -> dict[str, Any]:
    return complete(checkpoint.state["config"], checkpoint.format)


def _check_models(config: Config, checkpoint: Checkpoint, models: Models) -> None:
    """Check that the models have the same weights as at the start of the run. This check is necessary because the
    reference, a reward model and the initial model of an implicit reward are loaded from their model folders again.
    Raise UserError if a model's weights have changed."""
    for key, saved in _saved_models(checkpoint).items():
        if key in models and (current := models[key])["hash"] != saved["hash"]:
            remedy = " (model.revision selects a commit)" if is_hub_id(config.model.path) else ""
            raise UserError(
                f"{key}={current['folder']}: these weights (hash {current['hash'][:8]}…) differ from the weights that "
                f"the run of {checkpoint.path} started from: {saved['folder']} (hash {saved['hash'][:8]}…). Fix: "
                f"restore the weights{remedy}, or start a new run with resume=never and a different run.name"
            )


def _checkpoint_path(config: Config) -> Path | None:
    if config.resume == "never":
        return None
    if config.resume == "auto":
        latest = Checkpoints(RunFolder.of(config).checkpoints).latest()
        if latest is not None and not latest.exists() and (earlier := intact_before(latest)) is not None:
            print(f"{latest}: the newest checkpoint was moved or removed. Resuming from {earlier}", flush=True)
            return earlier
        return latest
    # Resolve links now, so that a checkpoint inside the run folder is recognized before the folder is moved aside.
    path = Path(config.resume).expanduser().resolve()
    if path.is_file() and path.name in (POINTER, BEST):
        path = Checkpoints(path.parent).pointed_to(path.name) or path
    if not path.is_dir():
        raise UserError(
            f"resume={config.resume}: no such folder. Fix: set resume to never, auto or a checkpoint folder"
        )
    return path
