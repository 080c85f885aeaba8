"""Helpers for GPU tests. Each rank sees its own GPU, as in a run.

Without GPUs, MEGARL_REHEARSAL=1 runs, on CPU, those tests whose calls are the same there, to find mistakes beforehand.
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
    """Return the mark of a test that needs `count` GPUs."""
    missing = torch.cuda.device_count() < count and not (REHEARSES and can_rehearse)
    return pytest.mark.skipif(missing, reason=f"requires CUDA devices: {count}, but torch finds fewer")


def run_on_gpus(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call function(store, rank, *args) on one GPU per rank. Return the results by rank or raise the first error.

    Results must be in host memory. The ranks are spawned, because a forked process cannot use its parent's CUDA.
    """
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
    os._exit(0)  # do not wait for failed peers
