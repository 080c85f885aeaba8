"""The run's scratch folder on each node, for temporary files. Only its owner can access it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from megarl.cluster.supervision import segments
from megarl.cluster.supervision.ownership import Untrusted, open_file, own_folder, private_folder
from megarl.core.errors import InfrastructureFailure

VARIABLE = "MEGARL_SCRATCH"
"""Environment variable that passes the node's scratch folder to the run's processes."""

PLACE, PREFIX, LOCK = Path("/tmp"), "megarl-", "lock"
"""Parent folder, name prefix and lock file of scratch folders. The folders are not in $TMPDIR, because its path may be
too long: socket paths are limited to 107 bytes."""

NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")
"""Names that `tempfile.mkdtemp` generates. Files with other names are not scratch folders."""

MAX_LISTED = 3
"""Maximum number of skipped folders that a message lists."""


def own_scratch() -> Path:
    """Return this node's scratch folder. Only available inside `supervised`."""
    return Path(os.environ[VARIABLE])


def ray_folder(scratch: Path) -> Path:
    """Return the path of Ray's folder in a scratch folder. Ray makes its folder world-writable, so it must not be the
    scratch folder itself, because other users must not enter that."""
    return scratch / "ray"


def memory_folder(scratch: Path) -> Path:
    """Return the path of the run's private folder in this node's shared memory. It is removed with the scratch
    folder."""
    return segments.SHARED_MEMORY / scratch.name


def make_memory_folder(scratch: Path) -> Path:
    """Create the run's folder in shared memory if it does not exist, and return its path. Raise InfrastructureFailure
    if another user may have created it: all users may create folders there, and see the scratch folder's name."""
    folder = memory_folder(scratch)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        with private_folder(folder):
            return folder
    except (Untrusted, OSError) as error:
        raise InfrastructureFailure(
            f"{folder}: not a private folder of this run ({error}). Fix: resume with resume=auto, or set "
            "cluster.replace_ranks=false"
        ) from error


def remove_memory_folder(scratch: Path) -> None:
    """Remove the run's folder in shared memory, if there is one that no other user may have created."""
    if NAME.fullmatch(scratch.name):
        with suppress(OSError, Untrusted), private_folder(memory_folder(scratch)):
            shutil.rmtree(memory_folder(scratch), ignore_errors=True)


_locks: list[int] = []
"""Descriptors of the lock files in the scratch folders that this process has created."""


def make_scratch() -> Path:
    """Create a scratch folder. This process and its forks hold the folder's lock until the last of them exits."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
    hidden = folder / f".{LOCK}"
    lock = os.open(hidden, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    hidden.rename(folder / LOCK)  # rename it after locking, so that the visible file is always locked
    _locks.append(lock)
    return folder


def remove_scratch(folder: Path) -> None:
    """Remove a scratch folder and its contents, unless it is gone and another user has taken its name. The lock file is
    removed last, and only if nothing else is left: without it, no later run could remove the folder."""
    remove_memory_folder(folder)
    with suppress(OSError, Untrusted), private_folder(folder):
        for path in _contents(folder):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not _contents(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _contents(folder: Path) -> list[Path]:
    """Return the contents of a scratch folder except its lock file, under either of its names."""
    return [path for path in folder.iterdir() if path.name not in (LOCK, f".{LOCK}")]


def sweep() -> None:
    """Remove scratch folders and shared memory of this user's runs that were killed before their cleanup. Print one
    line about folders that cannot be trusted, and leave them untouched."""
    skipped = [
        f"{folder} ({reason})"
        for folder in sorted(PLACE.glob(f"{PREFIX}*"))
        if NAME.fullmatch(folder.name) and (reason := _sweep(folder)) is not None
    ]
    if skipped:
        rest = f" and {len(skipped) - MAX_LISTED} more" if len(skipped) > MAX_LISTED else ""
        print(f"megarl: note: skipped scratch folders: {', '.join(skipped[:MAX_LISTED])}{rest}", flush=True)


def _sweep(folder: Path) -> str | None:
    """Remove a scratch folder if its run has ended. Return the reason if the folder cannot be trusted."""
    try:
        with own_folder(folder) as opened, open_file(LOCK, opened) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            segments.remove(segments.created(folder))
            remove_scratch(folder)
    except Untrusted as reason:
        return str(reason)
    except BlockingIOError:
        return None  # the run that owns the folder has not ended
    except OSError as error:
        # The error of flock has no filename. Errors on a descriptor have its number as the filename.
        name = folder if error.filename is None or isinstance(error.filename, int) else error.filename
        return None if _is_gone(folder) else f"{Path(name).name}: {error.strerror}"
    return None


def _is_gone(folder: Path) -> bool:
    """Return whether a folder does not exist or is empty, because another run is creating or removing it."""
    try:
        return not _contents(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
