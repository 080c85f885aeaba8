"""Encodes what has changed between two states of a tensor as indices and values, bit for bit."""

from __future__ import annotations

import torch

BLOCK = 2**16
"""The elements that are counted together: a place in them takes 16 bits."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Encodes two states, [elements] of one dtype. Returns how `old` becomes `new`, as bytes, and how many elements
    change.

    The bytes are, for each block of BLOCK elements, the number of those that change (int32); for each of these its
    place in the block (uint16); their new values.
    """
    bits = _bits(new)
    where = (bits != _bits(old)).nonzero().squeeze(1)
    counts = torch.bincount(where // BLOCK, minlength=_num_blocks(new)).to(torch.int32)
    fields = counts, (where % BLOCK).to(torch.uint16), bits[where]
    return torch.cat([field.view(torch.uint8) for field in fields]), len(where)


def encoded_bytes(num_changed: int, tensor: torch.Tensor) -> int:
    """Returns the bytes that encode a tensor of which `num_changed` elements change."""
    return 4 * _num_blocks(tensor) + num_changed * (2 + tensor.itemsize)


def apply(encoded: torch.Tensor, num_changed: int, target: torch.Tensor) -> None:
    """Makes the new state of the old one, in place. target: of any shape and strides."""
    num_blocks = _num_blocks(target)
    sizes = 4 * num_blocks, 2 * num_changed, target.itemsize * num_changed
    # Fields are copied, since they may lie anywhere.
    counts, places, values = (field.clone() for field in encoded.split(sizes))
    starts = torch.arange(num_blocks, device=target.device) * BLOCK
    blocks = starts.repeat_interleave(counts.view(torch.int32), output_size=num_changed)
    where = blocks + places.view(torch.uint16).to(torch.int64)
    bits = _bits(target)
    bits[torch.unravel_index(where, target.shape)] = values.view(bits.dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as integers: zeros of either sign differ, and equal NaNs do not."""
    return tensor.view(INTEGERS[tensor.itemsize])


def _num_blocks(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() // BLOCK)
