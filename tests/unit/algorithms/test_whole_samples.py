"""Sums over samples whose rows are on two ranks: the value of the whole, and gradients that add up to its own."""

import torch

from megarl.algorithms.whole_samples import WholeSamples

ROW_SAMPLE = torch.tensor([0, 0, 0, 1, 1, 2])
MASK = torch.tensor([True, False, True, True, True, False])
FIRST = torch.tensor([True, True, False, False, True, True])
"""Rows of the first rank."""


def test_the_ranks_gradients_add_up_to_that_of_the_whole():
    x = torch.tensor([0.5, 9.0, -1.5, 2.0, 0.25, 7.0], dtype=torch.float64, requires_grad=True)
    sums = torch.stack([x[[0, 2]].sum(), x[[3, 4]].sum(), x.new_zeros(())])
    plain = (sums.exp() * torch.tensor([1.0, 2.0, 3.0])).sum()
    [expected] = torch.autograd.grad(plain, x)
    gradients = torch.zeros(6, dtype=torch.float64)
    for rows in (FIRST, ~FIRST):
        other = WholeSamples(MASK[~rows], ROW_SAMPLE[~rows], 3).total(x[~rows])
        own = WholeSamples(MASK[rows], ROW_SAMPLE[rows], 3, lambda values, other=other: values + other)
        of_each = own.of_each(x[rows])
        torch.testing.assert_close(of_each, sums)
        loss = (of_each.exp() * torch.tensor([1.0, 2.0, 3.0])).sum()
        gradients += torch.autograd.grad(loss, x)[0]
    torch.testing.assert_close(gradients, expected)
