"""The machine: processors, memory, disk, ports and limits, from the kernel's own files."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from pathlib import Path

from megarl.cluster.network import EPHEMERAL
from megarl.core.cores import cgroup_cores
from megarl.planner.doctor.finding import Finding

GIB = 2**30
LEAST_SHARED_GIB = 1
"""Ray's object store and weights on their way to engines lie in shared memory; a container often has 64 MiB of it."""

LEAST_DISK_GIB, FULL_GIB = 10, 1
"""The free space below which a run may not get far, and below which it cannot begin: its logs and Ray's files."""

RUN_DISK = "disk of runs"

LEAST_FILES = 65536
"""Each process of Ray, and each pair of ranks, keeps sockets open."""

LEAST_PORTS = 10000
CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")


def look_at_machine(folder: Path) -> list[Finding]:
    """folder: the one whose disk runs are to be kept on."""
    return [
        processors(len(os.sched_getaffinity(0)), cgroup_cores(), os.cpu_count() or 1),
        memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), cgroup_bytes(CGROUP)),
        shared_memory(SHARED_MEMORY),
        disk(RUN_DISK, folder),
        disk("temporary files", Path(tempfile.gettempdir())),
        ports(EPHEMERAL.read_text() if EPHEMERAL.exists() else "", can_listen()),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
    ]


def processors(allowed: int, quota: float | None, there: int) -> Finding:
    """Compares the cores that this process may run on, and the share of time that its cgroup has, with those that
    there are."""
    if quota is not None and quota < allowed:
        found = f"{quota:g} of {there} by the cgroup's quota, on {allowed} of them"
        return Finding("processors", "note", found, "", f"set threads of the roles for {max(1, int(quota))} cores")
    return Finding("processors", "ok", f"{allowed} of {there}" if allowed < there else str(there))


def cgroup_bytes(cgroup: Path) -> int | None:
    file = cgroup / "memory.max"
    limit = file.read_text().strip() if file.exists() else "max"
    return None if limit == "max" else int(limit)


def memory(there: int, limit: int | None) -> Finding:
    if limit is not None and limit < there:
        return Finding("memory", "note", f"{limit / GIB:.0f} GiB by the cgroup's limit, of {there / GIB:.0f}")
    return Finding("memory", "ok", f"{there / GIB:.0f} GiB")


def shared_memory(folder: Path) -> Finding:
    wanted = f"{LEAST_SHARED_GIB} GiB"
    if not folder.is_dir():
        return Finding("shared memory", "problem", f"no {folder}", wanted, f"mount a tmpfs on {folder}")
    free = shutil.disk_usage(folder).free
    if free >= LEAST_SHARED_GIB * GIB:
        return Finding("shared memory", "ok", f"{free / GIB:.1f} GiB free", wanted)
    fix = f"enlarge it: mount -o remount,size=50% {folder}, or the container's --shm-size"
    return Finding("shared memory", "problem", f"{free / GIB:.2f} GiB free", wanted, fix)


def disk(name: str, folder: Path) -> Finding:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    wanted = f"{LEAST_DISK_GIB} GiB"
    if not os.access(there, os.W_OK):
        return Finding(name, "problem", f"{there} cannot be written", wanted, "set run.folder to a folder of yours")
    free = shutil.disk_usage(there).free
    if free >= LEAST_DISK_GIB * GIB:
        return Finding(name, "ok", f"{free / GIB:.0f} GiB free in {there}", wanted)
    state = "note" if free >= FULL_GIB * GIB else "problem"
    return Finding(name, state, f"{free / GIB:.1f} GiB free in {there}", wanted, "free some, or take another folder")


def ports(told: str, listening: bool) -> Finding:
    """told: the range of ports that the kernel gives out, as its file has it."""
    if not listening:
        fix = "allow programs to listen on ports: a sandbox or a firewall forbids it"
        return Finding("ports", "problem", "none can be listened on", "", fix)
    first, last = map(int, told.split()) if told.split() else (0, 65535)
    if last - first >= LEAST_PORTS:
        return Finding("ports", "ok", f"{first}–{last} are given out")
    fix = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
    return Finding("ports", "note", f"{first}–{last} are given out", f"{LEAST_PORTS} or more", fix)


def can_listen() -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", 0))
            one.listen()
        except OSError:
            return False
    return True


def open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        return Finding("open files", "ok", f"up to {'any number' if soft == resource.RLIM_INFINITY else f'{soft:,}'}")
    can = hard == resource.RLIM_INFINITY or hard >= LEAST_FILES
    fix = f"ulimit -n {LEAST_FILES}" if can else f"raise nofile in /etc/security/limits.conf to {LEAST_FILES}"
    return Finding("open files", "note", f"up to {soft:,}", f"{LEAST_FILES:,} for more than a few dozen ranks", fix)


def locked_memory(soft: int) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "any amount")
    fix = "ulimit -l unlimited, where ranks talk over InfiniBand or offload to host memory"
    return Finding("locked memory", "note", f"{soft / GIB:.2f} GiB", "any amount", fix)
