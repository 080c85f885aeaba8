"""A SwiGLU activation that saves only its input for the backward pass."""

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
