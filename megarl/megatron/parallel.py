"""The trainer's process group and Megatron's subdivision of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.model_schema import Layout
from megarl.core import device
from megarl.megatron import cpu_support, random_state

_host_group: dist.ProcessGroup | None = None


def initialize(layout: Layout, store: dist.Store, rank: int, seed: int, timeout_s: float) -> None:
    """Join the process group and makes Megatron's tensor, pipeline and data-parallel groups.

    timeout_s bounds every collective: a rank whose peer is gone fails then at the latest.
    """
    cpu_support.install()
    dist.init_process_group(
        device.backend(),
        store=store,
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    _subdivide(layout, distributed_timeout_minutes=timeout_s / 60)
    random_state.seed(seed)
    global _host_group
    _host_group = dist.new_group(backend=device.HOST_BACKEND, timeout=timedelta(seconds=timeout_s))


@contextmanager
def pretended(layout: Layout, rank: int) -> Iterator[None]:
    """Pretends in a single process that it is this rank of many: groups have ranks and sizes, but nothing
    communicates."""
    cpu_support.install()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        _subdivide(layout)
        random_state.seed(0)
        yield
    finally:
        destroy()


def _subdivide(layout: Layout, **options: float) -> None:
    # Groups over gloo would be for Megatron's own checkpoints of the optimizer.
    parallel_state.initialize_model_parallel(**sizes(layout), create_gloo_process_groups=False, **options)


def sizes(layout: Layout) -> dict[str, int | None]:
    """Return the sizes of a layout by megatron-core's names."""
    return dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
    )


def host_group() -> dist.ProcessGroup:
    """Return the group of all ranks over host memory, for a thread beside training, which uses the other groups
    alone."""
    assert _host_group is not None, "before initialize"
    return _host_group


def destroy() -> None:
    global _host_group
    _host_group = None
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def own_part(tokens: torch.Tensor) -> torch.Tensor:
    """Return the part of a sequence's tokens that sequence parallelism gives this tensor-parallel rank."""
    return tokens.chunk(parallel_state.get_tensor_model_parallel_world_size())[
        parallel_state.get_tensor_model_parallel_rank()
    ]


def tensor_group(is_expert: bool) -> dist.ProcessGroup:
    """Return the group of the ranks that have parts of the same tensors: those of experts are cut among others."""
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Make a tensor, in place, the maximum over the ranks of a group."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


def data_parallel_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def is_first_stage(virtual: int | None) -> bool:
    """Return whether this virtual stage of this rank (None: there are none) is the model's first."""
    return parallel_state.is_pipeline_first_stage(ignore_virtual=virtual is None, vp_stage=virtual)


def is_last_stage(virtual: int | None) -> bool:
    return parallel_state.is_pipeline_last_stage(ignore_virtual=virtual is None, vp_stage=virtual)


def reports_metrics() -> bool:
    """Return whether this rank's loss and metrics speak for its data-parallel and context-parallel replica: one
    does."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def returns_results() -> bool:
    """Return whether this rank's results of all of the replica's rows speak for its data-parallel replica: one
    does."""
    return reports_metrics() and parallel_state.get_context_parallel_rank() == 0
