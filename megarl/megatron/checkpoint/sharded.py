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
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
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

from megarl.core.checkpoint import FileRecord, seal, write_note
from megarl.core.errors import UserError
from megarl.megatron import parallel, random_state
from megarl.megatron.checkpoint import optimizer_state
from megarl.megatron.checkpoint.extents import CanonicalShard, Shard
from megarl.megatron.checkpoint.optimizer_state import OnDevice
from megarl.megatron.model.build import named_tensors
from megarl.megatron.weight_snapshots import WeightSnapshots

# Each layer has its own name: as slices of one tensor, frozen layers would be holes in the optimizer's state.
FORMAT = {"non_homogeneous_layers": True}
BACKEND = ("torch_dist", 1)
"""Megatron's name and version of the format of the files."""

ShardedAdapters = Mapping[torch.Tensor, CanonicalShard]
"""The factors of a rank's adapters, each with its description."""

SNAPSHOTS = "weight_snapshots"
RANDOM = "random"
"""The key of the ranks' random states, which mean something under the same layout only."""


class Saving:
    """A save whose copy to host memory is done. A thread writes the files, and reads them back, while training goes
    on. Its last file is a note of them, by which others learn that they are on the disk while the rank is busy."""

    def __init__(self, folder: Path, request: AsyncRequest):
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        write = request.async_fn  # nobody else has the copies
        self._written: Future[list[FileRecord]] = self._thread.submit(_write, folder, write, dist.get_rank())

    @property
    def written(self) -> bool:
        """Whether the thread has written the files, or failed to."""
        return self._written.done()

    def finish(self, checkpoint: Path) -> list[FileRecord]:
        """Wait for the thread, raises its error, and returns the files of this rank, which are on the disk then.
        checkpoint: the folder that the files' paths are relative to."""
        try:
            records = self._written.result()
        except torch_checkpoint.CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            # torch's own words for a full disk do not tell that it is one.
            free = shutil.disk_usage(self._folder).free / 1e9
            raise RuntimeError(f"{self._folder}, on a disk with {free:.2f} GB free: {reason}") from error
        self._thread.shutdown()
        # glibc would keep the memory of the copies, and more with every save.
        ctypes.CDLL(None).malloc_trim(0)
        return [replace(record, path=str((self._folder / record.path).relative_to(checkpoint))) for record in records]


def _write(folder: Path, write: Callable[[], None], rank: int) -> list[FileRecord]:
    """Write this rank's part of the model, and notes its files. Returns them, relative to the folder. Rank 0 adds the
    small files that all share."""
    write()
    files = sorted(folder.glob(f"__{rank}_*"))
    if rank == 0:
        save_config(CheckpointingConfig(*BACKEND), str(folder))
        # In one listing: between two, the name under which another rank writes its note becomes another.
        files += sorted(file for file in folder.iterdir() if not file.name.startswith("__"))
    records = [seal(file, folder) for file in files]
    write_note(folder, rank, records)
    return records


def save(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    weight_snapshots: WeightSnapshots,
    counters: Mapping[str, float],
    folder: Path,
    on_device: OnDevice,
    adapters: ShardedAdapters | None = None,
) -> Saving:
    """Start saving into an empty folder, on all ranks together. Returns when everything is in host memory.

    counters   further values that `load` returns, the same on all ranks; num_updates among them
    on_device  see optimizer_state.sharded
    adapters   the model's, which alone are saved then
    """
    models = _sharded_models(chunks) if adapters is None else {}
    # This copies by itself. It looks parameters up by identity, so those of the model are copied after it.
    own = optimizer_state.sharded(optimizer, adapters or _by_parameter(models), on_device)
    snapshots = _sharded_snapshots(weight_snapshots, chunks, models)
    others = _untrained(models, optimizer)
    for shard in _shards([others, snapshots]):
        if is_main_replica(shard.replica_id):
            shard.data = shard.data.detach().to("cpu", copy=True)
    state = {
        **others,
        SNAPSHOTS: snapshots,
        "own": own,
        "counters": dict(counters),
        RANDOM: _sharded_random(),
    }
    strategy = ThreadStrategy(*BACKEND)
    return Saving(folder, dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True))


def load(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    weight_snapshots: WeightSnapshots,
    folder: Path,
    same_layout: bool,
    adapters: ShardedAdapters | None = None,
) -> dict[str, float]:
    """Load a checkpoint of any layout in place, on all ranks together. Returns the counters. Of trained parameters
    each data-parallel rank reads its range, and gets the others' from them.

    same_layout: whether it was saved from this layout, so that each rank takes its random states too.
    adapters: see `save`
    """
    models = _sharded_models(chunks) if adapters is None else {}
    shards = adapters or _by_parameter(models)
    others = _untrained(models, optimizer)
    state = {**others, SNAPSHOTS: _sharded_snapshots(weight_snapshots, chunks, models)}
    if same_layout:
        state[RANDOM] = _sharded_random()
    loaded, missing, unexpected = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RETURN_ALL)
    if unexpected:
        raise UserError(f"{folder}: it is the checkpoint of another model: {sorted(unexpected)[0]} is in one only")
    for index, chunk in enumerate(chunks):
        # The trained parameters are not in it; that no other is lacking, the keys have shown.
        unwrap_model(chunk).load_state_dict(loaded.get(f"model{index}", {}), strict=False)
    weight_snapshots.restore(loaded.get(SNAPSHOTS, {}))
    trained_keys = {key for key in missing if not key.startswith(RANDOM)}
    optimizer_state.restore(optimizer, shards, loaded["counters"]["num_updates"], folder, trained_keys)
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
    if same_layout:
        random_state.restore(loaded[RANDOM])
    return loaded["counters"]


class ThreadStrategy(TorchDistSaveShardedStrategy):
    """A strategy that writes from a thread. Megatron's own forks, which a process with threads of torch and Ray may
    not, and keeps a manager process for each rank."""

    def async_save(self, sharded_state_dict, checkpoint_dir, *_) -> AsyncRequest:
        """Return a request that writes the tensors, which are in host memory and which nobody changes."""
        keyed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        state = mcore_to_pyt_state_dict(keyed)

        def write() -> None:
            torch_checkpoint.save(
                state,
                storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=True),
                planner=MCoreSavePlanner(flatten_state_dict=False),
                process_group=parallel.host_group(),
            )

        # What Megatron adds to the list is not called: it meets all ranks, which training does meanwhile.
        return AsyncRequest(write, (), [])


def _sharded_models(chunks: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """Return the sharded state by chunk. Layers are numbered through the whole model, so that the chunks of another
    layout find them."""
    return {f"model{i}": unwrap_model(chunk).sharded_state_dict(metadata=FORMAT) for i, chunk in enumerate(chunks)}


def _untrained(models: Mapping[str, Any], optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return the sharded state without the trained parameters, of which every rank has its range to write and read."""
    trained = optimizer_state.trained_parameters(optimizer)
    return {
        name: {key: entry for key, entry in entries.items() if entry.data not in trained}
        for name, entries in models.items()
    }


def _sharded_snapshots(
    weight_snapshots: WeightSnapshots, chunks: Sequence[DistributedDataParallel], models: Mapping[str, Any]
) -> dict[str, dict[str, Shard]]:
    """Return the snapshots that change, sharded as the model's weights are."""
    live, shards = named_tensors(chunks), _by_parameter(models)
    return {
        name: {key: _like(shards[live[key]], f"{SNAPSHOTS}.{name}", weight) for key, weight in weights.items()}
        for name, weights in weight_snapshots.state().items()
    }


def _like(model: Shard, prefix: str, tensor: torch.Tensor) -> Shard:
    """Return the tensor sharded as the model's parameter is, under the parameter's key with the prefix."""
    changes: dict[str, Any] = {"key": f"{prefix}.{model.key}", "data": tensor}
    if isinstance(model, ShardedTensor):  # a factory, which splits a tensor into several, has no dtype of its own
        changes["dtype"] = tensor.dtype
    return replace(model, **changes)


def _by_parameter(models: Mapping[str, Any]) -> dict[torch.Tensor, Shard]:
    return {shard.data: shard for shard in _shards(models)}


def _shards(state: Any) -> Iterator[Shard]:
    return (shard for shard in nested_values(state) if isinstance(shard, ShardedTensor | ShardedTensorFactory))


def _sharded_random() -> ShardedObject:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return ShardedObject(RANDOM, random_state.capture(), (world_size,), (rank,), replica_id=0)
