"""Modulation against the plain expression, in value and gradient."""

import pytest
import torch

from megarl.ops.modulation import modulate
from tests.closeness import relative_error

NUMBERS = torch.tensor([0, 0, 1, 1, 1, 3])
"""The third document has no tokens on this rank."""


@pytest.mark.parametrize("has_shift", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_value_and_gradients_match_the_plain_expression(has_shift, dtype, limit):
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 1, 10), (4, 10), (4, 10), (6, 1, 10)]
    *inputs, weight = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    inputs = inputs[: 2 + has_shift]
    ours, exact = (
        [tensor.to(kind, copy=True).requires_grad_() for tensor in inputs] for kind in (dtype, torch.float64)
    )
    found = modulate(ours[0], NUMBERS, *ours[1:])
    expected = exact[0] * exact[1][NUMBERS][:, None]
    if has_shift:
        expected = expected + exact[2][NUMBERS][:, None]
    assert found.dtype == dtype and relative_error(found.double(), expected) < limit
    (found * weight).sum().backward()
    (expected * weight.double()).sum().backward()
    for tensor, reference in zip(ours, exact, strict=True):
        assert relative_error(tensor.grad.double(), reference.grad) < limit


def test_backward_keeps_no_expanded_vectors():
    tokens, scale = torch.randn(6, 1, 10), torch.randn(4, 10, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        modulate(tokens, NUMBERS, scale)
    assert {tensor.data_ptr() for tensor in saved} == {tokens.data_ptr(), NUMBERS.data_ptr(), scale.data_ptr()}
