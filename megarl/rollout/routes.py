"""Routes as samples have them, from the experts that an engine tells."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import NO_ROUTE
from megarl.models.huggingface import Experts


def of_layers_with_experts(routed: Experts, told: NDArray[np.integer]) -> NDArray[np.integer]:
    """Returns the rows of the layers that have experts, of those of all layers, int [tokens, layers, experts per
    token]: vLLM tells zeros of dense ones."""
    return told[:, np.flatnonzero(routed.layers)]


def whole_routes(routed: Experts, computed: NDArray[np.integer], num_tokens: int) -> NDArray[np.signedinteger]:
    """Returns the routes of `num_tokens` tokens, of which the engine has computed the first: the last one was sampled,
    and nothing after it.

    computed   int [tokens, layers with experts, experts per token]

    Raises RuntimeError for numbers that are no experts of a token: trained on, they would go unseen.
    """
    layers = sum(routed.layers)
    assert computed.shape[1:] == (layers, routed.active), f"routes of shape {computed.shape}"
    names_one_twice = (computed[..., 0] == computed[..., -1]).any() and routed.active > 1
    if names_one_twice or computed.max(initial=0) >= routed.count or computed.min(initial=0) < 0:
        raise RuntimeError(
            f"the engine's routes are not {routed.active} of {routed.count} experts for each token and layer; set "
            "actor.experts.replay_routes=false"
        )
    routes = np.full((num_tokens, *computed.shape[1:]), NO_ROUTE, f"int{8 * routed.number_bytes}")
    routes[: len(computed)] = computed[:num_tokens]
    return routes
