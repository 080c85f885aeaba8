"""The gated activation of an MLP, which keeps nothing for its backward pass but what it is given."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def plain_swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """The twin: SiLU(gate) · up, where autograd keeps three products beside its input."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """[…, 2f] -> […, f]: SiLU(gate) · up, of gate = the first f channels and up = the others (arXiv:2002.05202)."""
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
        of_gate, of_up = both.chunk(2, dim=-1)
        torch.mul(gradient, up, out=of_up)
        torch.ops.aten.silu_backward.grad_input(of_up, gate, grad_input=of_gate)
        torch.ops.aten.silu.out(gate, out=of_up).mul_(gradient)
        return both
