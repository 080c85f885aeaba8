"""A run's operating system processes: adoption of orphans, memory, stack traces and termination.

With hidepid, /proc hides processes that this one may not trace: processes owned by other users, and processes in the
run that changed their user or are not dumpable. Signals may still reach them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from megarl.core.stacks import SIGNAL

_PR_SET_CHILD_SUBREAPER = 36

PROC = Path("/proc")
POLL_S = 0.02
ONE_THREAD = b"Current thread "
"""Text that occurs exactly once in a dump of all stacks: the heading of the thread that received the signal."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process on this node. Its start time distinguishes it from a later process with the same number.

    Attributes:
        started: clock ticks from the boot of the machine to the start of the process.
    """

    pid: int
    started: int

    @classmethod
    def own(cls) -> ProcessId:
        """Return the id of this process."""
        pid = os.getpid()
        started = _started(pid)
        assert started is not None, "a process can read its own status"
        return cls(pid, started)

    @property
    def _is_running(self) -> bool:
        return _started(self.pid) == self.started and not _has_exited(self.pid)


def kill(ids: Sequence[ProcessId], timeout_s: float = 60.0) -> None:
    """Kill these processes, even if they are suspended, and wait until they have exited, for at most timeout_s
    seconds."""
    running = [process.pid for process in ids if process._is_running]
    _await_exit([pid for pid in running if _signal(pid, signal.SIGKILL)], timeout_s)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that `end_descendants` finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(grace_s: float = 3.0, tracker_s: float = 10.0) -> None:
    """Terminate all descendants of this process and wait until they have exited. Send SIGTERM first, so that processes
    can release shared memory, and SIGKILL after grace_s seconds. Python's resource trackers get tracker_s seconds to
    clean up after killed processes and exit. Processes of other users are not awaited."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        # List the processes again for the second signal, because new ones may have started in between.
        others = [pid for pid in descendants() if not _tracks_resources(pid)]
        _await_exit([pid for pid in others if _signal(pid, number)], grace_s)
    _await_exit([pid for pid in descendants() if _signal(pid, 0)], tracker_s)
    _await_exit([pid for pid in descendants() if _signal(pid, signal.SIGKILL)], grace_s)


def descendants() -> list[int]:
    """Return all descendants of this process. Processes hidden in /proc are found only if they are direct children.
    After `adopt_orphans`, they become direct children when their parents exit."""
    children = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children[parent].append(int(entry.name))
    pids = dict.fromkeys([*children[os.getpid()], *_own_children()])
    waiting = list(pids)
    while waiting:
        new = [pid for pid in children[waiting.pop()] if pid not in pids]
        pids.update(dict.fromkeys(new))
        waiting += new
    return list(pids)


def _parent(process: Path) -> int | None:
    try:
        # The name in parentheses may itself contain spaces and parentheses.
        return int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:  # the process has exited or is not readable
        return None


def _started(pid: int) -> int | None:
    """Return the start time of a process in clock ticks; None if it has exited or is a zombie."""
    try:
        # The name in parentheses may itself contain spaces and parentheses.
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _own_children() -> list[int]:
    """Return the children of all threads in this process, including hidden ones, from the kernel's lists."""
    children = []
    for file in PROC.glob(f"{os.getpid()}/task/*/children"):
        with suppress(OSError):  # the thread has exited
            children += map(int, file.read_text().split())
    return children


def _await_exit(pids: Sequence[int], timeout_s: float) -> None:
    """Wait until these processes have exited, for at most timeout_s seconds."""
    deadline = time.monotonic() + timeout_s
    while pids := [pid for pid in pids if not _has_exited(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)


def _has_exited(pid: int) -> bool:
    """Return whether the process has exited. If it is a child, reap it."""
    with suppress(ChildProcessError):  # not a child of this process
        os.waitpid(pid, os.WNOHANG)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it exists, but belongs to a different user
        pass
    return False


def _tracks_resources(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:  # the process has exited or is not readable
        return False


def _signal(pid: int, number: int) -> bool:
    """Send a signal. Return False if the process has exited or belongs to a different user."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def request_stacks(files: Collection[Path], patience_s: float = 20.0, elsewhere: bool = False) -> list[Path]:
    """Make each descendant whose standard error is one of these files write its stack traces to that file. Processes
    that share a file write one after another, because the lines of simultaneous traces would interleave. Return the
    files that have received traces after at most patience_s seconds. `elsewhere`: whether processes on other nodes,
    which have received the same request, may write some of the files."""
    sizes = {file: file.stat().st_size for file in files if elsewhere and file.exists()}
    expected, writers = Counter(dict.fromkeys(sizes, 1)), defaultdict[Path, list[int]](list)
    for pid in descendants():
        file = _standard_error(pid)
        if file is not None and file in files and _catches(pid, SIGNAL):
            sizes.setdefault(file, file.stat().st_size)
            writers[file].append(pid)
    deadline = time.monotonic() + patience_s
    for number, pids in enumerate(zip_longest(*writers.values()), start=1):
        for file, pid in zip(writers, pids, strict=True):
            if pid is not None:
                _signal(pid, SIGNAL)
                expected[file] = max(number, expected[file])
        _await_traces(sizes, expected, deadline)
    if not writers:
        _await_traces(sizes, expected, deadline)
    return [file for file, size in sizes.items() if file.stat().st_size > size]


def _await_traces(sizes: Mapping[Path, int], expected: Mapping[Path, int], deadline: float) -> None:
    """Wait until each file has the expected number of traces after its first `sizes` bytes and has stopped growing."""
    last: dict[Path, bytes] = {}
    while time.monotonic() < deadline:
        written = {file: _read_from(file, size) for file, size in sizes.items()}
        if written == last and all(written[file].count(ONE_THREAD) >= expected[file] for file in expected):
            return
        last = written
        time.sleep(0.1)  # much longer than the time between two lines of a dump


def _read_from(file: Path, start: int) -> bytes:
    with file.open("rb") as log:
        log.seek(start)
        return log.read()


def _standard_error(pid: int) -> Path | None:
    try:
        return Path(os.readlink(PROC / str(pid) / "fd/2"))
    except OSError:  # the process has exited, has no standard error, or is not readable
        return None


def _catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal. Without one, the signal would terminate it."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return False
    [mask] = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def memory_gb() -> tuple[float, float]:
    """Return the resident memory of this process and its descendants, in 10⁹ bytes: (sum of RSS, sum of PSS). RSS
    counts a shared page once per process. PSS splits the page between the processes, so the sum of PSS is the memory in
    use. Processes that are not readable in /proc are not counted."""
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
    """Return the size of each field in bytes; all are 0 for a zombie."""
    lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    fields = {"Rss": 0, "Pss": 0}
    for line in lines[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields
