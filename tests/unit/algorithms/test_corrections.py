"""Worked examples of off-policy corrections for two samples: log-ratios 1, (untrained), −3; and 0.5."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.corrections import factors
from megarl.algorithms.sample_segments import SampleSegments

LOG_RATIO = torch.tensor([1.0, 0.0, -3.0, 0.5], dtype=torch.float64)
SAMPLES = SampleSegments(torch.tensor([True, False, True, True]), torch.tensor([0, 0, 0, 1]), 2)
TRAINED = [0, 2, 3]


def correction_factors(*arguments) -> list[float]:
    return factors(LOG_RATIO, SAMPLES, *arguments).factor[TRAINED].tolist()


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("token", [math.exp(1), math.exp(-3), math.exp(0.5)]),
        ("sequence", [math.exp(-2), math.exp(-2), math.exp(0.5)]),
        ("geometric", [math.exp(-1), math.exp(-1), math.exp(0.5)]),
    ],
)
def test_weights_match_worked_example(weight, expected):
    assert correction_factors(weight, None, None, 0.5, 5.0) == pytest.approx(expected)
    assert correction_factors(weight, 1.6, None, 0.5, 5.0) == pytest.approx([min(w, 1.6) for w in expected])


def test_weight_floor_raises_small_weights():
    """The ratios are e, e⁻³ and e^½, limited to [0.6, 1.6]."""
    assert correction_factors("token", 1.6, None, 0.5, 5.0, 0.6) == pytest.approx([1.6, 0.6, 1.6])
    assert correction_factors("token", None, None, 0.5, 5.0, 0.6) == pytest.approx([math.exp(1), 0.6, math.exp(0.5)])
    out = factors(LOG_RATIO, SAMPLES, "token", 2.0, None, 0.5, 5.0, 0.6)
    assert out.limited[TRAINED].tolist() == [True, True, False]


@pytest.mark.parametrize(("mask", "kept"), [("token", [1, 0, 1]), ("sequence", [0, 0, 1]), ("geometric", [0, 0, 1])])
def test_masks_match_worked_example(mask, kept):
    assert correction_factors(None, 2.0, mask, 0.4, 5.0) == kept
    assert correction_factors(None, 2.0, mask, 0.4, 1.5) == [0, 0, 0]
    assert correction_factors(None, 2.0, "geometric", 0.3, 5.0) == [1, 1, 1]


def test_icepop_keeps_weights_within_bounds():
    out = factors(LOG_RATIO, SAMPLES, "token", None, "token", 0.5, 5.0)
    assert out.factor[TRAINED].tolist() == pytest.approx([math.exp(1), 0, math.exp(0.5)])
    assert out.masked[TRAINED].tolist() == [False, True, False] and not out.limited.any()


def test_no_correction_has_unit_factors():
    out = factors(LOG_RATIO, SAMPLES, None, 2.0, None, 0.5, 5.0)
    assert out.factor.tolist() == [1, 1, 1, 1] and out.weight is None and out.masked is None


def test_weights_are_finite_and_detached():
    log_ratio = torch.tensor([500.0, 500.0], requires_grad=True)
    samples = SampleSegments(torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1)
    out = factors(log_ratio, samples, "sequence", None, None, 0.5, 5.0)
    assert not out.factor.requires_grad and torch.isfinite(out.factor).all()


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6))
def test_levels_are_consistent(values):
    """The sequence weight is the product of the token weights, and the n-th power of the geometric weight."""
    n = len(values)
    samples = SampleSegments(torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64), 1)
    factor_by_level = {
        level: factors(torch.tensor(values, dtype=torch.float64), samples, level, None, None, 0.5, 5.0).factor
        for level in ("token", "sequence", "geometric")
    }
    product = factor_by_level["token"].prod().item()
    assert factor_by_level["sequence"][0].item() == pytest.approx(product)
    assert factor_by_level["geometric"][0].item() ** n == pytest.approx(product)


def test_wrong_shapes_are_rejected():
    with pytest.raises(ValueError, match="same shape"):
        factors(torch.zeros(3), SAMPLES, "sequence", None, None, 0.5, 5.0)
    with pytest.raises(ValueError, match="same shape"):
        factors(torch.zeros(3), SAMPLES, "token", None, None, 0.5, 5.0)
