"""Convert the expert indices reported by an engine to a sample's routes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megarl.core.completion import NO_ROUTE
from megarl.models.huggingface import Experts

OFF = "Fix: set actor.experts.replay_routes=false"


def expert_layer_routes(routed: Experts, routes: NDArray[np.integer] | None) -> NDArray[np.integer]:
    """Select the routes for layers with experts from routes for all layers, int [tokens, layers, experts per token].
    vLLM reports zeros for dense layers. Raise a RuntimeError if it has reported nothing."""
    if routes is None:
        raise RuntimeError(f"actor.experts.replay_routes=true: the engine reported no routes for a request. {OFF}")
    return routes[:, np.flatnonzero(routed.layers)]


def whole_routes(routed: Experts, computed: NDArray[np.integer], num_tokens: int) -> NDArray[np.signedinteger]:
    """Return the routes for `num_tokens` tokens, padded with NO_ROUTE. The last sampled token has no routes, because
    the engine has not processed it as an input. Raise a RuntimeError if a token's expert indices are out of range or
    not distinct, because training would use them. `computed` contains the engine's routes, int [processed tokens,
    layers with experts, experts per token]."""
    layers = sum(routed.layers)
    assert computed.shape[1:] == (layers, routed.active), f"the routes have the wrong shape {computed.shape}"
    in_order = np.sort(computed, axis=-1)
    has_duplicates = (in_order[..., 1:] == in_order[..., :-1]).any()
    if has_duplicates or computed.max(initial=0) >= routed.count or computed.min(initial=0) < 0:
        raise RuntimeError(
            f"actor.experts.replay_routes=true: the engine's routes do not have {routed.active} distinct experts (of "
            f"{routed.count}) per token and layer. {OFF}"
        )
    routes = np.full((num_tokens, *computed.shape[1:]), NO_ROUTE, f"int{8 * routed.number_bytes}")
    routes[: len(computed)] = computed[:num_tokens]
    return routes
