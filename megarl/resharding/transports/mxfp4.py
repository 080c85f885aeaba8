"""Dequantize weights in the MXFP4 format of gpt-oss's checkpoints (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import torch

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes that the lower three bits of an element encode. The fourth bit is the sign."""

EXPONENT_BIAS = 127


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the elements, bfloat16 [rows, 32 · blocks], which are exact unless they overflow.

    Args:
        blocks: uint8 [rows, blocks, 16], two elements per byte, the first in the low bits.
        scales: uint8 [rows, blocks], e + 127 for each block. The block's elements are multiplied by 2ᵉ.
    """
    # Indexing by byte instead of by element halves the temporary memory.
    elements = torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.bfloat16)
    low, high = torch.meshgrid(elements, elements, indexing="xy")
    pairs = torch.stack((low, high), dim=-1).flatten(0, 1)
    values = pairs[blocks.int()].flatten(2)
    exponents = scales.int() - EXPONENT_BIAS
    return torch.ldexp(values, exponents[:, :, None], out=values).flatten(1)
