"""Config keys whose values are paths, and the resolution of these paths.

Relative paths in a recipe are relative to the recipe's folder. Relative paths on the command line and in megarl's own
recipes are relative to the working directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from megarl.config.data_schema import is_procedural
from megarl.config.document import Document, Key
from megarl.core.user_file import is_in_file

Convert = Callable[[str], str]
"""Function that maps a path in the configuration to its replacement."""

Rewrite = Callable[[str, Convert], str]
"""Function that applies a `Convert` to the path in a value, if the value contains one."""

ITEMS = "*"
"""Part of a pattern that matches every item of a list."""


def _whole(value: str, convert: Convert) -> str:
    return convert(value)


def _data_file(value: str, convert: Convert) -> str:
    looks_like_path = os.sep in value or bool(PurePath(value).suffix)
    return convert(value) if looks_like_path and not is_procedural(value) else value


def _code_file(value: str, convert: Convert) -> str:
    file, _, name = value.rpartition(":")
    return f"{convert(file)}:{name}" if is_in_file(value) and file.endswith(".py") else value


def _checkpoint(value: str, convert: Convert) -> str:
    return value if value in ("never", "auto") else convert(value)


def _unless_uri(value: str, convert: Convert) -> str:
    return value if ":" in value or value.startswith("databricks") else convert(value)


def _executable(value: str, convert: Convert) -> str:
    """Convert a value with a slash. Names without a slash are looked up on the PATH."""
    return convert(value) if os.sep in value else value


def _functions(key: str) -> dict[str, Rewrite]:
    entry = f"{key}.{ITEMS}"
    names = (f"{entry}.function", f"{entry}.options.verifier", f"{entry}.options.verifier.function")
    return dict.fromkeys(names, _code_file)


def _environment(key: str) -> dict[str, Rewrite]:
    """Return the path keys of an environment section, including the path options of megarl's own environments. The
    options of other environments stay unchanged."""
    return {
        f"{key}.class": _code_file,
        f"{key}.options.corpus": _whole,
        f"{key}.options.python": _executable,
        f"{key}.options.path.{ITEMS}": _whole,
    }


SET = f"evaluation.sets.{ITEMS}"
DATA: Mapping[str, Rewrite] = dict.fromkeys(("data.source", f"data.more_sources.{ITEMS}", f"{SET}.source"), _data_file)
CODE: Mapping[str, Rewrite] = {
    **dict.fromkeys(("algorithm.advantage.estimator", "algorithm.objective.name", "rewards.judge"), _code_file),
    **_functions("rewards.functions"),
    **_functions(f"{SET}.functions"),
    **_environment("environment"),
    **_environment(f"{SET}.environment"),
}
OTHER: Mapping[str, Rewrite] = {
    "run.folder": _whole,
    "resume": _checkpoint,
    "actor.lora.path": _whole,
    f"data.image_folders.{ITEMS}": _whole,
    "sandbox.image": _unless_uri,
    "trackers.mlflow.tracking_uri": _unless_uri,
}
MODELS = (
    *("model.path", "critic.path", "reward_model.path", "implicit_reward.path", "rollout.speculative.path"),
    f"teachers.models.{ITEMS}.path",
)
"""Keys whose value is a model folder or a Hub id. A Hub id looks like a relative path."""

OWN_ENVIRONMENTS = ("search", "search_tool", "verifiers")
"""megarl's own environments that have path options."""


def absolute(document: Document, is_own: Callable[[str], bool]) -> Document:
    """Return the document with absolute paths. A value that may be a Hub id becomes a path if it starts with a dot, a
    slash or ~, or if the folder exists. is_own: function that returns whether a file in `Document.origins` is one of
    megarl's own recipes."""

    def folder_of(key: Key) -> Path:
        file = document.origin(key, "").rpartition(":")[0]
        return Path.cwd() if not file or is_own(file) else Path(file).absolute().parent

    def convert_at(key: Key) -> Convert:
        return lambda path: _join(folder_of(key), path)

    values = document.values
    for pattern, rewrite in {**DATA, **CODE, **OTHER}.items():
        values = _rewritten(values, tuple(pattern.split(".")), rewrite, convert_at)
    for pattern in MODELS:
        values = _rewritten(values, tuple(pattern.split(".")), _model, convert_at)
    return Document(_with_weights(values, convert_at), document.origins)


def without_folders(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values with the paths of data and code reduced to file names, because equal runs may keep these
    files in different folders. The contents of the files are compared separately."""
    named = dict(values)
    for pattern, rewrite in {**DATA, **CODE}.items():
        named = _rewritten(named, tuple(pattern.split(".")), rewrite, lambda _: lambda path: PurePath(path).name)
    sources: list[str] = []
    for pattern in ("data.source", f"data.more_sources.{ITEMS}"):
        _rewritten(values, tuple(pattern.split(".")), _whole, lambda _: lambda path: sources.append(path) or path)
    return _with_weights(named, lambda _: lambda path: _short_name(path, sources))


def _short_name(path: str, sources: Sequence[str]) -> str:
    """Return the file name of a path, followed by the source's number if several sources have the same file name."""
    name = PurePath(path).name
    is_unique = [PurePath(source).name for source in sources].count(name) < 2
    return name if is_unique or path not in sources else f"{name} (source {sources.index(path) + 1})"


def code_files(values: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the key and the path of each Python file that a config names. The key omits list indices."""
    found: list[tuple[str, Path]] = []

    def note_at(key: Key) -> Convert:
        def note(path: str) -> str:
            if path.endswith(".py"):
                found.append((".".join(part for part in key if isinstance(part, str)), Path(path)))
            return path

        return note

    for pattern, rewrite in CODE.items():
        _rewritten(values, tuple(pattern.split(".")), rewrite, note_at)
    yield from dict.fromkeys(found)


def _join(folder: Path, path: str) -> str:
    """Return the absolute path, without `..` unless it follows a symlink."""
    if "\0" in path:  # opening the file raises an error
        return path
    joined = os.path.join(folder, os.path.expanduser(path))
    plain = os.path.normpath(joined)
    return plain if os.path.realpath(plain) == os.path.realpath(joined) else joined


def _model(value: str, convert: Convert) -> str:
    path = convert(value)
    may_be_id = value.count("/") < 2 and not os.path.isdir(path)  # a Hub id has at most one slash
    is_path = value.startswith((".", "/", "~")) or not (may_be_id or ":" in value)
    return path if is_path else value


def _with_weights(values: Mapping[str, Any], convert_at: Callable[[Key], Convert]) -> dict[str, Any]:
    """Rewrite the keys of data.source_weights if they are files, because data.source_column is null."""
    data = values.get("data")
    weights = data.get("source_weights") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(weights, Mapping) or data.get("source_column") is not None:
        return dict(values)
    key = ("data", "source_weights")
    files = {_data_file(name, convert_at((*key, name))): weight for name, weight in weights.items()}
    return {**values, "data": {**data, "source_weights": files}}


def _rewritten(
    values: Any, pattern: tuple[str, ...], rewrite: Rewrite, convert_at: Callable[[Key], Convert], key: Key = ()
) -> Any:
    """Return `values` with the strings at `pattern` rewritten. Values of unexpected types stay unchanged."""
    if not pattern:
        return rewrite(values, convert_at(key)) if isinstance(values, str) and values else values
    name, *inner = pattern
    if name == ITEMS:
        if not isinstance(values, list):
            return values
        return [_rewritten(item, tuple(inner), rewrite, convert_at, (*key, i)) for i, item in enumerate(values)]
    if not isinstance(values, Mapping) or name not in values:
        return values
    if name == "options" and not _has_path_options(values, inner[0]):
        return values
    return {**values, name: _rewritten(values[name], tuple(inner), rewrite, convert_at, (*key, name))}


def _has_path_options(section: Mapping[str, Any], option: str) -> bool:
    """Return whether an option of a reward function or an environment is a path."""
    return option == "verifier" or section.get("class") in OWN_ENVIRONMENTS
