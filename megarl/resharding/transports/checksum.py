"""Compute and compare checksums of tensors."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch

from megarl.core.errors import UserError
from megarl.core.files import Progress

CHUNK = 2**18
"""The 32-bit words that are weighted at once: more would only take memory."""


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of the bytes of a tensor in host memory. It detects corruption, not tampering."""
    return zlib.crc32(raw_bytes(tensor))


@torch.no_grad()
def word_sum(tensor: torch.Tensor) -> int:
    """Returns a checksum of the elements' bytes, 63 bits, computed where the elements are. It finds accidents, too.

    The bytes, with zeros up to a multiple of four, are words of 32 bits with a sign. Each is multiplied by the weight
    of its place, and the products of a chunk are added, modulo 2⁶⁴: integers wrap around alike on every device. Weights
    are odd, so that no change of a single word is missed, and mixed, so that several do not cancel out.
    """
    elements = tensor.contiguous().view(-1).view(torch.uint8)
    words = torch.zeros(-(-len(elements) // 4), dtype=torch.int32, device=tensor.device)  # aligned, as a view is not
    words.view(torch.uint8)[: len(elements)] = elements
    weights = _weights(tensor.device)
    value = 0
    for part in torch.stack([(chunk * weights[: len(chunk)]).sum() for chunk in words.split(CHUNK)]).tolist():
        value = value * 0x2545F4914F6CDD1D + part
    return value % 2**63


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Returns the weights of a chunk's words."""
    mixed = torch.arange(1, CHUNK + 1, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47
    return (mixed ^ (mixed >> 32)) | 1


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
