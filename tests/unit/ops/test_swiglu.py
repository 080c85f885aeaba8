"""SwiGLU compared with its plain reference, in value and gradient, and its saved tensors."""

import pytest
import torch
import torch.nn.functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from megarl.ops.swiglu import clamped_swiglu, swiglu
from tests.closeness import assert_matches


def plain_swiglu(gate_and_up):
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def check(activation, plain, gate_and_up: torch.Tensor) -> None:
    """Compare values and gradients."""
    gradient = torch.randn(*gate_and_up.shape[:-1], gate_and_up.shape[-1] // 2, dtype=gate_and_up.dtype)

    def results(function, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaf = gate_and_up.to(dtype, copy=True).requires_grad_()
        value = function(leaf)
        value.backward(gradient.to(dtype))
        return {"value": value.detach(), "gradient": leaf.grad}

    assert_matches(results(activation, gate_and_up.dtype), lambda: results(plain, torch.get_default_dtype()), "SwiGLU")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (7, 1, 34), (0, 8)])
def test_matches_plain_swiglu(dtype, shape):
    torch.manual_seed(0)
    check(swiglu, plain_swiglu, torch.randn(shape, dtype=dtype))


@pytest.mark.parametrize("activation", [swiglu, clamped_swiglu])
def test_saves_only_its_input(activation):
    gate_and_up = torch.randn(4, 6, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        activation(gate_and_up)
    assert [tensor.data_ptr() for tensor in saved] == [gate_and_up.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (7, 1, 34), (0, 8)])
def test_clamped_swiglu_matches_transformers(dtype, shape):
    """About a sixth of the channels exceed the limits, and some are exactly at a limit."""
    with torch.device("meta"):
        theirs = GptOssExperts(GptOssConfig())
    torch.manual_seed(0)
    gate_and_up = 5 * torch.randn(shape, dtype=dtype)
    gate_and_up[..., :1], gate_and_up[..., 1:2] = 7, -7
    check(clamped_swiglu, theirs._apply_gate, gate_and_up)
