"""Run a function on several ranks forked from this process, so that torch and Megatron are imported only once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from typing import Any

import torch
import torch.distributed as dist

import megarl.megatron.workers.actor
import megarl.megatron.workers.classifier
import megarl.megatron.workers.critic
import megarl.megatron.workers.implicit_reward
import megarl.megatron.workers.reward_model  # noqa: F401  imported once for all ranks
from tests.timing import QUIET_S, RANKS_S, WAIT_S


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Call function(store, rank, *args, **kwargs) on all ranks and return the results by rank.

    Raise all errors if a rank fails, the cause first: the other ranks only report a closed connection. Each process
    stays alive until all ranks have finished, because their last collective may still be running.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        receivers, results = {}, {}
        finished = context.Event()
        ranks = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            inputs = (sender, finished, path, rank, world_size, function, args, kwargs)
            ranks.append(context.Process(target=_rank, args=inputs))
            ranks[-1].start()
            sender.close()  # so that the pipe closes when the process exits
            receivers[receiver] = rank
        failures = []
        try:
            while receivers:
                answered = wait([*receivers], timeout=QUIET_S if failures else RANKS_S)
                if not answered:
                    assert failures, f"ranks {sorted(receivers.values())} did not answer within {RANKS_S} s"
                    break  # do not wait for the others, which wait for the failed rank
                for receiver in answered:
                    rank = receivers.pop(receiver)
                    try:
                        succeeded, results[rank] = pickle.loads(receiver.recv_bytes())
                    except EOFError:  # other ranks may notice the closed connections of a killed one first
                        ranks[rank].join(timeout=WAIT_S)
                        failures.insert(0, f"rank {rank} ended with exit code {ranks[rank].exitcode}")
                        continue
                    if not succeeded:
                        failures.append(f"rank {rank} failed:\n{results[rank]}")
        finally:
            finished.set()
            for process in ranks:
                process.join(timeout=0 if failures else WAIT_S)
                process.kill()
        assert not failures, "\n".join(failures)
        return [results[rank] for rank in range(world_size)]


def _rank(
    sender: Connection,
    finished: Event,
    path: str,
    rank: int,
    world_size: int,
    function: Callable,
    args: tuple,
    kwargs: dict,
) -> None:
    torch.set_num_threads(1)
    try:
        outcome = (True, function(dist.FileStore(path, world_size), rank, *args, **kwargs))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))  # not torch's pickler, whose shared memory ends with this process
    if outcome[0]:
        finished.wait(RANKS_S)
    os._exit(0)  # skip the exit handlers inherited from the parent
