"""Whitening of an update's advantages."""

import pytest
import torch

from megarl.algorithms.relative import mean_and_std, whiten


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7])
def test_equal_advantages_are_whitened_to_zero(value):
    """Their deviation is 0, and the epsilon may be 0 as well."""
    advantage = torch.full((3,), value)
    total, squares = float(advantage.double().sum()), float(advantage.double().square().sum())
    mean, std = mean_and_std(3, total, squares, "population")
    assert whiten(advantage, torch.ones(3).bool(), mean, std, 0.0).tolist() == [0.0] * 3
