"""The trainer's process group and Megatron's subgroups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import Store
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.model_schema import Layout
from megarl.core import device
from megarl.megatron import cpu_support, random_state

_host_group: dist.ProcessGroup | None = None


def initialize(layout: Layout, store: Store, rank: int, seed: int, timeout_s: float) -> None:
    """Join the process group and create Megatron's tensor-, pipeline- and data-parallel groups. A collective with a
    dead peer fails after timeout_s seconds."""
    cpu_support.install()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(device.backend(), store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
    _subdivide(layout, distributed_timeout_minutes=timeout_s / 60)
    random_state.seed(seed)
    global _host_group
    # torch's annotation includes int, but only ranks outside the group receive one.
    _host_group = dist.new_group(backend=device.HOST_BACKEND, timeout=timeout)  # pyright: ignore[reportAssignmentType]


@contextmanager
def simulated_rank(layout: Layout, rank: int) -> Iterator[None]:
    """Return a context manager that simulates one rank of a layout in a single process. Process groups have ranks and
    sizes but do not communicate."""
    cpu_support.install()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        _subdivide(layout)
        random_state.seed(0)
        yield
    finally:
        destroy()


def _subdivide(layout: Layout, **options: Any) -> None:
    # Only Megatron's own optimizer checkpoints need gloo groups.
    parallel_state.initialize_model_parallel(**sizes(layout), create_gloo_process_groups=False, **options)


def sizes(layout: Layout) -> dict[str, int | None]:
    """Return megatron-core's name -> size for each parallel dimension in a layout."""
    return dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
    )


def host_group() -> dist.ProcessGroup:
    """Return the process group of all ranks for host tensors. A thread can use it during training."""
    assert _host_group is not None, "call initialize first"
    return _host_group


def destroy() -> None:
    global _host_group
    _host_group = None
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def local_part(tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens in a sequence that belong to this tensor-parallel rank under sequence parallelism."""
    return tokens.chunk(parallel_state.get_tensor_model_parallel_world_size())[
        parallel_state.get_tensor_model_parallel_rank()
    ]


def context_part(rows: torch.Tensor) -> torch.Tensor:
    """Return this context-parallel rank's consecutive rows of a sequence whose length is a multiple of cp."""
    return rows.chunk(parallel_state.get_context_parallel_world_size())[parallel_state.get_context_parallel_rank()]


def tensor_group(is_expert: bool) -> dist.ProcessGroup:
    """Return the process group whose ranks shard a tensor. Experts have a separate tensor-parallel group."""
    # pyright infers the groups as None, because Megatron's globals have no annotations.
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()  # pyright: ignore[reportReturnType]
    return parallel_state.get_tensor_model_parallel_group()  # pyright: ignore[reportReturnType]


def context_group() -> dist.ProcessGroup:
    return parallel_state.get_context_parallel_group()  # pyright: ignore[reportReturnType]


def first_and_last_stage() -> dist.ProcessGroup:
    """Return the process group of the first- and last-stage ranks that hold the same part of each tensor."""
    return parallel_state.get_embedding_group()  # pyright: ignore[reportReturnType]


def mark(parameter: torch.Tensor, **marks: bool | int) -> None:
    """Set the attributes that tell Megatron how a parameter is sharded and how its gradient is reduced."""
    for name, value in marks.items():
        setattr(parameter, name, value)


def reduce_max(tensor: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """Reduce a tensor to the maximum over a process group, in place."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=process_group)


def data_parallel_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def is_first_stage(virtual: int | None) -> bool:
    """Return whether this virtual stage is the model's first stage. Without virtual stages, `virtual` is None."""
    return parallel_state.is_pipeline_first_stage(ignore_virtual=virtual is None, vp_stage=virtual)


def is_last_stage(virtual: int | None) -> bool:
    return parallel_state.is_pipeline_last_stage(ignore_virtual=virtual is None, vp_stage=virtual)


def reports_metrics() -> bool:
    """Return whether this rank reports metrics for its data- and context-parallel replica. Exactly one rank per replica
    does."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def returns_results() -> bool:
    """Return whether this rank returns its data-parallel replica's results. Exactly one rank per replica does."""
    return reports_metrics() and parallel_state.get_context_parallel_rank() == 0
