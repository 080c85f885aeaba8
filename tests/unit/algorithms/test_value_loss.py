"""The critic's loss by hand."""

import pytest
import torch

from megarl.algorithms.value_loss import squared_error


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope", "clipped"),
    # The old value is 0, the return 1.
    [
        (0.1, None, 0.81, -1.8, False),
        (0.5, None, 0.25, -1.0, False),
        (0.1, 0.2, 0.81, -1.8, False),
        (0.5, 0.2, 0.64, 0.0, True),  # has moved 0.5 towards the return: counts as 0.2
        (-0.5, 0.2, 2.25, -3.0, False),  # away from it: not clipped
        (3.0, 0.2, 4.0, 4.0, False),  # beyond it: the plain error is the larger one
    ],
)
def test_value_loss_by_hand(value, clip, loss, slope, clipped):
    now = torch.tensor([value], requires_grad=True)
    out = squared_error(now, torch.zeros(1), torch.ones(1), clip)
    out.loss.sum().backward()
    assert float(out.loss.detach()) == pytest.approx(loss)
    assert float(now.grad) == pytest.approx(slope)
    assert bool(out.clipped) is clipped


@pytest.mark.parametrize("clip", [None, 0.4])
def test_gradients_of_the_value_loss(clip):
    old, returns = torch.tensor([0.1, -0.4, 0.9]).double(), torch.tensor([1.0, -1.0, 0.5]).double()
    value = torch.tensor([0.2, 0.8, 0.6], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: squared_error(x, old, returns, clip).loss, value)
