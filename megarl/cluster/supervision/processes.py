"""The run's processes as the operating system sees them: adoption of orphans, memory, stacks, and their end."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from megarl.core.stacks import SIGNAL

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1


def adopt_orphans() -> None:
    """Makes grandchildren whose parent dies our children, so that `end_descendants` finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def interrupt_with_parent() -> None:
    """Makes the kernel send this process SIGINT when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)


def end_descendants(grace_s: float = 3.0, tracker_s: float = 10.0) -> None:
    """Ends every process that this one started, directly or not; returns when they are gone.

    SIGTERM comes first, upon which some processes release shared memory. After grace_s seconds follows SIGKILL.
    Python's resource trackers remove what killed processes leave, once these are gone, and end then; they have
    tracker_s seconds for it. A process that may not be signalled, because another user's identity is its own now, is
    not waited for.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Listed again for the second signal: a process may have started another in between.
        others = [process for process in _descendants() if not _tracks_resources(process)]
        psutil.wait_procs([process for process in others if _signal(process, number)], timeout=grace_s)
    _, late = psutil.wait_procs([process for process in _descendants() if _signal(process, 0)], timeout=tracker_s)
    psutil.wait_procs([process for process in late if _signal(process, signal.SIGKILL)], timeout=grace_s)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _tracks_resources(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:  # it has ended, or may not be read
        return False


def _signal(process: psutil.Process, number: int) -> bool:
    """Returns whether the signal could be sent: the process may have ended, or be another user's."""
    try:
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def ask_for_stacks(files: Iterable[Path], patience_s: float = 5.0) -> list[Path]:
    """Makes every process that this one started, and whose standard error is one of these files, write its stacks
    there. Returns the files that have them."""
    asked = {}
    for process in psutil.Process().children(recursive=True):
        file = _standard_error(process.pid)
        if file in files and _catches(process.pid, SIGNAL):
            asked.setdefault(file, file.stat().st_size)
            _signal(process, SIGNAL)
    deadline = time.monotonic() + patience_s
    last: dict[Path, int] = {}
    while time.monotonic() < deadline:
        sizes = {file: file.stat().st_size for file in asked}
        if sizes == last and all(sizes[file] > asked[file] for file in asked):
            break
        last = sizes
        time.sleep(0.1)  # far more than a process takes from one line to the next
    return [file for file in asked if file.stat().st_size > asked[file]]


def _standard_error(pid: int) -> Path | None:
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/2"))
    except OSError:  # the process has ended, has no standard error, or may not be read
        return None


def _catches(pid: int, number: int) -> bool:
    """Returns whether the process handles the signal, which would end any other process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    [mask] = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def memory_gb() -> tuple[float, float]:
    """Returns the resident memory of this process and its descendants, in 10⁹ bytes: (sum of RSS, sum of PSS).

    RSS counts a shared page once per process; PSS splits it between them, so that its sum is what the machine bears.
    Processes whose files in /proc may not be read are not counted.
    """
    rss = pss = 0
    this_process = psutil.Process()
    for process in [this_process, *this_process.children(recursive=True)]:
        try:
            fields = _smaps_rollup(process.pid)
        except OSError:
            continue
        rss += fields["Rss"]
        pss += fields["Pss"]
    return rss / 1e9, pss / 1e9


def _smaps_rollup(pid: int) -> dict[str, int]:
    """Returns bytes per field; all are 0 for a process that has ended but was not yet waited for."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = {"Rss": 0, "Pss": 0}
    for line in lines[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields
