"""A model with its optimizer, sharded over the ranks' files in Megatron's format, which loads under any layout."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
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
from megatron.core.utils import unwrap_model

from megarl.core.checkpoint import FileRecord, seal
from megarl.megatron import parallel, random_state
from megarl.megatron.checkpoint import optimizer_state
from megarl.megatron.checkpoint.optimizer_state import Shard, sharded_like
from megarl.megatron.model.build import named_tensors
from megarl.megatron.weight_snapshots import WeightSnapshots

# Each layer under its own name: as slices of one tensor, frozen layers would be holes in the optimizer's state.
FORMAT = {"non_homogeneous_layers": True}
SETS = "weight_snapshots"
RANDOM = "random"
"""Key of the ranks' random states, which mean something under the same layout only."""


class Saving:
    """A save whose copy to host memory is done. A thread writes the files, and reads them back, while training goes
    on."""

    def __init__(self, folder: Path, request: AsyncRequest):
        self._folder, self._finalize = folder, request.finalize_fns
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        write = request.async_fn  # nobody else has the copies
        self._written: Future[list[FileRecord]] = self._thread.submit(_write, folder, write, dist.get_rank())

    @property
    def written(self) -> bool:
        """Whether the thread is done, or has failed."""
        return self._written.done()

    def finish(self, checkpoint: Path) -> list[FileRecord]:
        """Together on all ranks. Waits for the thread, raises its error, and returns the files of this rank, which are
        on the disk then. checkpoint: the folder that their paths are relative to."""
        try:
            own = self._written.result()
        except torch_checkpoint.CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            # torch's own words for a full disk do not tell that it is one.
            free = shutil.disk_usage(self._folder).free / 1e9
            raise RuntimeError(f"{self._folder}, on a disk with {free:.2f} GB free: {reason}") from error
        for finalize in self._finalize:
            finalize()
        self._thread.shutdown()
        # glibc would keep what the copies took, and more with every save.
        ctypes.CDLL(None).malloc_trim(0)
        # Small ones, some of which `finalize` has just written.
        shared = set() if dist.get_rank() else set(self._folder.iterdir()) - set(self._folder.glob("__*"))
        records = own + [seal(file, self._folder) for file in sorted(shared)]
        return [replace(record, path=str((self._folder / record.path).relative_to(checkpoint))) for record in records]


def _write(folder: Path, write: Callable[[], None], rank: int) -> list[FileRecord]:
    """Writes this rank's part of the model. Returns its files, relative to the folder."""
    write()
    return [seal(file, folder) for file in sorted(folder.glob(f"__{rank}_*"))]


def save(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    weight_snapshots: WeightSnapshots,
    counters: Mapping[str, float],
    folder: Path,
) -> Saving:
    """Together on all ranks, into an empty folder. Returns when everything is in host memory.

    counters: what else `load` is to return, the same on all ranks; num_updates among them.
    """
    models = _sharded_models(chunks)
    # Copies by itself. It looks parameters up by identity, so those of the model are copied after it.
    moments = optimizer_state.sharded(optimizer, _by_parameter(models), is_loading=False)
    sets = _sharded_sets(weight_snapshots, chunks, models)
    for shard in _shards([models, sets]):
        if is_main_replica(shard.replica_id):
            shard.data = shard.data.detach().to("cpu", copy=True)
    state = {**models, SETS: sets, "optimizer": moments, "counters": dict(counters), RANDOM: _sharded_random()}
    strategy = ThreadStrategy("torch_dist", 1)
    return Saving(folder, dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True))


def load(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    weight_snapshots: WeightSnapshots,
    folder: Path,
    same_layout: bool,
) -> dict[str, float]:
    """Together on all ranks, in place, whatever the layout it was saved from. Returns the counters.

    same_layout: it was saved from this layout, so that each rank takes its random states too.
    """
    models = _sharded_models(chunks)
    state = {
        **models,
        SETS: _sharded_sets(weight_snapshots, chunks, models),
        "optimizer": optimizer_state.sharded(optimizer, _by_parameter(models), is_loading=True),
    }
    if same_layout:
        state[RANDOM] = _sharded_random()
    loaded, missing, unexpected = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RETURN_ALL)
    differing = unexpected | {key for key in missing if not key.startswith(RANDOM)}
    if differing:
        raise ValueError(f"{folder}: it is the checkpoint of another model: {sorted(differing)[0]} is in one only")
    for index, chunk in enumerate(chunks):
        unwrap_model(chunk).load_state_dict(loaded[f"model{index}"])
    weight_snapshots.restore(loaded.get(SETS, {}))
    # A rank whose parameters are all frozen has no optimizer state.
    optimizer_state.restore(optimizer, loaded.get("optimizer", {}), loaded["counters"]["num_updates"])
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


def _sharded_sets(
    weight_snapshots: WeightSnapshots, chunks: Sequence[DistributedDataParallel], models: Mapping[str, Any]
) -> dict[str, dict[str, Shard]]:
    """The weight sets that change, sharded as the model's weights are."""
    live, shards = named_tensors(chunks), _by_parameter(models)
    return {
        name: {key: sharded_like(shards[live[key]], f"{SETS}.{name}", weight) for key, weight in weights.items()}
        for name, weights in weight_snapshots.state().items()
    }


def _by_parameter(models: Mapping[str, Any]) -> dict[torch.Tensor, Shard]:
    return {shard.data: shard for shard in _shards(models)}


def _shards(state: Any) -> Iterator[Shard]:
    return (shard for shard in nested_values(state) if isinstance(shard, ShardedTensor | ShardedTensorFactory))


def _sharded_random() -> ShardedObject:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return ShardedObject(RANDOM, random_state.capture(), (world_size,), (rank,), replica_id=0)
