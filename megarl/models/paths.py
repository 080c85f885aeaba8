"""The paths of a run's models: as they were given, and the folders that they led to when the run began."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.models.folder import model_paths, with_real_paths

Models = Mapping[str, Mapping[str, str]]
"""The models that a run starts from: folder and hash of the weights of each, by the key of its path."""


def with_earlier_folders(config: Config, folders: Mapping[str, str]) -> Config:
    """Return the config with the paths of models' folders as `with_real_paths` has them. A path that is given as it
    was before stands for the folder that it led to then, which a line says: the link runs/latest has moved to this run
    meanwhile, and the same command is to go on with it.

    folders   the folders that paths led to in the attempts of the run so far, by what was given
    """
    real = with_real_paths(config)
    for key, given in model_paths(config).items():
        folder, path = folders.get(given), model_paths(real)[key]
        if folder not in (None, path) and Path(folder).is_dir():
            print(f"{key}={given}: the run goes on with {folder}, where this led when it began", flush=True)
            name, _ = key.split(".")
            section = getattr(real, name).model_copy(update={"path": folder})
            real = real.model_copy(update={name: section})
    return real


def note_given_paths(models: Models, config: Config, given: Mapping[str, str]) -> Models:
    """Return the models, each with its path as it was given where the config has another.

    config   as find_model_paths returns it
    given    the paths that it was made of, by key
    """
    paths = model_paths(config)
    return {
        key: {**model, "given": given[key]} if key in given and given[key] != paths[key] else model
        for key, model in models.items()
    }


def moved_models(config: Config, models: Models, saved: Mapping[str, Any], saved_models: Models) -> dict[str, str]:
    """Return the models that lie elsewhere than when the run was saved, with the same weights: key of the path -> the
    path that the saved config has. One that `models` lack is the actor's."""
    moved = {}
    for key, path in model_paths(config).items():
        name, _ = key.split(".")
        earlier = saved.get(name, {}).get("path")
        now, then = (found.get(key, found.get("model.path")) for found in (models, saved_models))
        if earlier not in (None, path) and now is not None and then is not None and now["hash"] == then["hash"]:
            moved[key] = earlier
    return moved


def with_present_paths(config: Config, saved: Mapping[str, Any], moved: Iterable[str]) -> dict[str, Any]:
    """Return the saved config with the paths of the moved models, by key, as this config has them."""
    present = dict(saved)
    for name in (key.split(".")[0] for key in moved):
        present[name] = {**saved[name], "path": getattr(config, name).path}
    return present
