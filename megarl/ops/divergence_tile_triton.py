"""Tile kernels for divergences in Triton, for CUDA. See `megarl/ops/divergence_tile.py`.

One program handles one row of both models' tiles, BLOCK columns at a time. Each kernel reads the tiles once and
allocates no memory of a tile's size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from megarl.ops.head_tile_triton import load_logits, raise_maximum

BLOCK = 1024


def fold(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | None,
    sums: torch.Tensor,
) -> None:
    """Same as divergence_tile.fold, but leaves the logits unchanged."""
    rows, width = logits.shape
    strides = logits.stride(0), teacher_logits.stride(0), sums.stride(0)
    _fold[(rows,)](logits, teacher_logits, targets, scale, sums, width, *strides, **_options(scale))


def fold_mixture(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    scale: torch.Tensor | None,
    normalizers: torch.Tensor,
    beta: float,
    sums: torch.Tensor,
) -> None:
    """Same as divergence_tile.fold_mixture, but leaves the logits unchanged."""
    rows, width = logits.shape
    strides = logits.stride(0), teacher_logits.stride(0), normalizers.stride(0), sums.stride(0)
    shares = math.log(1 - beta), math.log(beta)
    _fold_mixture[(rows,)](
        logits, teacher_logits, scale, normalizers, sums, width, *strides, *shares, **_options(scale)
    )


def to_gradient(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | None,
    normalizers: torch.Tensor,
    coefficients: torch.Tensor,
    beta: float | None,
    gradient: torch.Tensor,
) -> None:
    """Same as divergence_tile.to_gradient, but leaves the teacher's logits unchanged."""
    rows, width = logits.shape
    strides = logits.stride(0), teacher_logits.stride(0), normalizers.stride(0)
    output_strides = coefficients.stride(0), gradient.stride(0)
    shares = (0.0, 0.0) if beta is None else (math.log(1 - beta), math.log(beta))
    _to_gradient[(rows,)](
        logits,
        teacher_logits,
        targets,
        scale,
        normalizers,
        coefficients,
        gradient,
        width,
        *strides,
        *output_strides,
        *shares,
        **_options(scale, has_mixture=beta is not None),
    )


def _options(scale: torch.Tensor | None, **others: bool) -> dict[str, Any]:
    return dict(has_scale=scale is not None, block=BLOCK, **others)


@triton.jit
def _log_to_mixture(gap, log_own, log_other):
    """Same as divergence_tile.log_to_mixture, given the logarithms of the shares."""
    x = log_other - log_own - gap
    return -log_own - tl.maximum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _fold(
    logits,
    teacher_logits,
    targets,
    scales,
    sums,
    width,
    row_stride,
    teacher_stride,
    sums_stride,
    has_scale: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    scale = 1.0
    if has_scale:
        scale = tl.load(scales + row)
    sums += row
    maximum = tl.load(sums)
    teacher_maximum = tl.load(sums + sums_stride)
    total = tl.load(sums + 2 * sums_stride)
    total_d = tl.load(sums + 3 * sums_stride)
    total_gap = tl.load(sums + 4 * sums_stride)
    teacher_total = tl.load(sums + 5 * sums_stride)
    teacher_total_gap = tl.load(sums + 6 * sums_stride)
    target_z = tl.load(sums + 7 * sums_stride)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        z = load_logits(logits, row, columns, width, row_stride, scale)
        teacher_z = load_logits(teacher_logits, row, columns, width, teacher_stride, scale)
        target_z += tl.sum(tl.where((columns == target) & (columns < width), z, 0.0))
        maximum, rise, d = raise_maximum(maximum, z)
        teacher_maximum, teacher_rise, teacher_d = raise_maximum(teacher_maximum, teacher_z)
        gap = tl.where(columns < width, d - teacher_d, 0.0)
        gap_decrease = rise - teacher_rise
        shrunk, p = tl.exp(-rise), tl.exp(d)
        teacher_shrunk, q = tl.exp(-teacher_rise), tl.exp(teacher_d)
        total_d = (total_d - rise * total) * shrunk + tl.sum(p * d)
        total_gap = (total_gap - gap_decrease * total) * shrunk + tl.sum(p * gap)
        teacher_total_gap = (teacher_total_gap - gap_decrease * teacher_total) * teacher_shrunk + tl.sum(q * gap)
        total = total * shrunk + tl.sum(p)
        teacher_total = teacher_total * teacher_shrunk + tl.sum(q)
    tl.store(sums, maximum)
    tl.store(sums + sums_stride, teacher_maximum)
    tl.store(sums + 2 * sums_stride, total)
    tl.store(sums + 3 * sums_stride, total_d)
    tl.store(sums + 4 * sums_stride, total_gap)
    tl.store(sums + 5 * sums_stride, teacher_total)
    tl.store(sums + 6 * sums_stride, teacher_total_gap)
    tl.store(sums + 7 * sums_stride, target_z)


@triton.jit
def _fold_mixture(
    logits,
    teacher_logits,
    scales,
    normalizers,
    sums,
    width,
    row_stride,
    teacher_stride,
    normalizers_stride,
    sums_stride,
    log_own,
    log_other,
    has_scale: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if has_scale:
        scale = tl.load(scales + row)
    normalizers += row
    maximum = tl.load(normalizers)
    teacher_maximum = tl.load(normalizers + normalizers_stride)
    log_total = tl.load(normalizers + 2 * normalizers_stride)
    teacher_log_total = tl.load(normalizers + 3 * normalizers_stride)
    kl = tl.load(sums + row)
    teacher_kl = tl.load(sums + sums_stride + row)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        z = load_logits(logits, row, columns, width, row_stride, scale)
        teacher_z = load_logits(teacher_logits, row, columns, width, teacher_stride, scale)
        log_p = z - maximum - log_total
        log_q = teacher_z - teacher_maximum - teacher_log_total
        gap = tl.where(columns < width, log_p - log_q, 0.0)
        kl += tl.sum(tl.exp(log_p) * _log_to_mixture(gap, log_own, log_other))
        teacher_kl += tl.sum(tl.exp(log_q) * _log_to_mixture(-gap, log_other, log_own))
    tl.store(sums + row, kl)
    tl.store(sums + sums_stride + row, teacher_kl)


@triton.jit
def _to_gradient(
    logits,
    teacher_logits,
    targets,
    scales,
    normalizers,
    coefficients,
    gradients,
    width,
    row_stride,
    teacher_stride,
    normalizers_stride,
    coefficients_stride,
    gradient_stride,
    log_own,
    log_other,
    has_mixture: tl.constexpr,
    has_scale: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    scale = 1.0
    if has_scale:
        scale = tl.load(scales + row)
    normalizers += row
    maximum = tl.load(normalizers)
    teacher_maximum = tl.load(normalizers + normalizers_stride)
    log_total = tl.load(normalizers + 2 * normalizers_stride)
    teacher_log_total = tl.load(normalizers + 3 * normalizers_stride)
    coefficients += row
    a = tl.load(coefficients)
    b = tl.load(coefficients + coefficients_stride)
    c = tl.load(coefficients + 2 * coefficients_stride)
    d = tl.load(coefficients + 3 * coefficients_stride)
    e = tl.load(coefficients + 4 * coefficients_stride)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        z = load_logits(logits, row, columns, width, row_stride, scale)
        teacher_z = load_logits(teacher_logits, row, columns, width, teacher_stride, scale)
        log_p = z - maximum - log_total
        log_q = teacher_z - teacher_maximum - teacher_log_total
        ratio = log_p - log_q
        if has_mixture:
            ratio = _log_to_mixture(ratio, log_own, log_other)
        gradient = tl.exp(log_p) * (a + b * log_p + d * ratio) + e * tl.exp(log_q)
        gradient += tl.where(columns == target, c, 0.0)
        address = gradients + row * gradient_stride + columns
        tl.store(address, gradient.to(gradients.dtype.element_ty), mask=columns < width)
