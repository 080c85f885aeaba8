"""The files and folders that a recipe names, which all nodes of its run read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.algorithm_schema import Advantage, Objective
from megarl.config.schema import Config
from megarl.config.sources import is_procedural
from megarl.models.folder import model_paths


@dataclass(frozen=True, slots=True)
class Named:
    """A file or folder, by the key that names it. path: as it is given, without the name of a function in it."""

    key: str
    path: str
    is_folder: bool = False

    @property
    def is_there(self) -> bool:
        path = Path(self.path).expanduser()
        return path.is_dir() if self.is_folder else path.is_file()

    def missing(self, remedy: str) -> str:
        return f"{self.key}={self.path}: there is no such {'folder' if self.is_folder else 'file'} here; {remedy}"


def named_files(config: Config) -> list[Named]:
    """Return those of a recipe: folders of models, of which hub ids and packages have none here, data, and the files
    of its own functions."""
    models = [Named(key, path, is_folder=True) for key, path in model_paths(config).items() if _is_path(path)]
    sources = [("data.source", config.data.source)]
    sources += [("data.more_sources", source) for source in config.data.more_sources]
    algorithm = config.algorithm
    functions = [(Advantage.key, algorithm.advantage.estimator), (Objective.key, algorithm.objective.name)]
    functions += [("rewards.functions", entry.function) for entry in config.rewards.functions]
    for given in config.evaluation.sets:
        key = f"evaluation.sets: {given.name}"
        sources += [] if given.source is None else [(f"{key}: source", given.source)]
        functions += [(f"{key}: functions", entry.function) for entry in given.functions or ()]
        if given.environment is not None and given.environment.name is not None:
            functions.append((f"{key}: environment.class", given.environment.name))
    data = [Named(key, source) for key, source in sources if not is_procedural(source)]
    if config.rewards.judge is not None:
        functions.append(("rewards.judge", config.rewards.judge))
    if config.environment.name is not None:
        functions.append(("environment.class", config.environment.name))
    return [*models, *data, *_files(functions)]


def _files(functions: Sequence[tuple[str, str]]) -> list[Named]:
    """Return the files of path/to/file.py:function, or of a class; other names are megarl's own."""
    return [Named(key, name.rpartition(":")[0]) for key, name in functions if ":" in name]


def _is_path(path: str) -> bool:
    return path.startswith(("/", ".", "~"))
