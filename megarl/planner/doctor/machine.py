"""Checks processors, memory, disk, ports and limits, based on files that the kernel provides."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from pathlib import Path

from megarl.cluster.network import EPHEMERAL
from megarl.core.cores import cgroup_cores
from megarl.planner.doctor import Finding

GIB = 2**30
MIN_SHARED_GIB = 1
"""Minimum free shared memory in GiB, for Ray objects and for weights sent to engines. Containers often have 64 MiB."""

MIN_DISK_GIB, FULL_GIB = 10, 1
"""Free disk space in GiB below which a run may fill the disk, and below which it cannot start, because logs and Ray's
files need space."""

RUN_DISK = "disk of runs"

MIN_FILES = 65536
"""Minimum value of the limit on open files. Each Ray process and each pair of ranks keeps sockets open."""

MIN_PORTS = 10000
CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")


def check_machine(folder: Path) -> list[Finding]:
    """Check the resources of this machine."""
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


def processors(allowed: int, quota: float | None, installed: int) -> Finding:
    """Compare the number of cores that this process may use with the number of installed cores.

    Args:
        allowed: number of cores in the process's affinity mask.
        quota: CPU quota of the process's cgroup in cores, or None if there is no quota.
    """
    if quota is not None and quota < allowed:
        found = f"cgroup quota of {quota:g} cores ({allowed} of {installed} cores allowed)"
        return Finding(
            "processors",
            "note",
            found,
            "",
            f"set the threads of all roles (such as actor.threads) to at most {max(1, int(quota))} in total",
        )
    return Finding("processors", "ok", f"{allowed} of {installed}" if allowed < installed else str(installed))


def cgroup_bytes(cgroup: Path) -> int | None:
    file = cgroup / "memory.max"
    limit = file.read_text().strip() if file.exists() else "max"
    return None if limit == "max" else int(limit)


def memory(installed: int, limit: int | None) -> Finding:
    if limit is not None and limit < installed:
        return Finding(
            "memory", "note", f"cgroup limit of {limit / GIB:.0f} GiB on a machine with {installed / GIB:.0f} GiB"
        )
    return Finding("memory", "ok", f"{installed / GIB:.0f} GiB")


def shared_memory(folder: Path) -> Finding:
    wanted = f"{MIN_SHARED_GIB} GiB"
    if not folder.is_dir():
        return Finding("shared memory", "problem", f"{folder} does not exist", wanted, f"mount a tmpfs on {folder}")
    free = shutil.disk_usage(folder).free
    if free >= MIN_SHARED_GIB * GIB:
        return Finding("shared memory", "ok", f"{free / GIB:.1f} GiB free", wanted)
    fix = f"mount -o remount,size=50% {folder}, or start the container with a larger --shm-size"
    return Finding("shared memory", "problem", f"{free / GIB:.2f} GiB free", wanted, fix)


def disk(name: str, folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    wanted = f"{MIN_DISK_GIB} GiB"
    if not os.access(existing, os.W_OK):
        return Finding(name, "problem", f"{existing} is not writable", wanted, "set run.folder to a writable folder")
    free = shutil.disk_usage(existing).free
    if free >= MIN_DISK_GIB * GIB:
        return Finding(name, "ok", f"{free / GIB:.0f} GiB free in {existing}", wanted)
    state = "note" if free >= FULL_GIB * GIB else "problem"
    return Finding(
        name, state, f"{free / GIB:.1f} GiB free in {existing}", wanted, "free some space, or use another folder"
    )


def ports(local_range: str, listening: bool) -> Finding:
    """Check the range of ephemeral ports. local_range: contents of the kernel file ip_local_port_range."""
    if not listening:
        fix = "allow programs to listen on ports (a sandbox or firewall may forbid it)"
        return Finding("ports", "problem", "cannot listen on any port", "", fix)
    first, last = map(int, local_range.split()) if local_range.split() else (0, 65535)
    if last - first >= MIN_PORTS:
        return Finding("ports", "ok", f"ephemeral ports {first}–{last}")
    fix = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
    return Finding("ports", "note", f"ephemeral ports {first}–{last}", f"{MIN_PORTS} or more", fix)


def can_listen() -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
        except OSError:
            return False
    return True


def open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= MIN_FILES:
        return Finding("open files", "ok", f"up to {'any number' if soft == resource.RLIM_INFINITY else f'{soft:,}'}")
    can_raise = hard == resource.RLIM_INFINITY or hard >= MIN_FILES
    fix = f"ulimit -n {MIN_FILES}" if can_raise else f"raise nofile in /etc/security/limits.conf to {MIN_FILES}"
    return Finding("open files", "note", f"up to {soft:,}", f"{MIN_FILES:,} for more than a few dozen ranks", fix)


def locked_memory(soft: int) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "any amount")
    fix = "run ulimit -l unlimited if ranks communicate over InfiniBand or offload to host memory"
    return Finding("locked memory", "note", f"{soft / GIB:.2f} GiB", "any amount", fix)
