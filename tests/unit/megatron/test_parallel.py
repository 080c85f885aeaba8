"""Megatron's process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.megatron import parallel
from tests.forked import run_ranks
from tests.timing import WAIT_S
from tests.unit.resharding.cases import layout_of


def group_timeouts(store: dist.Store, rank: int) -> list[float]:
    """Return the collective timeout of each kind of process group, in seconds."""
    parallel.initialize(layout_of(pp=2), store, rank, seed=0, timeout_s=WAIT_S)
    process_groups = [
        dist.group.WORLD,
        parallel.host_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_model_parallel_group(),
    ]
    return [
        process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for process_group in process_groups
    ]


def test_all_process_groups_share_the_timeout() -> None:
    assert run_ranks(2, group_timeouts) == [[WAIT_S] * 6] * 2
