"""Worked examples of the critic's loss."""

import pytest
import torch

from megarl.algorithms.value_loss import explained_variance, squared_error


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope", "clipped"),
    # The old value is 0, the return 1.
    [
        (0.1, None, 0.81, -1.8, False),
        (0.5, None, 0.25, -1.0, False),
        (0.1, 0.2, 0.81, -1.8, False),
        (0.5, 0.2, 0.64, 0.0, True),  # moved by 0.5 toward the return, clipped to 0.2
        (-0.5, 0.2, 2.25, -3.0, False),  # moved away from the return: not clipped
        (3.0, 0.2, 4.0, 4.0, False),  # beyond the return: the unclipped error is larger
    ],
)
def test_value_loss_matches_worked_examples(value, clip, loss, slope, clipped):
    now = torch.tensor([value], requires_grad=True)
    out = squared_error(now, torch.zeros(1), torch.ones(1), clip)
    out.loss.sum().backward()
    assert float(out.loss.detach()) == pytest.approx(loss)
    assert float(now.grad) == pytest.approx(slope)
    assert bool(out.clipped) is clipped


@pytest.mark.parametrize("clip", [None, 0.4])
def test_value_loss_passes_gradcheck(clip):
    old, returns = torch.tensor([0.1, -0.4, 0.9]).double(), torch.tensor([1.0, -1.0, 0.5]).double()
    value = torch.tensor([0.2, 0.8, 0.6], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: squared_error(x, old, returns, clip).loss, value)


def explained(values: torch.Tensor, returns: torch.Tensor) -> float | None:
    residual = returns - values
    moments = (returns.mean(), returns.square().mean(), residual.mean(), residual.square().mean())
    return explained_variance(*(float(moment) for moment in moments))


def test_explained_variance_matches_torch():
    torch.manual_seed(0)
    returns = 5 + torch.randn(50, dtype=torch.float64)
    values = returns + 0.5 * torch.randn(50, dtype=torch.float64)
    assert explained(values, returns) == pytest.approx(1 - float((returns - values).var() / returns.var()))
    assert explained(returns + 3, returns) == pytest.approx(1), "a constant offset has no variance"
    assert explained(torch.full_like(returns, 5), returns) == pytest.approx(0)
    assert explained(-returns, returns) == pytest.approx(-3)
    assert explained(values, torch.full_like(returns, 0.1)) is None
