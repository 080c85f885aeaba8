"""Matrix products with results in float32, of factors in float32, bfloat16 or float16."""

from __future__ import annotations

import torch

from megarl.core import device


def put_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Write a · b to out: float32 [m, n], of float32, or of bfloat16 or float16, [m, k] and [k, n]."""
    if a.dtype is out.dtype:
        torch.mm(a, b, out=out)
    elif device.on_cuda():
        torch.mm(a, b, torch.float32, out=out)
    else:  # on CPU torch rounds products to the factors' dtype
        torch.mm(a.float(), b.float(), out=out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a · b to total in place: float32 [m, n], of float32, or of bfloat16 or float16, [m, k] and [k, n].

    On CPU the product of two bytes is rounded to them before it is added: the error of each is small against the
    gradients that are added up here, and a product of float32 would take four times as long.
    """
    if a.dtype is total.dtype:
        torch.addmm(total, a, b, out=total)
    elif device.on_cuda():
        torch.addmm(total, a, b, torch.float32, out=total)
    else:
        total.add_(a @ b)
