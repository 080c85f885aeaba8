"""The label loss compared with its formula, one token at a time."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.registry import OBJECTIVES
from megarl.algorithms.rewards import binary_cross_entropy

PAIRS = st.lists(st.tuples(st.floats(-30, 30), st.floats(0, 1)), min_size=1, max_size=6)


@given(PAIRS)
def test_loss_is_the_label_cross_entropy(pairs):
    scores, labels = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    for (score, label), loss in zip(pairs, binary_cross_entropy(scores, labels).tolist(), strict=True):
        right, wrong = 1 / (1 + math.exp(-score)), 1 / (1 + math.exp(score))
        assert loss == pytest.approx(-label * math.log(right) - (1 - label) * math.log(wrong), rel=1e-9, abs=1e-12)


def test_gradient_is_predicted_minus_label_probability():
    score = torch.tensor([math.log(0.9 / 0.1), 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    binary_cross_entropy(score, torch.tensor([0.9, 1.0, 0.25], dtype=torch.float64)).sum().backward()
    assert score.grad.tolist() == pytest.approx([0.0, -0.5, 0.25], abs=1e-12)


def test_step_and_token_reward_models_use_the_label_loss():
    score, label = torch.tensor([-2.0, 0.5, 40.0]), torch.tensor([0.0, 0.3, 1.0])
    for name in ("process_reward_model", "token_reward_model"):
        assert OBJECTIVES[name].loss(score, label).equal(binary_cross_entropy(score, label))


def test_different_shapes_are_rejected():
    with pytest.raises(ValueError, match=r"score and label must have the same shape"):
        binary_cross_entropy(torch.zeros(2), torch.zeros(3))
