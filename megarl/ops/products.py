"""Matrix products that add to what is there."""

from __future__ import annotations

import torch

from megarl.core import device


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds a · b to total in place: float32 [m, n], of float32 or bfloat16 [m, k] and [k, n]."""
    if a.dtype is total.dtype:
        torch.addmm(total, a, b, out=total)
    elif device.on_cuda():
        torch.addmm(total, a, b, torch.float32, out=total)
    else:  # on CPU torch has no product of bfloat16 that adds to float32
        total.add_(a @ b)
