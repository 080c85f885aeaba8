"""Memory in which one tensor after the other is put together."""

from __future__ import annotations

from math import prod

import torch

from megarl.resharding.transports.checksum import raw_bytes


class ReusedMemory:
    """The memory. To get new memory for each tensor would take as long as filling it."""

    def __init__(self, num_bytes: int):
        """num_bytes: of the largest tensor."""
        self._memory = raw_bytes(torch.empty(num_bytes, dtype=torch.uint8))

    def tensor(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Returns a tensor with anything in it; the one before is lost. Its storage is no larger than itself, as
        torch.save writes whole storages."""
        return torch.frombuffer(self._memory, dtype=getattr(torch, dtype), count=prod(shape)).view(shape)
