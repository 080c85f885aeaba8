"""A seccomp filter for programs in a sandbox.

It denies system calls that allocate memory outside the memory limit, access other processes, or have a history of
kernel vulnerabilities.
"""

from __future__ import annotations

import os
import platform
import struct
from typing import NamedTuple

SYSTEM_CALLS = {
    # System calls that allocate memory that belongs to no process.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "io_setup": (206, 0),
    "vmsplice": (278, 75),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    # System calls that access other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    # System calls with a history of kernel vulnerabilities.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
"""Denied system calls, with their numbers on x86_64 and aarch64."""

DENIED = {
    machine: [numbers[i] for numbers in SYSTEM_CALLS.values() if numbers[i] is not None]
    for i, machine in enumerate(("x86_64", "aarch64"))
}

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MMAP = {"x86_64": 9, "aarch64": 222}
SHARED_ANONYMOUS = 0x21
"""mmap flags of shared anonymous memory, which is denied: all of it stays allocated while any part is mapped, but no
process's statistics show this. The sandbox's /dev/zero cannot be mapped for the same reason."""

X32_BIT = 0x40000000
"""Lowest system call number of the x32 ABI on x86_64."""

LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
NUMBER_AT, ARCH_AT, FOURTH_ARGUMENT_AT = 0, 4, 40
ALLOW, NO_SUCH_CALL = 0x7FFF0000, 0x00050000 | 38


class Instruction(NamedTuple):
    """An instruction in a BPF program. A jump offset is the number of instructions to skip."""

    code: int
    if_true: int
    if_false: int
    value: int


def open_filter() -> tuple[int, ...]:
    """Return a 1-tuple with the descriptor of a file that contains the filter for this machine, or an empty tuple if
    the architecture is not supported."""
    machine = platform.machine()
    if machine not in DENIED:
        return ()
    file = os.memfd_create("seccomp")
    os.write(file, filter_program(machine))
    os.lseek(file, 0, os.SEEK_SET)
    return (file,)


def filter_program(machine: str) -> bytes:
    """Return a filter that makes denied system calls, and system calls from other architectures, fail with ENOSYS."""
    denied = DENIED[machine]
    tests = [(JUMP_EQUAL, number) for number in denied] + [(JUMP_AT_LEAST, X32_BIT)]
    program = [
        Instruction(LOAD, 0, 0, ARCH_AT),
        Instruction(JUMP_EQUAL, 0, len(tests) + 6, AUDIT_ARCH[machine]),
        Instruction(LOAD, 0, 0, NUMBER_AT),
        *(Instruction(code, len(tests) + 4 - i, 0, number) for i, (code, number) in enumerate(tests)),
        Instruction(JUMP_EQUAL, 0, 3, MMAP[machine]),
        Instruction(LOAD, 0, 0, FOURTH_ARGUMENT_AT),
        Instruction(AND, 0, 0, SHARED_ANONYMOUS),
        Instruction(JUMP_EQUAL, 1, 0, SHARED_ANONYMOUS),
        Instruction(RETURN, 0, 0, ALLOW),
        Instruction(RETURN, 0, 0, NO_SUCH_CALL),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
