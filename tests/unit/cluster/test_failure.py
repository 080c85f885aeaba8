from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from megarl.cluster.failure import RunFailure, cause

LOGS = Path("/run/logs")
USER = RayTaskError("score", "", ValueError("rewards.functions: no function 'f'"))
LOST = ActorDiedError()
PEER = RayTaskError("update", "", RuntimeError("Connection closed by peer\nmore\nand more"))


@pytest.mark.parametrize(
    ("errors", "kind", "message"),
    [
        ({"trainer-0": PEER, "trainer-1": LOST, "rewards-0": USER}, ValueError, "rewards.functions: no function 'f'"),
        ({"trainer-0": PEER, "trainer-1": LOST}, RunFailure, "update: trainer-1 died; see /run/logs/trainer-1.log"),
        (
            {"trainer-0": PEER},
            RunFailure,
            "update: trainer-0: RuntimeError: Connection closed by peer; see /run/logs/trainer-0.log",
        ),
    ],
)
def test_the_most_telling_error_is_the_cause(errors: dict[str, Exception], kind: type, message: str) -> None:
    for order in (errors, dict(reversed(errors.items()))):
        found = cause(order, "update", LOGS)
        assert type(found) is kind
        assert str(found) == message
