"""Tile kernels for the linear head in Triton, for CUDA. See `megarl/ops/head_tile.py`.

One program handles one row of the tile, BLOCK columns at a time. Both kernels read the tile once and allocate no memory
of the tile's size. `fold` writes four numbers per row; `to_gradient` writes the gradient, in place over the logits if
the dtypes match.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megarl.ops.head_tile import NEVER

BLOCK = 1024
NO_LOGIT = tl.constexpr(NEVER)


def fold(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | None,
    kept: torch.Tensor | None,
    sums: torch.Tensor,
) -> None:
    """Same as head_tile.fold, but leaves the logits unchanged."""
    rows, width = logits.shape
    _fold[(rows,)](logits, targets, scale, kept, sums, width, logits.stride(0), sums.stride(0), **_options(scale, kept))


def to_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | None,
    kept: torch.Tensor | None,
    log_sum_exp: torch.Tensor,
    coefficients: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Same as head_tile.to_gradient."""
    rows, width = logits.shape
    strides = logits.stride(0), coefficients.stride(0), gradient.stride(0)
    _to_gradient[(rows,)](
        logits, targets, scale, kept, log_sum_exp, coefficients, gradient, width, *strides, **_options(scale, kept)
    )


def _options(scale: torch.Tensor | None, kept: torch.Tensor | None) -> dict[str, Any]:
    return dict(has_scale=scale is not None, has_kept=kept is not None, block=BLOCK)


@triton.jit
def load_logits(logits, row, columns, width, row_stride, scale):
    """Return the row's scaled logits at these columns, float32 [block], with NEVER for columns outside the tile."""
    inside = columns < width
    return tl.where(inside, tl.load(logits + row * row_stride + columns, mask=inside, other=0.0) * scale, NO_LOGIT)


@triton.jit
def _load(logits, kept, row, columns, width, row_stride, scale, has_kept: tl.constexpr):
    """Same as load_logits, but also with NEVER for columns that are not kept."""
    z = load_logits(logits, row, columns, width, row_stride, scale)
    if has_kept:
        z = tl.where(tl.load(kept + row * width + columns, mask=columns < width, other=0) != 0, z, NO_LOGIT)
    return z


@triton.jit
def raise_maximum(maximum, z):
    """Return the updated running maximum, its increase, and z minus the new maximum."""
    raised = tl.maximum(maximum, tl.max(z))
    return raised, raised - maximum, z - raised


@triton.jit
def _fold(
    logits,
    targets,
    scales,
    kept,
    sums,
    width,
    row_stride,
    sums_stride,
    has_scale: tl.constexpr,
    has_kept: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    scale = 1.0
    if has_scale:
        scale = tl.load(scales + row)
    sums += row
    maximum = tl.load(sums)
    total = tl.load(sums + sums_stride)
    total_d = tl.load(sums + 2 * sums_stride)
    target_z = tl.load(sums + 3 * sums_stride)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        z = _load(logits, kept, row, columns, width, row_stride, scale, has_kept)
        target_z += tl.sum(tl.where((columns == target) & (columns < width), z, 0.0))
        maximum, rise, d = raise_maximum(maximum, z)
        shrunk = tl.exp(-rise)
        p = tl.exp(d)
        total_d = (total_d - rise * total) * shrunk + tl.sum(p * d)
        total = total * shrunk + tl.sum(p)
    tl.store(sums, maximum)
    tl.store(sums + sums_stride, total)
    tl.store(sums + 2 * sums_stride, total_d)
    tl.store(sums + 3 * sums_stride, target_z)


@triton.jit
def _to_gradient(
    logits,
    targets,
    scales,
    kept,
    log_sum_exps,
    coefficients,
    gradients,
    width,
    row_stride,
    coefficients_stride,
    gradient_stride,
    has_scale: tl.constexpr,
    has_kept: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    scale = 1.0
    if has_scale:
        scale = tl.load(scales + row)
    log_sum_exp = tl.load(log_sum_exps + row)
    a = tl.load(coefficients + row)
    b = tl.load(coefficients + coefficients_stride + row)
    c = tl.load(coefficients + 2 * coefficients_stride + row)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        log_p = _load(logits, kept, row, columns, width, row_stride, scale, has_kept) - log_sum_exp
        gradient = tl.exp(log_p) * (a + b * log_p) + tl.where(columns == target, c, 0.0)
        address = gradients + row * gradient_stride + columns
        tl.store(address, gradient.to(gradients.dtype.element_ty), mask=columns < width)
