"""SwiGLU compared with its plain reference, in value and gradient, and its saved tensors."""

import pytest
import torch
import torch.nn.functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from megarl.ops.swiglu import clamped_swiglu, swiglu


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


@pytest.mark.parametrize("activation", [swiglu, clamped_swiglu])
def test_saves_only_its_input(activation):
    gate_and_up = torch.randn(4, 6, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        activation(gate_and_up)
    assert [tensor.data_ptr() for tensor in saved] == [gate_and_up.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (7, 1, 34), (0, 8)])
def test_clamped_swiglu_matches_transformers(dtype, shape):
    """About a sixth of the channels exceed the limits, and some are exactly at a limit."""
    with torch.device("meta"):
        theirs = GptOssExperts(GptOssConfig())
    torch.manual_seed(0)
    ours = 5 * torch.randn(shape, dtype=dtype)
    ours[..., :1], ours[..., 1:2] = 7, -7
    gradient = torch.randn(*shape[:-1], shape[-1] // 2, dtype=dtype)
    plain = ours.clone().requires_grad_()
    ours.requires_grad_()
    actual, expected = clamped_swiglu(ours), theirs._apply_gate(plain)
    actual.backward(gradient)
    expected.backward(gradient)
    tolerance = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else dict(rtol=4e-2, atol=4e-2)
    torch.testing.assert_close(actual, expected, **tolerance)
    torch.testing.assert_close(ours.grad, plain.grad, **tolerance)
