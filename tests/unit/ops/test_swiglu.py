"""SwiGLU compared with its plain reference, in value and gradient, and its saved tensors."""

import pytest
import torch
import torch.nn.functional as F

from megarl.ops.swiglu import swiglu


def plain_swiglu(gate_and_up):
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (7, 1, 34), (0, 8)])
def test_matches_plain_swiglu(dtype, shape):
    torch.manual_seed(0)
    fused_input = torch.randn(shape, dtype=dtype).requires_grad_()
    plain_input = fused_input.detach().clone().requires_grad_()
    gradient = torch.randn(*shape[:-1], shape[-1] // 2, dtype=dtype)
    actual, expected = swiglu(fused_input), plain_swiglu(plain_input)
    actual.backward(gradient)
    expected.backward(gradient)
    tolerance = dict(rtol=1e-6, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(actual, expected, **tolerance)
    torch.testing.assert_close(fused_input.grad, plain_input.grad, **tolerance)


def test_saves_only_its_input():
    gate_and_up = torch.randn(4, 6, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        swiglu(gate_and_up)
    assert [tensor.data_ptr() for tensor in saved] == [gate_and_up.data_ptr()]
