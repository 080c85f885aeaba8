"""Reads weights of another process on this machine where they lie: one copy, no staging, no name in /dev/shm.

The owner's storages are moved into anonymous shared memory once; from then on every view of them (parameters, the
optimizer's shards) lives there, so that in-place updates are visible to a reader at once. The memory is reached
through the owner's file descriptor and goes away with the last process that maps it, however that process ends.
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
    """A piece of shared memory; the inode tells it from a later one under the same descriptor."""

    pid: int
    descriptor: int
    inode: int
    num_bytes: int

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    @property
    def alive(self) -> bool:
        """Whether its owner still has it."""
        return os.path.exists(self.path) and os.stat(self.path).st_ino == self.inode


def publish(parameters: Mapping[str, torch.Tensor]) -> Published[Segment]:
    """Moves the storages of CPU tensors into shared memory, in place.

    The caller keeps the tensors, and does not reallocate them. Their addresses change: nothing may hold a raw pointer.
    Doing it again changes nothing. Raises UserError where /dev/shm is too small.
    """
    return {
        name: PublishedParameter.of(tensor, _shared(tensor.untyped_storage())) for name, tensor in parameters.items()
    }


def _shared(storage: torch.UntypedStorage) -> Segment:
    free = shutil.disk_usage("/dev/shm").free
    if not storage.is_shared() and storage.nbytes() > free:
        raise UserError(
            f"/dev/shm has {free / 2**20:.0f} MiB free, but the weights need {storage.nbytes() / 2**20:.0f} MiB; "
            "enlarge it (mount -o remount,size=…, docker run --shm-size=…)"
        )
    # torch itself shares tensors between processes by this call; the segment is unlinked as soon as it is mapped.
    descriptor, num_bytes = storage._share_fd_cpu_()
    return Segment(os.getpid(), descriptor, os.fstat(descriptor).st_ino, num_bytes)


class SharedMemory(PublishedMemory[Segment]):
    """Sources in shared memory. It is its own Channel: nothing is opened before it is read."""

    def open(self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True) -> Self:
        return self

    def _opened(self, source: str, segment: Segment) -> torch.UntypedStorage:
        return _mapped(segment)


_mappings: dict[Segment, torch.UntypedStorage] = {}
"""The mappings of this process. Mapping a segment anew costs a page fault for every page that is read."""


def _mapped(segment: Segment) -> torch.UntypedStorage:
    if segment not in _mappings:
        for known in [known for known in _mappings if not known.alive]:
            del _mappings[known]
        if not segment.alive:
            raise RuntimeError(f"process {segment.pid} no longer shares its weights: it has ended or released them")
        _mappings[segment] = torch.UntypedStorage.from_file(segment.path, True, segment.num_bytes)
    return _mappings[segment]
