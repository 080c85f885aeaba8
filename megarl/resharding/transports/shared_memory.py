"""Read another process's weights on this machine through shared memory, without staging.

The owner's storages are moved into anonymous shared memory once. From then on, all views of the storages (parameters,
optimizer shards) are in shared memory, and readers see in-place updates immediately. Readers open the memory through
the owner's file descriptor; it has no name in /dev/shm. The kernel frees the memory when no process maps it any longer,
even after a crash.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from megarl.core.errors import UserError
from megarl.resharding.planning.plan import Plan
from megarl.resharding.transports.published import Published, PublishedMemory, PublishedParameter


@dataclass(frozen=True, slots=True)
class Segment:
    """A shared memory segment. Its inode distinguishes it from a later segment with the same file descriptor."""

    pid: int
    descriptor: int
    inode: int
    num_bytes: int

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    @property
    def alive(self) -> bool:
        """Whether the owner still has the segment open."""
        return os.path.exists(self.path) and os.stat(self.path).st_ino == self.inode


def publish(parameters: Mapping[str, torch.Tensor]) -> Published[Segment]:
    """Move the storages of CPU tensors into shared memory, in place. Idempotent.

    The caller must keep the tensors alive and must not reallocate them. Addresses change, so no raw pointers to the
    tensors may exist. Raise a UserError if /dev/shm is too small.
    """
    return {
        name: PublishedParameter.of(tensor, _shared(tensor.untyped_storage())) for name, tensor in parameters.items()
    }


def _shared(storage: torch.UntypedStorage) -> Segment:
    free = shutil.disk_usage("/dev/shm").free
    if not storage.is_shared() and storage.nbytes() > free:
        raise UserError(
            f"/dev/shm has {free / 2**20:.0f} MiB free, but the weights need {storage.nbytes() / 2**20:.0f} MiB. Fix: "
            "enlarge /dev/shm (mount -o remount,size=… or docker run --shm-size=…)"
        )
    # torch.multiprocessing makes the same call. The segment is unlinked as soon as it is mapped.
    descriptor, num_bytes = storage._share_fd_cpu_()
    return Segment(os.getpid(), descriptor, os.fstat(descriptor).st_ino, num_bytes)


class SharedMemory(PublishedMemory[Segment]):
    """Sources in shared memory. It is its own Channel, because segments are mapped on first read."""

    def open(self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True) -> Self:
        return self

    def _open_storage(self, source: str, segment: Segment) -> torch.UntypedStorage:
        return _mapped(segment)


_mappings: dict[Segment, torch.UntypedStorage] = {}
"""Cached mappings in this process. Mapping a segment again would cost a page fault for every page that is read."""


def _mapped(segment: Segment) -> torch.UntypedStorage:
    if segment not in _mappings:
        for known in [known for known in _mappings if not known.alive]:
            del _mappings[known]
        if not segment.alive:
            raise RuntimeError(
                f"process {segment.pid} has exited or released its shared weights. Fix: look for the first error in "
                "the logs of the run's trainers"
            )
        mapped = torch.UntypedStorage.from_file(segment.path, True, segment.num_bytes)
        _mappings[segment] = mapped  # pyright: ignore[reportArgumentType]  # torch annotates a base class
    return _mappings[segment]
