"""The gated activation against its twin, in value and gradient, and in what it keeps."""

import pytest
import torch

from megarl.ops.swiglu import plain_swiglu, swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (7, 1, 34), (0, 8)])
def test_equals_the_twin(dtype, shape):
    torch.manual_seed(0)
    ours = torch.randn(shape, dtype=dtype).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    gradient = torch.randn(*shape[:-1], shape[-1] // 2, dtype=dtype)
    got, expected = swiglu(ours), plain_swiglu(theirs)
    got.backward(gradient)
    expected.backward(gradient)
    tolerance = dict(rtol=1e-6, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got, expected, **tolerance)
    torch.testing.assert_close(ours.grad, theirs.grad, **tolerance)


def test_keeps_only_its_input():
    given = torch.randn(4, 6, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        swiglu(given)
    assert [tensor.data_ptr() for tensor in saved] == [given.data_ptr()]
