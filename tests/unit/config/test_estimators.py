"""The table of estimators against the schema."""

from typing import get_args

import pytest

from megarl.config.estimators import BASELINES, ESTIMATORS
from megarl.config.load import load
from megarl.config.schema import Advantage
from tests.paths import BASE


def config(*overrides: str):
    return load(BASE, ["model.path=m", "data.source=arithmetic", *overrides]).algorithm.advantage


def test_the_table_has_the_names_and_options_of_the_schema():
    assert set(ESTIMATORS) == set(get_args(Advantage.model_fields["estimator"].annotation))
    options = set(Advantage.model_fields) - {"estimator"}
    assert options == {name for estimator in ESTIMATORS.values() for name in estimator.options}
    assert {estimator.baseline for estimator in ESTIMATORS.values()} == set(BASELINES)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_options_have_their_own_default_and_can_be_given(estimator):
    plain = config(f"algorithm.advantage.estimator={estimator}")
    assert {name: plain.option(name) for name in plain.spec.options} == plain.spec.options
    given = config(f"algorithm.advantage.estimator={estimator}", "algorithm.advantage.whiten=true")
    assert given.option("whiten") is True
