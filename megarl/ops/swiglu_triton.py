"""SwiGLU in Triton, for CUDA: one kernel per pass, which reads and writes every element once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK: Any = 1024  # Triton converts it to a constexpr


Clamp = tuple[float, float]
"""α and the limit of `megarl.ops.swiglu.clamped_swiglu`, whose gate and up channels alternate."""


def forward(gate_and_up: torch.Tensor, clamp: Clamp | None = None) -> torch.Tensor:
    """Return SiLU(gate) · up, or the clamped activation, […, f], computed in float32. gate_and_up: […, 2f],
    contiguous."""
    width = gate_and_up.shape[-1] // 2
    out = gate_and_up.new_empty(*gate_and_up.shape[:-1], width)
    if out.numel():
        grid = out.numel() // width, triton.cdiv(width, BLOCK)
        _forward[grid](gate_and_up, out, width, *_arguments(clamp))
    return out


def backward(gate_and_up: torch.Tensor, gradient: torch.Tensor, clamp: Clamp | None = None) -> torch.Tensor:
    """Return the gradient of gate_and_up, […, 2f], from the output's gradient, […, f], contiguous."""
    width = gradient.shape[-1]
    both = torch.empty_like(gate_and_up)
    if gradient.numel():
        grid = gradient.numel() // width, triton.cdiv(width, BLOCK)
        _backward[grid](gate_and_up, gradient, both, width, *_arguments(clamp))
    return both


def _arguments(clamp: Clamp | None) -> tuple[Any, ...]:
    """Return the kernels' arguments for the activation and the block size."""
    alpha, limit = clamp or (1.0, 0.0)
    return alpha, limit, clamp is not None, BLOCK


@triton.jit
def _forward(gate_and_up, out, width, alpha, limit, clamped: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    gate_at = gate_and_up + 2 * row * width + columns * (2 if clamped else 1)
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + (1 if clamped else width), mask=inside, other=0.0).to(tl.float32)
    if clamped:
        gate, up = _clamped(gate, up, limit)
    result = gate * tl.sigmoid(alpha * gate) * up
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate_and_up, gradient, both, width, alpha, limit, clamped: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    place = 2 * row * width + columns * (2 if clamped else 1)
    up_place = place + (1 if clamped else width)
    gate = tl.load(gate_and_up + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + up_place, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    gate_factor, up_factor = grad, grad
    if clamped:
        # Like torch.clamp, keep the gradient at the limits.
        gate_factor = tl.where(gate > limit, 0.0, grad)
        up_factor = tl.where(tl.abs(up) > limit, 0.0, grad)
        gate, up = _clamped(gate, up, limit)
    share = tl.sigmoid(alpha * gate)
    gate_grad = gate_factor * up * share * (1 + alpha * gate * (1 - share))
    up_grad = up_factor * gate * share
    tl.store(both + place, gate_grad.to(both.dtype.element_ty), mask=inside)
    tl.store(both + up_place, up_grad.to(both.dtype.element_ty), mask=inside)


@triton.jit
def _clamped(gate, up, limit):
    """Return the clamped gate, and the clamped up plus one. Unlike minimum and maximum, comparisons propagate NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, up)
    return gate, tl.where(up < -limit, -limit, up) + 1
