"""The processor cores that this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Returns the cores of this process's affinity, or fewer where its control group has a quota of processor time: a
    job or a container may have 8 of a machine's 128 cores."""
    allowed, quota = len(os.sched_getaffinity(0)), cgroup_cores()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cgroup_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Returns the cores that the control group's quota of processor time is worth, the least of those of the groups
    that this one lies in; None where there is none.

    proc, cgroups: where the kernel shows processes, and control groups of version 2 (cpu.max) or 1 (cpu.cfs_quota_us).
    """
    return min((cores for folder in _folders(proc, cgroups) for cores in _quota(folder)), default=None)


def _folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yields the folders of this process's control groups that may have a quota, from its own up to the first."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            first = cgroups / controllers
            own = first / path.lstrip("/")
            # A container may see its own group as the first, and read the path that its host knows.
            for folder in (own, *own.parents) if own.is_dir() else (first,):
                if folder.is_relative_to(first):
                    yield folder


def _quota(folder: Path) -> Iterator[float]:
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        words = [word for file in files for line in _lines(folder / file) for word in line.split()]
        if len(words) == 2 and words[0] not in ("max", "-1"):
            yield int(words[0]) / int(words[1])


def _lines(file: Path) -> list[str]:
    with suppress(OSError):  # there are none
        return file.read_text().splitlines()
    return []
