"""What the tests for GPUs share. Each rank sees a GPU of its own, as in a run.

Where there are none, MEGARL_REHEARSAL=1 runs those tests on CPU whose calls are the same there: it shows that a test is
right before a GPU has it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.timing import RUN_S

REHEARSES = os.environ.get("MEGARL_REHEARSAL") == "1"


def needs_gpus(count: int, can_rehearse: bool = True) -> pytest.MarkDecorator:
    """Return the mark of a test for so many GPUs."""
    missing = torch.cuda.device_count() < count and not (REHEARSES and can_rehearse)
    return pytest.mark.skipif(missing, reason=f"needs CUDA devices: {count}, and torch finds fewer")


def run_on_gpus(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """function(store, rank, *args) on a GPU for each rank; returns the results by rank, their tensors in host memory,
    or raises the first error. The ranks are new processes: a fork has no CUDA where its parent has it."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(target=_rank, args=(sender, Path(folder) / "store", rank, world_size, function, args))
            for rank, (_, sender) in enumerate(pipes)
        ]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(number) for number in range(world_size)]
        try:
            for rank, process in enumerate(ranks):
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank]
                process.start()
        finally:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            os.environ.update({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        try:
            return [_receive(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _receive(rank: int, receiver: Connection) -> Any:
    assert receiver.poll(RUN_S), f"rank {rank} did not answer within {RUN_S} s"
    succeeded, result = pickle.loads(receiver.recv_bytes())
    assert succeeded, f"rank {rank} failed:\n{result}"
    return result


def _rank(sender: Connection, store: Path, rank: int, world_size: int, function: Callable, args: tuple) -> None:
    try:
        outcome = (True, function(dist.FileStore(str(store), world_size), rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))
    os._exit(0)  # without waiting for peers that have failed
