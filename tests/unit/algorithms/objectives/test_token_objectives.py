"""Token-level policy objectives: worked examples, and common properties such as the policy gradient at the old
policy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.objectives.dppo_kl import dppo_kl
from megarl.algorithms.registry import OBJECTIVES
from megarl.algorithms.sample_segments import SampleSegments

POLICY_OBJECTIVES = [name for name, spec in OBJECTIVES.items() if spec.is_policy_objective and "tokens" in spec.actions]
TOKEN_OBJECTIVES = [name for name in POLICY_OBJECTIVES if not OBJECTIVES[name].inputs]
WITH_DERIVATIVE = ("clip", "unclipped", "kl_penalty", "sapo")
"""Objectives whose gradient is the derivative of their value, except at kinks."""
LOG_PROBS = st.floats(-6, -0.05)
ADVANTAGES = st.floats(-3, 3)


def evaluate(name: str, ratio: float, advantage: float, old: float = -1.0, **options):
    """Return the loss of one token, its slope in log π, and whether the lower and upper bound stopped the gradient."""
    log_prob = torch.tensor([old + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    start = torch.tensor([old], dtype=torch.float64)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    out = OBJECTIVES[name].loss(log_prob, start, advantages, **dict(OBJECTIVES[name].arguments) | options)
    [slope] = torch.autograd.grad(out.loss.sum(), log_prob)
    return out.loss.item(), slope.item(), bool(out.clipped_low), bool(out.clipped_high)


@pytest.mark.parametrize(
    ("options", "ratio", "advantage", "loss", "slope", "low", "high"),
    [
        ({}, 1.0, 2.0, -2.0, -2.0, False, False),
        ({}, 1.5, 2.0, -2.4, 0.0, False, True),  # clipped to 1.2
        ({}, 0.5, 2.0, -1.0, -1.0, False, False),  # moving back toward 1 is never clipped
        ({}, 0.5, -2.0, 1.6, 0.0, True, False),  # clipped to 0.8
        ({}, 1.5, -2.0, 3.0, 3.0, False, False),
        ({"clip_high": 0.28}, 1.25, 1.0, -1.25, -1.25, False, False),
        ({"clip_high": 0.28}, 1.5, 1.0, -1.28, 0.0, False, True),
        ({"dual_clip": 3.0}, 2.0, -2.0, 4.0, 4.0, False, False),
        ({"dual_clip": 3.0}, 5.0, -2.0, 6.0, 0.0, False, True),  # at most 3·2
        ({"dual_clip": 3.0}, 5.0, 2.0, -2.4, 0.0, False, True),
    ],
)
def test_clip_matches_worked_examples(options, ratio, advantage, loss, slope, low, high):
    assert evaluate("clip", ratio, advantage, **options) == pytest.approx((loss, slope, low, high))


@pytest.mark.parametrize(
    ("name", "options", "ratio", "advantage", "loss", "slope", "low", "high"),
    [
        ("unclipped", {}, 4.0, 0.5, -2.0, -2.0, False, False),
        # −2·3 + 0.5·(2 − 1 − ln 2), and −6 + 0.5·(2 − 1)
        ("kl_penalty", {"penalty": 0.5}, 2.0, 3.0, -6 + 0.5 * (1 - math.log(2)), -5.5, False, False),
        ("kl_penalty", {"penalty": 0.5}, 1.0, 3.0, -3.0, -3.0, False, False),
        # log π = −1 + ln 8; the weight is clipped to 5
        ("cispo", {}, 8.0, 2.0, -5 * 2 * (-1 + math.log(8)), -10.0, False, True),
        ("cispo", {}, 0.1, 2.0, -0.1 * 2 * (-1 + math.log(0.1)), -0.2, False, False),
        ("cispo", {"clip_low": 0.2}, 0.1, -2.0, 0.8 * 2 * (-1 + math.log(0.1)), 1.6, True, False),
        # σ(1) = 0.7310586 and its derivative 0.1966119
        ("sapo", {"tau_positive": 2.0}, 1.5, 3.0, -2 * 0.7310586 * 3, -4 * 0.1966119 * 1.5 * 3, False, False),
        ("sapo", {"tau_negative": 2.0}, 1.5, -3.0, 2 * 0.7310586 * 3, 4 * 0.1966119 * 1.5 * 3, False, False),
        # 0.2 → 0.4 exceeds 0.15, 0.2 → 0.3 does not. Moving against the advantage is never masked.
        ("dppo_tv", {}, 2.0, 1.0, 0.0, 0.0, False, True),
        ("dppo_tv", {}, 1.5, 1.0, -1.5, -1.5, False, False),
        ("dppo_tv", {}, 2.0, -1.0, 2.0, 2.0, False, False),
        ("dppo_tv", {}, 0.1, -1.0, 0.0, 0.0, True, False),
        # 0.2 → 0.02 is within 0.19; the limit 0.15 still applies to positive advantages.
        ("dppo_tv", {"divergence_limit_negative": 0.19}, 0.1, -1.0, 0.1, 0.1, False, False),
        ("dppo_tv", {"divergence_limit_negative": 0.19}, 1.9, 1.0, 0.0, 0.0, False, True),
        ("dppo_tv", {"divergence_limit_negative": 0.1}, 0.4, -1.0, 0.0, 0.0, True, False),
        # 0.2·ln(1/2) + 0.8·ln(0.8/0.6) = 0.0915162; 0.2·ln(2/3) + 0.8·ln(0.8/0.7) = 0.0257321
        ("dppo_kl", {}, 2.0, 1.0, 0.0, 0.0, False, True),
        ("dppo_kl", {"divergence_limit": 0.0916}, 2.0, 1.0, -2.0, -2.0, False, False),
        ("dppo_kl", {"divergence_limit": 0.0915}, 2.0, 1.0, 0.0, 0.0, False, True),
        ("dppo_kl", {"divergence_limit": 0.0258}, 1.5, 1.0, -1.5, -1.5, False, False),
        ("dppo_kl", {"divergence_limit": 0.0257}, 1.5, 1.0, 0.0, 0.0, False, True),
        ("dppo_kl", {}, 0.1, -1.0, 0.0, 0.0, True, False),
        # 0.2·ln 10 + 0.8·ln(0.8/0.98) = 0.2981641
        ("dppo_kl", {"divergence_limit_negative": 0.2982}, 0.1, -1.0, 0.1, 0.1, False, False),
        ("dppo_kl", {"divergence_limit_negative": 0.2981}, 0.1, -1.0, 0.0, 0.0, True, False),
    ],
)
def test_objectives_match_worked_examples(name, options, ratio, advantage, loss, slope, low, high):
    old = math.log(0.2) if name.startswith("dppo") else -1.0
    actual = evaluate(name, ratio, advantage, old, **options)
    assert actual == pytest.approx((loss, slope, low, high), rel=1e-6)


@given(LOG_PROBS, ADVANTAGES)
@pytest.mark.parametrize("name", TOKEN_OBJECTIVES)
def test_gradient_at_old_policy_is_the_policy_gradient(name, old, advantage):
    assert evaluate(name, 1.0, advantage, old)[1] == pytest.approx(-advantage, abs=1e-9)


@pytest.mark.parametrize("name", WITH_DERIVATIVE)
def test_losses_pass_gradcheck(name):
    torch.manual_seed(0)
    old, advantage = -3 * torch.rand(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    now = (old + 0.3 * torch.randn(8, dtype=torch.float64)).requires_grad_()
    spec = OBJECTIVES[name]
    assert torch.autograd.gradcheck(lambda x: spec.loss(x, old, advantage, **spec.arguments).loss, now)


@given(st.lists(st.tuples(LOG_PROBS, LOG_PROBS, ADVANTAGES), min_size=2, max_size=8), st.randoms())
@pytest.mark.parametrize("name", TOKEN_OBJECTIVES)
def test_tokens_are_independent(name, tokens, source):
    """Permuting the tokens permutes the losses."""
    order = list(range(len(tokens)))
    source.shuffle(order)
    columns = torch.tensor(tokens, dtype=torch.float64).T
    spec = OBJECTIVES[name]
    loss = spec.loss(*columns, **spec.arguments).loss
    torch.testing.assert_close(spec.loss(*columns[:, order], **spec.arguments).loss, loss[order])


@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
def test_wrong_shapes_are_rejected(name):
    mask = torch.ones(3, dtype=torch.bool)
    samples = SampleSegments(mask, torch.zeros(3, dtype=torch.int64), 1)
    for shapes in ((3, 1, 3), (3, 3, 1), (1, 3, 3)):
        with pytest.raises(ValueError, match=r"must have the same shape \[N\], got \(\d,\), "):
            inputs = [{"samples": samples, "selected": mask[: shapes[0]]}[key] for key in OBJECTIVES[name].inputs]
            OBJECTIVES[name].loss(*map(torch.zeros, shapes), *inputs, **OBJECTIVES[name].arguments)


def test_dppo_kl_is_finite_at_probability_one():
    log_prob = torch.zeros(1, requires_grad=True)
    out = dppo_kl(log_prob, torch.tensor([-2.0]), torch.ones(1), 0.05)
    assert torch.isfinite(out.loss).all() and bool(out.clipped_high)
