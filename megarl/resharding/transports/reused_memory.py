"""A block of memory that is reused for one tensor after another."""

from __future__ import annotations

from math import prod

import torch

from megarl.resharding.transports.checksum import raw_bytes


class ReusedMemory:
    """A reusable block of host memory. Allocating memory for each tensor would take as long as filling it."""

    def __init__(self, num_bytes: int):
        """`num_bytes` is the size of the largest tensor in bytes."""
        self._memory = raw_bytes(torch.empty(num_bytes, dtype=torch.uint8))

    def tensor(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Return an uninitialized tensor in the block. It invalidates the tensor returned before.

        The storage has exactly the size of the tensor, because torch.save writes whole storages.
        """
        return torch.frombuffer(self._memory, dtype=getattr(torch, dtype), count=prod(shape)).view(shape)
