import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.metrics import Metric, merge, merge_updates, values

numbers = st.floats(-1e3, 1e3)
weights = st.floats(0.01, 100)


@given(st.lists(st.tuples(numbers, weights), min_size=1, max_size=8))
def test_mean_is_weighted(parts):
    merged = merge({"loss": Metric(value, weight)} for value, weight in parts)
    expected = np.average([value for value, _ in parts], weights=[weight for _, weight in parts])
    assert merged["loss"].value == pytest.approx(expected, abs=1e-9)
    assert merged["loss"].weight == pytest.approx(sum(weight for _, weight in parts))


@given(st.lists(numbers, min_size=1, max_size=8))
def test_sum_max_and_min(parts):
    for reduction, reference in (("sum", math.fsum), ("max", max), ("min", min)):
        merged = merge({"x": Metric(value, reduction=reduction)} for value in parts)
        assert merged["x"].value == pytest.approx(reference(parts), abs=1e-9)


@given(st.lists(st.tuples(numbers, weights), min_size=2, max_size=8), st.data())
def test_merge_in_two_stages_equals_merge_at_once(parts, data):
    """Merge over microbatches, then over ranks."""
    dicts = [
        {"mean": Metric(value, weight), "sum": Metric(value, weight, "sum"), "max": Metric(value, weight, "max")}
        for value, weight in parts
    ]
    cut = data.draw(st.integers(1, len(dicts) - 1))
    staged, direct = merge([merge(dicts[:cut]), merge(dicts[cut:])]), merge(dicts)
    assert values(staged) == pytest.approx(values(direct), abs=1e-9)


def test_merge_updates_averages_sums():
    """An update's loss is a sum over its ranks. Weighted means and maxima are reduced as usual."""
    updates = [
        {"loss": Metric(loss, reduction="sum"), "kl": Metric(kl, tokens), "ratio": Metric(ratio, reduction="max")}
        for loss, kl, tokens, ratio in ((3.0, 0.25, 3.0, 1.5), (1.0, 0.75, 1.0, 1.25))
    ]
    assert values(merge_updates(updates)) == {"loss": 2.0, "kl": 0.375, "ratio": 1.5}
    assert values(merge_updates(updates[:1])) == values(updates[0])


def test_part_with_weight_zero_does_not_count():
    merged = merge([{"reward": Metric(math.nan, 0.0)}, {"reward": Metric(2.0, 3.0)}])
    assert merged["reward"] == Metric(2.0, 3.0)


def test_mean_with_total_weight_zero_is_left_out():
    assert merge([{"reward": Metric(0.0, 0.0), "lr": Metric(1e-5)}]) == {"lr": Metric(1e-5)}


def test_names_in_only_some_parts_are_kept():
    merged = merge([{"a": Metric(1.0)}, {"b": Metric(2.0, reduction="sum")}])
    assert values(merged) == {"a": 1.0, "b": 2.0}


def test_conflicting_reductions_of_a_name_fail():
    with pytest.raises(AssertionError, match="loss has conflicting reductions"):
        merge([{"loss": Metric(1.0)}, {"loss": Metric(1.0, reduction="sum")}])
