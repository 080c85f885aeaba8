"""A seccomp filter for programs in a sandbox.

It denies system calls that allocate memory outside the memory limit, access other processes, or have a history of
kernel vulnerabilities.
"""

from __future__ import annotations

import os
import platform
import struct
from typing import NamedTuple

DENIED = {
    "x86_64": (
        319,
        447,
        29,
        64,
        68,
        240,
        206,
        278,
        253,
        294,
        300,
        101,
        310,
        311,
        438,
        248,
        249,
        250,
        272,
        308,
        298,
        321,
        323,
        425,
    ),
    "aarch64": (
        279,
        447,
        194,
        190,
        186,
        180,
        0,
        75,
        26,
        262,
        117,
        270,
        271,
        438,
        217,
        218,
        219,
        97,
        268,
        241,
        280,
        282,
        425,
    ),
}
"""System call numbers by architecture: memfd_create, memfd_secret, shmget, semget, msgget, mq_open, io_setup, vmsplice,
inotify_init (x86_64 only), inotify_init1 and fanotify_init, whose memory belongs to no process; ptrace,
process_vm_readv, process_vm_writev and pidfd_getfd; add_key, request_key and keyctl; unshare and setns;
perf_event_open, bpf, userfaultfd and io_uring_setup."""

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MMAP = {"x86_64": 9, "aarch64": 222}
SHARED_ANONYMOUS = 0x21
"""mmap flags for memory that stays allocated while any part is mapped, even if no process's statistics show it. The
sandbox's /dev/zero cannot be mapped for the same reason."""

X32_BIT = 0x40000000
"""First system call number in x86_64's x32 ABI."""

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
