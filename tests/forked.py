"""Run a function on several ranks forked from this process, so that torch and Megatron are imported only once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import megarl.megatron.workers.actor
import megarl.megatron.workers.classifier
import megarl.megatron.workers.critic
import megarl.megatron.workers.implicit_reward
import megarl.megatron.workers.reward_model  # noqa: F401  imported once for all ranks
from tests.timing import RANKS_S, WAIT_S


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Call function(store, rank, *args, **kwargs) on all ranks. Return the results by rank or raise the first error."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(target=_rank, args=(sender, path, rank, world_size, function, args, kwargs))
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        try:
            return [_receive(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
        finally:
            for process in ranks:
                process.join(timeout=WAIT_S)
                process.kill()


def _receive(rank: int, receiver: Connection) -> Any:
    assert receiver.poll(RANKS_S), f"rank {rank} did not answer within {RANKS_S} s"
    succeeded, result = pickle.loads(receiver.recv_bytes())
    if not succeeded:
        raise AssertionError(f"rank {rank} failed:\n{result}")
    return result


def _rank(
    sender: Connection, path: str, rank: int, world_size: int, function: Callable, args: tuple, kwargs: dict
) -> None:
    torch.set_num_threads(1)
    try:
        outcome = (True, function(dist.FileStore(path, world_size), rank, *args, **kwargs))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))  # a plain pickle: torch's shared memory would vanish with this process
    sender.close()
    os._exit(0)  # skip the exit handlers inherited from the parent
