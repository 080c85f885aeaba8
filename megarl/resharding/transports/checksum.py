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
    """Return the CRC-32 of the bytes in a host-memory tensor. It detects corruption, not tampering."""
    return zlib.crc32(raw_bytes(tensor))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a host-memory tensor as bytes, without a copy if the tensor is contiguous."""
    contiguous = tensor.detach().contiguous()
    # A numpy array would pin the memory, and the tensor's storage could no longer be replaced.
    array = (ctypes.c_ubyte * contiguous.nbytes).from_address(contiguous.data_ptr())
    array.owner = contiguous  # pyright: ignore[reportAttributeAccessIssue]  # typeshed omits the __dict__ of arrays
    return memoryview(array)


def verify(
    checksums: Mapping[str, int], read: Callable[[str], torch.Tensor], folder: Path, progress: Progress, total: int
) -> None:
    """Read the tensors back and raise a UserError if a checksum differs from that of the written data."""
    for name, expected in checksums.items():
        tensor = read(name)
        if checksum(tensor) != expected:
            raise UserError(
                f"{folder}: {name} differs from the data that megarl wrote, so the disk is faulty. "
                "Fix: write to a different disk"
            )
        progress("verified", tensor.nbytes, total)
