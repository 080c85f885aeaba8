"""Routes reported by engines; invalid routes must not be trained on."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.core.completion import NO_ROUTE
from megarl.models.huggingface import Experts
from megarl.rollout.routes import expert_layer_routes, whole_routes


def mixture(count: int = 8, layers: tuple[bool, ...] = (True, True)) -> Experts:
    return Experts(count=count, active=2, intermediate=32, shared_intermediate=0, layers=layers)


def reported(num_tokens: int, count: int = 8, layers: int = 2) -> np.ndarray:
    scores = np.random.default_rng(0).random((num_tokens, layers, count))
    return scores.argsort(axis=-1)[..., :2].astype(np.uint8)


def test_last_token_has_no_route():
    routes = whole_routes(mixture(), reported(6), 7)
    assert np.array_equal(routes[:6], reported(6))
    assert (routes[6] == NO_ROUTE).all()


def test_routes_after_the_last_token_are_dropped():
    assert np.array_equal(whole_routes(mixture(), reported(6), 4), reported(6)[:4])


def test_routes_of_zeros_are_rejected():
    zeros = reported(6)
    zeros[:, 1] = 0
    with pytest.raises(RuntimeError, match=r"do not have 2 distinct experts \(of 8\) per token and layer"):
        whole_routes(mixture(), zeros, 7)


def test_physical_expert_indices_are_rejected():
    """With load balancing, popular experts are replicated, so physical indices exceed the number of experts."""
    physical = reported(6)
    physical[3, 0, 1] = 8
    with pytest.raises(RuntimeError, match=r"do not have 2 distinct experts \(of 8\)"):
        whole_routes(mixture(), physical, 7)


def test_dense_layers_are_dropped():
    layers = (False, True, False, True)
    all_layers = np.zeros((6, 4, 2), np.uint8)
    all_layers[:, [1, 3]] = reported(6)
    assert np.array_equal(expert_layer_routes(mixture(layers=layers), all_layers), reported(6))


def test_missing_routes_are_rejected():
    with pytest.raises(RuntimeError, match="the engine reported no routes for a request"):
        expert_layer_routes(mixture(), None)


@pytest.mark.parametrize(("count", "dtype"), [(128, np.int8), (129, np.int16), (256, np.int16)])
def test_highest_expert_index_differs_from_no_route(count, dtype):
    highest = np.array([[[count - 1, 0]]], np.uint16)
    routes = whole_routes(mixture(count, layers=(True,)), highest, 2)
    assert routes.dtype == dtype
    assert routes.tolist() == [[[count - 1, 0]], [[NO_ROUTE, NO_ROUTE]]]


@pytest.mark.parametrize("experts", [[1, 1, 2, 3], [1, 2, 2, 3], [1, 2, 3, 3], [3, 1, 2, 1]])
def test_duplicate_experts_are_rejected(experts):
    routed = Experts(count=8, active=4, intermediate=32, shared_intermediate=0, layers=(True,))
    with pytest.raises(RuntimeError, match=r"do not have 4 distinct experts \(of 8\)"):
        whole_routes(routed, np.array([[[0, 1, 2, 3]], [experts]], np.uint8), 3)
