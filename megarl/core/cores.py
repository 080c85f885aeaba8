"""CPU cores available to this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of cores in this process's affinity mask, or its cgroup's CPU quota if that is lower. A job or
    container may be limited to 8 of a machine's 128 cores."""
    allowed, quota = len(os.sched_getaffinity(0)), cgroup_cores()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cgroup_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Return the CPU quota of this process's cgroup in cores, the minimum over the cgroup and its ancestors; None
    without a quota. cgroups: mount point of cgroup v2 (cpu.max) or v1 (cpu.cfs_quota_us)."""
    return min((cores for folder in _folders(proc, cgroups) for cores in _quota(folder)), default=None)


def _folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups that may set a CPU quota, from its own up to the root."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            root = cgroups / controllers
            leaf = root / path.lstrip("/")
            # A container may see its own cgroup as the root but read the path that is valid on the host.
            for folder in (leaf, *leaf.parents) if leaf.is_dir() else (root,):
                if folder.is_relative_to(root):
                    yield folder


def _quota(folder: Path) -> Iterator[float]:
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        words = [word for file in files for line in _lines(folder / file) for word in line.split()]
        if len(words) == 2 and words[0] not in ("max", "-1"):
            yield int(words[0]) / int(words[1])


def _lines(file: Path) -> list[str]:
    with suppress(OSError):  # the file does not exist
        return file.read_text().splitlines()
    return []
