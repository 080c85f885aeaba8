"""SwiGLU activations that save only their input for the backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Return SiLU(gate) · up, […, f], from […, 2f]: gate is the first f channels, up the rest (arXiv:2002.05202)."""
    return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_and_up):
        ctx.save_for_backward(gate_and_up)
        if gate_and_up.is_cuda:
            from megarl.ops import swiglu_triton

            return swiglu_triton.forward(gate_and_up.contiguous())
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, *grad_outputs):
        [gradient], [gate_and_up] = grad_outputs, ctx.saved_tensors
        if gate_and_up.is_cuda:
            from megarl.ops import swiglu_triton

            return swiglu_triton.backward(gate_and_up.contiguous(), gradient.contiguous())
        gate, up = gate_and_up.chunk(2, dim=-1)
        both = torch.empty_like(gate_and_up)
        gate_grad, up_grad = both.chunk(2, dim=-1)
        torch.mul(gradient, up, out=up_grad)
        torch.ops.aten.silu_backward.grad_input(up_grad, gate, grad_input=gate_grad)
        torch.ops.aten.silu.out(gate, out=up_grad).mul_(gradient)
        return both


CLAMPED_ALPHA, CLAMPED_LIMIT = 1.702, 7.0


def clamped_swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Return gpt-oss's activation (up + 1) · gate · sigmoid(1.702 · gate), […, f], from […, 2f] with alternating gate
    and up channels. First, gate is clamped to at most 7, and up to [−7, 7] (arXiv:2508.10925)."""
    return _ClampedSwiGLU.apply(gate_and_up)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_and_up):
        ctx.save_for_backward(gate_and_up)
        if gate_and_up.is_cuda:
            from megarl.ops import swiglu_triton

            return swiglu_triton.forward(gate_and_up.contiguous(), (CLAMPED_ALPHA, CLAMPED_LIMIT))
        gate, up = _clamped(gate_and_up)
        return (gate * torch.sigmoid(gate * CLAMPED_ALPHA)).mul_(up.add_(1))

    @staticmethod
    def backward(ctx, *grad_outputs):
        [gradient], [gate_and_up] = grad_outputs, ctx.saved_tensors
        if gate_and_up.is_cuda:
            from megarl.ops import swiglu_triton

            clamp = CLAMPED_ALPHA, CLAMPED_LIMIT
            return swiglu_triton.backward(gate_and_up.contiguous(), gradient.contiguous(), clamp)
        gate, up = _clamped(gate_and_up)
        sigmoid = torch.sigmoid(gate * CLAMPED_ALPHA)
        both = torch.empty_like(gate_and_up)
        # Like torch.clamp, keep the gradient at the limits.
        within = gate_and_up[..., 1::2].abs() <= CLAMPED_LIMIT
        torch.mul(gradient, (gate * sigmoid).mul_(within), out=both[..., 1::2])
        within = gate_and_up[..., ::2] <= CLAMPED_LIMIT
        slope = sigmoid * (1 + CLAMPED_ALPHA * gate * (1 - sigmoid))
        torch.mul(gradient, slope.mul_(up.add_(1)).mul_(within), out=both[..., ::2])
        return both


def _clamped(gate_and_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gate_and_up[..., ::2].clamp(max=CLAMPED_LIMIT), gate_and_up[..., 1::2].clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
