"""Computes and compares checksums of tensors."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megarl.core.errors import UserError
from megarl.core.files import Progress


def checksum(tensor: torch.Tensor) -> int:
    """Returns the CRC-32 of the elements' bytes, of a tensor in host memory. It finds accidents, not intent."""
    return zlib.crc32(raw_bytes(tensor))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the elements of a tensor in host memory, in order, without a copy if it is contiguous."""
    contiguous = tensor.detach().contiguous()
    # numpy would pin the memory: nobody could then take it from the tensor.
    array = (ctypes.c_ubyte * contiguous.nbytes).from_address(contiguous.data_ptr())
    array.owner = contiguous
    return memoryview(array)


def verify(
    checksums: Mapping[str, int], read: Callable[[str], torch.Tensor], folder: Path, progress: Progress, total: int
) -> None:
    """Raises UserError for a tensor that reads back from the folder other than it was. checksums: by its name."""
    for name, expected in checksums.items():
        tensor = read(name)
        if checksum(tensor) != expected:
            raise UserError(f"{name} reads back other than it was written: the disk of {folder} is faulty; use another")
        progress("verified", tensor.nbytes, total)
