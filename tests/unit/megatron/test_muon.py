"""Newton-Schulz against the singular value decomposition, and the assignment of matrices to ranks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.megatron.muon import COEFFICIENTS, Part, assign, orthogonalize
from megarl.models.flops import orthogonalization_flops


def exact(matrix: torch.Tensor) -> torch.Tensor:
    """Apply the polynomial of each step to the singular values, in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


@pytest.mark.parametrize("shape", [(8, 8), (5, 24), (24, 5), (1, 7), (7, 1)])
def test_result_has_the_singular_vectors_of_the_matrix(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalize(matrix, torch.float32)
    # A step multiplies small errors by up to 3.4445.
    limit = 3.4445**5 * torch.finfo(torch.float32).eps
    assert (result - exact(matrix)).abs().max() < limit
    assert torch.linalg.svdvals(result).sub(1).abs().max() < 0.35


def test_result_does_not_depend_on_the_scale() -> None:
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    one, other = (orthogonalize(matrix * scale, torch.bfloat16) for scale in (1.0, 2.0**20))
    assert torch.equal(one, other)
    assert one.dtype is torch.float32


@pytest.mark.parametrize("shape", [(6, 9), (24, 5), (4, 4)])
def test_operations_are_those_that_torch_counts(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(shape), torch.float32)
    assert counter.get_total_flops() == orthogonalization_flops(*shape)


def test_zero_matrix_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(4, 6), torch.float32).any()


def test_matrices_are_balanced_over_the_ranks_that_hold_them() -> None:
    shapes = {"a": (8, 8), "b": (8, 8), "c": (4, 8), "d": (4, 8), "e": (2, 2)}
    held = [("a", "b", "c", "d"), ("a", "b", "c", "d"), ("e",)]
    parts = [[Part(tensor, ((0, 1), (0, 1))) for tensor in tensors] for tensors in held]
    assert assign(parts, shapes) == [["a", "c"], ["b", "d"], ["e"]]
