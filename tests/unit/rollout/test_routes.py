"""Routes as engines tell them: what would be trained on silently if it went unseen."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.core.types import NO_ROUTE
from megarl.models.huggingface import Experts
from megarl.rollout.routes import of_layers_with_experts, whole_routes


def mixture(count: int = 8, layers: tuple[bool, ...] = (True, True)) -> Experts:
    return Experts(count=count, active=2, intermediate=32, shared_intermediate=0, layers=layers)


def told(num_tokens: int, count: int = 8, layers: int = 2) -> np.ndarray:
    scores = np.random.default_rng(0).random((num_tokens, layers, count))
    return scores.argsort(axis=-1)[..., :2].astype(np.uint8)


def test_the_last_token_has_no_route():
    routes = whole_routes(mixture(), told(6), 7)
    assert np.array_equal(routes[:6], told(6))
    assert (routes[6] == NO_ROUTE).all()


def test_what_was_computed_after_the_last_token_is_left_out():
    assert np.array_equal(whole_routes(mixture(), told(6), 4), told(6)[:4])


def test_routes_of_zeros_are_refused():
    zeros = told(6)
    zeros[:, 1] = 0
    with pytest.raises(RuntimeError, match="not 2 of 8 experts for each token and layer"):
        whole_routes(mixture(), zeros, 7)


def test_numbers_of_places_instead_of_experts_are_refused():
    """Places have numbers beyond those of the experts where popular experts are there several times."""
    places = told(6)
    places[3, 0, 1] = 8
    with pytest.raises(RuntimeError, match="not 2 of 8 experts"):
        whole_routes(mixture(), places, 7)


def test_dense_layers_have_no_row():
    layers = (False, True, False, True)
    of_all = np.zeros((6, 4, 2), np.uint8)
    of_all[:, [1, 3]] = told(6)
    assert np.array_equal(of_layers_with_experts(mixture(layers=layers), of_all), told(6))


@pytest.mark.parametrize(("count", "dtype"), [(128, np.int8), (129, np.int16), (256, np.int16)])
def test_the_highest_expert_is_not_taken_for_none(count, dtype):
    highest = np.array([[[count - 1, 0]]], np.uint16)
    routes = whole_routes(mixture(count, layers=(True,)), highest, 2)
    assert routes.dtype == dtype
    assert routes.tolist() == [[[count - 1, 0]], [[NO_ROUTE, NO_ROUTE]]]
