"""Modulation against the plain expression, in value and gradient."""

import pytest
import torch

from megarl.ops.modulation import modulate
from tests.closeness import assert_matches

NUMBERS = torch.tensor([0, 0, 1, 1, 1, 3])
"""The third document has no tokens on this rank."""


def plain_modulate(tokens, numbers, scale, shift=None):
    product = tokens * scale[numbers][:, None]
    return product if shift is None else product + shift[numbers][:, None]


@pytest.mark.parametrize("has_shift", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_value_and_gradients_match_the_plain_expression(has_shift, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 1, 10), (4, 10), (4, 10), (6, 1, 10)]
    *inputs, weight = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    inputs = inputs[: 2 + has_shift]

    def results(function, dtype):
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs]
        value = function(leaves[0], NUMBERS, *leaves[1:])
        value.backward(weight.to(dtype))
        return {"value": value.detach()} | {f"gradient {i}": leaf.grad for i, leaf in enumerate(leaves)}

    actual = results(modulate, dtype)
    assert actual["value"].dtype == dtype
    assert_matches(actual, lambda: results(plain_modulate, torch.get_default_dtype()), "modulation")


def test_backward_keeps_no_expanded_vectors():
    tokens, scale = torch.randn(6, 1, 10), torch.randn(4, 10, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        modulate(tokens, NUMBERS, scale)
    assert {tensor.data_ptr() for tensor in saved} == {tokens.data_ptr(), NUMBERS.data_ptr(), scale.data_ptr()}
