"""The run's processes as the operating system sees them: adoption of orphans, memory, stacks, and their end.

/proc may hide processes that this one may not trace (hidepid): those of other users, and of the run's those that have
another user's identity or are not dumpable. Signals may reach them all the same.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from megarl.core.parent import signal_with_parent
from megarl.core.stacks import SIGNAL

_PR_SET_CHILD_SUBREAPER = 36

PROC = Path("/proc")
POLL_S = 0.02
ONE_THREAD = b"Current thread "
"""Text that the stacks of a process have once: of the thread that heard the signal."""


def adopt_orphans() -> None:
    """Make grandchildren whose parent dies our children, so that `end_descendants` finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def interrupt_with_parent() -> None:
    """Make the kernel send this process SIGINT when its parent ends, however that happens."""
    signal_with_parent(signal.SIGINT)


def end_descendants(grace_s: float = 3.0, tracker_s: float = 10.0) -> None:
    """End every process that this one started, directly or not; returns when they are gone.

    SIGTERM comes first, upon which some processes release shared memory. After grace_s seconds follows SIGKILL.
    Python's resource trackers remove what killed processes leave, once these are gone, and end then; they have
    tracker_s seconds for it. A process that may not be signalled, because another user's identity is its own now, is
    not waited for.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Listed again for the second signal: a process may have started another in between.
        others = [pid for pid in descendants() if not _tracks_resources(pid)]
        _await_end([pid for pid in others if _signal(pid, number)], grace_s)
    _await_end([pid for pid in descendants() if _signal(pid, 0)], tracker_s)
    _await_end([pid for pid in descendants() if _signal(pid, signal.SIGKILL)], grace_s)


def descendants() -> list[int]:
    """Return the processes that this one started, directly or not. One that /proc hides is found as a child of this
    process, which it becomes with `adopt_orphans` when its parent has ended."""
    children = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children[parent].append(int(entry.name))
    found = dict.fromkeys([*children[os.getpid()], *_own_children()])
    waiting = list(found)
    while waiting:
        new = [pid for pid in children[waiting.pop()] if pid not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return list(found)


def _parent(process: Path) -> int | None:
    try:
        # The name, in brackets, may have spaces and brackets of its own.
        return int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:  # the process has ended, or may not be read
        return None


def _own_children() -> list[int]:
    """Return the children of all threads of this process as the kernel lists them, hidden ones too."""
    found = []
    for file in PROC.glob(f"{os.getpid()}/task/*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, file.read_text().split())
    return found


def _await_end(pids: Sequence[int], timeout_s: float) -> None:
    """Wait until these processes have ended, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while pids := [pid for pid in pids if not _has_ended(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)


def _has_ended(pid: int) -> bool:
    """Return whether there is no such process. A child that has ended is reaped."""
    with suppress(ChildProcessError):  # it is another's child
        os.waitpid(pid, os.WNOHANG)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # there is one, of another user
        return False
    return False


def _tracks_resources(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:  # it has ended, or may not be read
        return False


def _signal(pid: int, number: int) -> bool:
    """Return whether the signal could be sent: the process may have ended, or be another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def ask_for_stacks(files: Collection[Path], patience_s: float = 5.0, elsewhere: bool = False) -> list[Path]:
    """Make every process that this one started, and whose standard error is one of these files, write its stacks
    there, several into one file where they share it. Returns the files that have them.

    elsewhere: others of these files may be of processes of another node, of which that node has been asked."""
    sizes = {file: file.stat().st_size for file in files if elsewhere and file.exists()}
    asked, here = Counter(dict.fromkeys(sizes, 1)), Counter[Path]()
    for pid in descendants():
        file = _standard_error(pid)
        if file in files and _catches(pid, SIGNAL):
            sizes.setdefault(file, file.stat().st_size)
            here[file] += 1
            _signal(pid, SIGNAL)
    asked |= here
    deadline = time.monotonic() + patience_s
    last: dict[Path, bytes] = {}
    while time.monotonic() < deadline:
        written = {file: _read_from(file, size) for file, size in sizes.items()}
        if written == last and all(written[file].count(ONE_THREAD) >= asked[file] for file in asked):
            break
        last = written
        time.sleep(0.1)  # far more than a process takes from one line to the next
    return [file for file, size in sizes.items() if file.stat().st_size > size]


def _read_from(file: Path, start: int) -> bytes:
    with file.open("rb") as log:
        log.seek(start)
        return log.read()


def _standard_error(pid: int) -> Path | None:
    try:
        return Path(os.readlink(PROC / str(pid) / "fd/2"))
    except OSError:  # the process has ended, has no standard error, or may not be read
        return None


def _catches(pid: int, number: int) -> bool:
    """Return whether the process handles the signal, which would end any other process."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return False
    [mask] = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def memory_gb() -> tuple[float, float]:
    """Return the resident memory of this process and its descendants, in 10⁹ bytes: (sum of RSS, sum of PSS).

    RSS counts a shared page once per process; PSS splits it between them, so that its sum is what the machine bears.
    Processes whose files in /proc may not be read are not counted.
    """
    rss = pss = 0
    for pid in [os.getpid(), *descendants()]:
        try:
            fields = _smaps_rollup(pid)
        except OSError:
            continue
        rss += fields["Rss"]
        pss += fields["Pss"]
    return rss / 1e9, pss / 1e9


def _smaps_rollup(pid: int) -> dict[str, int]:
    """Return bytes per field; all are 0 for a process that has ended but was not yet waited for."""
    lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    fields = {"Rss": 0, "Pss": 0}
    for line in lines[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields
