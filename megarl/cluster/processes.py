"""The run's processes as the operating system sees them: adoption of orphans, memory, and their end."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1


def adopt_orphans() -> None:
    """Grandchildren whose parent dies become our children, so that `end_descendants` finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def interrupt_with_parent() -> None:
    """The kernel sends this process SIGINT when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)


def end_descendants(grace_s: float = 3.0) -> None:
    """Ends every process that this one started, directly or not; returns when they are gone.

    SIGTERM comes first: some release shared memory then. After grace_s seconds follows SIGKILL.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Asked again for the second signal: a process may have started another in between.
        descendants = psutil.Process().children(recursive=True)
        for process in descendants:
            _signal(process, number)
        psutil.wait_procs(descendants, timeout=grace_s)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def memory_gb() -> tuple[float, float]:
    """Resident memory of this process and its descendants, in 10⁹ bytes: (sum of RSS, sum of PSS).

    RSS counts a shared page once per process; PSS splits it between them, so that its sum is what the machine bears.
    """
    rss = pss = 0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            fields = _smaps_rollup(process.pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        rss += fields["Rss"]
        pss += fields["Pss"]
    return rss / 1e9, pss / 1e9


def _smaps_rollup(pid: int) -> dict[str, int]:
    """Bytes per field; all 0 for a process that has ended but was not yet waited for."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = {"Rss": 0, "Pss": 0}
    for line in lines[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields
