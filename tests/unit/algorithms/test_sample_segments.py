"""Per-sample sums with rows on two ranks: correct values, and gradients that sum to the full gradient."""

import pytest
import torch

from megarl.algorithms.sample_segments import SampleSegments

ROW_SAMPLE = torch.tensor([0, 0, 0, 1, 1, 2])
MASK = torch.tensor([True, False, True, True, True, False])
FIRST = torch.tensor([True, True, False, False, True, True])
"""Mask of the rows that the first rank holds."""


def test_gradients_of_ranks_sum_to_the_full_gradient():
    x = torch.tensor([0.5, 9.0, -1.5, 2.0, 0.25, 7.0], dtype=torch.float64, requires_grad=True)
    sums = torch.stack([x[[0, 2]].sum(), x[[3, 4]].sum(), x.new_zeros(())])
    plain = (sums.exp() * torch.tensor([1.0, 2.0, 3.0])).sum()
    [expected] = torch.autograd.grad(plain, x)
    gradients = torch.zeros(6, dtype=torch.float64)
    for rows in (FIRST, ~FIRST):
        other_total = SampleSegments(MASK[~rows], ROW_SAMPLE[~rows], 3).total(x[~rows])
        segments = SampleSegments(
            MASK[rows], ROW_SAMPLE[rows], 3, lambda values, other_total=other_total: values + other_total
        )
        totals = segments.differentiable_total(x[rows])
        torch.testing.assert_close(totals, sums)
        loss = (totals.exp() * torch.tensor([1.0, 2.0, 3.0])).sum()
        gradients += torch.autograd.grad(loss, x)[0]
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_tokens_of_a_sample_have_bit_identical_values(level):
    """If rounding made them differ, a bound could clip only some of a sample's tokens."""
    values = torch.tensor([700.0, 1e-3, -899.9, 0.1, 0.7, 3.0])
    samples = SampleSegments(MASK, ROW_SAMPLE, 3)
    row_values = samples.at_level(level, values)
    for rows in ([0, 2], [3, 4]):
        assert len(row_values[rows].unique()) == 1
    torch.testing.assert_close(row_values[3:5], torch.full((2,), 0.8 if level == "sequence" else 0.4))


@pytest.mark.parametrize(("level", "expected"), [("token", 75.25), ("sequence", 50.5)])
def test_share_at_level_weights_samples_equally(level, expected):
    """A sample of one token has the value 1, and one of three tokens 100."""
    values, row_sample = torch.tensor([1.0, 100.0, 100.0, 100.0, 7.0]), torch.tensor([0, 1, 1, 1, 2])
    share = SampleSegments(torch.tensor([True, True, True, True, False]), row_sample, 3).share_at_level(level)
    assert (values * share).sum() / share.sum() == pytest.approx(expected)
