"""The user's code that a run executes: copies, hashes, Git commits, and changes since the run was saved."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import megarl
from megarl.config.paths import code_files
from megarl.config.schema import Config
from megarl.core.credentials import has_credentials
from megarl.core.files import replacement

TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")
"""Files of a model that may contain its chat template."""

MEGARL = Path(megarl.__file__).resolve().parents[1]
GIT_S = 10
"""Timeout in seconds for one git command."""

Record = dict[str, str]
"""One file: its config key, its path, its SHA-256, and the name of its copy ("" if it was not copied)."""


def record_code(config: Config, model: Path | None, folder: Path | None) -> list[Record]:
    """Return a record of each file with reward functions, environments, estimators and objectives, and of the files
    with the actor's chat template. Missing files are skipped. Copy the files into `folder` unless it is None. Copies
    are named by content hash, so that attempts share them. Files with credentials are not copied."""
    templates = [] if model is None else [("model.path", model / name) for name in TEMPLATES]
    records = []
    for key, path in [*code_files(config.model_dump()), *templates]:
        if not path.is_file():
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        is_secret = has_credentials(content.decode("utf-8", "replace"))
        copy = "" if is_secret else f"{digest[:12]}-{path.name}"
        if folder is not None and copy:
            folder.mkdir(exist_ok=True)
            with replacement(folder / copy) as file:
                file.write(content)
        elif folder is not None:
            print(
                f"megarl: warning: {path}: not copied to {folder}, because it seems to contain credentials",
                file=sys.stderr,
            )
        records.append({"key": key, "path": str(path), "sha256": digest, "copy": copy})
    return records


def projects(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the Git state of each checkout that contains the user's code or the working directory, except megarl's."""
    folders = [Path.cwd(), *(Path(record["path"]).parent for record in records if record["key"] != "model.path")]
    roots = dict.fromkeys(root for folder in folders if (root := _root(folder)) not in (None, MEGARL))
    states = ((root, git_state(root)) for root in roots if root is not None)
    return [{"folder": str(root), **state} for root, state in states if state is not None]


def git_state(root: Path) -> dict[str, Any] | None:
    """Return the commit of the Git checkout at `root`, and whether tracked files have uncommitted changes (None if git
    takes too long). Return None if `root` is not a checkout or git cannot read it."""
    if not (root / ".git").exists():  # an installed package may be inside an unrelated checkout
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        try:
            dirty = _git(root, "status", "--porcelain", "--untracked-files=no") != ""
        except subprocess.TimeoutExpired:
            dirty = None
        return {"commit": commit, "dirty": dirty}
    except (OSError, subprocess.SubprocessError):  # git is missing, has no commit yet, or refuses to read the checkout
        return None


def _root(folder: Path) -> Path | None:
    """Return the root of the Git checkout that contains the folder, if any."""
    return next((path for path in (folder, *folder.parents) if (path / ".git").exists()), None)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_S).stdout.strip()


def changes(old: Mapping[str, Any], new: Mapping[str, Any], code: Path) -> Iterator[str]:
    """Yield a line for each difference in code, Git commits and package versions between two manifests.

    Args:
        code: folder with the copies of the old run's code.
    """
    before, after = (_hashes(manifest) for manifest in (old, new))
    for (key, name), digests in after.items():
        earlier = before.get((key, name), {})
        if "code" not in old or digests.keys() <= earlier.keys():
            continue
        copies = ", ".join(str(code / copy) for digest, copy in earlier.items() if digest not in digests and copy)
        detail = f"earlier version: {copies}" if copies else "no copy of the earlier version" if earlier else "new file"
        yield f"{key}: {name} has changed ({detail})"
    for key, name in before.keys() - after.keys():
        yield f"{key}: {name} is no longer used"
    for name, (was, now) in _states(old, new).items():
        if _show(was) != _show(now):
            yield f"{name}: {_show(was)} -> {_show(now)}"


def _hashes(manifest: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, str]]:
    """Return (key, file name) -> SHA-256 of a file -> name of its copy. The manifest may be malformed."""
    files: dict[tuple[str, str], dict[str, str]] = {}
    records = manifest.get("code")
    for record in records if isinstance(records, list) else ():
        if isinstance(record, dict) and all(isinstance(record.get(name), str) for name in ("key", "path", "sha256")):
            key = record["key"], Path(record["path"]).name
            files.setdefault(key, {})[record["sha256"]] = Path(str(record.get("copy", ""))).name
    return files


def _states(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> (old, new) for the Git states of megarl and of the projects, and for package versions."""
    states = {"git commit of megarl": (old.get("git"), new.get("git"))}
    before, after = ({_name(each): _state(each) for each in _list(manifest.get("projects"))} for manifest in (old, new))
    states |= {f"git commit of {name}": (before[name], state) for name, state in after.items() if name in before}
    packages = (manifest.get("versions") for manifest in (old, new))
    was, now = (versions if isinstance(versions, dict) else {} for versions in packages)
    return states | {f"version of {name}": (was.get(name), now.get(name)) for name in {**was, **now}}


def _list(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _name(project: Mapping[str, Any]) -> str:
    return Path(str(project.get("folder"))).name


def _state(project: Mapping[str, Any]) -> dict[str, Any]:
    return {"commit": project.get("commit"), "dirty": project.get("dirty")}


def _show(state: Any) -> str:
    if not isinstance(state, dict):
        return str(state)
    return f"{str(state.get('commit'))[:12]}{' with uncommitted changes' if state.get('dirty') else ''}"
