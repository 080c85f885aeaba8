"""Sandboxes of bubblewrap: namespaces that an ordinary user may make, and a view of the system that has next to
nothing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from megarl.config import schema
from megarl.sandbox.provider import OWN_AGENT, SYSTEM_PATH, Provider
from megarl.sandbox.sandbox import Command, SandboxError
from megarl.sandbox.seccomp import open_filter

OLDEST = (0, 8)
"""The first version that limits the size of folders in memory and what namespaces a program may make itself."""

NOBODY = 65534

FOLDER = "/tmp"
"""The folder in which programs run, the only one besides /dev/shm where they may write. It is in memory."""

SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")


class Bubblewrap(Provider):
    """Programs see /usr, this Python and its packages, all of it read-only, and their own /tmp. They have no network
    and no rights, and see no process but their own.

    Root is another user in the sandbox than outside, so that the kernel counts its processes and nothing of root's is
    its own; the folders of this Python may lie where only root can go.
    """

    name = "bubblewrap"

    def __init__(self, limits: schema.Sandbox, deadline_s: float | None = None, drops_root: bool | None = None):
        """drops_root: whether root becomes another user (None: if this process is root)."""
        super().__init__(limits, deadline_s)
        self.drops_root = os.geteuid() == 0 if drops_root is None else drops_root

    def command(self) -> Command:
        """Raises SandboxError where bubblewrap is not installed, or too old."""
        bubblewrap, files = _bubblewrap(), open_filter()
        seccomp = ["--seccomp", str(files[0])] if files else []
        path = f"{os.path.dirname(sys.executable)}:{SYSTEM_PATH}"
        prefix = _other_user(bubblewrap) if self.drops_root else []
        arguments = [*prefix, bubblewrap, *_isolation(self.limits), *seccomp, "--", *OWN_AGENT]
        arguments += [FOLDER, path, *(["counts_own"] if _counts_own() else [])]
        return Command(arguments, files=files)


@cache
def _bubblewrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError("bwrap is not on the PATH")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60).stdout
    version = re.search(r"(\d+)\.(\d+)", said)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        raise SandboxError(f"{found} is {said.strip()}, which is older than {'.'.join(map(str, OLDEST))}")
    return found


def _isolation(limits: schema.Sandbox) -> list[str]:
    """Returns the options that make a sandbox. What they mount later lies over what they mounted before."""
    size = str(limits.file_mib << 20)
    return [
        *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"),
        *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--cap-drop", "ALL"),
        *("--ro-bind", "/usr", "/usr"),
        *(option for folder in SYSTEM for option in _system_folder(folder)),
        *(option for path in ETC for option in ("--ro-bind-try", path, path)),
        *("--proc", "/proc", "--remount-ro", "/proc"),
        *("--dev", "/dev", "--size", size, "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
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
    """Returns the folders of this Python that are not under /usr."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    folders = prefixes | {os.path.realpath(prefix) for prefix in prefixes}
    folders.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    return sorted(folder for folder in folders if Path(folder).parts[:2] != ("/", "usr"))


@cache
def _other_user(bubblewrap: str) -> list[str]:
    """Returns the beginning of a command that root runs as nobody. Where nobody cannot go to the folders of this
    Python, it goes through a view of the files in which it can."""
    setpriv = [shutil.which("setpriv") or "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    ways = [(folder, way) for folder in _python_folders() if (way := _closed_way(Path(folder))) is not None]
    if not ways:
        return setpriv
    opened = [option for way in sorted({way for _, way in ways}) for option in ("--perms", "0755", "--tmpfs", str(way))]
    for folder, way in ways:
        for inner in _between(way, Path(folder)):
            opened += ["--perms", "0755", "--dir", str(inner)]
        opened += ["--ro-bind", folder, folder]
    rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--die-with-parent"]
    return [bubblewrap, "--dev-bind", "/", "/", *opened, *rights, "--", *setpriv]


def _closed_way(folder: Path) -> Path | None:
    """Returns the first folder on the way to this one that not everybody may pass."""
    return next((way for way in reversed(folder.parents) if not way.stat().st_mode & 0o001), None)


def _between(way: Path, folder: Path) -> Iterator[Path]:
    yield from (inner for inner in reversed(folder.parents) if way in inner.parents)


def _counts_own() -> bool:
    """Returns whether the kernel counts the processes of a user namespace by themselves."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)
