"""Worked examples of Clip-Cov and KL-Cov."""

import math

import pytest
import torch

from megarl.algorithms.objectives.clip_cov import clip_cov, random_between_bounds
from megarl.algorithms.objectives.kl_cov import highest_covariance, kl_cov
from megarl.algorithms.relative import covariance

SELECTED = torch.tensor([True, False, False])
RATIO = torch.tensor([1.1, 1.1, 2.0], dtype=torch.float64)
ADVANTAGE = torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64)
OLD = torch.tensor([-1.0, -1.0, -4.0], dtype=torch.float64)


def gradient(function, *options):
    log_prob = (OLD + RATIO.log()).requires_grad_()
    out = function(log_prob, OLD, ADVANTAGE, SELECTED, *options)
    return out, torch.autograd.grad(out.loss.sum(), log_prob)[0]


def test_covariance_matches_worked_example():
    actual = covariance(OLD, ADVANTAGE, -2.0, 5 / 3)
    torch.testing.assert_close(actual, torch.tensor([-2 / 3, -2 / 3, -8 / 3], dtype=torch.float64))
    assert math.isclose(actual.mean(), ((OLD + 2) * (ADVANTAGE - 5 / 3)).mean())


def test_clip_cov_draws_tokens_within_bounds_only():
    order = random_between_bounds(torch.tensor([0.5, 1.0, 5.0, 5.1]), torch.tensor([0.9, 0.2, 0.0, 0.8]), 1.0, 5.0)
    torch.testing.assert_close(order, torch.tensor([-torch.inf, 0.2, 0.0, -torch.inf]))


def test_kl_cov_selects_by_covariance():
    covariances = torch.tensor([0.5, 7.0, -3.0])
    assert highest_covariance(covariances, torch.tensor([0.9, 0.2, 0.0])).equal(covariances)


def test_clip_cov_excludes_selected_tokens():
    out, slope = gradient(clip_cov, 0.2, 0.2)
    torch.testing.assert_close(out.loss.detach(), torch.tensor([0.0, -1.1, -3.6], dtype=torch.float64))
    torch.testing.assert_close(slope, torch.tensor([0.0, -1.1, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(("function", "options"), [(clip_cov, (0.2, 0.2)), (kl_cov, (0.5,))])
def test_losses_pass_gradcheck(function, options):
    log_prob = (OLD + RATIO.log()).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, OLD, ADVANTAGE, SELECTED, *options).loss, log_prob)


def test_kl_cov_penalizes_selected_tokens():
    out, slope = gradient(kl_cov, 0.5)
    expected = torch.tensor([-1.1 + 0.5 * math.log(1.1), -1.1, -6.0], dtype=torch.float64)
    torch.testing.assert_close(out.loss.detach(), expected)
    torch.testing.assert_close(slope, torch.tensor([-1.1 + 0.5, -1.1, -6.0], dtype=torch.float64))
