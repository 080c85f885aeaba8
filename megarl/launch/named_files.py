"""Files and folders that a recipe names. All nodes of a run must be able to read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.config.algorithm_schema import Advantage, Objective
from megarl.config.data_schema import is_procedural
from megarl.config.schema import Config
from megarl.core.user_file import is_in_file
from megarl.models.folder import all_model_paths


@dataclass(frozen=True, slots=True)
class NamedPath:
    """A file or folder that a config key names.

    Attributes:
        path: the path from the config, without a function or class name.
        is_folder: whether it must be a folder.
    """

    key: str
    path: str
    is_folder: bool = False

    @property
    def exists(self) -> bool:
        path = Path(self.path).expanduser()
        return path.is_dir() if self.is_folder else path.is_file()

    def missing_error(self, remedy: str) -> str:
        return f"{self.key}={self.path}: the {'folder' if self.is_folder else 'file'} does not exist. Fix: {remedy}"


def named_files(config: Config) -> list[NamedPath]:
    """Return the paths that a recipe names: model folders (not Hub ids or packages), data files, and files with user
    functions."""
    paths = {key: path for key, path in all_model_paths(config).items() if path.startswith(("/", ".", "~"))}
    models = [NamedPath(key, path, is_folder=True) for key, path in paths.items()]
    sources = [("data.source", config.data.source)]
    sources += [("data.more_sources", source) for source in config.data.more_sources]
    algorithm = config.algorithm
    functions = [(Advantage.key, algorithm.advantage.estimator), (Objective.key, algorithm.objective.name)]
    functions += [("rewards.functions", entry.function) for entry in config.rewards.functions]
    for evaluation_set in config.evaluation.sets:
        key, environment = f"evaluation.sets: {evaluation_set.name}", evaluation_set.environment
        sources += [] if evaluation_set.source is None else [(f"{key}: source", evaluation_set.source)]
        functions += [(f"{key}: functions", entry.function) for entry in evaluation_set.functions or ()]
        if environment is not None and environment.name is not None:
            functions.append((f"{key}: environment.class", environment.name))
    data = [NamedPath(key, source) for key, source in sources if not is_procedural(source)]
    if config.rewards.judge is not None:
        functions.append(("rewards.judge", config.rewards.judge))
    if config.environment.name is not None:
        functions.append(("environment.class", config.environment.name))
    return [*models, *data, *(NamedPath(key, name.rpartition(":")[0]) for key, name in functions if is_in_file(name))]
