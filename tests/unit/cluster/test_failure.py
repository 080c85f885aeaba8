from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from megarl.cluster.failure import RunFailure, cause

LOGS = Path("/run/logs")
USER = RayTaskError("score", "", ValueError("rewards.functions: no function 'f'"))
LOST = ActorDiedError()
UNBORN = ActorDiedError(RayTaskError("__init__", "Traceback\n  File\nTypeError: takes 2 arguments", TypeError()))
ENDED = OutOfMemoryError("1 worker(s) were killed. Memory was 23.1GB used / 23.5GB limit\nand more")
PEER = RayTaskError("update", "", RuntimeError("Connection closed by peer\nmore\nand more"))


@pytest.mark.parametrize(
    ("errors", "kind", "message"),
    [
        ({"trainer-0": PEER, "trainer-1": LOST, "rewards-0": USER}, ValueError, "rewards.functions: no function 'f'"),
        ({"trainer-0": PEER, "trainer-1": LOST}, RunFailure, "update: trainer-1 died; see /run/logs/trainer-1.log"),
        (
            {"trainer-0": PEER, "rewards-0": UNBORN},
            RunFailure,
            "update: rewards-0 did not start: TypeError: takes 2 arguments; see /run/logs/rewards-0.log",
        ),
        (
            {"trainer-0": PEER, "engine-1": ENDED},
            RunFailure,
            "update: engine-1 was ended by Ray before the machine ran out of memory: 1 worker(s) were killed. Memory "
            "was 23.1GB used / 23.5GB limit; see /run/logs/engine-1.log",
        ),
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
