"""A model with its optimizer, sharded over the ranks' files in Megatron's format, which loads under any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model

from megarl.checkpoints import FileRecord, seal
from megarl.megatron import kernels, parallel, random_state

FORMAT = {
    # The optimizer's state in the shapes of the parameters, so that it too loads under any layout. One rank of each
    # data-parallel group gathers it in its host memory; with Megatron's default all of them would.
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
    # Each layer under its own name: as slices of one tensor, frozen layers would be holes in the optimizer's state.
    "non_homogeneous_layers": True,
}
RANDOM = "random"
"""Key of the ranks' random states, which mean something under the same layout only."""


class Saving:
    """A save whose copy to host memory is done. A thread writes the files while training goes on."""

    def __init__(self, folder: Path, request: AsyncRequest):
        self._folder, self._request = folder, request
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] = self._thread.submit(request.async_fn)
        self._thread.shutdown(wait=False)

    @property
    def written(self) -> bool:
        """Whether the thread is done, or has failed."""
        return self._written.done()

    def finish(self, checkpoint: Path) -> list[FileRecord]:
        """Together on all ranks. Waits for the thread, raises its error, and returns the files of this rank, which are
        on the disk then. checkpoint: the folder that their paths are relative to."""
        try:
            self._written.result()
        except torch_checkpoint.CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            raise RuntimeError(f"{self._folder}: {reason}") from error
        for finalize in self._request.finalize_fns:
            finalize()
        own = set(self._folder.glob(f"__{dist.get_rank()}_*"))
        shared = set() if dist.get_rank() else set(self._folder.iterdir()) - set(self._folder.glob("__*"))
        return [seal(file, checkpoint) for file in sorted(own | shared)]


def save(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    counters: Mapping[str, int],
    folder: Path,
) -> Saving:
    """Together on all ranks, into an empty folder. Returns when everything is in host memory.

    counters: what else `load` is to return, the same on all ranks; num_updates among them.
    """
    for part in optimizer.chained_optimizers:
        _make_state(part, counters["num_updates"])
    models = _sharded_models(chunks)
    # Gathers copies. It looks parameters up by identity, so those of the model are made after it.
    optimizer_state = optimizer.sharded_state_dict(models, metadata=FORMAT)
    for shard in nested_values(models):
        if isinstance(shard, ShardedTensor | ShardedTensorFactory) and is_main_replica(shard.replica_id):
            shard.data = shard.data.detach().to("cpu", copy=True)
    state = {**models, "optimizer": optimizer_state, "counters": dict(counters), RANDOM: _sharded_random()}
    strategy = ThreadStrategy("torch_dist", 1)
    return Saving(folder, dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True))


def load(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    folder: Path,
    same_layout: bool,
) -> dict[str, int]:
    """Together on all ranks, in place, whatever the layout it was saved from. Returns the counters.

    same_layout: it was saved from this layout, so that each rank takes its random states too.
    """
    for part in optimizer.chained_optimizers:
        _make_state(part, num_updates=0)
    models = _sharded_models(chunks)
    state = {**models, "optimizer": optimizer.sharded_state_dict(models, is_loading=True, metadata=FORMAT)}
    if same_layout:
        state[RANDOM] = _sharded_random()
    loaded, missing, unexpected = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RETURN_ALL)
    differing = unexpected | {key for key in missing if not key.startswith(RANDOM)}
    if differing:
        raise ValueError(f"{folder}: it is the checkpoint of another model: {sorted(differing)[0]} is in one only")
    for index, chunk in enumerate(chunks):
        unwrap_model(chunk).load_state_dict(loaded[f"model{index}"])
    parts = optimizer.chained_optimizers
    states = [loaded["optimizer"]] if len(parts) == 1 else [loaded["optimizer"][i] for i in range(len(parts))]
    for part, part_state in zip(parts, states, strict=True):
        _load_part(part, part_state)
    if same_layout:
        random_state.restore(loaded[RANDOM])
    return loaded["counters"]


class ThreadStrategy(TorchDistSaveShardedStrategy):
    """Writes from a thread. Megatron's own strategy forks, which a process with threads of torch and Ray may not, and
    keeps a manager process for each rank."""

    def async_save(self, sharded_state_dict, checkpoint_dir, *_) -> AsyncRequest:
        """The tensors are in host memory, and nobody changes them."""
        keyed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        state = mcore_to_pyt_state_dict(keyed)

        def write() -> None:
            torch_checkpoint.save(
                state,
                storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=True),
                planner=MCoreSavePlanner(flatten_state_dict=False),
                process_group=parallel.host_group(),
            )

        return AsyncRequest(write, (), [])


def _sharded_models(chunks: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """By chunk; layers are numbered through the whole model, so that other chunks of another layout find them."""
    return {f"model{i}": unwrap_model(chunk).sharded_state_dict(metadata=FORMAT) for i, chunk in enumerate(chunks)}


def _sharded_random() -> ShardedObject:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return ShardedObject(RANDOM, random_state.capture(), (world_size,), (rank,), replica_id=0)


def _make_state(part: DistributedOptimizer, num_updates: int) -> None:
    """What the first update would make: Megatron reads and writes state that exists."""
    _count_without_parameters(part, num_updates)
    if not part.optimizer.state:
        part.init_state_fn(part.optimizer, part.config)
        for state in part.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))


def _count_without_parameters(part: DistributedOptimizer, num_updates: int) -> None:
    """On a rank whose parameters are all frozen. Megatron writes rank 0's count of updates, which torch's AdamW keeps
    beside the state of each parameter, and the fused kernels in each group."""
    if any(group["params"] for group in part.optimizer.param_groups):
        return
    for group in part.optimizer.param_groups:
        group["step"] = num_updates
    if kernels.adam() == kernels.TORCH_ADAM:
        part.optimizer.state["no parameter"] = {"step": torch.tensor(float(num_updates))}


def _load_part(part: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """torch's AdamW, other than the fused kernels of Transformer Engine and Apex, counts steps for each parameter:
    Megatron would look for the counts among the loaded tensors, and leave one count to all parameters."""
    part.load_state_dict({key: value for key, value in state.items() if not key.startswith("param_state")})
    counts = [inner.pop("step", None) for inner in part.optimizer.state.values()]
    if "param_state" in state:  # not where all parameters are frozen
        part.load_parameter_state_from_fully_reshardable(state["param_state"])
    for inner, count in zip(part.optimizer.state.values(), counts, strict=True):
        if count is not None:
            inner["step"] = count.clone()
