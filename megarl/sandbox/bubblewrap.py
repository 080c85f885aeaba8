"""Bubblewrap sandboxes: unprivileged namespaces with a minimal view of the system."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.sandbox.provider import OWN_AGENT, SYSTEM_PATH, Provider
from megarl.sandbox.sandbox import Command, SandboxError
from megarl.sandbox.seccomp import open_filter

if TYPE_CHECKING:
    from megarl.config import schema

OLDEST = (0, 8)
"""Oldest supported version of bubblewrap: the first that can limit the size of a tmpfs and disable nested user
namespaces."""

NOBODY = 65534

FOLDER = "/tmp"
"""Working directory of programs, in memory. Programs can write only to this folder and to /dev/shm."""

SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")


class Bubblewrap(Provider):
    """Runs programs with a read-only /usr and Python installation, and with a private /tmp.

    Programs have no network and no capabilities, and see only their own processes. If this process runs as root, the
    sandbox runs as a different user, so that the kernel enforces process limits and the sandbox does not own root's
    files. This works even if the Python installation is in a folder that only root can enter.
    """

    name = "bubblewrap"

    def __init__(self, limits: schema.Sandbox, deadline_s: float | None = None, drops_root: bool | None = None):
        """drops_root: whether the sandbox runs as a user other than root. None: only if this process is root."""
        super().__init__(limits, deadline_s)
        self.drops_root = os.geteuid() == 0 if drops_root is None else drops_root

    def command(self) -> Command:
        """Return the command that starts a sandbox. Raise SandboxError if bubblewrap is missing or too old."""
        bubblewrap, files = _bubblewrap(), open_filter()
        seccomp = ["--seccomp", str(files[0])] if files else []
        path = f"{os.path.dirname(sys.executable)}:{SYSTEM_PATH}"
        prefix = _other_user(bubblewrap) if self.drops_root else []
        arguments = [*prefix, bubblewrap, *_isolation(self.limits), *seccomp, "--", *OWN_AGENT]
        arguments += [FOLDER, path, *(["counts_own"] if _counts_own() else [])]
        return Command(arguments, files=files)


@cache
def _bubblewrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError("bwrap is not on the PATH")
    output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    version = re.search(r"(\d+)\.(\d+)", output)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        raise SandboxError(f"{path} is {output.strip()}, but version {'.'.join(map(str, OLDEST))} or later is required")
    return path


def _isolation(limits: schema.Sandbox) -> list[str]:
    """Return the bubblewrap options that create a sandbox. Later mounts hide earlier ones."""
    size = str(limits.file_mib << 20)
    return [
        *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"),
        *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--cap-drop", "ALL"),
        *("--ro-bind", "/usr", "/usr"),
        *(option for folder in SYSTEM for option in _system_folder(folder)),
        *(option for path in ETC for option in ("--ro-bind-try", path, path)),
        *("--proc", "/proc", "--remount-ro", "/proc"),
        # Replace /dev/zero with /dev/full, which also reads as zeros but cannot be mapped as shared memory.
        *("--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero"),
        *("--size", size, "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", size, "--perms", "1777", "--tmpfs", FOLDER),
        *(option for folder in _python_folders() for option in ("--ro-bind", folder, folder)),
        *("--remount-ro", "/", "--chdir", FOLDER),
    ]


def _system_folder(folder: str) -> list[str]:
    if os.path.islink(folder):
        return ["--symlink", os.readlink(folder), folder]
    return ["--ro-bind", folder, folder] if os.path.isdir(folder) else []


@cache
def _python_folders() -> list[str]:
    """Return the folders of the Python installation outside /usr."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    folders = prefixes | {os.path.realpath(prefix) for prefix in prefixes}
    folders.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    return sorted(folder for folder in folders if Path(folder).parts[:2] != ("/", "usr"))


@cache
def _other_user(bubblewrap: str) -> list[str]:
    """Return the command prefix that lets root run a command as nobody. If the user nobody cannot enter the folders of
    the Python installation, the prefix also creates a view of the file system that lets it enter them."""
    setpriv = [shutil.which("setpriv") or "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    closed = [(folder, parent) for folder in _python_folders() if (parent := _closed_parent(Path(folder))) is not None]
    if not closed:
        return setpriv
    mounts = []
    for parent in sorted({parent for _, parent in closed}):
        mounts += ["--perms", "0755", "--tmpfs", str(parent)]
    for folder, parent in closed:
        for inner in reversed(Path(folder).parents):
            mounts += ["--perms", "0755", "--dir", str(inner)] if parent in inner.parents else []
        mounts += ["--ro-bind", folder, folder]
    rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--die-with-parent"]
    return [bubblewrap, "--dev-bind", "/", "/", *mounts, *rights, "--", *setpriv]


def _closed_parent(folder: Path) -> Path | None:
    """Return the folder's outermost parent that other users cannot enter, or None."""
    return next((parent for parent in reversed(folder.parents) if not parent.stat().st_mode & 0o001), None)


def _counts_own() -> bool:
    """Return whether the kernel counts the processes of each user namespace separately."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)
