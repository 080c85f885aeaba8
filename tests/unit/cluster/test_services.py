"""A node on which Ray does not start in time starts it again."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
import pytest
import ray
import ray._private.node
import ray._private.services

from megarl.cluster.services import STARTS
from megarl.cluster.session import Session
from megarl.config.load import load
from megarl.core.errors import RunFailure
from tests.paths import QUICKSTART
from tests.timing import START_S, WAIT_S

pytestmark = pytest.mark.slow
Late = Literal["once", "dies", "always"]
FAILURE = "no such node"


def answer() -> int:
    return 42


def start(sender: Any, late: Late, logs: Path, scratch: Path) -> None:
    """Start a session in which the raylet registers after Ray's timeout, is killed once, or never registers. Send the
    result of a task, or the error, and the names of this process's children."""
    find, asked = ray._private.services.get_node, []

    def find_late(*args: Any) -> Any:
        asked.append(args)
        if late == "always":
            raise ValueError(FAILURE)
        if late == "dies" and len(asked) == 1:
            [raylet] = [child for child in psutil.Process().children() if child.name() == "raylet"]
            for process in (*raylet.children(recursive=True), raylet):
                process.kill()
        if len(asked) <= 3:
            raise RuntimeError(FAILURE)
        return find(*args)

    ray._private.services.get_node = find_late
    clock = itertools.count(step=31)  # each lookup takes longer than Ray's timeout
    ray._private.node.time = SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep, time=time.time)
    try:
        with Session(load(QUICKSTART), logs, scratch):
            outcome = ray.get(ray.remote(answer).remote(), timeout=WAIT_S)
            sender.send((outcome, [child.name() for child in psutil.Process().children()]))
    except RunFailure as failure:
        sender.send((str(failure), []))


def started(late: Late, logs: Path) -> tuple[Any, list[str]]:
    context = multiprocessing.get_context("spawn")  # spawn, because a session modifies Ray in its process
    receiver, sender = context.Pipe(duplex=False)
    # Avoid tmp_path: socket paths in it would be too long. Ray may still write for a moment after a failed start.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        process = context.Process(target=start, args=(sender, late, logs, Path(scratch)))
        process.start()
        sender.close()
        try:
            assert receiver.poll(START_S)
            return receiver.recv()
        finally:
            process.join(timeout=WAIT_S)
            process.kill()


def test_late_ray_is_awaited(tmp_path):
    """Without the wait, all attempts would have failed."""
    outcome, names = started("once", tmp_path)
    assert outcome == 42
    assert names.count("raylet") == names.count("gcs_server") == 1


def test_ray_that_dies_starts_again(tmp_path, capfd):
    outcome, names = started("dies", tmp_path)
    assert outcome == 42
    assert names.count("raylet") == names.count("gcs_server") == 1
    assert "trying again" in capfd.readouterr().out


def test_ray_that_never_starts_ends_the_run(tmp_path):
    outcome, _ = started("always", tmp_path)
    assert f"in {STARTS} attempts: {FAILURE} Fix: " in outcome
