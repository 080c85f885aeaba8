"""The start of a run: anew, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.algorithms.baselines import MovingAverage
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
from megarl.models.paths import moved_models, with_present_paths
from megarl.run.checkpoints import Checkpoints
from megarl.run.folder import Models, RunFolder


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """A row of the data whose rollouts have been begun and not yet trained on. version: that of the weights when they
    were begun first, or again after they had been dropped."""

    row: int
    version: int


@dataclass
class RunState:
    """The driver's state after `step` steps, from which a run goes on. The weights then have version `step`."""

    step: int
    cursor: PromptCursor | WeightedCursor
    average: MovingAverage = field(default_factory=MovingAverage)
    """The moving average of the rewards, for estimators that take it as their baseline."""
    under_way: list[PendingPrompt] = field(default_factory=list)
    """The rows whose rollouts are under way, in their order."""
    again: list[PendingPrompt] = field(default_factory=list)
    """Such rows of the attempt before, and those whose rollouts were dropped. They come before others."""
    lengths: dict[int, float] = field(default_factory=dict)
    """The mean tokens of a row's responses when it was last trained on, with rollout.longest_first."""

    def draw(self, n: int, version: int) -> list[PendingPrompt]:
        """Returns the next n rows, whose rollouts are under way from now on. version: that of the weights."""
        rows, self.again = self.again[:n], self.again[n:]
        rows += [PendingPrompt(row, version) for row in self.cursor.take(n - len(rows))]
        self.under_way += rows
        return rows

    def take_up(self, item: PendingPrompt) -> None:
        """Notes that the rollouts of a row that would come again are there."""
        self.again.remove(item)
        self.under_way.append(item)

    def put_back(self, items: Sequence[PendingPrompt], version: int) -> None:
        """Makes rows whose rollouts were dropped come again, before others. version: that of the next step's
        weights."""
        for item in items:
            self.under_way.remove(item)
        self.again += [PendingPrompt(item.row, version) for item in items]

    def dump(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return {
            "step": self.step,
            "weights_version": self.step,
            "cursor": self.cursor.state(),
            "average": asdict(self.average),
            "under_way": [item.row for item in (*self.again, *self.under_way)],
            "lengths": {str(row): length for row, length in self.lengths.items()},
            "under_way_since": [item.version for item in (*self.again, *self.under_way)],
        }

    @classmethod
    def restore(cls, saved: Mapping[str, Any], config: Config, data: PromptSet | OfflineData) -> RunState:
        if config.data.draws_by_weight:
            cursor = WeightedCursor.restore(saved["cursor"], _weights(data), config.data.solved_weight)
        else:
            cursor = PromptCursor.restore(saved["cursor"])
        rows = saved.get("under_way", ())  # earlier formats have none
        versions = saved.get("under_way_since", [saved["step"]] * len(rows))
        again = [PendingPrompt(row, version) for row, version in zip(rows, versions, strict=True)]
        again.sort(key=lambda item: item.version)  # whose turn is first
        lengths = {int(row): length for row, length in saved.get("lengths", {}).items()}
        return cls(saved["step"], cursor, MovingAverage(**saved["average"]), again=again, lengths=lengths)


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
    """Opens the run's folder as the key `resume` says. num_bytes: the size of a checkpoint. Raises UserError, and
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
    """Returns the checkpoint from which the run goes on, as the key `resume` says; None if it begins anew. Raises
    UserError for one that is missing, damaged, or of another run."""
    path = _checkpoint_path(config)
    return None if path is None else _open(path, config, data, models)


def _fresh(config: Config, data: PromptSet | OfflineData) -> RunState:
    seed = config.run.seed
    if config.data.draws_by_weight:
        return RunState(0, WeightedCursor(len(data), seed, _weights(data), config.data.solved_weight))
    return RunState(0, PromptCursor(len(data), seed, config.data.shuffle))


def _weights(data: PromptSet | OfflineData) -> Sequence[float] | None:
    return data.weights if isinstance(data, PromptSet) else None


def _is_of_this_run(checkpoint: Checkpoint, checkpoints: Checkpoints) -> bool:
    """Returns whether the checkpoint is one of this run's. Raises UserError for one that would be moved aside with the
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
    """Raises UserError for a model whose weights are not those that the run started from: the reference, a reward model
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
