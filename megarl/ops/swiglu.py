"""The gated activation of an MLP, which keeps nothing for its backward pass but what it is given."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def plain_swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Return SiLU(gate) · up, for which autograd keeps three products beside its input: the plain twin of `swiglu`."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Return from […, 2f] the […, f] of SiLU(gate) · up, with gate the first f channels and up the others
    (arXiv:2002.05202)."""
    return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_and_up):
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, gradient):
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        both = torch.empty_like(gate_and_up)
        gate_grad, up_grad = both.chunk(2, dim=-1)
        torch.mul(gradient, up, out=up_grad)
        torch.ops.aten.silu_backward.grad_input(up_grad, gate, grad_input=gate_grad)
        torch.ops.aten.silu.out(gate, out=up_grad).mul_(gradient)
        return both
