"""Ranks forked for a test report the error that caused the others', and outlive each other's last collective."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.forked import run_ranks


def reduce_after(seconds: float, store, rank: int) -> dist.Work:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    time.sleep(seconds if rank == 0 else 0)
    return dist.all_reduce(torch.ones(1), async_op=True)


def raises(store, rank: int) -> None:
    work = reduce_after(0, store, rank) if rank == 0 else None
    if rank == 1:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        raise ValueError("the cause")
    work.wait()


def is_killed(store, rank: int) -> None:
    work = reduce_after(0, store, rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work.wait()


def leaves_early(store, rank: int) -> None:
    """Rank 1 returns before rank 0 has joined its collective."""
    work = reduce_after(1, store, rank)
    if rank == 0:
        work.wait()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, r"rank 1 failed:(\n  .*|\nTrace.*)+\nValueError: the cause"),
        (is_killed, "rank 1 ended with exit code -9"),
    ],
)
def test_cause_is_reported_first(function, message):
    with pytest.raises(AssertionError, match="^" + message):
        run_ranks(2, function)


def test_ranks_wait_for_each_other():
    assert run_ranks(2, leaves_early) == [None, None]
