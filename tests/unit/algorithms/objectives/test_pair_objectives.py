"""Pair objectives compared with their formulas, one pair at a time."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.objectives.ipo import ipo
from megarl.algorithms.objectives.slic import slic
from megarl.algorithms.registry import OBJECTIVES
from megarl.algorithms.rewards import bradley_terry, margins
from megarl.config.load import load
from tests.paths import CONFIGS

MARGINS = st.floats(-30, 30)


@given(st.lists(MARGINS, min_size=1, max_size=6), st.sampled_from([0.0, 0.1, 0.4]))
def test_bradley_terry_is_the_preference_cross_entropy(values, smoothing):
    losses = bradley_terry(torch.tensor(values, dtype=torch.float64), smoothing)
    for margin, loss in zip(values, losses.tolist(), strict=True):
        wins, loses = 1 / (1 + math.exp(-margin)), 1 / (1 + math.exp(margin))
        expected = -(1 - smoothing) * math.log(wins) - smoothing * math.log(loses)
        assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(MARGINS)
def test_bradley_terry_with_half_smoothing_is_symmetric(margin):
    """At ε = ½ neither response of a pair is preferred."""
    one, other = (bradley_terry(torch.tensor([sign * margin]).double(), 0.5) for sign in (1, -1))
    torch.testing.assert_close(one, other)


def test_bradley_terry_optimum_matches_label_confidence():
    best = torch.tensor([math.log(0.9 / 0.1)], dtype=torch.float64, requires_grad=True)
    bradley_terry(best, 0.1).sum().backward()
    assert best.grad.item() == pytest.approx(0, abs=1e-12)


def test_ipo_optimal_margin_is_one_over_two_beta():
    """The margin is that of the log-ratios; ipo receives β times the margin."""
    margin = torch.tensor([2.5, 1.0, -3.0], dtype=torch.float64, requires_grad=True)
    loss = ipo(0.2 * margin, beta=0.2)
    assert loss.tolist() == pytest.approx([0.0, 2.25, 30.25])
    loss.sum().backward()
    assert margin.grad.tolist() == pytest.approx([0.0, -3.0, -11.0])


def test_slic_hinge_stops_at_margin_but_imitation_continues():
    """Three worked pairs with δ = 2 and λ = 0.25: beyond the margin, at 0, and in the wrong order."""
    better = torch.tensor([-4.0, -2.0, -8.0], dtype=torch.float64, requires_grad=True)
    worse = torch.tensor([-6.5, -2.0, -5.0], dtype=torch.float64, requires_grad=True)
    losses = slic(better - worse, better, hinge_margin=2.0, regularisation=0.25)
    assert losses.tolist() == [1.0, 2.5, 7.0]
    losses.sum().backward()
    assert better.grad.tolist() == [-0.25, -1.25, -1.25]
    assert worse.grad.tolist() == [0.0, 1.0, 1.0]


def test_slic_uses_the_margin_from_the_paper():
    """SLiC-HF uses a margin of 1 between log-probs without length normalization. The paper does not report λ."""
    config = load(CONFIGS / "smollm2-cpu-slic.yaml")
    options = config.algorithm.objective.options()
    assert options["hinge_margin"] == 1.0 and not config.algorithm.objective.option("length_normalised")


@pytest.mark.parametrize("loss", [lambda m: bradley_terry(m, 0.2), lambda m: ipo(m, 0.3)])
def test_pair_losses_pass_gradcheck(loss):
    assert torch.autograd.gradcheck(loss, torch.tensor([-2.0, 0.0, 0.7], dtype=torch.float64, requires_grad=True))


def test_margins_pairs_consecutive_rewards():
    assert margins(torch.tensor([1.0, 0.25, -2.0, 3.0])).tolist() == [0.75, -5.0]
    assert margins(torch.zeros(0)).shape == (0,)


def test_wrong_shapes_are_rejected():
    with pytest.raises(ValueError, match=r"rewards must have shape \[2·P\], got \(3,\)"):
        margins(torch.zeros(3))
    for better in (torch.zeros(3), torch.zeros(2, 1)):
        with pytest.raises(ValueError, match=r"margin and better must have the same shape \[N\]"):
            slic(torch.zeros(2), better, 1.0, 0.0)
    for loss in (lambda m: bradley_terry(m, 0.0), lambda m: ipo(m, 0.1)):
        with pytest.raises(ValueError, match=r"margin must have shape \[P\], got \(2, 1\)"):
            loss(torch.zeros(2, 1))


def test_dpo_and_reward_model_equal_bradley_terry():
    margin = torch.tensor([-2.0, 0.0, 0.7])
    for name in ("dpo", "reward_model"):
        assert OBJECTIVES[name].loss(margin, label_smoothing=0.1).equal(bradley_terry(margin, 0.1))
