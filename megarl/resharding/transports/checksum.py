"""Compute and compare checksums of tensors."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megarl.core.errors import UserError
from megarl.core.files import Progress


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of the bytes of a tensor in host memory. It detects corruption, not tampering."""
    return zlib.crc32(raw_bytes(tensor))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor in host memory as bytes, without a copy if it is contiguous."""
    contiguous = tensor.detach().contiguous()
    # A numpy array would pin the memory, so that the tensor's storage could no longer be replaced.
    array = (ctypes.c_ubyte * contiguous.nbytes).from_address(contiguous.data_ptr())
    array.owner = contiguous
    return memoryview(array)


def verify(
    checksums: Mapping[str, int], read: Callable[[str], torch.Tensor], folder: Path, progress: Progress, total: int
) -> None:
    """Read the tensors back and raise UserError if one differs from its checksum.

    checksums   tensor name -> checksum when it was written
    """
    for name, expected in checksums.items():
        tensor = read(name)
        if checksum(tensor) != expected:
            raise UserError(
                f"{folder}: {name} differs from the data that was written; the disk is faulty. "
                "Fix: write to another disk"
            )
        progress("verified", tensor.nbytes, total)
