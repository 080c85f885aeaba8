"""Routes of requests that an engine preempts and recomputes."""

from __future__ import annotations

import numpy as np

from megarl.rollout.vllm.route_capture import RouteCapture


def test_recomputed_tokens_keep_their_first_routes():
    """Four tokens are routed to expert 1. After an update, they are recomputed, followed by a fifth token."""
    steps = [
        (0, np.full((3, 1, 1), 1)),
        (3, np.full((1, 1, 1), 1)),
        (0, np.full((4, 1, 1), 2)),
        (4, np.full((1, 1, 1), 2)),
    ]
    assert RouteCapture._joined(steps).flatten().tolist() == [1, 1, 1, 1, 2]
