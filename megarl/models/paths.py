"""Handle the model paths in a resumed run: the given paths, and the folders resolved when the run started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.models.folder import model_paths, resolve_links

Models = Mapping[str, Mapping[str, str]]
"""The initial models of a run: config key of the path -> folder and hash of the weights."""


def reuse_earlier_folders(config: Config, folders: Mapping[str, str]) -> Config:
    """Return the config with symlinks resolved. A path that an earlier attempt resolved keeps that folder: the link
    runs/latest moves when a run starts, but the same command must resume the run with the same model. `folders` maps a
    path in the config to the folder that earlier attempts resolved it to."""
    real = resolve_links(config)
    for key, config_path in model_paths(config).items():
        folder, path = folders.get(config_path), model_paths(real)[key]
        if folder not in (None, path) and Path(folder).is_dir():
            print(f"{key}={config_path}: using {folder}, the folder from the start of the run", flush=True)
            name, _ = key.split(".")
            section = getattr(real, name).model_copy(update={"path": folder})
            real = real.model_copy(update={name: section})
    return real


def add_config_paths(models: Models, config: Config, config_paths: Mapping[str, str]) -> Models:
    """Return the models, with the path from the config added to each model whose resolved path differs from it.

    Args:
        config: config with resolved paths.
        config_paths: config key -> path before it was resolved.
    """
    paths = model_paths(config)
    return {
        key: {**model, "given": config_paths[key]} if key in config_paths and config_paths[key] != paths[key] else model
        for key, model in models.items()
    }


def moved_models(config: Config, models: Models, saved: Mapping[str, Any], saved_models: Models) -> dict[str, str]:
    """Return the models that have the same weights as when the run was saved, but a different path. The result maps the
    config key of the path to the path in the saved config. A model that is missing from `models` is the actor's
    model."""
    moved = {}
    for key, path in model_paths(config).items():
        name, _ = key.split(".")
        earlier = saved.get(name, {}).get("path")
        current, previous = (each.get(key, each.get("model.path")) for each in (models, saved_models))
        if current and previous and earlier not in (None, path) and current["hash"] == previous["hash"]:
            moved[key] = earlier
    return moved


def update_moved_paths(config: Config, saved: Mapping[str, Any], moved: Iterable[str]) -> dict[str, Any]:
    """Return the saved config with the current paths of the moved models. moved: config keys of their paths."""
    updated = dict(saved)
    for name in (key.split(".")[0] for key in moved):
        updated[name] = {**saved[name], "path": getattr(config, name).path}
    return updated
