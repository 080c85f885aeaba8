"""The start of a run: anew, or from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.continuation import check_continues
from megarl.config.saved import complete
from megarl.config.schema import Config
from megarl.core.checkpoint import NAME, Checkpoint
from megarl.core.errors import UserError
from megarl.data.cursor import PromptCursor
from megarl.data.offline import OfflineData
from megarl.data.prompts import PromptSet
from megarl.data.weighted_cursor import WeightedCursor
from megarl.models.folder import MODEL_SECTIONS, is_hub_id, model_paths, real_path
from megarl.models.paths import Models, moved_models, with_present_paths
from megarl.run.checkpoints import Checkpoints
from megarl.run.folder import RunFolder
from megarl.step.state import RunState, weights_of


@dataclass(frozen=True, slots=True)
class ResumePoint:
    folder: RunFolder
    state: RunState
    checkpoint: Checkpoint | None

    def describe(self) -> str:
        if self.checkpoint is None:
            return "starts at the first step"
        return f"goes on after step {self.state.step}, from {self.checkpoint.path}"


def start(config: Config, data: PromptSet | OfflineData, num_bytes: int, models: Models) -> ResumePoint:
    """Open the run's folder as the key `resume` says. num_bytes: the size of a checkpoint. Raise UserError, and
    leaves the folder as it was, for a checkpoint that is missing, damaged, or of another run, and for a disk without
    room for those to come."""
    checkpoint = find_checkpoint(config, data, models)
    checkpoints = Checkpoints(RunFolder.of(config).checkpoints)
    state = _fresh(config, data) if checkpoint is None else RunState.restore(checkpoint.state["run"], config, data)
    goes_on = checkpoint is not None and _is_of_this_run(checkpoint, checkpoints)
    if checkpoint is not None:
        for key, earlier in _moved_models(config, checkpoint, models).items():
            print(f"{key}={model_paths(config)[key]}: its weights are those of {earlier}, where the run began")
    if goes_on:
        RunFolder.of(config).metrics_until(checkpoint.step)  # raises for what cannot be read, before anything changes
        if checkpoints.steps()[-1] > checkpoint.step:
            checkpoint.verify(checkpoint.files)  # later ones, which may be the only good ones, are removed
        checkpoints.sweep()
    if config.checkpoint.may_be_saved:
        keep, most = config.checkpoint.keep, config.most_checkpoints
        # Checkpoints that exist already are counted in, even more than `keep`: the oldest are removed for the next.
        checkpoints.require_space(num_bytes, keep, number=max(0, most + 1 - (len(checkpoints) if goes_on else 0)))
    if goes_on:
        # The order matters: a run that is killed in between is one that was killed before it went on, and later
        # checkpoints are removed when the folder is ready for others.
        checkpoints.point_to(checkpoint.path)
        folder = RunFolder.reopen(config, checkpoint.step, data.data_hash, models)
        checkpoints.go_back_to(checkpoint.step)
    else:
        folder = RunFolder.create(config, data.data_hash, models)
    return ResumePoint(folder, state, checkpoint)


def find_checkpoint(config: Config, data: PromptSet | OfflineData, models: Models) -> Checkpoint | None:
    """Return the checkpoint from which the run goes on, as the key `resume` says; None if it begins anew. Raises
    UserError for one that is missing, damaged, or of another run."""
    path = _checkpoint_path(config)
    return None if path is None else _open(path, config, data, models)


def _fresh(config: Config, data: PromptSet | OfflineData) -> RunState:
    seed = config.run.seed
    if config.data.draws_by_weight:
        return RunState(0, WeightedCursor(len(data), seed, weights_of(data), config.data.solved_weight))
    return RunState(0, PromptCursor(len(data), seed, config.data.shuffle))


def _is_of_this_run(checkpoint: Checkpoint, checkpoints: Checkpoints) -> bool:
    """Return whether the checkpoint is one of this run's. Raise UserError for one that would be moved aside with the
    run's folder."""
    path, name = checkpoint.path.resolve(), NAME.format(checkpoint.step)
    if path == checkpoints.path.resolve() / name:
        return True
    if path.is_relative_to(checkpoints.path.parent.resolve()):
        raise UserError(
            f"resume={checkpoint.path}: it lies in the folder of this run, where its name is checkpoints/{name}; give "
            "it that name, or move it elsewhere"
        )
    return False


def _open(path: Path, config: Config, data: PromptSet | OfflineData, models: Models) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    saved_config = with_present_paths(config, _saved_config(checkpoint), _moved_models(config, checkpoint, models))
    check_continues(config, saved_config, checkpoint.step, str(path))
    _check_models(config, checkpoint, models)
    if (saved := checkpoint.state["data_hash"]) != data.data_hash:
        raise UserError(
            f"data.source={config.data.source}: its {config.data.format} have changed since {path} was saved (hash "
            f"{data.data_hash[:8]}…, then {saved[:8]}…); restore them, or start another run with "
            "resume=never and a new run.name"
        )
    return checkpoint


def _moved_models(config: Config, checkpoint: Checkpoint, models: Models) -> dict[str, str]:
    return moved_models(config, models, _saved_config(checkpoint), _saved_models(checkpoint))


def _saved_models(checkpoint: Checkpoint) -> Models:
    return checkpoint.state.get("models", {})  # format 1 has none


def _saved_config(checkpoint: Checkpoint) -> dict[str, Any]:
    saved = complete(checkpoint.state["config"], checkpoint.format)
    if checkpoint.format == 1:  # which has the paths as they were given
        for section in (saved[name] for name in MODEL_SECTIONS):
            section["path"] = section["path"] and real_path(section["path"])
    return saved


def _check_models(config: Config, checkpoint: Checkpoint, models: Models) -> None:
    """Raise UserError for a model whose weights are not those that the run started from: the reference, a reward model
    and an implicit reward's start are read from its folder again."""
    for key, saved in _saved_models(checkpoint).items():
        if key in models and (found := models[key])["hash"] != saved["hash"]:
            remedy = " (model.revision chooses a commit)" if is_hub_id(config.model.path) else ""
            raise UserError(
                f"{key}={found['folder']}: its weights (hash {found['hash'][:8]}…) are not those that the run of "
                f"{checkpoint.path} started from, then in {saved['folder']} (hash {saved['hash'][:8]}…); restore "
                f"them{remedy}, or start another run with resume=never and a new run.name"
            )


def _checkpoint_path(config: Config) -> Path | None:
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return Checkpoints(RunFolder.of(config).checkpoints).latest()
    # Links are resolved: the run's folder is moved away, unless the checkpoint is found to lie in it.
    path = Path(config.resume).expanduser().resolve()
    if not path.is_dir():
        raise UserError(
            f"resume={config.resume}: there is no such folder; give never, auto or the folder of a checkpoint"
        )
    return path
