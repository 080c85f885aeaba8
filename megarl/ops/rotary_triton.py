"""Rotary position embedding in Triton, for CUDA: one kernel per pass instead of Megatron's ten in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

HEADS = 4
"""Number of heads that one Triton program rotates."""


def rotate(x: torch.Tensor, angles: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Rotate the first r channels of each head by the token's angles; the remaining channels are unchanged.

    Args:
        x: [T, 1, heads, d], as Megatron passes packed documents.
        angles: float32 [T, 1, 1, r]. Channel pairs are (i, i + r / 2), and both halves contain the same angles.
        factor: multiplies the cosines and sines.
    """
    return _Rotation.apply(x, angles, factor)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, angles, factor):
        ctx.save_for_backward(angles)
        ctx.factor = factor
        return _rotated(x, angles, factor, 1)

    @staticmethod
    def backward(ctx, *grad_outputs):
        [gradient], [angles] = grad_outputs, ctx.saved_tensors
        return _rotated(gradient, angles, ctx.factor, -1), None, None


def _rotated(x: torch.Tensor, angles: torch.Tensor, factor: float, direction: int) -> torch.Tensor:
    num_tokens, _, heads, size = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    angles = angles.reshape(num_tokens, -1)
    half = angles.shape[1] // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rest = size - 2 * half
        constants: dict[str, Any] = dict(
            direction=direction,
            heads_block=HEADS,
            half_block=triton.next_power_of_2(half),
            rest_block=triton.next_power_of_2(rest),
        )
        _rotate[(num_tokens, triton.cdiv(heads, HEADS))](
            *(x, out, angles, factor, heads, half, rest, x.stride(0), x.stride(2), out.stride(0), out.stride(2)),
            angles.stride(0),
            **constants,
        )
    return out


@triton.jit
def _rotate(
    x,
    out,
    angles,
    factor,
    heads,
    half,
    rest,
    x_token,
    x_head,
    out_token,
    out_head,
    angles_token,
    direction: tl.constexpr,
    heads_block: tl.constexpr,
    half_block: tl.constexpr,
    rest_block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * heads_block + tl.arange(0, heads_block))[:, None]
    channel = tl.arange(0, half_block)[None, :]
    angle = tl.load(angles + token * angles_token + channel, mask=channel < half, other=0.0)
    # Like Megatron and vLLM, round cosines and sines to the dtype of the rotated states.
    cosine = (tl.cos(angle) * factor).to(out.dtype.element_ty).to(tl.float32)
    sine = (tl.sin(angle) * factor).to(out.dtype.element_ty).to(tl.float32) * direction
    inside = (head < heads) & (channel < half)
    source = x + token * x_token + head * x_head + channel
    target = out + token * out_token + head * out_head + channel
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)
    if rest_block > 0:
        channel = tl.arange(0, rest_block)[None, :]
        inside = (head < heads) & (channel < rest)
        shift = 2 * half + channel
        kept = tl.load(x + token * x_token + head * x_head + shift, mask=inside, other=0.0)
        tl.store(out + token * out_token + head * out_head + shift, kept, mask=inside)
