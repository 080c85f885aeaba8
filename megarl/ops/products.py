"""Matrix products with float32 results from float32, bfloat16 or float16 factors."""

from __future__ import annotations

import torch

from megarl.core import device


def put_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Write a · b to `out`, float32 [m, n]. `a`, [m, k], and `b`, [k, n], are both float32, bfloat16 or float16."""
    if a.dtype is out.dtype:
        torch.mm(a, b, out=out)
    elif device.on_cuda():
        torch.mm(a, b, torch.float32, out=out)
    else:  # on CPU, torch rounds the result to the factors' dtype
        torch.mm(a.float(), b.float(), out=out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a · b to `total` in place.

    On CPU, 16-bit products are rounded to 16 bits before they are added. The error is small compared with the
    accumulated gradients, and a float32 product would take four times as long. `total` is float32 [m, n]; `a`, [m, k],
    and `b`, [k, n], are both float32, bfloat16 or float16.
    """
    if a.dtype is total.dtype:
        torch.addmm(total, a, b, out=total)
    elif device.on_cuda():
        torch.addmm(total, a, b, torch.float32, out=total)
    else:
        total.add_(a @ b)
