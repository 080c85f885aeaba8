"""Megatron's subdivision of the process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.megatron import parallel
from tests.forked import run_ranks
from tests.unit.resharding.cases import layout_of


def seconds_of_groups(store: dist.Store, rank: int) -> list[float]:
    """Return the seconds that collectives of each kind of group wait at most."""
    parallel.initialize(layout_of(pp=2), store, rank, seed=0, timeout_s=90)
    groups = [
        dist.group.WORLD,
        parallel.host_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_model_parallel_group(),
    ]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_no_group_waits_longer_than_a_call_may_take() -> None:
    assert run_ranks(2, seconds_of_groups) == [[90] * 6] * 2
