"""Policies so far apart that their probability ratio, e^200, is not representable."""

import pytest
import torch

from megarl.algorithms import kl
from megarl.algorithms.corrections import factors
from megarl.algorithms.policy_loss import ratio_of
from megarl.algorithms.registry import OBJECTIVES
from megarl.algorithms.sample_segments import SampleSegments
from megarl.algorithms.specs import PolicyObjective

MASK = torch.tensor([True, True, False, True, True, True])
SAMPLES = SampleSegments(MASK, torch.tensor([0, 0, 0, 1, 1, 2]), 3)
OLD = torch.tensor([-1.5, -0.3, -2.0, -300.0, -0.7, -1.0])
NOW = torch.tensor([-1.2, -0.5, -1.0, -100.0, -0.8, -0.9])
FAR = 3
NEAR = torch.where(torch.arange(6) == FAR, OLD, NOW)
OTHERS = [0, 1, 5]
"""Trained tokens of the other samples."""


def gradient(name: str, now: torch.Tensor, sign: float) -> tuple[torch.Tensor, torch.Tensor]:
    now = now.clone().requires_grad_()
    advantage = sign * torch.tensor([0.5, 0.5, 0.5, 1.0, 1.0, -0.8])
    selected = torch.tensor([True, False, False, False, True, False])
    of_steps = {"std": torch.ones(6), "divergence": torch.zeros(6)}
    known = {"samples": SAMPLES, "selected": selected} | of_steps
    inputs = [known[key] for key in OBJECTIVES[name].inputs]
    out = OBJECTIVES[name].loss(now, OLD, advantage, *inputs, **OBJECTIVES[name].arguments)
    return torch.autograd.grad((out.loss * MASK).sum(), now)[0], torch.cat((out.loss.detach(), out.ratio))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", [name for name, spec in OBJECTIVES.items() if isinstance(spec, PolicyObjective)])
def test_objectives_stay_finite_for_extreme_ratios(name, sign):
    far, numbers = gradient(name, NOW, sign)
    near, _ = gradient(name, NEAR, sign)
    assert torch.isfinite(far).all() and torch.isfinite(numbers).all()
    assert torch.equal(far[OTHERS], near[OTHERS]) and far[OTHERS].any()


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", kl.KL_ESTIMATORS)
def test_kl_estimators_stay_finite_for_extreme_ratios(estimator, straight_through):
    log_ratio = torch.tensor([200.0, -200.0], requires_grad=True)
    estimate = kl.estimate(estimator, log_ratio, straight_through)
    [slope] = torch.autograd.grad(estimate.sum(), log_ratio)
    assert torch.isfinite(estimate).all() and torch.isfinite(slope).all()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_corrections_stay_finite_for_extreme_ratios(level):
    assert torch.isfinite(factors(NOW - OLD, SAMPLES, level, None, None, 0.5, 5.0).factor).all()


def slopes(function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def test_ratios_below_the_bound_are_bit_exact():
    log_ratio = torch.linspace(-120, 20, 4001)
    for bounded_function, plain, x in (
        (ratio_of, torch.exp, log_ratio),
        (kl.k3, lambda d: torch.expm1(-d) + d, -log_ratio),
    ):
        for actual, expected in zip(slopes(bounded_function, x), slopes(plain, x), strict=True):
            assert torch.equal(actual, expected)


def test_nan_log_prob_propagates():
    assert ratio_of(torch.tensor([torch.nan])).isnan().all()
