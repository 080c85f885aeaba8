"""Checksums of tensors."""

from __future__ import annotations

import ctypes
import zlib

import torch


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the elements' bytes, of a tensor in host memory. It finds accidents, not intent."""
    return zlib.crc32(raw_bytes(tensor))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in host memory, in order, without a copy if it is contiguous."""
    contiguous = tensor.detach().contiguous()
    # Not by way of numpy, which pins the memory: nobody could then take it from the tensor.
    array = (ctypes.c_ubyte * contiguous.nbytes).from_address(contiguous.data_ptr())
    array.owner = contiguous
    return memoryview(array)
