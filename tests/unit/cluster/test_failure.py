from __future__ import annotations

import errno
import traceback
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from megarl.cluster.failure import cause, write_stacks
from megarl.core.errors import InfrastructureFailure, RunFailure, UserError

LOGS = Path("/run/logs")
USER = RayTaskError("score", "", UserError("rewards.functions: unknown function 'f'"))
STRANGER = RayTaskError("update", "", ValueError("operands could not be broadcast together"))
LOST = ActorDiedError()
JUDGE_AWAY = RayTaskError("score", "", InfrastructureFailure("the judge is away"))
FULL = RayTaskError("score", "", OSError(errno.EDQUOT, "Disk quota exceeded", "/run/rollouts"))
UNBORN = ActorDiedError(RayTaskError("__init__", "Traceback\n  File\nTypeError: takes 2 arguments", TypeError()))
ENDED = OutOfMemoryError("1 worker(s) were killed. Memory was 23.1GB used / 23.5GB limit\nand more")
PEER = RayTaskError("update", "", RuntimeError("Connection closed by peer\nmore\nand more"))


@pytest.mark.parametrize(
    ("errors", "kind", "message"),
    [
        (
            {"trainer-0": PEER, "trainer-1": LOST, "rewards-0": USER},
            UserError,
            "rewards.functions: unknown function 'f'",
        ),
        ({"rewards-0": JUDGE_AWAY, "engine-1": LOST, "trainer-0": PEER}, InfrastructureFailure, "the judge is away"),
        ({"rewards-0": JUDGE_AWAY, "rewards-1": USER}, UserError, "rewards.functions: unknown function 'f'"),
        (
            {"trainer-0": PEER, "rewards-0": FULL},
            InfrastructureFailure,
            f"update: rewards-0: [Errno {errno.EDQUOT}] Disk quota exceeded: '/run/rollouts'. Fix: free disk space, "
            "then resume with resume=auto",
        ),
        ({"trainer-0": PEER, "trainer-1": LOST}, RunFailure, "update: trainer-1 died. See /run/logs/trainer-1.log"),
        (
            {"trainer-0": PEER, "rewards-0": UNBORN},
            RunFailure,
            "update: rewards-0 did not start: TypeError: takes 2 arguments. See /run/logs/rewards-0.log",
        ),
        (
            {"trainer-0": PEER, "engine-1": ENDED},
            RunFailure,
            "update: engine-1 was killed by Ray before the machine ran out of memory: 1 worker(s) were killed. Memory "
            "was 23.1GB used / 23.5GB limit. See /run/logs/engine-1.log",
        ),
        (
            {"trainer-0": RayTaskError("update", "", ValueError("zip() argument 2 is shorter than argument 1"))},
            RunFailure,
            "update: trainer-0: ValueError: zip() argument 2 is shorter than argument 1. See /run/logs/trainer-0.log",
        ),
        ({"trainer-0": STRANGER, "trainer-1": LOST}, RunFailure, "update: trainer-1 died. See /run/logs/trainer-1.log"),
        (
            {"trainer-0": PEER},
            RunFailure,
            "update: trainer-0: RuntimeError: Connection closed by peer. See /run/logs/trainer-0.log",
        ),
    ],
)
def test_most_specific_error_is_the_cause(errors: dict[str, Exception], kind: type, message: str) -> None:
    for order in (errors, dict(reversed(errors.items()))):
        found = cause(order, "update", LOGS)
        assert type(found) is kind
        assert str(found) == message


def test_stacks_are_written_to_the_processes_logs(tmp_path: Path) -> None:
    try:
        int("no number")
    except ValueError as error:
        stack = "\x1b[36mray::TrainerActor.update()\x1b[39m\n" + "".join(traceback.format_exception(error))
        failed = RayTaskError("update", stack, error).as_instanceof_cause()
    log = tmp_path / "trainer-0.log"
    log.write_text("it says something\n")
    write_stacks({"trainer-0": failed, "trainer-1": LOST, "rewards-0": failed}, tmp_path)
    first, second, *_, last = log.read_text().splitlines()
    assert (first, second) == ("it says something", "ray::TrainerActor.update()")
    assert 'int("no number")' in log.read_text()
    assert last == "ValueError: invalid literal for int() with base 10: 'no number'"
    assert [path.name for path in tmp_path.iterdir()] == ["trainer-0.log"]
