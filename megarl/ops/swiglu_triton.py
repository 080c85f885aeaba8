"""SwiGLU in Triton, for CUDA: one kernel per pass, which reads and writes every element once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK: Any = 1024  # Triton converts it to a constexpr


def forward(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Return SiLU(gate) · up, […, f], computed in float32. gate_and_up: […, 2f], contiguous."""
    width = gate_and_up.shape[-1] // 2
    out = gate_and_up.new_empty(*gate_and_up.shape[:-1], width)
    if out.numel():
        _forward[(out.numel() // width, triton.cdiv(width, BLOCK))](gate_and_up, out, width, block=BLOCK)
    return out


def backward(gate_and_up: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of gate_and_up, […, 2f], from the output's gradient, […, f], contiguous."""
    width = gradient.shape[-1]
    both = torch.empty_like(gate_and_up)
    if gradient.numel():
        grid = gradient.numel() // width, triton.cdiv(width, BLOCK)
        _backward[grid](gate_and_up, gradient, both, width, block=BLOCK)
    return both


@triton.jit
def _forward(gate_and_up, out, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    gate = tl.load(gate_and_up + 2 * row * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + (2 * row + 1) * width + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate_and_up, gradient, both, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    gate = tl.load(gate_and_up + 2 * row * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + (2 * row + 1) * width + columns, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    gate_grad = grad * up * share * (1 + gate * (1 - share))
    up_grad = grad * gate * share
    tl.store(both + 2 * row * width + columns, gate_grad.to(both.dtype.element_ty), mask=inside)
    tl.store(both + (2 * row + 1) * width + columns, up_grad.to(both.dtype.element_ty), mask=inside)
