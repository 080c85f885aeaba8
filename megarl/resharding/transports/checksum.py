"""Computes and compares checksums of tensors."""

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
    """Returns the CRC-32 of the elements' bytes, of a tensor in host memory. It finds accidents, not intent."""
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
