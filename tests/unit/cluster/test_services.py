"""A node on which Ray does not start in time starts it again."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import ray._private.services

from megarl.cluster.services import STARTS
from megarl.cluster.session import Session
from megarl.config.load import load
from megarl.core.errors import RunFailure
from tests.paths import QUICKSTART
from tests.timing import WAIT_S

pytestmark = pytest.mark.slow
LATE = "The current node timed out during startup."


def answer() -> int:
    return 42


def start(sender: Any, num_late: int, logs: Path, scratch: Path) -> None:
    """Start a session in which Ray is late `num_late` times. Send a task's result or the error, and the names of the
    processes then."""
    find, asked = ray._private.services.get_node, []

    def find_late(*args: Any) -> Any:
        asked.append(args)
        if len(asked) <= num_late:
            raise TimeoutError(LATE)
        return find(*args)

    ray._private.services.get_node = find_late
    try:
        with Session(load(QUICKSTART), logs, scratch):
            outcome = ray.get(ray.remote(answer).remote(), timeout=WAIT_S)
            sender.send((outcome, [child.name() for child in psutil.Process().children()]))
    except RunFailure as failure:
        sender.send((str(failure), []))


def started(num_late: int, logs: Path) -> tuple[Any, list[str]]:
    context = multiprocessing.get_context("spawn")  # a session changes Ray in its process
    receiver, sender = context.Pipe(duplex=False)
    # Paths of sockets in tmp_path would be too long. Ray's processes may outlive a failed session for a moment.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        process = context.Process(target=start, args=(sender, num_late, logs, Path(scratch)))
        process.start()
        sender.close()
        try:
            assert receiver.poll(WAIT_S)
            return receiver.recv()
        finally:
            process.join(timeout=WAIT_S)
            process.kill()


def test_late_ray_starts_again(tmp_path):
    outcome, names = started(STARTS - 1, tmp_path)
    assert outcome == 42
    assert names.count("raylet") == names.count("gcs_server") == 1


def test_ray_that_never_starts_ends_the_run(tmp_path):
    outcome, _ = started(STARTS, tmp_path)
    assert f"in {STARTS} attempts: {LATE} Fix: " in outcome
