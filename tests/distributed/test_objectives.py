"""Every objective, aggregation, correction and KL form through Megatron. In any layout, loss and gradients match plain
Hugging Face and torch, which process one sample at a time."""

from __future__ import annotations

import pytest

from tests.closeness import Expected
from tests.marks import exhaustive_but
from tests.objective_cases import CASES, LAYOUTS, Results, World, check, expected


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World.make(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def single_samples(world) -> dict[str, Expected[Results]]:
    return expected(world, CASES)


@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "CP2, padded"))
def test_gradients_equal_those_of_single_samples(world, single_samples, layout):
    check(world, CASES, single_samples, layout)
